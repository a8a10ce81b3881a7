"""``mla_decode`` refuses what no backend can decode: one error, every reason, before any work."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import k3backend
from k3backend.common.errors import UnsupportedDecodeError
from tests.helpers.decode_cases import BF16, FP8, SCALE, Case, build

BACKENDS = (None, "reference", "nvidia", "rocm")
FNUZ = torch.float8_e4m3fnuz
ON_THE_CPU = "tensors are on the CPU"


def arguments() -> dict[str, Any]:
    """Two requests of 30 and 70 keys, 2 tokens each, 12 heads, fp8, blocks of 64."""
    inputs = build(Case(lens=(30, 70), heads=12, q_len=2))
    return {
        "q": inputs.q, "kv_cache": inputs.kv_cache, "block_table": inputs.block_table,
        "seq_lens": inputs.seq_lens, "scale": SCALE, "q_len": 2,
    }  # fmt: skip


def reasons(backend: str | None, **changes: Any) -> list[str]:
    """Why the call is refused, without the one about kernels on a CPU."""
    given = arguments() | changes
    positional = [given.pop(name) for name in ("q", "kv_cache", "block_table", "seq_lens")]
    with pytest.raises(UnsupportedDecodeError) as error:
        k3backend.mla_decode(*positional, backend=backend, **given)
    return [reason for reason in error.value.reasons if not reason.startswith(ON_THE_CPU)]


def as_dtype(name: str, dtype: torch.dtype) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.zeros(arguments()[name].shape, dtype=dtype)}


# name -> what is changed, what the only reason says
NONSENSE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "uint8 cache": (
        lambda: {"kv_cache": arguments()["kv_cache"].view(torch.uint8)},
        "kv_cache is torch.uint8",
    ),
    "int32 q": (as_dtype("q", torch.int32), "q is torch.int32"),
    "fp16 q": (as_dtype("q", torch.float16), "q is torch.float16"),
    "fp8 q over bf16": (as_dtype("kv_cache", BF16), "q is torch.float8_e4m3fn over a kv_cache of"),
    "float table": (lambda: {"block_table": arguments()["block_table"].float()}, "block_table is"),
    "table too narrow": (
        lambda: {"block_table": arguments()["block_table"][:, :1]},
        "block_table has 1 columns, expected at least 2",
    ),
    "table beyond the cache": (
        lambda: {"block_table": arguments()["block_table"] + 1000},
        "block_table[0, 0] is 10",
    ),
    "no block": (lambda: {"kv_cache": arguments()["kv_cache"][:, :0]}, "kv_cache has shape"),
    "list lens": (lambda: {"seq_lens": [30, 70]}, "seq_lens is a list"),
    "negative lens": (lambda: {"seq_lens": -arguments()["seq_lens"]}, "seq_lens holds -70"),
    "scale None": (lambda: {"scale": None}, "scale is a NoneType"),
    "scale tensor": (lambda: {"scale": torch.tensor(SCALE)}, "scale is a Tensor"),
    "q_scale 0": (lambda: {"q_scale": 0.0}, "q_scale is 0.0"),
    "q_scale nan": (lambda: {"q_scale": math.nan}, "q_scale is nan"),
    "k_scale 0": (lambda: {"k_scale": 0.0}, "k_scale is 0.0"),
    "q_len None": (lambda: {"q_len": None}, "q_len is None"),
    "q_len float": (lambda: {"q_len": 2.0}, "q_len is 2.0"),
    "q_len 3": (lambda: {"q_len": 3}, "q has shape [4, 12, 576], expected [6, heads, 576]"),
    "cp of two": (lambda: {"cp": (2, 1)}, "cp is (2, 1)"),
    "cp None": (lambda: {"cp": None}, "cp is None"),
    "causal lens": (
        lambda: {"causal_lens": torch.tensor([30, 70])},
        "causal_lens is torch.int64",
    ),
    "no tensor q": (lambda: {"q": None}, "q is a NoneType"),
    "no tensor cache": (lambda: {"kv_cache": "cache"}, "kv_cache is a str"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_one_reason_that_names_the_argument(name: str, backend: str | None) -> None:
    change, text = NONSENSE[name]
    found = reasons(backend, **change())
    assert len(found) == 1, found
    assert found[0].startswith(text), found


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_fp8_formats_do_not_meet(backend: str | None) -> None:
    mixed = reasons(backend, kv_cache=torch.zeros(4, 64, 576).to(FNUZ))
    assert len(mixed) == 1
    assert "torch.float8_e4m3fnuz" in mixed[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_reason_is_listed(backend: str | None) -> None:
    good = arguments()
    found = reasons(
        backend,
        q=torch.zeros(4, 200, 576).to(FP8),
        kv_cache=torch.zeros(4, 64, 512).to(FP8),
        block_table=good["block_table"].long(),
        seq_lens=good["seq_lens"].long(),
        scale=-1,
        q_scale=-1,
    )
    said = ("heads is 200", "kv_cache has shape", "block_table is torch.int64",
            "seq_lens is torch.int64", "scale is -1", "q_scale is -1")  # fmt: skip
    for text in said:
        assert sum(reason.startswith(text) for reason in found) == 1, (text, found)
    assert len(found) == len(said)


@pytest.mark.parametrize("q_dtype", [FP8, FNUZ, BF16, torch.float32, torch.float64])
def test_the_reference_takes_what_it_says(q_dtype: torch.dtype) -> None:
    given = arguments()
    pairs = {q_dtype} | ({FP8, FNUZ} if q_dtype not in (FP8, FNUZ) else set())
    pairs |= {BF16, torch.float16} if q_dtype.itemsize > 2 else set()
    for kv_dtype in pairs:
        out, lse2 = k3backend.mla_decode(
            given["q"].float().to(q_dtype), torch.ones(4, 64, 576).to(kv_dtype),
            torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), given["seq_lens"], scale=SCALE,
            q_len=2, backend="reference",
        )  # fmt: skip
        assert lse2 is not None
        assert lse2.dtype == torch.float32
        assert out.dtype == (q_dtype if q_dtype.itemsize > 2 else BF16)
        assert (out == 1).all()
