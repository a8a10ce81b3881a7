"""Decode every AITER route of the installed version once; AITER may end this process.

Prints each route before it runs, so the last line names the one that ended the process. Exit code 1
where a result was wrong.

    python tests/hardware/route_probe.py
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from k3backend.rocm.aiter_capabilities import DTYPES
from k3backend.rocm.aiter_ops import installed_version
from k3backend.rocm.kv_balanced_mla.core import FP8_DTYPES, gpu_arch
from k3backend.rocm.kv_balanced_mla.decode import KvBalancedDecode
from k3backend.rocm.mla_decode import choose_route
from tests.helpers.decode_cases import BF16, FP8, Case
from tests.helpers.hardware_checks import check_layer

HEADS = (6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def main() -> int:
    """Run the probe and return the exit code."""
    device = torch.device("cuda", torch.cuda.current_device())
    arch, version = gpu_arch(device), installed_version()
    print(f"AITER {version} on {arch}", flush=True)
    wrong = ran = 0
    for heads, q_len, q, kv, causal, dcp in product(
        HEADS, range(1, 9), DTYPES, DTYPES, (True, False), (1, 2)
    ):
        route = choose_route(
            heads=heads,
            q_len=q_len,
            q_dtype=q,
            kv_dtype=kv,
            causal=causal,
            dcp=dcp,
            arch=arch,
            need_lse=True,
            aiter_version=version,
        )
        if not route.calls_aiter:
            continue
        print(f"{heads} x {q_len} {q}/{kv} causal={causal} dcp={dcp}: {route.reason}", flush=True)
        case = Case(
            lens=(3000, 17, 700),
            heads=heads,
            q_len=q_len,
            q_dtype=FP8 if q == "fp8" else BF16,
            kv_dtype=FP8 if kv == "fp8" else BF16,
            causal=causal,
            cp=(dcp, 0, 1),
            seed=heads,
        )
        ran += 1
        try:
            check_layer(KvBalancedDecode, case, device, FP8_DTYPES[arch])
        except AssertionError as error:
            wrong += 1
            print(f"  WRONG: {error}", flush=True)
    print(f"{ran} routes, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
