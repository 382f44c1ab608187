"""When a watched module was imported, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import importlib.util, json, sys, time
from otel_infer import _clock
from otel_infer.instrumentation.hooks import instrumentor
from otel_infer.instrumentation.hooks.import_starts import estimate_past_import, import_starts
from otel_infer.ringbuffer.recorder import recorder

sys.path.insert(0, sys.argv[1])
recorded = []
recorder.record_startup = recorded.append
began = _clock.read_process_start()
{before}
instrumentor.Instrumentor("slow", "slow", ("slow_library",)).install()
{after}
print(json.dumps([[(e.started_at - began) / 1e9, (e.at - began) / 1e9, (_clock.now() - began) / 1e9] for e in recorded]))
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "slow_library.py").write_text("import time; time.sleep(0.2)")
    return tmp_path


def run(folder: Path, before: str = "", after: str = "") -> list[Any]:
    program = PROGRAM.format(before=before, after=after)
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_an_import_lasts_from_its_own_start(library: Path) -> None:
    """Not from a search for the module, which libraries do to see what is installed."""
    search = "importlib.util.find_spec('slow_library'); time.sleep(1.2); import slow_library"
    ((started_at, at, _),) = run(library, after=search)
    assert 0.2 <= at - started_at < 1.1
    assert started_at >= 1.2


def test_an_import_begins_with_the_imports_before_it(library: Path) -> None:
    (library / "application.py").write_text("import slow_part, slow_library")
    (library / "slow_part.py").write_text("import time; time.sleep(0.3)")
    ((started_at, at, _),) = run(library, after="time.sleep(1.1); import application")
    assert 0.5 <= at - started_at < 1.05


def test_an_import_before_its_watch_lasts_no_longer_than_the_cpu_time(library: Path) -> None:
    ((started_at, at, now),) = run(library, before="import slow_library; time.sleep(1)")
    assert started_at == pytest.approx(0, abs=1e-3)
    assert 0 < at <= now - 1.1


def test_a_module_that_is_missing_is_not_imported(library: Path) -> None:
    missing = "sys.path.remove(sys.argv[1]); importlib.util.find_spec('slow_library')"
    assert run(library, after=missing) == []
