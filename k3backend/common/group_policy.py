"""Which grouping to take: the cheapest one that every backend can serve, and why.

A grouping costs bytes and time. One request takes ``blocks x pool block`` bytes, and every group
adds a block table and a metadata build to every step. Both are brought to one number, ``request
bytes x (1 + 0.00225 x groups)``: 16 groups more cost 3.6 % throughput on 8 MI355X (vllm#59733),
0.225 % a group. ``K3BACKEND_GROUP_COST`` sets the constant. Bytes depend on the length of the
request, so the choice is made at the planning context.

Groupings with more groups than vLLM's default are taken only where they save bytes in earnest: they
may need at most 0.95 of the default's (``K3BACKEND_SPLIT_GAIN``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from k3backend.common import envs
from k3backend.common.block_forms import group_kernel_problem
from k3backend.common.errors import InputError, K3Error, PlanError
from k3backend.common.group_candidates import Candidate, unique_names
from k3backend.common.group_search import find_candidates, isolated_candidate
from k3backend.common.grouping_choice import GroupingCandidate, GroupingChoice, PlanWarning
from k3backend.common.kv_capacity import plan_stages
from k3backend.common.kv_config import layer_spec_runs, request_blocks
from k3backend.common.kv_groups import kv_tp_replicas, mark_draft_groups, plan_groups
from k3backend.common.kv_labels import LabelReport, normalize_labels, settle_dcp_sharding
from k3backend.common.kv_layout import KVCacheLayout
from k3backend.common.kv_spec import KVCacheGroupSpec, KVCacheSpec
from k3backend.common.plan_context import PlanContext
from k3backend.common.plan_warnings import label_warning, shard_sentence
from k3backend.common.shard_repair import ShardRepair, declare_shards

DEFAULT_NAME = "vllm"


@dataclass(frozen=True, slots=True)
class _Rates:
    """The two constants of the choice: cost of a group, and what more groups must save."""

    group_cost: float
    split_gain: float

    @classmethod
    def from_environment(cls) -> _Rates:
        """K3BACKEND_GROUP_COST and K3BACKEND_SPLIT_GAIN. Raises InputError on a bad value."""
        group_cost = envs.GROUP_COST.number()
        split_gain = envs.SPLIT_GAIN.number()
        return cls(group_cost or 0.0, split_gain or 0.0)

    def cost(self, candidate: Candidate) -> float:
        """Bytes of a request, raised by what its groups cost per step."""
        return candidate.request_bytes * (1 + self.group_cost * candidate.num_groups)


def choose_grouping(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    policy: str = "k3",
    stages: Mapping[str, int] | None = None,
) -> GroupingChoice:
    """Group the layers by a policy. Pure and deterministic.

    Args:
        specs: spec per layer, in layer order. Not changed.
        context: the deployment; costs are taken at ``context.planning_tokens``.
        policy: "k3" the cheapest grouping, "vllm" the default planner's, "isolate" the draft in
            groups of its own.
        stages: pipeline stage per layer; a pool block is then that of the widest stage.

    Returns:
        The groups, every grouping that was compared, and why this one. Label-only differences and
        undeclared replication are repaired under "k3" and reported in ``warnings``.

    Raises:
        InputError: an unknown policy, or a bad environment variable.
        PlanError: no grouping holds the layers. Names the layer that does not fit.
    """
    if policy not in ("k3", "vllm", "isolate"):
        raise InputError(f"policy is {policy!r}, expected k3, vllm or isolate; give one of these")
    choice = _choose(specs, context, policy, stages)
    return replace(choice, groups=mark_draft_groups(choice.groups, specs))


def _choose(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    policy: str,
    stages: Mapping[str, int] | None,
) -> GroupingChoice:
    at_stage = _stages(specs, stages)
    default, failure = _default(specs, context, stages if at_stage else None)
    if policy == "vllm" or not specs:
        if default is None:
            raise failure or PlanError("no grouping was found")
        return _default_answer(default, "the default grouping was asked for")
    if policy == "isolate":
        return _isolated(specs, context, default, failure, at_stage)
    if default is not None:
        settled = _leave_alone(default, context)
        if settled is not None:
            return _default_answer(default, settled)
    return _cheapest(specs, context, default, failure, at_stage)


def _stages(specs: Mapping[str, KVCacheSpec], stages: Mapping[str, int] | None) -> tuple[int, ...]:
    """Pipeline stage per layer in order; empty where all are on one.

    Raises:
        PlanError: a layer has no stage.
    """
    if stages is None or len(set(stages.values())) < 2:
        return ()
    for name in specs:
        if name not in stages:
            raise PlanError(f"layer {name} has no pipeline stage; give each layer one", name)
    return tuple(stages[name] for name in specs)


def _default(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    stages: Mapping[str, int] | None,
) -> tuple[Candidate | None, K3Error | None]:
    """vLLM's own grouping, or why there is none."""
    at_context = context.with_max_model_len(context.planning_tokens)
    try:
        groups = plan_groups(specs, context)
        return given_candidate(DEFAULT_NAME, groups, specs, at_context, stages), None
    except K3Error as error:
        return None, error


def given_candidate(
    name: str,
    groups: Sequence[KVCacheGroupSpec],
    specs: Mapping[str, KVCacheSpec],
    at_context: PlanContext,
    stages: Mapping[str, int] | None = None,
) -> Candidate:
    """Groups that somebody else formed, with their numbers."""
    cut = plan_stages(groups, at_context, stages)
    block_bytes = max((stage.block_bytes for stage in cut), default=0)
    used = sum(
        len(names) * spec.page_size_bytes
        for group in groups
        for spec, names in layer_spec_runs(group)
    )
    return Candidate(
        name=name,
        num_groups=len(groups),
        block_bytes=block_bytes,
        blocks=sum(request_blocks(groups, at_context)),
        idle_bytes=len(groups) * block_bytes - used,
        problem=_draft_problem(groups, specs, at_context),
        given=tuple(groups),
    )


def _draft_problem(
    groups: Sequence[KVCacheGroupSpec], specs: Mapping[str, KVCacheSpec], context: PlanContext
) -> str | None:
    """Why the draft's backend cannot serve one of the groups, or None."""
    for group in groups:
        drafts = {name for name in group.layer_names if specs[name].is_draft}
        if drafts:
            seen = dict.fromkeys(
                replace(spec, is_draft=name in drafts)
                for spec, names in layer_spec_runs(group)
                for name in names
            )
            problem = group_kernel_problem(list(seen), context)
            if problem is not None:
                return problem
    return None


def _leave_alone(default: Candidate, context: PlanContext) -> str | None:
    """Why the default grouping is the answer without a look at others, or None."""
    if context.disable_hybrid_kv_cache_manager:
        return "the hybrid KV cache manager is disabled, so vLLM's default grouping stands"
    pages = {spec.page_size_bytes for group in default.given for spec, _ in layer_spec_runs(group)}
    if KVCacheLayout[context.layout].is_block_outermost and len(pages) > 1:
        return (
            f"layout {context.layout} packs pages of {len(pages)} sizes side by side in a block, "
            "so vLLM's default grouping has nothing to repair"
        )
    return None


def _cheapest(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    default: Candidate | None,
    failure: K3Error | None,
    stages: tuple[int, ...],
) -> GroupingChoice:
    rates = _Rates.from_environment()
    repaired, labels, shards = _repaired(specs, context)
    found = find_candidates(repaired, context, default, rates.cost, stages)
    candidates = unique_names(found if default is None else [default, *found])
    usable = [candidate for candidate in candidates if candidate.problem is None]
    if not usable:
        if default is None:
            raise _unplannable(repaired, context, candidates, failure)
        usable = [default]
    yardstick = default or min(usable, key=lambda c: (c.num_groups, c.request_bytes))
    chosen = min(
        (candidate for candidate in usable if _is_eligible(candidate, yardstick, rates)),
        key=lambda c: (rates.cost(c), c.num_groups, c.idle_bytes),
        default=usable[0],
    )
    served = chosen
    if default is not None and rates.cost(chosen) > rates.cost(default):
        # Only where a backend cannot serve the default as it stands; said in a warning below.
        chosen = default
    source = specs if chosen.family is None else repaired
    groups = chosen.build(list(source))
    warnings = [
        *(label_warning(report, specs) for report in labels),
        *(_shard_warning(repair, specs, groups, context, chosen) for repair in shards),
    ]
    if chosen.problem is not None:
        other = (
            f"the cheapest grouping that runs, {served.name}, takes {served.request_bytes:,} B"
            if served is not chosen
            else "no other grouping runs either"
        )
        warnings.append(
            PlanWarning(
                "kernel-blocks",
                f"vLLM's default cannot run as it stands: {chosen.problem}; {other}: take another "
                "draft backend, a block-outermost layout, or prefix caching off",
            )
        )
    whys = [_why_not(candidate, chosen, yardstick, rates) for candidate in candidates]
    return _answer(
        chosen, candidates, groups, _reason(chosen, default, failure, context), whys, warnings
    )


def _repaired(
    specs: Mapping[str, KVCacheSpec], context: PlanContext
) -> tuple[dict[str, KVCacheSpec], list[LabelReport], list[ShardRepair]]:
    """The specs without differences that mean nothing, and what was changed."""
    settled, sharding = settle_dcp_sharding(specs, context.dcp_size)
    declared, shards = declare_shards(settled)
    repaired, labels = normalize_labels(declared)
    return repaired, [*sharding, *labels], shards


def _is_eligible(candidate: Candidate, yardstick: Candidate, rates: _Rates) -> bool:
    """Whether it has no more groups than the yardstick, or saves bytes in earnest."""
    return (
        candidate.num_groups <= yardstick.num_groups
        or candidate.request_bytes <= rates.split_gain * yardstick.request_bytes
    )


def _isolated(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    default: Candidate | None,
    failure: K3Error | None,
    stages: tuple[int, ...],
) -> GroupingChoice:
    """The draft in groups of its own; the default where there is no draft, or no target."""
    isolated = isolated_candidate(specs, context, stages)
    if isolated is None:
        if default is None:
            raise failure or PlanError("no grouping was found; plan with policy k3")
        reason = "there is no draft beside a target, so vLLM's default grouping stands"
        return _default_answer(default, reason)
    if isolated.problem is not None:
        raise PlanError(f"the draft cannot be set apart: {isolated.problem}; plan with policy k3")
    candidates = [isolated] if default is None else [isolated, default]
    return _answer(
        isolated,
        candidates,
        isolated.build(list(specs)),
        "the draft was asked to stand apart",
        [None, "the draft was asked to stand apart"],
    )


def _default_answer(default: Candidate, reason: str) -> GroupingChoice:
    """vLLM's grouping as it is, with a word where a backend cannot serve it."""
    warnings = []
    if default.problem is not None:
        text = f"vLLM's default cannot run as it stands: {default.problem}"
        warnings.append(PlanWarning("kernel-blocks", text))
    return _answer(default, [default], list(default.given), reason, [None], warnings)


def _answer(
    chosen: Candidate,
    candidates: Sequence[Candidate],
    groups: list[KVCacheGroupSpec],
    reason: str,
    whys: Sequence[str | None],
    warnings: Sequence[PlanWarning] = (),
) -> GroupingChoice:
    return GroupingChoice(
        groups=groups,
        candidates=tuple(
            GroupingCandidate(
                name=candidate.name,
                groups=candidate.num_groups,
                block_bytes=candidate.block_bytes,
                request_bytes=candidate.request_bytes,
                chosen=candidate is chosen,
                why_not=None if candidate is chosen else why,
            )
            for candidate, why in zip(candidates, whys, strict=False)
        ),
        reason=reason,
        warnings=tuple(warnings),
    )


def _reason(
    chosen: Candidate, default: Candidate | None, failure: K3Error | None, context: PlanContext
) -> str:
    numbers = (
        f"{_counted(chosen.num_groups, 'group')} and {chosen.request_bytes:,} B per request of "
        f"{context.planning_tokens:,} tokens"
    )
    if chosen is default:
        doubt = "" if chosen.problem is None else f", but it cannot run: {chosen.problem}"
        return f"vLLM's default is the cheapest grouping: {numbers}{doubt}"
    if default is None:
        return f"{numbers}; vLLM's default cannot plan these layers ({failure})"
    if default.problem is not None:
        return f"{numbers}; vLLM's default cannot run: {default.problem}"
    return (
        f"{numbers}; vLLM's default needs {_counted(default.num_groups, 'group')} and "
        f"{default.request_bytes:,} B"
    )


def _why_not(
    candidate: Candidate, chosen: Candidate, yardstick: Candidate, rates: _Rates
) -> str | None:
    if candidate is chosen:
        return None
    if candidate.problem is not None:
        return candidate.problem
    if not _is_eligible(candidate, yardstick, rates):
        share = candidate.request_bytes / yardstick.request_bytes
        return (
            f"{candidate.num_groups} groups against {yardstick.num_groups} of {yardstick.name} for "
            f"{share:.1%} of its bytes; more groups must bring them to {rates.split_gain:.0%}"
        )
    more = rates.cost(candidate) / rates.cost(chosen) - 1 if chosen.request_bytes else 0.0
    if more > 0:
        return (
            f"costs {more:.2%} more: {candidate.request_bytes:,} B in "
            f"{_counted(candidate.num_groups, 'group')}"
        )
    return f"costs the same as {chosen.name}, which comes first"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shard_warning(
    repair: ShardRepair,
    specs: Mapping[str, KVCacheSpec],
    groups: Sequence[KVCacheGroupSpec],
    context: PlanContext,
    chosen: Candidate,
) -> PlanWarning:
    message = shard_sentence(repair, specs)
    if chosen.family is None:
        return PlanWarning("undeclared-shards", f"{message}; the grouping does not depend on it")
    before = kv_tp_replicas(_singles(specs), context)
    after = kv_tp_replicas(groups, context)
    rises = "" if before == after else f" and kv_tp_replicas goes from {before} to {after}"
    return PlanWarning(
        "undeclared-shards", f"{message}, so 1 was taken{rises}; declare it in the model"
    )


def _singles(specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """One group per different spec, for questions that do not depend on the grouping."""
    first: dict[KVCacheSpec, str] = {}
    for name, spec in specs.items():
        first.setdefault(spec, name)
    return [KVCacheGroupSpec([name], spec) for spec, name in first.items()]


def _unplannable(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    candidates: Sequence[Candidate],
    failure: K3Error | None,
) -> K3Error:
    """What to raise where nothing holds the layers: of a draft that does not fit, its page."""
    problems = [candidate.problem for candidate in candidates if candidate.problem is not None]
    layer = getattr(failure, "layer_name", None)
    if not problems:
        try:
            isolated_candidate(specs, context)
        except PlanError as error:
            if error.layer_name is not None and specs[error.layer_name].is_draft:
                return error
        except K3Error:
            pass
        return failure or PlanError("no grouping was found")
    if str(failure) == problems[0]:
        return PlanError(problems[0], layer)
    said = str(failure).replace(", or plan with policy k3", "")
    return PlanError(f"{said}; other groupings are ruled out: {problems[0]}", layer)


def candidate_groups(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    stages: Mapping[str, int] | None = None,
) -> dict[str, list[KVCacheGroupSpec]]:
    """The groups of every candidate of policy "k3" that could be used, by name, and vLLM's default.

    For a look at other lengths than the planning context. Arguments as :func:`choose_grouping`.

    Raises:
        PlanError: as :func:`choose_grouping`.
    """
    choice = choose_grouping(specs, context, "k3", stages)
    at_stage = _stages(specs, stages)
    default, _ = _default(specs, context, stages if at_stage else None)
    if default is not None and len(choice.candidates) == 1:
        return {default.name: choice.groups}
    rates = _Rates.from_environment()
    repaired, _, _ = _repaired(specs, context)
    found = find_candidates(repaired, context, default, rates.cost, at_stage)
    candidates = unique_names(found if default is None else [default, *found])
    return {
        candidate.name: mark_draft_groups(candidate.build(list(specs)), specs)
        for candidate in candidates
        if candidate.problem is None or candidate is default
    }
