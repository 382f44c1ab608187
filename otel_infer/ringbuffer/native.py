"""The compiled module that writes ring cells, where it was built; else None, and Python code writes them.

It is an option of the wheel: a build without a C compiler leaves it out. `OTEL_INFER_NATIVE=off` ignores it,
to compare both.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

OFF_VALUES = ("off", "0", "false")


def _load() -> Any:
    if os.environ.get("OTEL_INFER_NATIVE", "").strip().lower() in OFF_VALUES:
        return None
    try:
        return importlib.import_module("otel_infer.ringbuffer._native")
    except ImportError:
        return None


native: Any = _load()
