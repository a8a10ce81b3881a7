"""Random spec files that look like models: hybrids, drafts, mixed pages, and odd mixtures.

Values come from small pools, so that specs meet, divide and collide often. A document is a plain
``k3backend.specs/1`` object and depends on the seed alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

LAYOUTS = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")

RARE_KINDS = (
    "rswa",
    "chunked_local_attention",
    "encoder_only_attention",
    "cross_attention",
    "sink_full_attention",
    "circular_buffer",
)

Entry = dict[str, Any]
Rng = random.Random


def _block(rng: Rng) -> int:
    return rng.choice((16, 16, 32, 48, 64, 128))


def _maybe(rng: Rng, chance: float, entry: Entry, **fields: Any) -> None:
    if rng.random() < chance:
        entry.update(fields)


def attention(rng: Rng, kind: str, **fields: Any) -> Entry:
    """A plain attention layer of ``kind``; sometimes with one unusual field."""
    entry: Entry = {
        "kind": kind,
        "block_size": _block(rng),
        "num_kv_heads": rng.choice((1, 2, 4, 8)),
        "head_size": rng.choice((32, 64, 128)),
        "dtype": rng.choice(("bfloat16", "bfloat16", "uint8", "float32")),
    }
    _maybe(rng, 0.15, entry, head_size_v=rng.choice((16, 64, 128)))
    _maybe(rng, 0.1, entry, max_tp_shards=rng.choice((1, 2, 4, 8)))
    _maybe(rng, 0.08, entry, dcp_sharded=False)
    _maybe(rng, 0.06, entry, num_head_slots=rng.choice((1, 2, 3)))
    _maybe(rng, 0.05, entry, state_content_bytes=rng.choice((128, 320, 576)))
    _maybe(rng, 0.05, entry, tokens_per_state=rng.choice((2, 4, "1/2", "1/4")))
    _maybe(rng, 0.06, entry, kv_quant_mode=rng.choice(("FP8_PER_TENSOR", "NVFP4")))
    alignments = (64, 512, 4096, {"multiple_of": 16}, {"multiple_of": 64})
    _maybe(rng, 0.08, entry, block_stride_alignment=rng.choice(alignments))
    _maybe(rng, 0.06, entry, page_size_padded=rng.choice((1 << 16, 3 << 15, 1 << 17, 1 << 19)))
    entry.update(fields)
    return entry


def full(rng: Rng, **fields: Any) -> Entry:
    """Full attention, sometimes computed as a window or in chunks."""
    entry = attention(rng, "full_attention")
    _maybe(rng, 0.15, entry, sliding_window=rng.choice((512, 1024)))
    _maybe(rng, 0.08, entry, attention_chunk_size=rng.choice((512, 2048)))
    _maybe(rng, 0.08, entry, non_causal=True)
    entry.update(fields)
    return entry


def window(rng: Rng, **fields: Any) -> Entry:
    """A sliding window."""
    entry = attention(rng, "sliding_window", sliding_window=rng.choice((128, 1024, 2048)))
    _maybe(rng, 0.6, entry, dcp_sharded=False)
    _maybe(rng, 0.08, entry, extra_retained_tokens=rng.choice((1, 7)))
    entry.update(fields)
    return entry


def mla(rng: Rng, **fields: Any) -> Entry:
    """A latent cache."""
    entry = attention(rng, "mla_attention", num_kv_heads=1, head_size=rng.choice((64, 192, 576)))
    entry.pop("head_size_v", None)
    _maybe(rng, 0.5, entry, max_tp_shards=1)
    _maybe(rng, 0.4, entry, cache_dtype_str=rng.choice(("auto", "fp8", "fp8_e4m3")))
    _maybe(rng, 0.1, entry, alignment=rng.choice((512, 576, 1000)))
    _maybe(rng, 0.08, entry, model_version="deepseek_v4")
    _maybe(rng, 0.08, entry, cache_role=rng.choice(("SPARSE", "INDEXER")))
    _maybe(rng, 0.05, entry, is_index_group_leader=True)
    _maybe(rng, 0.05, entry, topk_buffer_width=2048)
    _maybe(rng, 0.1, entry, non_causal_multi_token_decode=True)
    _maybe(rng, 0.03, entry, head_size_v=64)
    entry.update(fields)
    return entry


def window_mla(rng: Rng, **fields: Any) -> Entry:
    """A window of latent vectors."""
    entry = attention(
        rng,
        "sliding_window_mla",
        num_kv_heads=1,
        head_size=rng.choice((64, 192, 576)),
        sliding_window=rng.choice((128, 1024)),
    )
    entry.pop("head_size_v", None)
    _maybe(rng, 0.7, entry, dcp_sharded=False)
    _maybe(rng, 0.3, entry, cache_dtype_str=rng.choice(("auto", "fp8")))
    _maybe(rng, 0.15, entry, alignment=rng.choice((512, 576, 1000)))
    _maybe(rng, 0.15, entry, model_version="deepseek_v4")
    _maybe(rng, 0.1, entry, bounded_replay=True)
    _maybe(rng, 0.05, entry, extra_retained_tokens=3)
    entry.update(fields)
    return entry


def mamba(rng: Rng, **fields: Any) -> Entry:
    """A recurrent state."""
    entry: Entry = {
        "kind": "mamba",
        "block_size": rng.choice((64, 128, 512)),
        "shapes": rng.choice(
            ([[4096]], [[64, 3], [8, 64, 64]], [[1000]], [[96, 10], [12, 16, 16]])
        ),
        "mamba_cache_mode": rng.choice(("none", "align", "all")),
    }
    entry["dtypes"] = ["bfloat16", "float32"][-len(entry["shapes"]) :]
    _maybe(rng, 0.3, entry, num_speculative_blocks=rng.choice((1, 4, 7)))
    _maybe(rng, 0.1, entry, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=64)
    _maybe(rng, 0.2, entry, page_size_padded=rng.choice((1 << 14, 20_000, 1 << 18, 3 << 17)))
    _maybe(rng, 0.05, entry, tp_replicated=True)
    _maybe(rng, 0.25, entry, num_heads=rng.choice((2, 3)))
    _maybe(rng, 0.1, entry, mamba_type=rng.choice(("LINEAR", "GDN_ATTN")))
    entry.update(fields)
    return entry


def hidden_state(rng: Rng, **fields: Any) -> Entry:
    """A layer that stores hidden states."""
    heads, width = rng.choice(((1, 576), (3, 1024), (5, 7168), (1, 64)))
    entry: Entry = {
        "kind": "hidden_state_cache",
        "block_size": _block(rng),
        "num_kv_heads": heads,
        "head_size": width,
        "dtype": "bfloat16",
    }
    _maybe(rng, 0.1, entry, alignment=512)
    entry.update(fields)
    return entry


def circular(rng: Rng, **fields: Any) -> Entry:
    """A ring of one block."""
    return attention(rng, "circular_buffer", **{"block_size": rng.choice((8, 12, 16)), **fields})


def other(rng: Rng, **fields: Any) -> Entry:
    """One of the rarer kinds."""
    kind = fields.get("kind") or rng.choice(RARE_KINDS)
    entry = attention(rng, kind)
    if kind == "rswa":
        entry["rswa_window"] = rng.choice((128, 512))
    elif kind == "chunked_local_attention":
        entry["attention_chunk_size"] = rng.choice((512, 2048))
    elif kind == "sink_full_attention":
        entry["sink_len"] = rng.choice((None, 4, 128))
    elif kind == "circular_buffer":
        entry["block_size"] = 8
    entry.update(fields)
    return entry


KINDS: tuple[Callable[..., Entry], ...] = (
    full,
    full,
    window,
    window,
    mla,
    mla,
    window_mla,
    mamba,
    mamba,
    hidden_state,
    circular,
    other,
    other,
    other,
)


def soup(rng: Rng) -> list[Entry]:
    """Any kinds in any numbers."""
    return [rng.choice(KINDS)(rng, count=rng.randint(1, 6)) for _ in range(rng.randint(1, 6))]


def near_uniform(rng: Rng) -> list[Entry]:
    """Layers of one class and base format that differ in at most a field or two."""
    make = rng.choice((full, full, window, mla, mla, window_mla, mamba, other, other, hidden_state))
    base = make(rng)
    if rng.random() < 0.5:
        base["block_size"] = rng.choice((16, 64))
    entries = []
    for _ in range(rng.randint(1, 4)):
        entry = dict(base, count=rng.randint(1, 5))
        twin = make(rng, kind=base["kind"])
        for field in rng.sample(sorted(twin), k=min(len(twin), rng.choice((0, 1, 1, 2)))):
            entry[field] = twin[field]
        if entry["kind"] == "mamba":
            entry["dtypes"] = ["bfloat16", "float32"][-len(entry["shapes"]) :]
        entries.append(entry)
    return entries


def full_family(rng: Rng) -> list[Entry]:
    """Members of the full-attention family with one format, in any order: the lossy merges."""
    base = full(rng)
    entries = []
    for _ in range(rng.randint(2, 5)):
        entry = dict(base, count=rng.randint(1, 3))
        kind = rng.choice(("full_attention", "rswa", "sink_full_attention", "full_attention"))
        entry["kind"] = kind
        if kind == "rswa":
            entry["rswa_window"] = rng.choice((128, 128, 512))
        if kind == "sink_full_attention":
            entry["sink_len"] = rng.choice((4, 4, 128))
        _maybe(rng, 0.2, entry, sliding_window=rng.choice((512, 1024)))
        _maybe(rng, 0.1, entry, head_size=rng.choice((64, 128)))
        entries.append(entry)
    if rng.random() < 0.5:
        entries.append(window(rng, count=rng.randint(1, 4), block_size=base["block_size"]))
    return entries


def local_hybrid(rng: Rng) -> list[Entry]:
    """Full attention and windows or chunks in the usual ratios, pages equal or multiples."""
    heads, size, block = rng.choice((1, 2, 4, 8)), rng.choice((64, 128)), _block(rng)
    shape = {"block_size": block, "num_kv_heads": heads, "head_size": size, "dtype": "bfloat16"}
    repeats = rng.randint(1, 13)
    entries = [full(rng, count=repeats, **shape)]
    for _ in range(rng.randint(1, 3)):
        local = dict(shape)
        if rng.random() < 0.3:
            local["num_kv_heads"] = rng.choice((1, 2, 3, 4, 8))
        if rng.random() < 0.2:
            local["block_size"] = _block(rng)
        count = max(1, repeats * rng.choice((1, 1, 2, 3, 5)) + rng.choice((-1, 0, 0, 1, 3)))
        if rng.random() < 0.8:
            entries.append(window(rng, count=count, **local))
        else:
            chunk = rng.choice((512, 2048))
            entry = attention(rng, "chunked_local_attention", attention_chunk_size=chunk, **local)
            entries.append(dict(entry, count=count))
    for entry in entries:
        for field in ("page_size_padded", "num_head_slots", "tokens_per_state", "kv_quant_mode"):
            if rng.random() < 0.8:
                entry.pop(field, None)
    return entries


def kimi_hybrid(rng: Rng) -> list[Entry]:
    """Recurrent layers, latent layers and a draft, in Kimi-K3's shape and in what breaks it."""
    block = rng.choice((128, 384, 1536))
    page = block * 576
    periods = rng.randint(1, 8)
    latent = {
        "block_size": block,
        "num_kv_heads": 1,
        "head_size": 576,
        "dtype": "uint8",
        "cache_dtype_str": "fp8",
        "kv_quant_mode": "FP8_PER_TENSOR",
        "max_tp_shards": 1,
    }
    state = {
        "kind": "mamba",
        "block_size": block,
        "shapes": [[page // 8, 1], [page // 4 - rng.choice((0, 3, 100)) * 4]],
        "dtypes": ["bfloat16", "uint8"],
        "page_size_padded": page,
        "mamba_cache_mode": "align",
        "num_speculative_blocks": rng.choice((0, 4, 7)),
    }
    if rng.random() < 0.15:
        state["page_size_padded"] = page * rng.choice((2, 3))
    _maybe(rng, 0.12, state, num_heads=rng.choice((2, 3)))
    entries: list[Entry] = [
        dict(state, count=3 * periods),
        dict(latent, kind="mla_attention", count=periods),
    ]
    drafts = rng.randint(1, 5)
    form = rng.choice(("none", "mla", "shards", "stride", "label", "window", "full", "replicated"))
    if form in ("mla", "shards", "stride", "label", "replicated"):
        draft = dict(latent, kind="mla_attention", non_causal_multi_token_decode=True)
        if form == "shards":
            del draft["max_tp_shards"]
        elif form == "stride":
            draft["block_stride_alignment"] = {"multiple_of": rng.choice((32, 64))}
        elif form == "label":
            draft["cache_dtype_str"] = "fp8_e4m3"
        elif form == "replicated":
            draft["dcp_sharded"] = False
        entries.append(dict(draft, count=drafts, is_draft=True))
    elif form != "none":
        fields = {
            "block_size": rng.choice((block, 16, 64)),
            "num_kv_heads": rng.choice((1, 2, 4, 16)),
            "head_size": 64,
            "dtype": "bfloat16",
            "is_draft": True,
            "count": drafts,
        }
        if form == "window":
            extra = {"sliding_window": 2048, "dcp_sharded": False}
            entries.append({"kind": "sliding_window", **fields, **extra})
        else:
            entries.append({"kind": "full_attention", **fields})
    return entries


def sparse_model(rng: Rng) -> list[Entry]:
    """Compressed latent caches, indexers, windows and rings of several page sizes."""
    block = rng.choice((64, 128, 256))
    entries: list[Entry] = []
    count = rng.randint(1, 8)
    for ratio in rng.sample((1, 4, 16), k=rng.randint(1, 3)):
        entries.append(
            mla(
                rng,
                count=max(1, count + rng.choice((-1, 0, 0, 0, 1))),
                block_size=block,
                head_size=rng.choice((192, 576)),
                dtype="uint8",
                tokens_per_state=ratio,
                alignment=rng.choice((None, 576, 512)),
                cache_role=rng.choice(("SPARSE", "INDEXER")),
            )
        )
    if rng.random() < 0.8:
        local = {"block_size": rng.choice((block, 64)), "head_size": 576, "dtype": "uint8"}
        entries.append(window_mla(rng, count=rng.randint(1, 2 * count), **local))
    if rng.random() < 0.5:
        entries.append(circular(rng, count=rng.randint(1, 2 * count)))
    if rng.random() < 0.3:
        entries.append(circular(rng, count=rng.randint(1, 2 * count)))
    if rng.random() < 0.4:
        entries.append(mamba(rng, count=rng.randint(1, 2 * count)))
    if rng.random() < 0.3:
        entries.append(window(rng, count=rng.randint(1, count)))
    return entries


def with_hidden_states(rng: Rng) -> list[Entry]:
    """A hybrid whose hidden states are kept as well."""
    entries = rng.choice((local_hybrid, kimi_hybrid, near_uniform, soup))(rng)
    return [
        *entries,
        *(hidden_state(rng, count=rng.randint(1, 2)) for _ in range(rng.randint(1, 2))),
    ]


def latent_with_window_draft(rng: Rng) -> list[Entry]:
    """Latent layers beside a window whose page does not divide theirs: the full allocation."""
    entries = [mla(rng, count=rng.randint(1, 6), block_size=64, dtype="uint8")]
    heads = rng.choice((1, 3, 5))
    draft = window(rng, count=rng.randint(1, 3), num_kv_heads=heads, is_draft=True)
    if rng.random() < 0.7:
        draft["dcp_sharded"] = entries[0].get("dcp_sharded", True)
    if rng.random() < 0.3:
        entries.append(full(rng, count=1, block_size=64))
    return [*entries, draft]


MODELS: tuple[tuple[Callable[[Rng], list[Entry]], int], ...] = (
    (soup, 6),
    (near_uniform, 4),
    (full_family, 2),
    (local_hybrid, 5),
    (kimi_hybrid, 5),
    (sparse_model, 4),
    (with_hidden_states, 3),
    (latent_with_window_draft, 3),
)


def random_document(seed: int) -> dict[str, Any]:
    """The spec file of this seed."""
    rng = random.Random(seed)
    model = rng.choices([m for m, _ in MODELS], weights=[w for _, w in MODELS])[0]
    entries = model(rng)
    if rng.random() < 0.15:
        rng.shuffle(entries)
    if rng.random() < 0.4:
        entries = _interleaved(rng, entries)
    sparse = model is sparse_model
    tp_size = rng.choice((1, 1, 2, 4, 8, 16))
    layers = []
    stages = rng.choice((1, 1, 2, 3))
    for number, entry in enumerate(entries):
        layer = {"count": 1, **entry, "prefix": f"{entry['kind']}{number}."}
        if layer.get("page_size_padded") is not None:
            layer["page_size_padded"] = max(layer["page_size_padded"], _real_page_bytes(layer))
        if stages > 1:
            layer["stage"] = min(stages - 1, number * stages // len(entries))
        layers.append(layer)
    max_model_len = rng.choice((1, 100, 1024, 16384, 131072))
    return {
        "schema": "k3backend.specs/1",
        "layout": _layout(rng, sparse),
        "tp_size": tp_size,
        "dcp_size": rng.choice([d for d in (1, 1, 1, 2, 8) if tp_size % d == 0]),
        "max_model_len": max_model_len,
        "max_in_flight_tokens": rng.choice((1, 2048, 8192)),
        "mamba_cache_mode": rng.choice(("none", "align", "align", "all")),
        "disable_hybrid_kv_cache_manager": rng.random() < _no_hybrid_chance(model),
        "max_num_encoder_input_tokens": rng.choice((0, 1500)),
        # Without bytes for some: the search for the longest length takes most of the time.
        "available_bytes": rng.choice((None, None, None, 1 << 20, 1 << 26, 1 << 34)),
        "layers": layers,
    }


def _no_hybrid_chance(model: object) -> float:
    """Few mixtures can be planned without the hybrid manager; these can."""
    return 0.3 if model in (local_hybrid, near_uniform, full_family) else 0.04


def _layout(rng: Rng, sparse: bool) -> str:
    if sparse and rng.random() < 0.8:
        return rng.choice(("BLHNC", "BLNHC"))
    # The last two cut pages apart and refuse most mixtures.
    return rng.choices(LAYOUTS, weights=(3, 3, 3, 3, 1, 1))[0]


def _real_page_bytes(layer: Entry) -> int:
    """Bytes of the page without padding, from the fields of the entry."""
    itemsize = {"bfloat16": 2, "float32": 4, "uint8": 1}
    if layer["kind"] == "mamba":
        return sum(
            math.prod(shape) * itemsize[dtype]
            for shape, dtype in zip(layer["shapes"], layer["dtypes"], strict=True)
        )
    latent = "mla" in layer["kind"] or layer["kind"] == "hidden_state_cache"
    size_v = layer.get("head_size_v", 0 if latent else layer["head_size"])
    cell = (layer["head_size"] + size_v) * itemsize[layer["dtype"]]
    heads = layer.get("num_head_slots", layer["num_kv_heads"])
    states = layer["block_size"] // Fraction(layer.get("tokens_per_state", 1))
    return heads * int(states) * layer.get("state_content_bytes", cell)


def _interleaved(rng: Rng, entries: list[Entry]) -> list[Entry]:
    """The same layers in slices, taken from the entries by turns."""
    slices: list[list[Entry]] = []
    for entry in entries:
        count = entry.get("count", 1)
        step = rng.choice((1, 1, 2, 3))
        slices.append([dict(entry, count=min(step, count - i)) for i in range(0, count, step)])
    rounds = max(len(s) for s in slices)
    return [s[i] for i in range(rounds) for s in slices if i < len(s)]
