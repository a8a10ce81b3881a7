"""What planning needs to know besides the layers: layout, parallel sizes, lengths, policies."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum

from k3backend.common.errors import InputError

LAYOUT_NAMES = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
MAMBA_CACHE_MODES = ("none", "align", "all")


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """The block sizes, in tokens, that an attention backend's kernels take without a split.

    Attributes:
        multiple_of: every multiple of this many tokens; 1 is any size.
        sizes: these sizes only; wins over ``multiple_of`` where given.

    Raises:
        InputError: a size is no positive integer.
    """

    multiple_of: int = 1
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for size in (self.multiple_of, *self.sizes):
            if type(size) is not int or size < 1:
                raise InputError(
                    f"kernel block size is {size!r}, expected an integer >= 1; "
                    'give "any", "multiple:N" or a list such as "32,64"'
                )

    @classmethod
    def parse(cls, text: str) -> KernelBlocks:
        """Read ``any``, ``multiple:N`` or ``N,N,…``. Raises InputError on anything else."""
        form = text.strip() if isinstance(text, str) else ""
        if form == "any":
            return cls()
        multiple = form.startswith("multiple:")
        words = [word.strip() for word in form.removeprefix("multiple:").split(",")]
        valid = all(word.isascii() and word.isdigit() and len(word) <= 12 for word in words)
        if not valid or 0 in map(int, words) or (multiple and len(words) != 1):
            raise InputError(
                f'kernel blocks {text!r} are not understood; give "any", "multiple:N" or a list '
                'of sizes such as "32,64"'
            )
        if multiple:
            return cls(multiple_of=int(words[0]))
        return cls(sizes=tuple(sorted({int(word) for word in words})))

    def allows(self, block_tokens: int) -> bool:
        """Whether a manager block of this many tokens can be the kernel block, unsplit."""
        if self.sizes:
            return block_tokens in self.sizes
        return block_tokens % self.multiple_of == 0

    def __str__(self) -> str:
        if self.sizes:
            return ",".join(map(str, self.sizes))
        return "any" if self.multiple_of == 1 else f"multiple:{self.multiple_of}"


MAX_RANKS = 1 << 16
"""More ranks of one kind than any machine has: taken for a mistake."""
MAX_TOKENS = 1 << 40
"""More tokens than any request or batch has: taken for a mistake."""

# Field -> least, most, meaning.
_SIZES = {
    "tp_size": (1, MAX_RANKS, "the tensor-parallel ranks"),
    "dcp_size": (1, MAX_RANKS, "the decode-context-parallel ranks"),
    "pp_size": (1, MAX_RANKS, "the pipeline stages"),
    "max_model_len": (1, MAX_TOKENS, "the longest request, in tokens"),
    "max_in_flight_tokens": (1, MAX_TOKENS, "the tokens scheduled and not yet settled"),
    "max_num_encoder_input_tokens": (0, MAX_TOKENS, "the encoder tokens of one request"),
}
_SWITCHES = ("prefix_caching", "disable_hybrid_kv_cache_manager")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """The deployment that layers are planned for.

    Attributes:
        layout: physical order of the cache, one of ``LAYOUT_NAMES``; a ``KVCacheLayout`` is taken
            by its name.
        tp_size, dcp_size, pp_size: ranks per kind of parallelism.
        max_model_len: longest request, in tokens.
        context: tokens at which groupings are compared; None means ``max_model_len``.
        max_in_flight_tokens: tokens scheduled and not yet settled, all concurrent batches
            together; bounded caches keep room for them.
        mamba_cache_mode: "none", "align" or "all".
        mla_kernel_block, draft_kernel_block: block sizes that the backends take unsplit; text is
            parsed.
        prefix_caching: whether finished blocks are reused by prefix.
        disable_hybrid_kv_cache_manager: give local attention its full length.
        max_num_encoder_input_tokens: encoder tokens of one request, for cross attention.

    Raises:
        InputError: a field is of the wrong type or out of range.
    """

    layout: str = "LBNHC"
    tp_size: int = 1
    dcp_size: int = 1
    pp_size: int = 1
    max_model_len: int
    context: int | None = None
    max_in_flight_tokens: int = 8192
    mamba_cache_mode: str = "align"
    mla_kernel_block: KernelBlocks = field(default_factory=KernelBlocks)
    draft_kernel_block: KernelBlocks = field(default_factory=lambda: KernelBlocks(multiple_of=16))
    prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    max_num_encoder_input_tokens: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.layout, Enum):
            object.__setattr__(self, "layout", self.layout.name)
        if not isinstance(self.layout, str) or self.layout not in LAYOUT_NAMES:
            raise InputError(f"layout is {self.layout!r}, expected one of {_any_of(LAYOUT_NAMES)}")
        if self.mamba_cache_mode not in MAMBA_CACHE_MODES:
            raise InputError(
                f"mamba_cache_mode is {self.mamba_cache_mode!r}, expected one of "
                f"{_any_of(MAMBA_CACHE_MODES)}"
            )
        for name, (least, most, meaning) in _SIZES.items():
            _check_int(name, getattr(self, name), least, most, meaning)
        if self.context is not None:
            _check_int("context", self.context, 1, MAX_TOKENS, "the planning context in tokens")
            if self.context > self.max_model_len:
                raise InputError(
                    f"context is {self.context}, expected at most max_model_len "
                    f"({self.max_model_len}); no request is longer than that"
                )
        for name in _SWITCHES:
            if type(getattr(self, name)) is not bool:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected True or False")
        for name in ("mla_kernel_block", "draft_kernel_block"):
            value = getattr(self, name)
            if not isinstance(value, KernelBlocks):
                object.__setattr__(self, name, _parse_blocks(name, value))

    @property
    def planning_tokens(self) -> int:
        """Tokens of the request at which groupings are compared."""
        return self.max_model_len if self.context is None else self.context

    def with_max_model_len(self, tokens: int) -> PlanContext:
        """The same deployment for requests of at most ``tokens``; the planning context follows."""
        return replace(self, max_model_len=tokens, context=None)


FIELD_NAMES = tuple(f.name for f in fields(PlanContext))


def _any_of(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _check_int(name: str, value: object, least: int, most: int, meaning: str) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InputError(
            f"{name} is {value!r}, expected an integer from {least} to {most}; give {meaning}"
        )


def _parse_blocks(name: str, value: object) -> KernelBlocks:
    if not isinstance(value, str):
        raise InputError(
            f"{name} is {value!r}, expected KernelBlocks or text; "
            'give "any", "multiple:N" or a list such as "32,64"'
        )
    try:
        return KernelBlocks.parse(value)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
