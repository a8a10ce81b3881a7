"""What a decode layer meets of its host, as plain records: impl, metadata, scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.helpers.decode_cases import SCALE, Inputs


@dataclass
class Forward:
    """One forward: its layers share the metadata."""

    impl: Any
    metadata: Any
    layer: Any


@dataclass
class Host:
    """Makes forwards of cases. ``max_tokens``: columns of the block tables in tokens."""

    dcp_world: int = 1
    dcp_rank: int = 0
    with_lse: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def forward(self, inputs: Inputs) -> Forward:
        """The records of one step of these inputs."""
        case = inputs.case
        requests = len(case.lens)
        starts = torch.arange(0, requests * case.q_len + 1, case.q_len)
        decode = SimpleNamespace(
            block_table=inputs.block_table,
            seq_lens=inputs.seq_lens,
            dcp_tot_seq_lens=inputs.causal_lens,
        )
        metadata = SimpleNamespace(
            num_decodes=requests,
            num_decode_tokens=requests * case.q_len,
            num_prefills=0,
            causal=case.causal,
            decode=decode,
            query_start_loc_cpu=starts,
            **self.extra,
        )
        impl = SimpleNamespace(
            scale=SCALE,
            dcp_world_size=self.dcp_world,
            dcp_rank=self.dcp_rank,
            need_to_return_lse_for_decode=self.with_lse,
        )
        layer = SimpleNamespace(_q_scale_float=case.q_scale, _k_scale_float=case.k_scale)
        return Forward(impl, metadata, layer)
