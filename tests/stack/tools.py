"""Finds Prometheus, promtool, Alertmanager, amtool and the Collector, and records which tests use them.

Programs in the folder OTEL_INFER_TEST_TOOLS come first, then Debian's from `make tools`, then installed ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

UNPACKED = Path(__file__).parents[2] / ".tools" / "usr" / "bin"
TEMPLATE = Path("/usr/share/prometheus/alertmanager/default.tmpl")
"""The path at which Debian's Alertmanager expects its template."""
DEBIAN_NAMES = {"alertmanager": "prometheus-alertmanager"}
"""Names of programs in Debian's packages."""


_used: defaultdict[str, set[str]] = defaultdict(set)
"""The programs that each module of tests has used."""


def find_tool(name: str) -> str | None:
    """Returns the path of a program by its own or Debian's name, in the first folder that has it."""
    folders = os.pathsep.join([os.environ.get("OTEL_INFER_TEST_TOOLS", ""), str(UNPACKED)])
    for path in [*folders.split(os.pathsep), os.environ.get("PATH", "")]:
        for candidate in (name, DEBIAN_NAMES.get(name, name)):
            found = shutil.which(candidate, path=path) if path else None
            if found is not None:
                return found
    return None


def list_used_tools(nodeid: str) -> set[str]:
    """Returns the programs that the module of this test has used so far."""
    return _used[nodeid.partition("::")[0]]


@cache
def accepts_otlp(prometheus: str) -> bool:
    """Returns whether this Prometheus has an OTLP receiver (3 and later)."""
    completed = subprocess.run([prometheus, "--help"], capture_output=True, text=True)
    return "web.enable-otlp-receiver" in completed.stdout + completed.stderr


def prometheus_3() -> str:
    """Returns the path of a Prometheus with an OTLP receiver, or skips the test."""
    found = tool("prometheus")
    if not accepts_otlp(found):
        pytest.skip(f"{found} has no OTLP receiver: set OTEL_INFER_TEST_TOOLS to a folder with Prometheus 3")
    return found


def tool(name: str) -> str:
    """Returns the path of a program, or skips the test if it is not installed."""
    found = find_tool(name)
    if found is None:
        where = "set OTEL_INFER_TEST_TOOLS to a folder with it" if name == "otelcol" else "run make tools"
        pytest.skip(f"{name} is not installed: {where}")
    _used[os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]].add(found)
    if name == "alertmanager" and found.startswith(str(UNPACKED)) and not TEMPLATE.exists():
        pytest.skip(f"{TEMPLATE} is missing: run make tools as root")
    return found
