"""A Kimi-K3 deployment as numbers: its layers in vLLM's order, its block, its KDA page.

The block rule, with ``g`` = max(128, block size asked for), made a multiple of the prefill
checkpoint alignment where checkpoints are kept::

    block = g * ceil(kda_state_bytes / (g * mla_bytes_per_token))

and the KDA page is then padded to ``block * mla_bytes_per_token``. Example, TP 8, fp8, 7 draft
tokens: the state is 4608 x 10 x 2 + 12 x 128 x 128 x 4 = 878,592 B, a token takes 576 B, so the
block is 128 x ceil(878592 / 73728) = 1536 tokens and the page 884,736 B. The draft tokens are part
of the state: each adds a row to the convolution's window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from k3backend.common.cache_dtype import CacheDtype, resolve_cache_dtype
from k3backend.common.errors import InputError
from k3backend.common.kv_dtype import DType
from k3backend.common.model_config import (
    MAX_LAYERS,
    MAX_TOKENS,
    DraftConfig,
    GQADraftConfig,
    MLADraftConfig,
    TargetConfig,
    load_draft,
    load_target,
)

MLA_BLOCK_ALIGNMENT_TOKENS = 128
"""FlashInfer's MLA decode wants 128 // kernel block kernel blocks at a time; vLLM holds every
hybrid MLA model to it, on every platform."""
SMALLEST_KERNEL_BLOCK_TOKENS = 16
"""A block size that is asked for must be a multiple, or no draft backend can use it."""
DEFAULT_SPEC_TOKENS = 7
MAX_RANKS = 2**16
MAX_SPEC_TOKENS = 1024
MAX_CHECKPOINT_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer of a deployment.

    Attributes:
        name: vLLM's layer name (its ROCm model's; the NVIDIA one leaves ``.attn`` away).
        kind: "kda", "mla" or "gqa".
        is_draft: whether the draft owns it.
        stage: pipeline stage that holds it.
        sliding_window: tokens, for a windowed GQA layer, else None.
    """

    name: str
    kind: Literal["kda", "mla", "gqa"]
    is_draft: bool
    stage: int
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One target, at most one draft, and how they are served. Checked when built.

    Attributes:
        target, draft: what load_target and load_draft give.
        tp_size, dcp_size, pp_size: ranks; dcp_size divides tp_size.
        kv_dtype: one of KV_DTYPES, for the target.
        draft_kv_dtype: the same for the draft; None follows the target.
        spec_tokens: draft tokens per step. They take rows of the KDA state with or without a draft.
        max_model_len, max_in_flight_tokens: tokens.
        mamba_cache_mode: "align" keeps states at block ends for prefix caching, "none" only the
            running one.
        prefill_checkpoint_blocks: extra KDA blocks per request and group.
        block_size: tokens asked for; None leaves it to the block rule, which also raises what is
            too small for the KDA state.
        draft_max_tp_shards: how many TP shards the draft's cache says it has; "declared" is the
            truth (1 for MLA, the KV heads for GQA), None leaves it undeclared.
    Raises:
        InputError: naming the flag that cannot be used.
    """

    target: TargetConfig
    draft: DraftConfig | None = None
    tp_size: int = 8
    dcp_size: int = 1
    pp_size: int = 1
    kv_dtype: str = "fp8"
    draft_kv_dtype: str | None = None
    spec_tokens: int = 0
    max_model_len: int
    max_in_flight_tokens: int = 8192
    mamba_cache_mode: Literal["none", "align"] = "align"
    prefill_checkpoint_blocks: int = 0
    block_size: int | None = None
    draft_max_tp_shards: int | Literal["declared"] | None = "declared"

    @classmethod
    def load(
        cls,
        target: str = "kimi-k3",
        draft: str | None = None,
        *,
        spec_tokens: int | None = None,
        max_model_len: int | None = None,
        **sizes: Any,
    ) -> Deployment:
        """A deployment by names: a bundled name or a config.json each; draft None or "none".

        Args:
            spec_tokens: None takes 7 with a draft and 0 without.
            max_model_len: None takes the target's.
            sizes: the other fields of Deployment.
        """
        target_config = load_target(target)
        draft_config = None if draft is None or draft == "none" else load_draft(draft)
        if spec_tokens is None:
            spec_tokens = DEFAULT_SPEC_TOKENS if draft_config is not None else 0
        if max_model_len is None:
            max_model_len = target_config.max_position_embeddings
        return cls(
            target=target_config,
            draft=draft_config,
            spec_tokens=spec_tokens,
            max_model_len=max_model_len,
            **sizes,
        )

    def __post_init__(self) -> None:
        _check_int("--tp", self.tp_size, 1, MAX_RANKS)
        _check_int("--dcp", self.dcp_size, 1, MAX_RANKS)
        _check_int("--pp", self.pp_size, 1, MAX_LAYERS)
        _check_int("--spec-tokens", self.spec_tokens, 0, MAX_SPEC_TOKENS)
        _check_int("--max-model-len", self.max_model_len, 1, MAX_TOKENS)
        _check_int("--max-in-flight-tokens", self.max_in_flight_tokens, 1, MAX_TOKENS)
        _check_int(
            "--prefill-checkpoint-blocks", self.prefill_checkpoint_blocks, 0, MAX_CHECKPOINT_BLOCKS
        )
        if self.mamba_cache_mode not in ("none", "align"):
            raise InputError(
                f"--mamba-cache-mode is {self.mamba_cache_mode!r}, expected none or align; "
                "choose one"
            )
        if self.block_size is not None:
            _check_int("--block-size", self.block_size, 1, MAX_TOKENS)
            if self.block_size % SMALLEST_KERNEL_BLOCK_TOKENS:
                raise InputError(
                    f"--block-size is {self.block_size}, expected a multiple of "
                    f"{SMALLEST_KERNEL_BLOCK_TOKENS} tokens; round it or leave it out"
                )
        if self.draft_max_tp_shards is not None and self.draft_max_tp_shards != "declared":
            _check_int("--draft-max-tp-shards", self.draft_max_tp_shards, 1, MAX_RANKS)
        self._check_ranks()
        resolve_cache_dtype(self.kv_dtype, self.target.dtype, self.target.latent_size)
        if self.draft is not None:
            _ = self.draft_cache_dtype

    def _check_ranks(self) -> None:
        """Refuse sizes that do not divide what they shard."""
        if self.tp_size % self.dcp_size:
            raise InputError(
                f"--dcp is {self.dcp_size}, expected a divisor of --tp ({self.tp_size}); "
                "context parallelism reuses the TP ranks"
            )
        if self.pp_size > self.target.num_layers:
            raise InputError(
                f"--pp is {self.pp_size}, expected at most one stage per layer "
                f"({self.target.num_layers}); lower it"
            )
        heads = [
            ("the target's MLA heads", self.target.num_attention_heads),
            ("the target's KDA heads", self.target.kda_num_heads),
        ]
        if self.draft is not None:
            heads.append(("the draft's query heads", self.draft.num_attention_heads))
        for what, count in heads:
            if count % self.tp_size:
                raise InputError(
                    f"--tp is {self.tp_size}, expected a divisor of {what} ({count}); "
                    f"choose one of {_shared_divisors(heads)}"
                )
        if isinstance(self.draft, GQADraftConfig):
            kv_heads = self.draft.num_kv_heads
            if kv_heads % self.tp_size and self.tp_size % kv_heads:
                raise InputError(
                    f"--tp is {self.tp_size}, expected a divisor or a multiple of the draft's KV "
                    f"heads ({kv_heads}); choose one of {_shared_divisors(heads)}"
                )

    @property
    def cache_dtype(self) -> CacheDtype:
        """What the target's MLA layers store."""
        return resolve_cache_dtype(self.kv_dtype, self.target.dtype, self.target.latent_size)

    @property
    def draft_cache_dtype(self) -> CacheDtype:
        """What the draft's layers store: the target's format unless ``draft_kv_dtype`` says so."""
        latent = self.draft.latent_size if isinstance(self.draft, MLADraftConfig) else None
        if self.draft_kv_dtype is None:
            return resolve_cache_dtype(self.kv_dtype, self.target.dtype, latent)
        return resolve_cache_dtype(
            self.draft_kv_dtype, self.target.dtype, latent, "--draft-kv-dtype"
        )

    @property
    def mla_token_bytes(self) -> int:
        """Bytes of one token in one target MLA layer; every rank holds the whole latent."""
        return self.cache_dtype.token_bytes(self.target.latent_size)

    @property
    def kda_state_shapes(self) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Per rank: convolution state [channels, rows] and recurrent state [heads, size, size].

        Queries, keys and values are convolved, hence 3 x heads x size channels; the rows are the
        taps before the current token and one per draft token.
        """
        target = self.target
        heads = target.kda_num_heads // self.tp_size
        channels = 3 * heads * target.kda_head_dim
        rows = target.kda_conv_kernel - 1 + self.spec_tokens
        return (channels, rows), (heads, target.kda_head_dim, target.kda_head_dim)

    @property
    def kda_state_dtypes(self) -> tuple[DType, DType]:
        """The convolution state has the model's dtype, the recurrent one float32."""
        return DType.of(self.target.dtype), DType.of("float32")

    @property
    def kda_state_bytes(self) -> int:
        """Bytes of one KDA layer's state on one rank, unpadded."""
        return sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.kda_state_shapes, self.kda_state_dtypes, strict=True)
        )

    def block_tokens(self, checkpoint_alignment_tokens: int = 1) -> int:
        """The block by the rule at the top of this module.

        Args:
            checkpoint_alignment_tokens: the platform's, where prefill checkpoints are kept.
        """
        granule = max(MLA_BLOCK_ALIGNMENT_TOKENS, self.block_size or 0)
        if self.mamba_cache_mode == "align" and self.prefill_checkpoint_blocks:
            granule = math.lcm(granule, checkpoint_alignment_tokens)
        granules = -(-self.kda_state_bytes // (granule * self.mla_token_bytes))
        return granule * granules

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers, the target's first, in vLLM's order."""
        target = self.target
        stages = pipeline_stages(target.num_layers, self.pp_size)
        mla = set(target.mla_layers)
        found: list[Layer] = []
        for index in range(target.num_layers):
            name = f"{target.layer_prefix}.layers.{index}.self_attn"
            if index in mla:
                found.append(Layer(f"{name}.attn", "mla", False, stages[index]))
            else:
                found.append(Layer(name, "kda", False, stages[index]))
        last = self.pp_size - 1
        if isinstance(self.draft, MLADraftConfig):
            for index in range(self.draft.num_layers):
                name = f"model.layers.{target.num_layers + index}.self_attn"
                found.append(Layer(name, "mla", True, last))
        elif isinstance(self.draft, GQADraftConfig):
            for index, window in enumerate(self.draft.windows):
                name = f"model.layers.{target.num_layers + index}.self_attn.attn"
                found.append(Layer(name, "gqa", True, last, window))
        return tuple(found)

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """(code, message) of what a user may not expect and that is no error."""
        found = []
        if self.block_size is not None and self.block_size != self.block_tokens():
            found.append(
                (
                    "block-size-raised",
                    f"--block-size {self.block_size} holds no KDA state "
                    f"({self.kda_state_bytes} B); the block is {self.block_tokens()} tokens",
                )
            )
        if self.max_model_len > self.target.max_position_embeddings:
            found.append(
                (
                    "beyond-trained-length",
                    f"--max-model-len {self.max_model_len} is above the target's "
                    f"{self.target.max_position_embeddings}",
                )
            )
        trained_for = None if self.draft is None else self.draft.target_num_layers
        if trained_for not in (None, self.target.num_layers):
            found.append(
                (
                    "draft-of-another-target",
                    f"the draft was trained for a target of {trained_for} layers, "
                    f"this one has {self.target.num_layers}",
                )
            )
        return tuple(found)


def pipeline_stages(num_layers: int, pp_size: int) -> tuple[int, ...]:
    """Pipeline stage of each layer, as vLLM partitions them by default.

    Every stage gets ``num_layers // pp_size`` layers; the remainder goes one layer each to the
    stages before the last, from the back, and the first stage is the last to get one.
    """
    sizes = [num_layers // pp_size] * pp_size
    for index in range(num_layers % pp_size):
        sizes[pp_size - 2 - index] += 1
    return tuple(stage for stage, size in enumerate(sizes) for _ in range(size))


def _check_int(flag: str, value: object, minimum: int, maximum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise InputError(
            f"{flag} is {value!r}, expected an integer from {minimum} to {maximum}; correct it"
        )


def _shared_divisors(heads: list[tuple[str, int]]) -> str:
    shared = math.gcd(*(count for _, count in heads))
    return ", ".join(str(size) for size in range(1, min(shared, 512) + 1) if shared % size == 0)
