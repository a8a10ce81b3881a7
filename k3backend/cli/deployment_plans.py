"""From the deployment flags to plans: one per platform, for the commands that plan a K3 target."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Literal

from k3backend.cli.arguments import planning_context
from k3backend.cli.command_line import UsageError, given_flags
from k3backend.common.errors import K3Error, PlanError
from k3backend.common.k3_model import Deployment
from k3backend.common.kv_plan import KvPlan, make_plan
from k3backend.common.kv_spec import KVCacheSpec
from k3backend.common.layer_specs import VendorCacheFacts
from k3backend.common.plan_context import PlanContext

DRAFT_FLAGS = ("--draft-kv-dtype", "--draft-max-tp-shards")


@dataclass(frozen=True, slots=True)
class PlanInput:
    """What is planned: the layers of one platform or of one spec file.

    Attributes:
        name: the platform, or the spec file's path.
        platform: the vendor, None for a spec file.
        specs, stages: spec and pipeline stage per layer.
        context: the deployment's sizes.
        policy: grouping policy.
        available_bytes: bytes for the cache on each rank, None where not said.
        notes: (code, message) of what a user may not expect.
        origin: what a message puts before the reason why it cannot be planned.
    """

    name: str
    platform: str | None
    specs: dict[str, KVCacheSpec]
    stages: dict[str, int]
    context: PlanContext
    policy: str
    available_bytes: int | None = None
    notes: tuple[tuple[str, str], ...] = ()
    origin: str = ""

    def plan(self) -> KvPlan:
        """Plan it. Raises PlanError, with the origin before the reason, where it cannot be done."""
        try:
            return make_plan(
                self.specs, self.context, self.policy, self.stages, self.available_bytes
            )
        except K3Error as error:
            raise PlanError(f"{self.origin}{error}") from error

    def document(self, plan: KvPlan) -> dict[str, Any]:
        """The Layout JSON of its plan."""
        from k3backend.report.layout_document import layout_document

        return layout_document(plan, self.platform, self.notes)


def read_deployment(args: argparse.Namespace) -> Deployment:
    """The deployment that the flags describe. Raises InputError naming the flag."""
    without_draft = args.draft is None or args.draft == "none"
    if without_draft:
        for flag in given_flags(args):
            if flag in DRAFT_FLAGS:
                raise UsageError(
                    f"argument {flag}: there is no draft; name one with --draft or leave it out"
                )
    given = {
        "tp_size": args.tp,
        "dcp_size": args.dcp,
        "pp_size": args.pp,
        "kv_dtype": args.kv_dtype,
        "draft_kv_dtype": args.draft_kv_dtype,
        "max_in_flight_tokens": args.max_in_flight_tokens,
        "mamba_cache_mode": args.mamba_cache_mode,
        "prefill_checkpoint_blocks": args.prefill_checkpoint_blocks,
        "block_size": args.block_size,
    }
    return Deployment.load(
        args.target or "kimi-k3",
        None if without_draft else args.draft,
        spec_tokens=args.spec_tokens,
        max_model_len=args.max_model_len,
        draft_max_tp_shards=_shards(args.draft_max_tp_shards),
        **{name: value for name, value in given.items() if value is not None},
    )


def _shards(given: int | str | None) -> int | Literal["declared"] | None:
    if given is None:
        return "declared"
    return given if isinstance(given, int) else None


def deployment_inputs(args: argparse.Namespace, deployment: Deployment) -> list[PlanInput]:
    """What to plan, for each platform that the flags ask for."""
    from k3backend.common.backend import VENDOR_NAMES
    from k3backend.dispatch import BACKEND, load_backend

    if args.platform is None:
        backends = [BACKEND]
    else:
        names = VENDOR_NAMES if args.platform == "all" else (args.platform,)
        backends = [load_backend(name) for name in names]
    inputs = []
    for backend in backends:
        facts = backend.mla_specs.FACTS
        inputs.append(
            PlanInput(
                name=backend.name,
                platform=backend.name,
                specs=backend.mla_specs.build_layer_specs(deployment),
                stages=backend.mla_specs.build_layer_stages(deployment),
                context=_context(args, deployment, facts),
                policy=args.policy or "k3",
                available_bytes=args.memory,
                notes=deployment.notes,
            )
        )
    return inputs


def _context(
    args: argparse.Namespace, deployment: Deployment, facts: VendorCacheFacts
) -> PlanContext:
    return PlanContext(
        layout=args.layout or "LBNHC",
        tp_size=deployment.tp_size,
        dcp_size=deployment.dcp_size,
        pp_size=deployment.pp_size,
        max_model_len=deployment.max_model_len,
        context=planning_context(args, deployment.max_model_len),
        max_in_flight_tokens=deployment.max_in_flight_tokens,
        mamba_cache_mode=deployment.mamba_cache_mode,
        mla_kernel_block=args.mla_kernel_block or facts.mla_kernel_blocks,
        draft_kernel_block=args.draft_kernel_block or facts.draft_kernel_blocks,
        prefix_caching=args.prefix_caching != "off",
    )


def describe(deployment: Deployment) -> str:
    """The deployment in one line."""
    draft = "no draft" if deployment.draft is None else f"draft {deployment.draft.name}"
    parts = [
        deployment.target.name,
        draft,
        f"TP {deployment.tp_size}",
        *([f"DCP {deployment.dcp_size}"] if deployment.dcp_size > 1 else []),
        *([f"PP {deployment.pp_size}"] if deployment.pp_size > 1 else []),
        f"{deployment.kv_dtype} cache",
        f"{deployment.spec_tokens} draft tokens",
        f"{deployment.max_model_len:,} tokens",
    ]
    return ", ".join(parts)
