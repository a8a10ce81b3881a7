"""What a ``--kv-dtype`` name stores: vLLM's names, the stored elements, the bytes of a token.

vLLM's mapping (0.33): fp8 caches are stored as uint8 and quantised per tensor, "auto" is the
model's dtype, and ``fp8_ds_mla`` packs a latent of 512 + 64 elements with its scales into 656 B.
Formats with scales per token and head, and NVFP4, exist there for layers that K3 does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3backend.common.errors import InputError
from k3backend.common.kv_dtype import DType, KVQuantMode, get_kv_quant_mode


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """One cache format.

    Attributes:
        name: vLLM's name, the ``cache_dtype_str`` of a spec.
        storage: dtype of the stored elements.
        packed_token_bytes: bytes of a token whose scales are packed with its data, else None.
    """

    name: str
    storage: DType
    packed_token_bytes: int | None = None

    @property
    def quant_mode(self) -> KVQuantMode:
        """How the elements are quantised."""
        return get_kv_quant_mode(self.name)

    def token_bytes(self, elements: int) -> int:
        """Bytes of one token that has ``elements`` elements."""
        return self.packed_token_bytes or elements * self.storage.itemsize


_FORMATS = {
    dtype.name: dtype
    for dtype in (
        CacheDtype("bfloat16", DType.of("bfloat16")),
        CacheDtype("float16", DType.of("float16")),
        CacheDtype("fp8", DType.of("uint8")),
        CacheDtype("fp8_e4m3", DType.of("uint8")),
        CacheDtype("fp8_e5m2", DType.of("uint8")),
        CacheDtype("fp8_inc", DType.of("float8_e4m3fn")),
        CacheDtype("fp8_ds_mla", DType.of("uint8"), packed_token_bytes=656),
    )
}
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}
KV_DTYPES = ("auto", *_ALIASES, *_FORMATS)
_PACKED_LATENT = 512 + 64


def resolve_cache_dtype(
    name: str, model_dtype: str, latent_size: int | None, flag: str = "--kv-dtype"
) -> CacheDtype:
    """The format behind a name.

    Args:
        name: one of KV_DTYPES.
        model_dtype: torch name of the target's dtype, which "auto" stands for.
        latent_size: elements of an MLA token, None for layers that are not MLA.
        flag: the argument to name in a message.
    Raises:
        InputError: unknown name, or a packed MLA format on a layer that it does not fit.
    """
    if not isinstance(name, str) or name not in KV_DTYPES:
        raise InputError(f"{flag} is {name!r}, expected one of {', '.join(KV_DTYPES)}; choose one")
    if name == "auto":
        return CacheDtype("auto", DType.of(model_dtype))
    found = _FORMATS[_ALIASES.get(name, name)]
    if found.packed_token_bytes is not None and latent_size != _PACKED_LATENT:
        came = "is not MLA" if latent_size is None else f"has a latent of {latent_size} elements"
        remedy = "choose fp8 or bf16" if latent_size else "choose fp8 or bf16 as --draft-kv-dtype"
        raise InputError(
            f"{flag} {name} packs a latent of {_PACKED_LATENT} elements into "
            f"{found.packed_token_bytes} B, but the layer {came}; {remedy}"
        )
    return found
