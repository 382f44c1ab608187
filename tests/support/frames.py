"""Lists the Python functions of otel_infer that a call enters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import otel_infer

PACKAGE = str(Path(otel_infer.__file__).parent)


def list_own_frames(call: Callable[[], Any]) -> list[str]:
    """Returns the names of the functions, in the order of their calls."""
    entered: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered
