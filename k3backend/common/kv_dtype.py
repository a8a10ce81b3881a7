"""Names of tensor dtypes and of KV cache quantisation formats, without importing torch.

Planning needs only a dtype's name and its bytes per element, so it uses :class:`DType`; torch is
imported where a tensor is made (``DType.torch``).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3backend.common.errors import InputError

if TYPE_CHECKING:
    import torch

_ITEMSIZE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "complex32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DType:
    """A torch dtype by name. Equal to, and built from, a torch dtype or its name.

    Use :meth:`of`; it returns the one instance per name. The hash is that of the name, so a
    mapping keyed by DType finds its name too (not a torch dtype, whose hash is its own).

    Attributes:
        name: torch's name without the module, such as "bfloat16".
        itemsize: bytes of one element.
    """

    name: str
    itemsize: int

    @staticmethod
    def of(value: object) -> DType:
        """The dtype that ``value`` (DType, torch dtype or name) stands for.

        Raises:
            InputError: the name is unknown.
        """
        if isinstance(value, DType):
            return value
        name = value if isinstance(value, str) else _torch_name(value)
        if name is not None:
            found = _DTYPES.get(_ALIASES.get(name, name))
            if found is not None:
                return found
        raise InputError(
            f"dtype {value!r} is not known; give a torch dtype or one of {', '.join(_DTYPES)}"
        )

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype. Imports torch."""
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, DType):
            return self.name == other.name
        if isinstance(other, str):
            return self.name == _ALIASES.get(other, other)
        name = _torch_name(other)
        return NotImplemented if name is None else self.name == name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (DType.of, (self.name,))


def _torch_name(value: object) -> str | None:
    """Name of a torch dtype, None for any other object."""
    cls = type(value)
    if cls.__name__ == "dtype" and cls.__module__ == "torch":
        return str(value).removeprefix("torch.")
    return None


_DTYPES: dict[str, DType] = {name: DType(name, size) for name, size in _ITEMSIZE_BYTES.items()}


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Any size that is a multiple of ``base``; as a stride alignment, ``base`` is in tokens.

    Raises:
        InputError: ``base`` is no positive integer.
    """

    base: int

    def __post_init__(self) -> None:
        if type(self.base) is not int or self.base < 1:
            raise InputError(
                f"MultipleOf.base is {self.base!r}, expected an integer >= 1; give the tokens of "
                "a kernel block"
            )

    def __repr__(self) -> str:
        return f"MultipleOf({self.base})"


class KVQuantMode(enum.IntEnum):
    """How cached keys and values are quantised. Every member has a value of its own.

    vLLM 0.33.0 gives CUSTOM and OCTAVE_K3V4 one value (12), so its CUSTOM is an alias; here
    CUSTOM is 15. Translate between the two by name, never by value.
    """

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_K8V4 = 6
    TURBOQUANT_4BIT_NC = 7
    TURBOQUANT_K3V4_NC = 8
    TURBOQUANT_3BIT_NC = 9
    NVFP4_DS_MLA = 10
    ULTRAQUANT_4BIT = 11
    OCTAVE_K3V4 = 12
    OCTAVE_K3V3 = 13
    OCTAVE_K3V3_COMPACT = 14
    CUSTOM = 15

    @property
    def is_quantized(self) -> bool:
        """Whether anything but plain elements is stored."""
        return self is not KVQuantMode.NONE

    @property
    def is_per_token_head(self) -> bool:
        """Whether a scale per token and head is stored beside the elements."""
        return self.name.endswith("_PER_TOKEN_HEAD")

    @property
    def is_nvfp4(self) -> bool:
        """Whether it is packed NVFP4. The opaque MLA form (NVFP4_DS_MLA) is not."""
        return self is KVQuantMode.NVFP4

    @property
    def is_turboquant(self) -> bool:
        """Whether it is one of the Turboquant formats."""
        return self.name.startswith("TURBOQUANT_")

    @property
    def is_octave(self) -> bool:
        """Whether it is one of the Octave formats."""
        return self.name.startswith("OCTAVE_")

    @property
    def is_ultraquant(self) -> bool:
        """Whether it is the Ultraquant 4-bit format."""
        return self is KVQuantMode.ULTRAQUANT_4BIT

    @property
    def is_custom_mode(self) -> bool:
        """Whether a backend chooses its kernels by itself."""
        return self is KVQuantMode.CUSTOM


_UNQUANTIZED = ("auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32", "float")
_EXACT = {
    name.lower(): mode
    for name, mode in KVQuantMode.__members__.items()
    if name not in ("NONE", "CUSTOM", "FP8_PER_TENSOR")
}
# Checked in this order after the exact names, which are the longer ones.
_PREFIXES = (("nvfp4", KVQuantMode.NVFP4), ("fp8", KVQuantMode.FP8_PER_TENSOR))


def get_kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """The quantisation format that a ``--kv-cache-dtype`` name stands for.

    Longer names win: "nvfp4_ds_mla" is not NVFP4, "fp8_per_token_head" is not per tensor.

    Raises:
        InputError: the name is unknown. (vLLM takes an unknown name for an unquantised cache.)
    """
    if kv_cache_dtype in _UNQUANTIZED:
        return KVQuantMode.NONE
    exact = _EXACT.get(kv_cache_dtype)
    if exact is not None:
        return exact
    for prefix, mode in _PREFIXES:
        if isinstance(kv_cache_dtype, str) and kv_cache_dtype.startswith(prefix):
            return mode
    raise InputError(
        f"kv_cache_dtype {kv_cache_dtype!r} is not known; give one of "
        f"{', '.join((*_UNQUANTIZED, 'fp8', 'fp8_e4m3', 'fp8_e5m2', *_EXACT))}"
    )


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """Whether the name stands for a quantised cache. Raises as :func:`get_kv_quant_mode`."""
    return get_kv_quant_mode(kv_cache_dtype).is_quantized


def kv_cache_uses_per_token_head_scales(kv_cache_dtype: str) -> bool:
    """Whether the name needs a scale per token and head. Raises as :func:`get_kv_quant_mode`."""
    return get_kv_quant_mode(kv_cache_dtype).is_per_token_head
