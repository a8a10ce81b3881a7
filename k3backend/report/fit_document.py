"""Fit JSON (``k3backend.fit/1``): what a byte budget holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3backend.common.kv_config import request_blocks
from k3backend.common.kv_plan import KvPlan
from k3backend.report.schemas import FIT_SCHEMA, FIT_SET_SCHEMA


def fit_document(
    plan: KvPlan, platform: str | None, asked: int | None, limit: int
) -> dict[str, Any]:
    """What the plan's bytes hold.

    Args:
        plan: made with available bytes: at the asked length, or at the longest that fits.
        asked: the length that was asked for, in tokens; None where the longest was.
        limit: the target's longest length, in tokens.
    Returns:
        ``limited_by`` says what ends the longest length: "model" or "memory". ``missing_bytes`` is
        what one request of ``max_model_len`` lacks on the tightest stage, 0 where it fits.
    """
    capacity = plan.capacity
    available_bytes = 0 if capacity is None else capacity.available_bytes
    missing_bytes = 0
    for stage in plan.stages:
        if stage.num_blocks is not None:
            needed = sum(request_blocks(stage.groups, plan.context)) + 1
            missing_bytes = max(missing_bytes, needed * stage.block_bytes - available_bytes)
    fits = missing_bytes == 0
    longest: int | None = None
    limited_by: str | None = None
    if asked is None:
        longest = plan.context.max_model_len if fits else 0
        limited_by = "model" if longest == limit else "memory"
    return {
        "schema": FIT_SCHEMA,
        "platform": platform,
        "policy": plan.policy,
        "layout": plan.context.layout,
        "available_bytes": available_bytes,
        "max_model_len": plan.context.max_model_len,
        "fits": fits,
        "longest_max_model_len": longest,
        "limited_by": limited_by,
        "max_concurrency": None if capacity is None else capacity.max_concurrency,
        "missing_bytes": missing_bytes,
        "groups": len(plan.groups),
        "block_bytes": plan.block_bytes,
        "num_blocks": None if capacity is None else capacity.num_blocks,
        "usable_blocks": None if capacity is None else capacity.usable_blocks,
        "request": {"blocks": plan.request.blocks, "bytes": plan.request.bytes},
        "warnings": [{"code": w.code, "message": w.message} for w in plan.warnings],
    }


def fit_set_document(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Fit documents by platform, and whether all say the same."""
    answers = [{**document, "platform": None} for document in documents.values()]
    return {
        "schema": FIT_SET_SCHEMA,
        "platforms": dict(documents),
        "equal": all(answer == answers[0] for answer in answers),
    }
