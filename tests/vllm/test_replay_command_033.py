"""``k3backend replay`` from the command line, over the real trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3backend.__main__ import main

pytestmark = pytest.mark.vllm

TRACE = "tests/data/mooncake_conversation_lengths.csv"


def test_two_layouts_of_k3_with_a_full_attention_draft(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", TRACE, "--draft", "dspark-gqa-full", "--memory", "60"]
    assert main(["replay", *flags, "--max-requests", "12", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["schema"] == "k3backend.replay/1"
    assert document["vllm"].startswith("0.33")
    ours, default = document["layouts"]
    assert (ours["name"], ours["num_groups"], ours["block_bytes"]) == ("k3", 4, 25_657_344)
    assert (default["name"], default["num_groups"], default["block_bytes"]) == (
        "vllm",
        20,
        4_423_680,
    )
    for layout in (ours, default):
        assert layout["requests"] == {"finished": 12, "skipped": 0}
        assert layout["steps"] == ours["steps"]
        assert layout["host_us"]["schedule"]["calls"] == layout["steps"]
        # One allocation per step and running request.
        assert layout["host_us"]["allocate_slots"]["calls"] >= layout["steps"]
    # The co-located draft and target hold one block where the default holds six.
    assert ours["groups"][3]["num_layers"] == 29
    assert sum(g["blocks_peak"] for g in ours["groups"]) < sum(
        g["blocks_peak"] for g in default["groups"]
    )


def test_spec_files_are_replayed_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = Path("tests/data/planning/k3-no-draft-tp16.json")
    document = json.loads(case.read_text())["specs"] | {"max_model_len": 200_000}
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(document))
    flags = ["--trace", TRACE, "--max-requests", "3", "--against", "k3"]
    assert main(["replay", "--specs", str(path), "--memory", "30", *flags]) == 0
    out = capfd.readouterr().out
    assert "policy k3" in out
    assert "no model is run" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trace", TRACE], "--memory: is missing"),
        (["--trace", "none.csv", "--memory", "60"], "No such file"),
        (["--trace", TRACE, "--memory", "60", "--step-ms", "0"], "--step-ms"),
        (["--trace", TRACE, "--memory", "60", "--platform", "all"], "--platform"),
        (["--trace", TRACE, "--memory", "0.01"], "at least 2"),
        (["--memory", "60"], "--trace"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *flags]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1
