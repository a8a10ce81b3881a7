"""Flags that several commands share, and how their values are read.

A flag that is not given stays None, so that a command knows what was said and what is a default.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence

from k3backend.cli.command_line import CommandParser, UsageError, given_flags
from k3backend.common import envs
from k3backend.common.backend import VENDOR_NAMES
from k3backend.common.errors import InputError
from k3backend.common.plan_context import LAYOUT_NAMES, KernelBlocks

MAX_TOKENS = 2**31 - 1
"""Lengths are int32 in the block tables and the kernels."""
MAX_RANKS = 4096
MAX_SPEC_TOKENS = 1024
MAX_CHECKPOINT_BLOCKS = 1024
MAX_MEMORY_GIB = 2**20

PLATFORMS = (*VENDOR_NAMES, "all")
POLICIES = ("k3", "vllm", "isolate")
CACHE_MODES = ("align", "none")

PLAN_FLAGS = (
    "--specs",
    "--policy",
    "--context",
    "--mla-kernel-block",
    "--draft-kernel-block",
    "--plot",
)
"""Flags that go with a spec file; everything else about the model is said in the file."""


def integer(minimum: int, maximum: int) -> Callable[[str], int]:
    """A reader of plain decimal integers from ``minimum`` to ``maximum``."""

    def read(text: str) -> int:
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) <= 20:
            value = int(text)
            if minimum <= value <= maximum:
                return value
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not an integer from {minimum} to {maximum:,}; give one"
        )

    return read


def gibibytes(text: str) -> int:
    """Read GiB, whole or with decimals, and return bytes."""
    value = float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,12})?", text, re.ASCII) else -1.0
    if not 0 < value <= MAX_MEMORY_GIB or not math.floor(value * 2**30):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a size in GiB above 0 and up to {MAX_MEMORY_GIB:,}; "
            "give the bytes of one rank's KV cache as GiB, for example 60.5"
        )
    return math.floor(value * 2**30)


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """A reader of one of the names."""

    def read(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not one of {', '.join(choices)}; give one of these"
            )
        return text

    return read


def shards(text: str) -> int | str:
    """Read the number of tensor-parallel shards, or ``none``, which stays text."""
    return text if text == "none" else integer(1, MAX_RANKS)(text)


def kernel_blocks(text: str) -> KernelBlocks:
    """Read ``any``, ``multiple:N`` or a list of sizes in tokens."""
    try:
        return KernelBlocks.parse(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def word(text: str) -> str:
    """A name or path that is not empty."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{shown(text)} is empty or holds NUL; give a name")
    return text


def shown(text: str) -> str:
    """A value as a message shows it: quoted, and cut where it is long."""
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."


def add_deployment_arguments(parser: CommandParser) -> None:
    """The flags that say which target and draft run, and how."""
    add = parser.add_argument_group("deployment").add_argument
    tokens = integer(1, MAX_TOKENS)
    ranks = integer(1, MAX_RANKS)
    add("--target", type=word, metavar="NAME|PATH", help="default: kimi-k3")
    add("--draft", type=word, metavar="NAME|PATH|none", help="default: none")
    add("--tp", type=ranks, metavar="N", help="tensor-parallel ranks, default 8")
    add("--dcp", type=ranks, metavar="N", help="decode context-parallel ranks, default 1")
    add("--pp", type=ranks, metavar="N", help="pipeline stages, default 1")
    add("--kv-dtype", type=word, metavar="DTYPE", help="auto, bf16, fp8, fp8_e4m3 ...; fp8")
    add("--draft-kv-dtype", type=word, metavar="DTYPE", help="default: the target's")
    add(
        "--spec-tokens",
        type=integer(0, MAX_SPEC_TOKENS),
        metavar="N",
        help="speculative tokens; default 7 with a draft, else 0",
    )
    add("--max-model-len", type=tokens, metavar="N", help="tokens; default: the target's")
    add("--max-in-flight-tokens", type=tokens, metavar="N", help="tokens, default 8192")
    add("--mamba-cache-mode", type=one_of(CACHE_MODES), metavar="none|align", help="align")
    add(
        "--prefill-checkpoint-blocks",
        type=integer(0, MAX_CHECKPOINT_BLOCKS),
        metavar="N",
        help="KDA checkpoint blocks per request, default 0",
    )
    add("--block-size", type=tokens, metavar="N", help="tokens; default: derived")
    add(
        "--layout",
        type=one_of(LAYOUT_NAMES),
        metavar="ORDER",
        help=f"{', '.join(LAYOUT_NAMES)}; LBNHC",
    )
    add(
        "--platform",
        type=one_of(PLATFORMS),
        metavar="NAME",
        help=f"{', '.join(PLATFORMS)}; default: the one chosen here",
    )
    add("--prefix-caching", type=one_of(("on", "off")), metavar="on|off", help="default on")
    add("--memory", type=gibibytes, metavar="GIB", help="bytes for the KV cache of one rank")
    add(
        "--draft-max-tp-shards",
        type=shards,
        metavar="N|none",
        help="override what the draft declares, to reproduce a bad one",
    )


def add_plan_arguments(parser: CommandParser) -> None:
    """The flags that say how to plan, whatever the layers come from."""
    add = parser.add_argument_group("planning").add_argument
    add("--policy", type=one_of(POLICIES), metavar="NAME", help=f"{', '.join(POLICIES)}; k3")
    add(
        "--context",
        type=integer(1, MAX_TOKENS),
        metavar="N",
        help="tokens at which groupings are compared; default: the longest request",
    )
    blocks = "any|multiple:N|N,N"
    add("--mla-kernel-block", type=kernel_blocks, metavar=blocks, help="default any")
    add("--draft-kernel-block", type=kernel_blocks, metavar=blocks, help="default multiple:16")


def add_plot_argument(parser: CommandParser) -> None:
    """``--plot``, for the commands that draw a plan."""
    parser.add_argument(
        "--plot",
        type=word,
        metavar="FILE.png|.svg|.html",
        help="write a picture of a pool block, and of bytes against context",
    )


def add_output_arguments(parser: CommandParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def refuse_deployment_flags(args: argparse.Namespace) -> None:
    """Refuse flags that a spec file answers itself."""
    for flag in given_flags(args):
        if flag not in PLAN_FLAGS:
            raise UsageError(
                f"argument {flag}: does not go with --specs, whose file says it; remove one of them"
            )


def planning_context(args: argparse.Namespace, max_model_len: int) -> int | None:
    """``--context``, else K3BACKEND_PLAN_CONTEXT, else None for ``max_model_len``, in tokens."""
    for name, value in (
        ("argument --context:", args.context),
        (envs.PLAN_CONTEXT.name, envs.PLAN_CONTEXT.positive_int()),
    ):
        if value is not None:
            if value > max_model_len:
                raise InputError(
                    f"{name} {value} is above the longest request ({max_model_len} tokens); "
                    "lower it or raise the longest request"
                )
            return value
    return None
