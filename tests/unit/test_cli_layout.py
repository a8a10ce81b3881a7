"""``k3backend layout``: the numbers that a user checks first, in JSON and in tables."""

from __future__ import annotations

import io
import json
import statistics
import time
from typing import Any

import pytest
from rich.console import Console

from k3backend.report.layout_tables import print_layout_set
from tests.helpers.command_lines import run_fresh, run_here

K3 = (
    *("--target", "kimi-k3", "--draft", "dspark-mla", "--tp", "8", "--kv-dtype", "fp8"),
    *("--spec-tokens", "7", "--max-model-len", "1048576", "--platform", "all"),
    *("--policy", "vllm"),
)
UNDECLARED = (*K3, "--draft-max-tp-shards", "none")
HEAVY = ("torch", "triton", "vllm", "aiter")


def layout(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    outcome = run_here(capsys, "layout", "--json", *words)
    assert (outcome.code, outcome.stderr) == (0, "")
    document: dict[str, Any] = json.loads(outcome.stdout)
    return document


def test_k3_with_its_mla_draft_is_four_groups_on_every_platform(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = layout(capsys, *K3)
    assert document["schema"] == "k3backend.layout-set/1"
    assert document["equal"] is True
    assert list(document["platforms"]) == ["nvidia", "rocm", "reference"]
    for name, plan in document["platforms"].items():
        assert plan["platform"] == name
        assert [group["num_layers"] for group in plan["groups"]] == [23, 23, 23, 29]
        assert {group["block_size"] for group in plan["groups"]} == {1536}
        assert {group["page_size_bytes"] for group in plan["groups"]} == {884_736}
        assert [group["is_draft"] for group in plan["groups"]] == [False, False, False, True]
        assert plan["block_bytes"] == 25_657_344
        assert plan["request"]["blocks"] == 710
        assert plan["request"]["bytes"] == 18_216_714_240


def test_an_undeclared_draft_makes_twenty_groups(capsys: pytest.CaptureFixture[str]) -> None:
    document = layout(capsys, *UNDECLARED)
    for plan in document["platforms"].values():
        assert len(plan["groups"]) == 20
        assert plan["block_bytes"] == 4_423_680
        assert plan["request"]["blocks"] == 4224
        assert plan["request"]["bytes"] == 18_685_624_320


def test_the_document_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    plan = layout(capsys, *K3, "--memory", "60")["platforms"]["rocm"]
    groups, request = plan["groups"], plan["request"]
    assert plan["schema"] == "k3backend.layout/1"
    assert (plan["tp_size"], plan["dcp_size"], plan["pp_size"]) == (8, 1, 1)
    assert (plan["max_model_len"], plan["layout"], plan["policy"]) == (1_048_576, "LBNHC", "vllm")
    names = [name for group in groups for name in group["layer_names"]]
    assert len(names) == len(set(names)) == 98
    for group in groups:
        assert group["num_layers"] == len(group["layer_names"])
        used = group["num_layers"] * group["page_size_bytes"]
        assert group["idle_bytes_per_block"] == plan["block_bytes"] - used
        assert group["spec"]["block_size"] == group["block_size"]
    assert request["blocks"] == sum(group["blocks_per_request"] for group in groups)
    assert request["bytes"] == request["blocks"] * plan["block_bytes"]
    assert request["padding_bytes"] == request["bytes"] - request["real_bytes"]
    assert request["padding_fraction"] == request["padding_bytes"] / request["bytes"]
    capacity = plan["capacity"]
    assert capacity["available_bytes"] == 60 * 2**30
    assert capacity["num_blocks"] == 60 * 2**30 // plan["block_bytes"]
    assert capacity["usable_blocks"] == capacity["num_blocks"] - 1
    assert capacity["max_concurrency"] == capacity["usable_blocks"] / request["blocks"]
    assert capacity["max_model_len_that_fits"] == 1_048_576
    assert plan["prefix_hit_tokens"] == 1536
    assert len(plan["block_table_columns"]) == 4
    assert plan["stages"] == [
        {"stage": 0, "layers": 98, "block_bytes": 25_657_344, "num_blocks": 2510}
    ]
    assert [candidate["chosen"] for candidate in plan["candidates"]].count(True) == 1
    assert groups[3]["spec"]["kind"] == "mla_attention"
    assert groups[3]["spec"]["max_tp_shards"] == 1
    assert groups[0]["spec"]["dtypes"] == ["bfloat16", "float32"]


def test_pipeline_stages_count_the_widest_block(capsys: pytest.CaptureFixture[str]) -> None:
    plan = layout(capsys, *K3, "--pp", "2", "--memory", "60")["platforms"]["nvidia"]
    stages = plan["stages"]
    assert [stage["layers"] for stage in stages] == [47, 51]
    assert plan["block_bytes"] == max(stage["block_bytes"] for stage in stages)
    assert plan["capacity"]["num_blocks"] == min(stage["num_blocks"] for stage in stages)


@pytest.mark.parametrize(
    ("tp", "blocks", "page"),
    [
        (16, (384, 768), 442_368),
        (8, (768, 1536), 884_736),
        (4, (1536, 3072), 1_769_472),
        (2, (3072, 6144), 3_538_944),
        (1, (6144, 12288), 7_077_888),
    ],
)
def test_block_and_page_by_tensor_parallel_size(
    tp: int, blocks: tuple[int, int], page: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype, block in zip(("bf16", "fp8"), blocks, strict=True):
        plan = layout(
            capsys, "--draft", "dspark-mla", "--tp", str(tp), "--kv-dtype", dtype,
            "--platform", "reference", "--policy", "vllm",
        )  # fmt: skip
        assert {group["block_size"] for group in plan["groups"]} == {block}
        assert {group["page_size_bytes"] for group in plan["groups"]} == {page}


def test_a_checkpoint_block_adds_three_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    document = layout(capsys, *K3, "--prefill-checkpoint-blocks", "1")
    request = document["platforms"]["nvidia"]["request"]
    assert (request["blocks"], request["bytes"]) == (713, 18_293_686_272)


def test_tables_hold_the_numbers_without_colour_in_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = run_here(capsys, "layout", *K3, "--memory", "60")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "\x1b" not in outcome.stdout
    assert max(len(line) for line in outcome.stdout.splitlines()) <= 100
    for text in (
        "nvidia = rocm = reference: the same plan",
        "4 groups: 23/23/23/29",
        "5 draft",
        "1,536",
        "884,736",
        "25,657,344 B",
        "710 blocks, 18,216,714,240 B",
        "2,509 usable blocks",
    ):
        assert text in outcome.stdout, text
    many = run_here(capsys, "layout", *UNDECLARED).stdout
    for text in ("20 groups", "4,423,680", "4,224 blocks, 18,685,624,320 B"):
        assert text in many, text


def test_tables_fit_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (K3, UNDECLARED):
        plans = layout(capsys, *words, "--memory", "60", "--pp", "2")["platforms"]
        text = io.StringIO()
        console = Console(file=text, width=80)
        for plan in plans.values():
            plan["warnings"] = []
        print_layout_set(console, plans, equal=False)
        assert max(len(line.rstrip()) for line in text.getvalue().splitlines()) <= 80
        assert "\u2026" not in text.getvalue(), "a cell was cut"


def test_the_default_platform_is_the_dispatchers(capsys: pytest.CaptureFixture[str]) -> None:
    from k3backend.dispatch import BACKEND

    assert layout(capsys, "--policy", "vllm")["platform"] == BACKEND.name


def test_a_real_config_file_plans_like_the_bundled_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.helpers.command_lines import REPOSITORY

    configs = REPOSITORY / "k3backend" / "data" / "configs"
    words = ("--policy", "vllm", "--platform", "rocm")
    named = layout(capsys, "--draft", "dspark-mla", *words)
    by_path = layout(
        capsys,
        *("--target", str(configs / "kimi-k3.json"), "--draft", str(configs / "dspark-mla.json")),
        *words,
    )
    assert by_path == named


@pytest.mark.parametrize("command", ["layout", "explain", "groups", "diff"])
def test_planning_imports_nothing_heavy(command: str, tmp_path: Any) -> None:
    from tests.helpers.command_lines import REPOSITORY

    case = json.loads((REPOSITORY / "tests/data/planning/k3-mla-draft.json").read_text())
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(case["specs"]))
    words: dict[str, tuple[str, ...]] = {
        "layout": K3,
        "explain": UNDECLARED,
        "groups": ("--policy", "vllm", "--specs", str(path)),
        "diff": ("--policy", "vllm", str(path), str(path)),
    }
    for output in ((), ("--json",)):
        outcome = run_fresh(command, *words[command], *output, block=HEAVY)
        assert outcome.code == 0, outcome.stderr
        assert outcome.stderr == "loaded:\n"


def test_layout_answers_in_under_three_seconds() -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert run_fresh("layout", *K3).code == 0
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 3
