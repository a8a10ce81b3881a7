"""Reading a model's ``config.json``: the fields of a target or a draft that shape its KV cache.

A config is one that the package ships, named (``kimi-k3``), or a Hugging Face ``config.json`` by
path. Everything else in the file is ignored; what is read is checked, and each failure is one
InputError that names the argument, the field, what was expected and what came.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3backend.common.errors import InputError
from k3backend.common.json_file import read_json_object

BUNDLED_TARGETS = ("kimi-k3", "kimi-linear-48b")
BUNDLED_DRAFTS = (
    "dspark-mla",
    "dspark-mla-96h",
    "dspark-mla-3l",
    "dspark-gqa-window",
    "dspark-gqa-full",
)
TARGET_MODEL_TYPES = ("kimi_k3", "kimi_linear")
TEXT_MODEL_TYPE = "kimi_linear"
"""What the text part of a ``kimi_k3`` config is."""
MODEL_DTYPES = ("bfloat16", "float16", "float32")
LAYER_TYPES = ("full_attention", "sliding_attention")

MAX_LAYERS = 4096
MAX_WIDTH = 2**20
"""Largest head count, head size or rank that is taken for a model and not for a slip."""
MAX_TOKENS = 2**40
"""Largest context length in tokens, for configs and for deployments."""

_CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "data" / "configs"


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """A hybrid of MLA and KDA layers, as its ``config.json`` says.

    Attributes:
        name: the bundled name or the path it was read from.
        layer_prefix: what vLLM puts before ``layers.<index>``.
        num_layers: all layers; ``mla_layers`` holds the 0-based MLA ones, the others are KDA.
        num_attention_heads: MLA query heads.
        kv_lora_rank, qk_rope_head_dim: elements of a token's latent and of its rope part.
        kda_num_heads, kda_head_dim: heads and head size of KDA's keys, queries and values.
        kda_conv_kernel: taps of the short convolution, in tokens.
        dtype: torch name of the model's dtype.
        max_position_embeddings: tokens.
    """

    name: str
    layer_prefix: str
    num_layers: int
    mla_layers: tuple[int, ...]
    num_attention_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    kda_num_heads: int
    kda_head_dim: int
    kda_conv_kernel: int
    dtype: str
    max_position_embeddings: int

    @property
    def latent_size(self) -> int:
        """Elements that one token stores in an MLA layer: latent and rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class MLADraftConfig:
    """A DSpark draft of MLA layers: one latent head per layer, replicated on every TP rank.

    ``target_num_layers`` is the layer count of the target it was trained for, where it says so.
    """

    name: str
    num_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    target_num_layers: int | None = None

    @property
    def latent_size(self) -> int:
        """Elements that one token stores in a layer: latent and rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class GQADraftConfig:
    """A DSpark draft of grouped-query layers, each with full attention or a sliding window.

    ``windows`` holds the window in tokens of each layer, None for full attention.
    """

    name: str
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    target_num_layers: int | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the draft."""
        return len(self.windows)


DraftConfig = MLADraftConfig | GQADraftConfig


def load_target(name: str) -> TargetConfig:
    """The target that ``--target`` names: a bundled name, a ``config.json`` or its folder."""
    fields = _load(name, "--target", BUNDLED_TARGETS, ("--draft", BUNDLED_DRAFTS))
    model_type = fields.text("model_type")
    if model_type not in TARGET_MODEL_TYPES:
        raise fields.error(
            "model_type", f"one of {', '.join(TARGET_MODEL_TYPES)}", "give a Kimi-K3 family config"
        )
    text = fields.section("text_config") if model_type == "kimi_k3" else fields
    if text is not fields and text.has("model_type") and text.text("model_type") != TEXT_MODEL_TYPE:
        raise text.error("model_type", TEXT_MODEL_TYPE, "give a Kimi-K3 family config")
    num_layers = text.integer("num_hidden_layers", maximum=MAX_LAYERS)
    linear = text.section("linear_attn_config")
    return TargetConfig(
        name=name,
        layer_prefix="language_model.model" if model_type == "kimi_k3" else "model",
        num_layers=num_layers,
        mla_layers=_mla_layers(linear, num_layers),
        num_attention_heads=text.integer("num_attention_heads"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        kda_num_heads=linear.integer("num_heads"),
        kda_head_dim=linear.integer("head_dim"),
        kda_conv_kernel=linear.integer("short_conv_kernel_size", minimum=2),
        dtype=_model_dtype(text, fields),
        max_position_embeddings=text.integer("max_position_embeddings", maximum=MAX_TOKENS),
    )


def load_draft(name: str) -> DraftConfig:
    """The draft that ``--draft`` names: a bundled name, a ``config.json`` or its folder.

    A config with ``kv_lora_rank`` is an MLA draft, any other a GQA draft.
    """
    fields = _load(name, "--draft", BUNDLED_DRAFTS, ("--target", BUNDLED_TARGETS))
    if fields.text("model_type") in TARGET_MODEL_TYPES:
        raise fields.error("model_type", "a draft's", "give it to --target")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_attention_heads = fields.integer("num_attention_heads")
    target_num_layers = fields.optional_integer("target_num_hidden_layers", maximum=MAX_LAYERS)
    if fields.has("kv_lora_rank"):
        return MLADraftConfig(
            name=name,
            num_layers=num_layers,
            num_attention_heads=num_attention_heads,
            kv_lora_rank=fields.integer("kv_lora_rank"),
            qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
            target_num_layers=target_num_layers,
        )
    num_kv_heads = fields.integer("num_key_value_heads")
    if num_attention_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads",
            f"a divisor of num_attention_heads ({num_attention_heads})",
            "correct one of them",
        )
    return GQADraftConfig(
        name=name,
        num_attention_heads=num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, num_attention_heads),
        windows=_layer_windows(fields, num_layers),
        target_num_layers=target_num_layers,
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """One object of a config file, and how to name it in a message."""

    where: str
    document: dict[str, Any]
    path: str = ""

    def has(self, key: str) -> bool:
        return self.document.get(key) is not None

    def error(self, key: str, expected: str, remedy: str = "correct the config") -> InputError:
        if key not in self.document:
            came = f"{self.path}{key} is missing"
        else:
            came = f"{self.path}{key} is {_shown(self.document[key])}"
        return InputError(f"{self.where}: {came}, expected {expected}; {remedy}")

    def text(self, key: str) -> str:
        value = self.document.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, "a name")
        return value

    def integer(self, key: str, *, minimum: int = 1, maximum: int = MAX_WIDTH) -> int:
        value = self.document.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(key, f"an integer from {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str, *, maximum: int = MAX_WIDTH) -> int | None:
        return self.integer(key, maximum=maximum) if self.has(key) else None

    def flag(self, key: str) -> bool:
        value = self.document.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def items(self, key: str) -> list[Any]:
        value = self.document.get(key)
        if not isinstance(value, list):
            raise self.error(key, "a list")
        return value

    def section(self, key: str) -> _Fields:
        value = self.document.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return _Fields(self.where, value, f"{self.path}{key}.")


def _load(
    name: str, flag: str, bundled: Sequence[str], other: tuple[str, Sequence[str]]
) -> _Fields:
    """The file behind a name, by the rules of load_target and load_draft."""
    other_flag, other_names = other
    if not isinstance(name, str) or not name:
        raise InputError(
            f"{flag} is {_shown(name)}, expected one of {', '.join(bundled)} or the path of a "
            "config.json; name one"
        )
    if name in bundled:
        return _Fields(f"{flag} {name}", read_json_object(_CONFIG_FOLDER / f"{name}.json", flag))
    if name in other_names:
        raise InputError(f"{flag} {name} is a name for {other_flag}; choose {', '.join(bundled)}")
    path = os.path.join(name, "config.json") if os.path.isdir(name) else name
    if os.sep not in path and not path.endswith(".json") and not os.path.exists(path):
        near = difflib.get_close_matches(name, bundled, n=1)
        hint = f"did you mean {near[0]}?" if near else "give one of these or a path"
        raise InputError(
            f"{flag} {_shown(name)} is neither a file nor one of {', '.join(bundled)}; {hint}"
        )
    return _Fields(f"{flag} {path!r}", read_json_object(path, flag))


def _mla_layers(linear: _Fields, num_layers: int) -> tuple[int, ...]:
    """0-based MLA layers; the file counts from 1 and must name every layer exactly once."""
    kinds: dict[int, str] = {}
    for key in ("full_attn_layers", "kda_layers"):
        for layer in linear.items(key):
            if not isinstance(layer, int) or isinstance(layer, bool):
                raise _layer_error(linear, key, f"holds {_shown(layer)}, expected layer numbers")
            if not 1 <= layer <= num_layers:
                raise _layer_error(
                    linear, key, f"holds layer {_shown(layer)}, expected 1 to {num_layers}"
                )
            if layer in kinds:
                other = "twice" if kinds[layer] == key else f"and so does {kinds[layer]}"
                raise _layer_error(linear, key, f"holds layer {layer} {other}")
            kinds[layer] = key
    missing = [layer for layer in range(1, num_layers + 1) if layer not in kinds]
    if missing:
        raise _layer_error(
            linear,
            "kda_layers",
            f"and full_attn_layers leave out layer {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + f" of {num_layers}",
        )
    mla = tuple(sorted(layer - 1 for layer, key in kinds.items() if key == "full_attn_layers"))
    if not mla:
        raise linear.error("full_attn_layers", "at least one MLA layer")
    return mla


def _layer_error(linear: _Fields, key: str, what: str) -> InputError:
    return InputError(
        f"{linear.where}: {linear.path}{key} {what}; name each layer in one of the two lists"
    )


def _model_dtype(text: _Fields, outer: _Fields) -> str:
    """The dtype under its new or old name, in the text part or around it."""
    for fields in (text, outer):
        for key in ("dtype", "torch_dtype"):
            if fields.has(key):
                value = fields.text(key).removeprefix("torch.")
                if value not in MODEL_DTYPES:
                    raise fields.error(key, f"one of {', '.join(MODEL_DTYPES)}")
                return value
    raise text.error("dtype", f"one of {', '.join(MODEL_DTYPES)}")


def _head_dim(fields: _Fields, num_attention_heads: int) -> int:
    """``head_dim``, or the share of ``hidden_size`` that a head has where it is not given."""
    head_dim = fields.optional_integer("head_dim")
    if head_dim is not None:
        return head_dim
    if not fields.has("hidden_size"):
        raise fields.error("head_dim", f"an integer from 1 to {MAX_WIDTH}")
    hidden_size = fields.integer("hidden_size")
    if hidden_size % num_attention_heads:
        raise fields.error(
            "hidden_size", f"a multiple of num_attention_heads ({num_attention_heads})"
        )
    return hidden_size // num_attention_heads


def _layer_windows(fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer.

    ``layer_types`` says which layers slide, or Qwen's older switch fields do; a ``dflash_config``
    with ``use_swa`` makes all of them slide where no layer does, with a window of its own.
    """
    dflash = fields.section("dflash_config") if fields.has("dflash_config") else None
    sliding = _sliding_layers(fields, num_layers, has_dflash=dflash is not None)
    window = fields.optional_integer("sliding_window", maximum=MAX_TOKENS)
    if dflash is not None:
        own_window = dflash.optional_integer("swa_window_size", maximum=MAX_TOKENS)
        window = window if own_window is None else own_window
        if dflash.flag("use_swa") and not any(sliding):
            sliding = [True] * num_layers
    if any(sliding) and window is None:
        raise fields.error("sliding_window", "the window in tokens, as some layers slide")
    return tuple(window if slides else None for slides in sliding)


def _sliding_layers(fields: _Fields, num_layers: int, *, has_dflash: bool) -> list[bool]:
    if fields.has("layer_types"):
        types = fields.items("layer_types")
        if len(types) != num_layers:
            raise InputError(
                f"{fields.where}: layer_types names {len(types)} layers, expected "
                f"num_hidden_layers ({num_layers}); correct one of them"
            )
        for layer_type in types:
            if layer_type not in LAYER_TYPES:
                raise InputError(
                    f"{fields.where}: layer_types holds {_shown(layer_type)}, expected "
                    f"{' or '.join(LAYER_TYPES)}; correct the config"
                )
        sliding = [layer_type == "sliding_attention" for layer_type in types]
        switch_is_off = fields.has("use_sliding_window") and not fields.flag("use_sliding_window")
        if any(sliding) and switch_is_off:
            raise fields.error("use_sliding_window", "true, as layer_types names sliding layers")
        return sliding
    if fields.flag("use_sliding_window"):
        if not fields.has("max_window_layers"):
            raise fields.error("layer_types", "the kind of each layer, as use_sliding_window is on")
        first = fields.integer("max_window_layers", minimum=0)
        return [index >= first for index in range(num_layers)]
    if fields.has("sliding_window") and not fields.has("use_sliding_window") and not has_dflash:
        raise fields.error("layer_types", "the kind of each layer, as sliding_window is set")
    return [False] * num_layers


def _shown(value: object) -> str:
    """A value for a message: short, on one line."""
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
