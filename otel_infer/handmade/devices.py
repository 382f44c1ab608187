"""Which device a stage or a step of one's own launches on."""

from __future__ import annotations

import sys
from typing import Any

from otel_infer.gpu.timing import timing


def device_of(gpu: object) -> Any:
    """What `gpu` of `stage` and `step` means, as a `torch.device`: `True` is the calling thread's current device, which need not be
    the one that it used first; anything else names it. None where no device is timed yet. Raises what torch does for what
    is no device."""
    if not timing.is_by_device:
        return None
    torch: Any = sys.modules["torch"]
    if gpu is not True:
        return torch.device(gpu)
    kind = "cuda" if torch.cuda.is_initialized() else "xpu"
    return torch.device(kind, getattr(torch, kind).current_device())
