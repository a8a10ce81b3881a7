"""The default planner against vLLM 0.33.0's own, on the public cases and on random spec files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from k3backend.common.errors import K3Error
from k3backend.common.kv_capacity import longest_model_len, plan_stages
from k3backend.common.kv_config import (
    build_kv_cache_config,
    layer_spec_runs,
    pool_block_bytes,
    request_blocks,
    request_bytes,
)
from k3backend.common.kv_groups import kv_tp_replicas, plan_groups
from k3backend.common.kv_layout import KVCacheLayout
from k3backend.common.kv_spec import UniformTypeKVCacheSpecs
from k3backend.common.spec_file import parse_spec_document
from tests.helpers.random_specs import random_document
from tests.helpers.vllm_planner import VLLM_ERRORS, Outcome, PathCounter, plan_with_vllm

CASES = sorted((Path(__file__).parents[1] / "data" / "planning").glob("*.json"))
RANDOM_SETS = 2800
FLOORS = {
    "planned": 2000,
    "full_attention": 600,
    "mla_attention": 700,
    "hidden_state_cache": 200,
    "rswa": 90,
    "chunked_local_attention": 110,
    "sliding_window": 600,
    "circular_buffer": 200,
    "sliding_window_mla": 220,
    "mamba": 450,
    "encoder_only_attention": 20,
    "cross_attention": 40,
    "sink_full_attention": 90,
    "LBNHC": 300,
    "LBHNC": 300,
    "LHBNC": 60,
    "BLHNC": 400,
    "BLNHC": 400,
    "BHLNC": 35,
    "dcp": 250,
    "sized": 800,
    "stages": 250,
    "drafts": 200,
    "no hybrid": 90,
    "mamba none": 250,
    "mamba align": 500,
    "mamba all": 250,
    # Calls of vLLM's functions that gave a result.
    "_get_kv_cache_groups_uniform_spec": 200,
    "_get_kv_cache_groups_uniform_type": 150,
    "_get_packed_kv_cache_groups": 600,
    "_get_kv_cache_groups_uniform_page_size": 700,
    "_try_get_full_allocation_fallback_groups": 25,
    "_promote_local_kv_cache_specs": 200,
    "_ensure_min_page_size": 100,
    "_approximate_gcd": 70,
    "unify_hybrid_kv_cache_specs": 150,
    # Refusals.
    "AssertionError": 120,
    "ValueError": 120,
    "NotImplementedError": 60,
    "TypeError": 3,
    "StopIteration": 4,
    "heads placed": 80,
    "heads refused": 50,
}


def plan_with_ours(document: dict[str, Any]) -> Outcome:
    """Plan with policy "vllm". Raises K3Error where we refuse."""
    file = parse_spec_document(document, "random")
    context = file.context
    groups = plan_groups(file.specs, context)
    if not groups:
        return Outcome()
    outcome = Outcome(
        block_bytes=pool_block_bytes(groups, context),
        request_bytes=request_bytes(groups, context),
        kv_tp_replicas=kv_tp_replicas(groups, context),
    )
    for group, blocks in zip(groups, request_blocks(groups, context), strict=True):
        spec = group.kv_cache_spec
        pages = {
            name: run.page_size_bytes for run, names in layer_spec_runs(group) for name in names
        }
        outcome.groups.append(
            (
                list(group.layer_names),
                spec.block_size,
                spec.page_size_bytes,
                [pages[name] for name in group.layer_names],
                isinstance(spec, UniformTypeKVCacheSpecs),
                blocks,
                spec.max_num_blocks_per_req(context, context.max_model_len),
            )
        )
    try:
        config = build_kv_cache_config(groups, context, 7)
    except K3Error as error:
        # Every number of a plan was given by now.
        raise AssertionError(f"planned, but cannot be placed: {error}") from error
    outcome.tensors = [
        (list(t.layers), t.layer_stride, t.block_stride, t.offset, t.size)
        for t in config.kv_cache_tensors
    ]
    if file.available_bytes is not None:
        stages = plan_stages(groups, context, file.stages, file.available_bytes)
        blocks = min(stage.num_blocks for stage in stages if stage.num_blocks is not None)
        outcome.fit = (blocks, longest_model_len(stages, context))
    return outcome


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_public_case_equals_vllm(path: Path) -> None:
    """Our plan is vLLM's plan now, and the numbers that the case records."""
    case = json.loads(path.read_text())
    expected = case["expect"]["vllm"]
    if "error" in expected:
        with pytest.raises(VLLM_ERRORS) as raised:
            plan_with_vllm(case["specs"])
        assert type(raised.value).__name__ == expected["error"]
        with pytest.raises(K3Error, match="layer draft"):
            plan_with_ours(case["specs"])
        return
    ours = plan_with_ours(case["specs"])
    assert ours == plan_with_vllm(case["specs"])
    assert [len(layers) for layers, *_ in ours.groups] == expected["group_sizes"]
    assert [block_size for _, block_size, *_ in ours.groups] == expected["block_sizes"]
    assert ours.block_bytes == expected["block_bytes"]
    assert ours.request_bytes == expected["request_bytes"]
    assert ours.kv_tp_replicas == expected["kv_tp_replicas"]
    if "num_blocks" in expected:
        assert ours.fit == (expected["num_blocks"], expected["max_model_len_that_fits"])


def _compare(document: dict[str, Any]) -> tuple[str, str]:
    """Plan with both. Returns vLLM's error, empty where it plans, and the difference, if any."""
    try:
        theirs: Outcome | None = plan_with_vllm(document)
        error = ""
    except VLLM_ERRORS as raised:
        theirs, error = None, type(raised).__name__
    try:
        ours: Outcome | None = plan_with_ours(document)
        refusal = ""
    except K3Error as raised:
        ours, refusal = None, str(raised)
    if theirs is None:
        return error, "" if ours is None else f"vLLM raised {error}, we planned {ours}"
    if ours is None:
        return error, f"vLLM planned, we refused: {refusal}"
    return error, "" if ours == theirs else f"ours   {ours}\ntheirs {theirs}"


def test_random_spec_sets_equal_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partition, order, pages, bytes, replicas, tensors, capacity; refusal where vLLM raises.

    The floors make sure that a change of the generator cannot empty a path; each is below the
    count that these seeds give.
    """
    paths = PathCounter(monkeypatch.setattr)
    covered: Counter[str] = Counter()
    differences = []
    for seed in range(RANDOM_SETS):
        document = random_document(seed)
        error, difference = _compare(document)
        if difference:
            differences.append(f"seed {seed}: {difference}\n{json.dumps(document)}")
        covered[error or "planned"] += 1
        covered["heads refused" if error else "heads placed"] += any(
            "num_heads" in entry for entry in document["layers"]
        )
        if not error:
            covered.update({entry["kind"] for entry in document["layers"]})
            covered[document["layout"]] += 1
            covered["dcp"] += document["dcp_size"] > 1
            sized = document["available_bytes"] is not None
            covered["sized"] += sized
            covered["stages"] += sized and any(e.get("stage") for e in document["layers"])
            covered["drafts"] += any(entry.get("is_draft") for entry in document["layers"])
            covered["no hybrid"] += document["disable_hybrid_kv_cache_manager"]
            covered[f"mamba {document['mamba_cache_mode']}"] += 1
    assert not differences, f"{len(differences)} differ\n" + "\n".join(differences[:3])
    covered.update(paths.counts)
    short = {name: covered[name] for name, floor in FLOORS.items() if covered[name] < floor}
    assert not short, f"too few of {short}, expected {FLOORS}"


def _entry(kind: str, count: int = 2, **fields: Any) -> dict[str, Any]:
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
    return {"kind": kind, "count": count, **shape, **fields}


def _mla(count: int = 2, **fields: Any) -> dict[str, Any]:
    return _entry("mla_attention", count, **{"num_kv_heads": 1, **fields})


def _state(count: int, **fields: Any) -> dict[str, Any]:
    """Kimi-K3's recurrent state at TP 8: 878,592 B."""
    shapes = {"shapes": [[4608, 10], [12, 128, 128]], "dtypes": ["bfloat16", "float32"]}
    return {"kind": "mamba", "count": count, "block_size": 64, **shapes, **fields}


QUIRKS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "two windows on full attention end the planning": (
        "ValueError",
        [_entry("full_attention", sliding_window=w) for w in (512, 1024)],
        {},
    ),
    "a window and a chunk size on one layer never merge": (
        "AssertionError",
        [
            _entry("full_attention", sliding_window=512, attention_chunk_size=512),
            _entry("sliding_window", sliding_window=512),
        ],
        {},
    ),
    "full attention swallows a reference window": (
        "",
        [
            _entry("full_attention"),
            _entry("rswa", rswa_window=128),
            _entry("sliding_window", sliding_window=512),
        ],
        {},
    ),
    "a reference window refuses full attention": (
        "",
        [
            _entry("rswa", rswa_window=128),
            _entry("full_attention"),
            _entry("sliding_window", sliding_window=512),
        ],
        {},
    ),
    "a group that begins with a reference window cannot take full attention": (
        "AssertionError",
        [
            _entry("full_attention", 1),
            _entry("rswa", 1, rswa_window=128),
            _entry("full_attention", 2, non_causal=True),
            _entry("sliding_window", 2, sliding_window=512),
        ],
        {},
    ),
    "full attention swallows a sink": (
        "",
        [_entry("full_attention"), _entry("sink_full_attention", sink_len=4)],
        {},
    ),
    "a sink with more than one token per state never merges": (
        "AssertionError",
        [
            _entry("sink_full_attention", sink_len=4, tokens_per_state=2),
            _entry("sliding_window", sliding_window=512, block_size=32, tokens_per_state=4),
        ],
        {},
    ),
    "MLA with a value head never merges": (
        "AssertionError",
        [
            _mla(head_size_v=64),
            _entry("sliding_window", num_kv_heads=1, sliding_window=512),
        ],
        {},
    ),
    "MLA drops its alignment when it merges": (
        "",
        [_mla(head_size=100, alignment=1000, block_stride_alignment={"multiple_of": 8})],
        {},
    ),
    "windowed MLA merges different formats of one page size": (
        "",
        [
            _entry("sliding_window_mla", head_size=64, sliding_window=128, dtype="bfloat16"),
            _entry("sliding_window_mla", head_size=128, sliding_window=128, dtype="uint8"),
            _mla(head_size=64, num_kv_heads=2),
        ],
        {},
    ),
    "windowed MLA with the hybrid manager disabled": (
        "TypeError",
        [_mla(), _entry("sliding_window_mla", num_kv_heads=1, sliding_window=128)],
        {"disable_hybrid_kv_cache_manager": True},
    ),
    "hidden-state layers of several formats alone": (
        "ValueError",
        [_entry("hidden_state_cache", 1, block_size=b) for b in (16, 32)],
        {},
    ),
    "a hidden-state layer of MLA's format joins MLA": (
        "",
        [_mla(), _entry("hidden_state_cache", 1, num_kv_heads=1)],
        {},
    ),
    "a padded page does not grow by a factor": (
        "AssertionError",
        [
            _entry("full_attention", page_size_padded=1 << 14),
            _entry("sliding_window", sliding_window=512, num_kv_heads=8),
        ],
        {},
    ),
    "windows of two page sizes in unequal numbers lose layers": (
        "AssertionError",
        [
            _entry("full_attention", 2, block_size=32),
            _entry("sliding_window", 5, sliding_window=512),
            _entry("sliding_window", 2, sliding_window=512, num_kv_heads=1),
        ],
        {"layout": "BLHNC"},
    ),
    "windows of two page sizes can leave a group empty": (
        "StopIteration",
        [
            _entry("full_attention", 1, num_kv_heads=1, block_size=32),
            _entry("sliding_window", 3, sliding_window=512),
            _entry("sliding_window", 1, sliding_window=512, num_kv_heads=1),
        ],
        {"layout": "BLHNC"},
    ),
    "an encoder-only layer has no uniform type": (
        "AssertionError",
        [
            _entry("encoder_only_attention", 1),
            _entry("full_attention", 1),
        ],
        {},
    ),
    "two quantisation modes of one number are one": (
        "",
        [_entry("full_attention", kv_quant_mode=m) for m in ("CUSTOM", "OCTAVE_K3V4")],
        {},
    ),
    "two quantisation modes of one number take one place in the order of layers": (
        "",
        [
            *(
                _entry("full_attention", count, kv_quant_mode=mode)
                for count, mode in ((1, "CUSTOM"), (1, "OCTAVE_K3V4"), (3, "CUSTOM"))
            ),
            _entry("sliding_window", 2, sliding_window=512),
        ],
        {},
    ),
    "a padded state whose heads spread over more than its page": (
        "AssertionError",
        [_state(2, num_heads=2, page_size_padded=884_736)],
        {},
    ),
    "a state whose heads spread over whole pages": (
        "",
        [_state(2, num_heads=2, page_size_padded=878_592), _state(1, num_heads=2)],
        {},
    ),
    "a page padded to all heads of a state": (
        "",
        [_state(2, num_heads=2, page_size_padded=2 * 884_736)],
        {},
    ),
    "a window that DCP would have to shard": (
        "AssertionError",
        [_entry("full_attention"), _entry("sliding_window", sliding_window=512)],
        {"tp_size": 2, "dcp_size": 2},
    ),
}


def _document(entries: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    return {
        "schema": "k3backend.specs/1",
        "layout": "LBNHC",
        "tp_size": 1,
        "dcp_size": 1,
        "max_model_len": 4096,
        "max_in_flight_tokens": 2048,
        "mamba_cache_mode": "align",
        "available_bytes": 1 << 30,
        **settings,
        "layers": [
            {**entry, "prefix": f"{entry['kind']}{number}."} for number, entry in enumerate(entries)
        ],
    }


@pytest.mark.parametrize("quirk", QUIRKS)
def test_quirk_equals_vllm(quirk: str) -> None:
    """Each known oddity by itself: vLLM still has it, and we answer alike."""
    expected_error, entries, settings = QUIRKS[quirk]
    document = _document(entries, **settings)
    error, difference = _compare(document)
    assert error == expected_error
    assert difference == ""
    if expected_error:
        with pytest.raises(K3Error, match=r"layer \w+\.\d+"):
            plan_with_ours(document)


@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
@pytest.mark.parametrize(
    ("padded", "places"), [(884_736, False), (878_592, True), (2 * 878_592, True)]
)
def test_padded_state_of_two_heads_equals_vllm(layout: str, padded: int, places: bool) -> None:
    """vLLM places it where the heads spread over whole pages and lie within the block."""
    entries = [_state(2, num_heads=2, page_size_padded=padded)]
    error, difference = _compare(_document(entries, layout=layout))
    assert difference == ""
    assert error == ("" if places and KVCacheLayout[layout].is_block_compact else "AssertionError")
