"""Prometheus, promtool, Alertmanager and amtool: Debian's, where `make tools` unpacked them, or whatever is installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

UNPACKED = Path(__file__).parents[2] / ".tools" / "usr" / "bin"
TEMPLATE = Path("/usr/share/prometheus/alertmanager/default.tmpl")
"""Where Debian's Alertmanager looks for it."""
ALSO = {"alertmanager": "prometheus-alertmanager"}
"""What Debian calls it."""


def tool(name: str) -> str:
    """The path of this program; the test is skipped by name where there is none."""
    path = os.pathsep.join(
        [os.environ.get("OTEL_INFER_TEST_TOOLS", ""), str(UNPACKED), os.environ.get("PATH", "")]
    )
    found = shutil.which(ALSO.get(name, name), path=path) or shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"no {name} here: make tools")
    if name == "alertmanager" and found.startswith(str(UNPACKED)) and not TEMPLATE.exists():
        pytest.skip(f"no {TEMPLATE}: make tools, as root")
    return found
