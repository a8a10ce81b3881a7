"""From a spec file to a plan, for the commands that take one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from k3backend.cli.arguments import planning_context
from k3backend.cli.deployment_plans import PlanInput
from k3backend.common.errors import InputError
from k3backend.common.spec_file import SpecFile, load_spec_file, parse_spec_document


def spec_file_input(path: str, args: argparse.Namespace) -> PlanInput:
    """What a spec file describes, with the planning flags that were given.

    Raises:
        InputError: the file cannot be used; names the argument and the file.
    """
    try:
        file = load_spec_file(path)
    except InputError as error:
        raise InputError(f"argument --specs: {error}") from error
    return _input(path, file, args, "argument --specs: ")


def spec_document_plan(
    document: Mapping[str, Any], source: str, policy: str | None
) -> dict[str, Any]:
    """The Layout JSON of a spec document. Raises K3Error whose message begins with ``source``."""
    flags = argparse.Namespace(
        policy=policy, context=None, mla_kernel_block=None, draft_kernel_block=None
    )
    spec_input = _input(source, parse_spec_document(document, source), flags, "")
    return spec_input.document(spec_input.plan())


def _input(name: str, file: SpecFile, args: argparse.Namespace, argument: str) -> PlanInput:
    context = file.context
    changes: dict[str, Any] = {
        flag: value
        for flag in ("mla_kernel_block", "draft_kernel_block")
        if (value := getattr(args, flag)) is not None
    }
    if args.context is not None or context.context is None:
        changes["context"] = planning_context(args, context.max_model_len)
    return PlanInput(
        name=name,
        origin=f"{argument}{name}: ",
        platform=None,
        specs=file.specs,
        stages=file.stages,
        context=replace(context, **changes) if changes else context,
        policy=args.policy or "k3",
        available_bytes=file.available_bytes,
    )
