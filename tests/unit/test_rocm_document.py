"""The route table in `docs/rocm.md` is what `choose_route` says."""

from __future__ import annotations

from pathlib import Path

from k3backend.rocm.mla_decode import route_table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "rocm.md"
SHAPES = {"one token": "target, one token", "verify": "target verify, 7 drafted"}


def test_the_documented_routes_are_the_chosen_ones() -> None:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCUMENT.read_text().splitlines()
        if line.startswith(("| 1 |", "| 8 |"))
    ]
    assert len(lines) == 16
    for dcp, arch, dtype, shape, size, name, padded, reads in lines:
        rows = route_table(tp=8, spec_tokens=7, dcp=int(dcp), arch=arch, aiter_version="0.1.20")
        wanted = SHAPES.get(shape, "DSpark draft block")
        (row,) = [r for r in rows if r.shape == wanted and r.kv_dtype == dtype]
        assert size == f"{row.heads} x {row.q_len}"
        assert (name, int(padded), int(reads)) == (
            row.route.name,
            row.route.padded_heads,
            row.route.kv_reads,
        ), (dcp, arch, dtype, shape)
