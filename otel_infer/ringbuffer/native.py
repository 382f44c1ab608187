"""The compiled module that writes ring cells, where it was built; else None, and Python code writes them.

It is an option of the wheel: a build without a C compiler leaves it out.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from otel_infer.config.settings import SETTINGS


def _load_native() -> Any:
    """Returns the module; None if it was not built or is switched off. An invalid value is reported elsewhere."""
    setting = SETTINGS["native"]
    try:
        if not setting.parse(os.environ.get(setting.variable, "").strip() or setting.default):
            return None
    except ValueError:
        pass
    try:
        return importlib.import_module("otel_infer.ringbuffer._native")
    except ImportError:
        return None


native: Any = _load_native()
