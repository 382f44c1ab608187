"""What NVML says of this machine's GPUs. For the sidecar and for `doctor`, never for the server's own threads."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""There where the kernel has the driver, also inside a container that was not given its library."""

NvmlStatus = Literal["ready", "no driver", "no library", "no permission", "no package", "broken"]


class NvmlState(NamedTuple):
    """Whether NVML answers, and for which devices.

    `status`: "no library", the kernel has the driver but `libnvidia-ml` is not found here; "no package",
    nvidia-ml-py is not installed; "broken", anything else, which `reason` names.
    """

    status: NvmlStatus
    driver: str = ""
    devices: tuple[str, ...] = ()
    reason: str = ""


def query_state() -> NvmlState:
    """Asks NVML once, and lets go of it again; never raises."""
    try:
        import pynvml
    except ImportError:
        return NvmlState("no package")
    try:
        pynvml.nvmlInit()
    except Exception as refusal:
        return _state_from_error(pynvml, refusal)
    try:
        return NvmlState(
            "ready", decode_text(pynvml.nvmlSystemGetDriverVersion()), _list_device_names(pynvml)
        )
    except Exception as refusal:
        return _state_from_error(pynvml, refusal)
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _list_device_names(pynvml: Any) -> tuple[str, ...]:
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return tuple(decode_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles)


def _state_from_error(pynvml: Any, refusal: Exception) -> NvmlState:
    code = getattr(refusal, "value", None)
    if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return NvmlState("no library" if DRIVER_FILE.exists() else "no driver")
    if code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return NvmlState("no driver")
    if code == pynvml.NVML_ERROR_NO_PERMISSION:
        return NvmlState("no permission")
    return NvmlState("broken", reason=f"{type(refusal).__name__}: {refusal}")


def decode_text(said: str | bytes) -> str:
    """What NVML says; older bindings answer with bytes."""
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else said
