"""The one place that knows vLLM: its classes in, its classes out.

vLLM's ``vllm.general_plugins`` entry point is :func:`register`; importing this package imports
nothing heavy.
"""

from __future__ import annotations

from k3backend.common.errors import PluginError


def register() -> None:
    """Register this package's attention backends and Kimi-K3's grouping with vLLM.

    Runs once in every process of vLLM; a second call changes nothing. ``K3BACKEND_DISABLE=1``
    turns it off.

    Raises:
        PluginError: vLLM lacks something that this package cannot work without.
        PlatformError: K3BACKEND_PLATFORM contradicts vLLM's platform.
    """
    # vLLM swallows what fails while it imports this module, but not what fails in this call.
    try:
        from k3backend.vllm_plugin.registration import register_all
    except ImportError as error:
        raise PluginError(
            f"k3backend's vLLM plugin does not import ({error}); reinstall k3backend and vLLM, or "
            "leave k3backend out of VLLM_PLUGINS"
        ) from error

    register_all()
