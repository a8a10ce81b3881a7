"""Pictures of plans: what they show, that they are written, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from k3backend.__main__ import main
from k3backend.common.errors import InputError
from k3backend.common.group_policy import candidate_groups
from k3backend.common.kv_config import request_bytes
from k3backend.common.kv_groups import plan_groups
from k3backend.common.kv_plan import make_plan
from k3backend.report import pictures
from k3backend.report.pictures import Curve, PlanPicture
from tests.helpers.k3_layers import MILLION, k3_context, k3_layers

CASE = Path("tests/data/planning/k3-gqa-full-tp8.json")


def full_draft_picture() -> PlanPicture:
    specs, context = k3_layers(8, "full"), k3_context(8)
    curves = pictures.context_curves(candidate_groups(specs, context), "co-located-w29", context)
    return PlanPicture("test", make_plan(specs, context), specs, curves)


def test_curves_are_the_exact_bytes() -> None:
    picture = full_draft_picture()
    chosen, default, plain = picture.curves[:3]
    assert (chosen.name, chosen.groups, chosen.chosen) == ("co-located-w29", 4, True)
    assert (default.name, default.groups) == ("vllm", 20)
    assert (plain.name, plain.groups) == ("isolate-w24", 5)
    assert chosen.tokens[-1] == MILLION
    assert chosen.request_bytes[-1] == 18_216_714_240
    groups = plan_groups(picture.specs, picture.plan.context)
    for tokens, size in list(zip(default.tokens, default.request_bytes, strict=True))[::20]:
        assert size == request_bytes(groups, picture.plan.context, tokens)


def test_the_crossing_with_the_default_lies_between_64k_and_256k() -> None:
    """At 60,000 tokens the default needs fewer bytes, at a million the co-located layout does."""
    chosen, default = full_draft_picture().curves[:2]
    (crossing,) = pictures.crossing_tokens(chosen, default)
    assert 1 << 16 < crossing < 1 << 18


def test_crossings_ignore_equal_stretches() -> None:
    left = Curve("a", 1, (1, 2, 3, 4, 5), (9, 5, 5, 4, 6), True)
    right = Curve("b", 1, (1, 2, 3, 4, 5), (8, 5, 5, 5, 5), False)
    assert pictures.crossing_tokens(left, right) == [4, 5]
    assert pictures.crossing_tokens(left, left) == []


def test_the_block_shows_every_byte_once() -> None:
    """Bars of a group add up to the pool block: layers, padding and what is idle."""
    picture = full_draft_picture()
    axes = pictures.draw([picture]).axes[0]
    rows: dict[int, list[tuple[float, float]]] = {}
    for bar in axes.patches:
        rows.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append(
            (bar.get_x(), bar.get_width())
        )
    block_mib = picture.plan.block_bytes / (1 << 20)
    assert len(rows) == 4
    for bars in rows.values():
        end = 0.0
        for left, width in sorted(bars):
            assert left == pytest.approx(end, abs=1e-9)
            end = left + width
        assert end == pytest.approx(block_mib, abs=1e-9)


def test_the_draft_is_marked() -> None:
    axes = pictures.draw([full_draft_picture()]).axes[0]
    hatched = [bar for bar in axes.patches if bar.get_hatch()]
    assert len(hatched) == 5
    assert {round(bar.get_y() + bar.get_height() / 2) for bar in hatched} == {3}
    legend = axes.get_legend()
    assert legend is not None
    assert "draft" in [text.get_text() for text in legend.get_texts()]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
def test_files_are_written_and_equal_plans_give_equal_files(tmp_path: Path, suffix: str) -> None:
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doctype html>"}
    written = []
    for name in ("first", "second"):
        path = tmp_path / (name + suffix)
        pictures.write_picture(path, [full_draft_picture()])
        written.append(path.read_bytes())
    assert written[0].startswith(starts[suffix])
    assert written[0] == written[1]
    if suffix == ".html":
        page = written[0].decode()
        assert "18,216,714,240 B" in page
        assert "<svg" in page


def test_layout_and_groups_write_what_plot_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.svg"
    flags = ["--draft", "dspark-gqa-full", "--platform", "all", "--plot", str(path), "--json"]
    assert main(["layout", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "k3backend.layout-set/1"
    assert "nvidia" in path.read_text()
    specs = tmp_path / "specs.json"
    specs.write_text(json.dumps(json.loads(CASE.read_text())["specs"]))
    page = tmp_path / "plan.html"
    flags = ["--specs", str(specs), "--policy", "isolate", "--plot", str(page)]
    assert main(["groups", *flags]) == 0
    assert "co-located-w29" in page.read_text()


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
@pytest.mark.parametrize("command", ["explain", "explain --specs", "fit"])
def test_explain_and_fit_write_what_plot_names(
    command: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"plan{suffix}"
    specs = tmp_path / "specs.json"
    specs.write_text(json.dumps(json.loads(CASE.read_text())["specs"]))
    flags = {
        "explain": ["--draft", "dspark-gqa-full"],
        "explain --specs": ["--specs", str(specs)],
        "fit": ["--draft", "dspark-gqa-full", "--memory", "10"],
    }[command]
    words = [command.split()[0], *flags, "--json"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--plot", str(path)]) == 0
    assert capsys.readouterr().out == plain
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    drawn = path.read_text()
    assert "co-located" in drawn
    if command == "fit":
        # The curves end at the longest request that fits, not at the model's.
        assert json.loads(plain)["longest_max_model_len"] < MILLION
        assert "1 Mi" not in drawn
    else:
        assert "1 Mi" in drawn


@pytest.mark.parametrize(
    ("name", "words"), [("plan.pdf", "does not end in"), ("none/plan.png", "does not exist")]
)
def test_other_names_are_refused_before_any_work(
    tmp_path: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["layout"], ["explain"], ["fit", "--memory", "60"]):
        assert main([*command, "--plot", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert words in captured.err


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"k3backend\[plot\]"):
        pictures.check_picture_path("plan.png")
