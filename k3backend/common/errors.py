"""Every error that k3backend raises on purpose.

One class per kind of failure. The message names the argument, what was expected, what came and
what to do. Callers' mistakes raise one of these, never ``assert``.
"""

from __future__ import annotations

from collections.abc import Sequence


class K3Error(Exception):
    """Base of all k3backend errors."""


class InputError(K3Error, ValueError):
    """An argument, flag, file or environment variable holds a value that cannot be used."""


class SpecError(InputError):
    """A KV cache spec field is out of range or contradicts another field.

    Attributes:
        field: name of the field, or None where no single one is wrong.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(message)


class ShapeError(InputError):
    """A tensor argument has the wrong shape, dtype, device or memory layout."""


class UnsupportedDecodeError(InputError):
    """A decode cannot run as asked. Lists every reason, not only the first.

    Attributes:
        reasons: one sentence per limit that is broken.
    """

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{what}: " + "; ".join(self.reasons))


class KvMergeError(K3Error, ValueError):
    """Specs cannot share one group.

    Attributes:
        field: name of the field that differs.
        left, right: the two values.
        layer_names: the layers that hold them, where known.
        vllm_exception: name of the exception that vLLM's own merge raises here, or None where
            this package's merge refused.
    """

    def __init__(
        self,
        field: str,
        left: object,
        right: object,
        layer_names: Sequence[str] = (),
        remedy: str = "give both layers the same value or let them form two groups",
        vllm_exception: str | None = None,
    ) -> None:
        self.field = field
        self.left = left
        self.right = right
        self.layer_names = tuple(layer_names)
        self.vllm_exception = vllm_exception
        where = f" (layers {', '.join(self.layer_names)})" if self.layer_names else ""
        super().__init__(
            f"specs do not merge: {field} is {left!r} against {right!r}{where}; {remedy}"
        )


class PlanError(K3Error, ValueError):
    """Layers cannot be grouped or placed.

    Attributes:
        layer_name: the layer that really does not fit, or None.
    """

    def __init__(self, message: str, layer_name: str | None = None) -> None:
        self.layer_name = layer_name
        super().__init__(message)


class LayoutError(K3Error, ValueError):
    """A physical KV cache layout cannot hold what is asked of it."""


class PlatformError(K3Error, RuntimeError):
    """The chosen platform cannot run here. Says what was looked at."""


class WorkspaceError(K3Error, RuntimeError):
    """Scratch memory was not reserved before the workspace was locked, or is too small."""


class PluginError(K3Error, RuntimeError):
    """The vLLM plugin met a vLLM whose interfaces it cannot serve."""
