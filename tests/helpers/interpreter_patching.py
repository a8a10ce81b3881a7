"""Triton's interpreter, made to patch the language once per launch instead of once per call.

Triton 3.9 replaces every builtin of ``triton.language`` at each call of a nested device function,
a third of an interpreted kernel's time. The replacement is the same each time, so the first one of
a launch is enough. Drop this module when Triton's ``InterpretedFunction.__call__`` no longer calls
``_patch_lang`` unconditionally.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch_once_per_launch() -> bool:
    """Install it; False, and nothing changed, where this Triton has no such functions."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "GridExecutor"):
        return False
    patch: Callable[[Any], Any] = interpreter._patch_lang
    launch: Callable[..., Any] = interpreter.GridExecutor.__call__
    patched: set[tuple[bool, bool]] = set()

    def patch_lang(function: Any) -> Any:
        # What is patched follows from which of the two modules the function sees.
        seen = function.__globals__.values()
        key = (any(value is tl for value in seen), any(value is tl.core for value in seen))
        if key in patched:
            return None
        patched.add(key)
        return patch(function)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The launch takes its own patch back at its end.
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = call
    return True
