"""Finds Prometheus, promtool, Alertmanager and amtool: Debian's from `make tools`, or installed ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

UNPACKED = Path(__file__).parents[2] / ".tools" / "usr" / "bin"
TEMPLATE = Path("/usr/share/prometheus/alertmanager/default.tmpl")
"""The path at which Debian's Alertmanager expects its template."""
DEBIAN_NAMES = {"alertmanager": "prometheus-alertmanager"}
"""Names of programs in Debian's packages."""


def tool(name: str) -> str:
    """Returns the path of a program, or skips the test if it is not installed."""
    path = os.pathsep.join(
        [os.environ.get("OTEL_INFER_TEST_TOOLS", ""), str(UNPACKED), os.environ.get("PATH", "")]
    )
    found = shutil.which(DEBIAN_NAMES.get(name, name), path=path) or shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"{name} is not installed: run make tools")
    if name == "alertmanager" and found.startswith(str(UNPACKED)) and not TEMPLATE.exists():
        pytest.skip(f"{TEMPLATE} is missing: run make tools as root")
    return found
