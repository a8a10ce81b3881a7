"""The kernels of production: which compilations the static report looks at, per target.

Shapes are ``launch_config.PRODUCTION_SHAPES``, launch choices each vendor's own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from k3backend.common.errors import PlatformError
from k3backend.common.launch_config import (
    PRODUCTION_SHAPES,
    DtypeName,
    LaunchConfig,
    ProductionShape,
)
from k3backend.nvidia import launch_config as nvidia_launch
from k3backend.report.chips import CHIPS
from k3backend.rocm import launch_config as rocm_launch

if TYPE_CHECKING:
    from k3backend.common.kernels.static_compile import KernelRequest

TARGETS: tuple[str, ...] = tuple(CHIPS)

PLANNED_REQUESTS = (256, 1024)
"""Requests of the plans that are compiled; 1,024 is the most that one launch plans."""


COMBINED_SHAPES = ("TP8 1 token", "TP8 8 tokens", "TP8 DCP8 8 tokens")
"""Few rows, a full row tile, several row tiles: the combine differs by nothing else."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One row of the report before it is compiled.

    Attributes:
        target, name: unique together.
        kind: "decode", "combine" or "plan".
        shape, launch: of a decode or combine.
        requests: of a plan.
    """

    target: str
    name: str
    kind: str
    shape: ProductionShape | None = None
    launch: LaunchConfig | None = None
    requests: int = 0

    @property
    def bounded(self) -> bool:
        """Production runs it, so its numbers are recorded: an fp8 cache with an fp8 query."""
        return self.shape is None or self.shape.q_dtype == "fp8"

    @property
    def config(self) -> dict[str, Any]:
        """Shape and launch choice as JSON values."""
        if self.shape is None or self.launch is None:
            return {"requests": self.requests, "workers": CHIPS[self.target].units}
        shape = {k: v for k, v in asdict(self.shape).items() if k != "name"}
        launch = asdict(self.launch)
        return shape | launch | {"backend_options": dict(self.launch.backend_options)}


def subjects(target: str, dtype: DtypeName = "fp8") -> list[Subject]:
    """What the report shows for a target, in order.

    Args:
        dtype: of query and cache. Production is "fp8"; "bf16" gives the same decodes in bfloat16.
    """
    shapes = PRODUCTION_SHAPES
    if dtype != "fp8":
        shapes = tuple(
            replace(shape, name=f"{shape.name} {dtype}", q_dtype=dtype, kv_dtype=dtype)
            for shape in shapes
        )
    launches = [(shape, launch_choice(shape, target)) for shape in shapes]
    decodes = [Subject(target, f"decode {s.name}", "decode", s, launch) for s, launch in launches]
    if dtype != "fp8":
        return decodes
    combines = [
        Subject(target, f"combine {shape.name}", "combine", shape, launch)
        for shape, launch in launches
        if shape.name in COMBINED_SHAPES
    ]
    plans = [Subject(target, f"plan {n} requests", "plan", requests=n) for n in PLANNED_REQUESTS]
    return [*decodes, *combines, *plans]


def launch_choice(shape: ProductionShape, target: str) -> LaunchConfig:
    """The vendor's launch choice for a shape on a target."""
    rows = shape.heads * shape.q_len
    if target.startswith("gfx"):
        return rocm_launch.decode_launch(
            rows, q_dtype=shape.q_dtype, kv_dtype=shape.kv_dtype, arch=target
        )
    return nvidia_launch.decode_launch(
        rows,
        q_dtype=shape.q_dtype,
        kv_dtype=shape.kv_dtype,
        capability=int(target.removeprefix("sm_")),
    )


def compile_request(subject: Subject) -> KernelRequest:
    """The compilation of a subject. Raises PlatformError where triton cannot compile here."""
    check_compiler()
    if subject.shape is None or subject.launch is None:
        from k3backend.common.kernels.plan_compile import plan_request

        return plan_request(subject.requests, subject.target, workers=CHIPS[subject.target].units)
    from k3backend.common.kernels.static_compile import combine_request, decode_request

    make = decode_request if subject.kind == "decode" else combine_request
    return make(subject.shape, subject.launch, subject.target)


def check_compiler() -> str:
    """Triton's version. Raises PlatformError where it is missing or interprets kernels."""
    try:
        import triton
    except ImportError as error:
        raise PlatformError(
            f"triton cannot be imported ({error}); the report compiles kernels with it: install "
            "triton 3.6 to 3.9, for example with `pip install 'k3backend[kernels,decode]'`"
        ) from error
    if triton.knobs.runtime.interpret:
        raise PlatformError(
            "TRITON_INTERPRET is set, which replaces the compiler; unset it for this report"
        )
    return str(triton.__version__)
