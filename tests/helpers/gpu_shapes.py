"""Small problems for tests of tools/gpu_check.py: a pool on the CPU, right outputs, no clock."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla
from tests.helpers.decode_cases import BF16, FP8
from tools import gpu_correctness, gpu_speed

CPU = gpu_correctness.Device("cpu", KvBalancedMla, FP8)


def use_small_pool(monkeypatch: pytest.MonkeyPatch) -> gpu_speed.KvPool:
    """A pool of 17 blocks of 512 tokens."""
    monkeypatch.setattr(gpu_speed, "MAX_TOKENS", 8192)
    monkeypatch.setattr(gpu_speed, "MAX_REQUESTS", 1)
    monkeypatch.setattr(gpu_speed, "BLOCK_SIZES", {8: 512})
    return gpu_speed.KvPool(CPU)


def right_output(problem):
    """float64 attention of every request, rounded as the kernel rounds it."""
    case, rows = problem.case, []
    for request, length in enumerate(case.lens):
        tokens = slice(request * case.q_len, (request + 1) * case.q_len)
        q = problem.q[tokens].double()
        blocks = problem.table[request].long()
        keys = problem.cache.float()[blocks].reshape(-1, 576)[:length].double()
        scores = torch.einsum("thd,kd->thk", q, keys) * gpu_speed.SCALE
        for token in range(case.q_len):
            scores[token, :, length - case.q_len + token + 1 :] = -math.inf
        rows.append((scores.softmax(-1).nan_to_num(0.0) @ keys[:, :512]).to(BF16))
    return torch.cat(rows)


def no_watch():
    """A watch that calls once and reads no clock."""

    def time(call):
        call()
        return gpu_speed.Time(10.0, 9.0)

    return SimpleNamespace(time=time)
