"""The kernels of production: which compilations the static report looks at, per target.

Shapes are ``launch_config.PRODUCTION_SHAPES``, launch choices each vendor's own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from k3backend.common.errors import PlatformError
from k3backend.common.launch_config import PRODUCTION_SHAPES, LaunchConfig, ProductionShape
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
    def config(self) -> dict[str, Any]:
        """Shape and launch choice as JSON values."""
        if self.shape is None or self.launch is None:
            return {"requests": self.requests, "workers": CHIPS[self.target].units}
        shape = {k: v for k, v in asdict(self.shape).items() if k != "name"}
        launch = asdict(self.launch)
        return shape | launch | {"backend_options": dict(self.launch.backend_options)}


def subjects(target: str) -> list[Subject]:
    """What the report shows for a target, in order."""
    launches = [(shape, launch_choice(shape, target)) for shape in PRODUCTION_SHAPES]
    decodes = [Subject(target, f"decode {s.name}", "decode", s, launch) for s, launch in launches]
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
