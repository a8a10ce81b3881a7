"""Making a foreign draft's spec fit the target's group, where that changes no byte.

A draft that vLLM or a third party built may name the same bytes differently, or leave undeclared
that its latent is on every rank. Both split the groups for nothing, and both are repaired and
reported. A cache that really differs is refused with what differs and what that means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from k3backend.common.errors import KvMergeError
from k3backend.common.foreign_spec import changed_spec, own_spec
from k3backend.common.kv_merge import DifferenceKind, FieldDifference, explain_difference
from k3backend.common.kv_spec import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

_Draft = TypeVar("_Draft")
_MEANING = {
    DifferenceKind.FORMAT: "the caches differ in their bytes",
    DifferenceKind.SHARING: "the caches differ in what ranks hold of them",
    DifferenceKind.POLICY: "the caches keep different tokens",
    DifferenceKind.LABEL: "the caches have two names for the same bytes",
}


@dataclass(frozen=True, slots=True)
class DraftRepair:
    """One field of a draft spec that was set to the target's value.

    Attributes:
        field: its name.
        was, now: the draft's value and the target's.
        reason: "label", or "undeclared replication".
    """

    field: str
    was: object
    now: object
    reason: str

    def __str__(self) -> str:
        return f"{self.field}: {self.was!r} -> {self.now!r} ({self.reason})"


def align_draft_spec(target: object, draft: _Draft) -> tuple[_Draft, tuple[DraftRepair, ...]]:
    """The draft's spec so that it merges with the target's, and what was set for that.

    Repaired are label-only differences, and ``max_tp_shards`` None on a draft whose latent is the
    single head that the target declares as one shard. What merging reconciles anyway (causality, a
    window on one side) stays the draft's, and the result is marked as a draft.

    Args:
        target, draft: specs of one layer each, of this package or of vLLM (told by the names of
            class and fields; vLLM is not imported), in any mix.
    Returns:
        The draft in its own class: a vLLM draft comes back as vLLM's object. ``is_draft`` is set
        where that class has it (vLLM 0.33; 0.32 has not). And the repairs, in this package's
        values.
    Raises:
        SpecError: one of the two is no spec, or holds what this package does not know.
        KvMergeError: the specs differ in more than that. Names the first such field with both
            values, what the difference means, and the other fields.
    """
    repairs: list[DraftRepair] = []
    refused: list[FieldDifference] = []
    own_target, own_draft = own_spec(target, "target"), own_spec(draft, "draft")
    for difference in explain_difference(own_target, own_draft):
        if not difference.blocks:
            continue
        reason = _repair_reason(difference, own_draft)
        if reason is None:
            refused.append(difference)
        else:
            repairs.append(DraftRepair(difference.field, difference.right, difference.left, reason))
    if refused:
        raise _refusal(refused)
    changes: dict[str, Any] = {repair.field: repair.now for repair in repairs}
    return changed_spec(draft, {"is_draft": True, **changes}), tuple(repairs)


def _repair_reason(difference: FieldDifference, draft: KVCacheSpec) -> str | None:
    if difference.kind is DifferenceKind.LABEL:
        return "label"
    is_single_latent = (
        isinstance(draft, MLAAttentionSpec | SlidingWindowMLASpec) and draft.num_kv_heads == 1
    )
    if (
        is_single_latent
        and difference.field == "max_tp_shards"
        and (difference.left, difference.right) == (1, None)
    ):
        return "undeclared replication"
    return None


def _refusal(refused: list[FieldDifference]) -> KvMergeError:
    first = refused[0]
    others = ", ".join(f"{other.field} ({other.kind})" for other in refused[1:])
    also = f"; they also differ in {others}" if others else ""
    return KvMergeError(
        first.field,
        first.left,
        first.right,
        remedy=f"target against draft, {_MEANING[first.kind]}{also}; "
        "build the draft's cache like the target's or let it form its own group",
    )
