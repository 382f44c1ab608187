"""The state of this machine's GPUs by NVML, for the sidecar and `doctor`, never for the server's threads."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""Exists where the kernel has the driver, also inside a container that lacks its library."""

NvmlStatus = Literal["ready", "no driver", "no library", "no permission", "no package", "broken"]


class NvmlState(NamedTuple):
    """Whether NVML is available, its driver version, and the names of the devices.

    `status`: "no library", the kernel has the driver but `libnvidia-ml` is not found here; "no package",
    nvidia-ml-py is not installed; "broken", any other error, which `reason` names.
    """

    status: NvmlStatus
    driver: str = ""
    devices: tuple[str, ...] = ()
    reason: str = ""


def query_state() -> NvmlState:
    """Returns the state of NVML, from one query; never raises."""
    try:
        import pynvml
    except ImportError:
        return NvmlState("no package")
    try:
        pynvml.nvmlInit()
    except Exception as error:
        return state_from_error(pynvml, error)
    try:
        return NvmlState(
            "ready", decode_text(pynvml.nvmlSystemGetDriverVersion()), _list_device_names(pynvml)
        )
    except Exception as error:
        return state_from_error(pynvml, error)
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _list_device_names(pynvml: Any) -> tuple[str, ...]:
    names = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            names.append(read_name(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)))
        except Exception as error:  # a GPU that fell off the bus hides no other
            names.append(f"GPU {index}, which does not answer ({error})")
    return tuple(names)


def read_name(pynvml: Any, handle: Any) -> str:
    """Returns the name of a device; `unknown` where it cannot be read, as one that is not UTF-8."""
    try:
        return decode_text(pynvml.nvmlDeviceGetName(handle))
    except Exception:
        return "unknown"


def state_from_error(pynvml: Any, error: Exception) -> NvmlState:
    """Returns the state that an exception of NVML means."""
    code = getattr(error, "value", None)
    if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return NvmlState("no library" if DRIVER_FILE.exists() else "no driver")
    if code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return NvmlState("no driver")
    if code == pynvml.NVML_ERROR_NO_PERMISSION:
        return NvmlState("no permission")
    return NvmlState("broken", reason=f"{type(error).__name__}: {error}")


def decode_text(text: str | bytes) -> str:
    """Returns a text of NVML's as str; older bindings return bytes."""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text
