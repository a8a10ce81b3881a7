"""The planning context and the block sizes that backends take."""

from __future__ import annotations

from typing import Any

import pytest

from k3backend.common.errors import InputError
from k3backend.common.kv_layout import KVCacheLayout
from k3backend.common.kv_spec import MambaType
from k3backend.common.plan_context import KernelBlocks, PlanContext


@pytest.mark.parametrize(
    ("text", "allowed", "refused"),
    [
        ("any", (1, 7, 1536), ()),
        ("multiple:16", (16, 1728), (8, 24, 100)),
        ("multiple:1", (1, 7), ()),
        ("32,64", (32, 64), (16, 96, 128)),
        (" 64 , 32 ", (32, 64), (16,)),
        ("16", (16,), (32,)),
    ],
)
def test_kernel_blocks(text: str, allowed: tuple[int, ...], refused: tuple[int, ...]) -> None:
    blocks = KernelBlocks.parse(text)
    assert all(blocks.allows(size) for size in allowed)
    assert not any(blocks.allows(size) for size in refused)
    assert KernelBlocks.parse(str(blocks)) == blocks


@pytest.mark.parametrize(
    "text",
    [
        "",
        "multiple:",
        "multiple:0",
        "multiple:16,32",
        "0",
        "32,",
        "-1",
        "1.5",
        "all",
        "¹",
        None,
        16,
    ],
)
def test_bad_kernel_blocks_are_refused(text: object) -> None:
    with pytest.raises(InputError, match='give "any", "multiple:N" or a list'):
        KernelBlocks.parse(text)  # type: ignore[arg-type]


def test_defaults() -> None:
    context = PlanContext(max_model_len=1000)
    assert (context.layout, context.tp_size, context.dcp_size, context.pp_size) == (
        "LBNHC",
        1,
        1,
        1,
    )
    assert context.mamba_cache_mode == "align"
    assert context.max_in_flight_tokens == 8192
    assert str(context.mla_kernel_block) == "any"
    assert str(context.draft_kernel_block) == "multiple:16"
    assert context.prefix_caching
    assert not context.disable_hybrid_kv_cache_manager
    assert context.planning_tokens == 1000
    assert PlanContext(max_model_len=1000, context=60).planning_tokens == 60


def test_a_shorter_request_of_the_same_deployment() -> None:
    context = PlanContext(max_model_len=1000, context=600, tp_size=8)
    shorter = context.with_max_model_len(100)
    assert (shorter.max_model_len, shorter.planning_tokens, shorter.tp_size) == (100, 100, 8)


def test_kernel_blocks_may_be_text() -> None:
    context = PlanContext(max_model_len=1, draft_kernel_block="32,64")  # type: ignore[arg-type]
    assert context.draft_kernel_block == KernelBlocks(sizes=(32, 64))


def test_a_layout_may_be_the_enum() -> None:
    for layout in KVCacheLayout:
        context = PlanContext(max_model_len=1, layout=layout)  # type: ignore[arg-type]
        assert context == PlanContext(max_model_len=1, layout=layout.name)
        assert context.layout == layout.name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "LNBHC"}, "layout is 'LNBHC', expected one of LBNHC"),
        ({"layout": None}, "layout is None"),
        ({"layout": ["LBNHC"]}, "layout is ['LBNHC']"),
        ({"layout": MambaType.MAMBA2}, "layout is 'MAMBA2'"),
        ({"tp_size": 0}, "tp_size is 0, expected an integer from 1 to 65536"),
        ({"tp_size": True}, "tp_size is True"),
        ({"dcp_size": -2}, "dcp_size is -2"),
        ({"tp_size": 1 << 17}, "tp_size is 131072, expected an integer from 1 to 65536"),
        ({"max_model_len": 1 << 41}, "max_model_len is 2199023255552, expected"),
        ({"pp_size": "2"}, "pp_size is '2'"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": 1.0}, "max_model_len is 1.0"),
        ({"context": 0}, "context is 0"),
        ({"context": 1001}, "context is 1001, expected at most max_model_len"),
        ({"max_in_flight_tokens": 0}, "max_in_flight_tokens is 0"),
        ({"max_num_encoder_input_tokens": -1}, "max_num_encoder_input_tokens is -1"),
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode is 'some', expected one of none"),
        ({"prefix_caching": 1}, "prefix_caching is 1, expected True or False"),
        ({"disable_hybrid_kv_cache_manager": None}, "disable_hybrid_kv_cache_manager is None"),
        ({"mla_kernel_block": 64}, "mla_kernel_block is 64"),
        ({"mla_kernel_block": "64k"}, "mla_kernel_block: kernel blocks '64k'"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        PlanContext(**{"max_model_len": 1000, **fields})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
