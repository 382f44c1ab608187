"""The in-process reader: its thread runs the pipeline, and each wait for it has a limit."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from otel_infer.config.environment import Config
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.sidecar.in_process import CLOSE_S, FLUSH_S, InProcessReader


def test_a_failure_at_interpreter_shutdown_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = InProcessReader(Config(), MemoryArena(), None, {})

    def fail() -> Any:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    reader._build_pipeline = fail  # type: ignore[method-assign]
    reader.run()
    reader.close()
    assert not reader.flush(5.0)
    assert caplog.text.count("export stopped") == 1


def test_flush_and_exit_are_bounded_behind_a_slow_exporter(tmp_path: Path) -> None:
    """The provider's processor sends each span in 1 s before it returns; there are 60 of them."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _SLOW_PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    flushed, flush_s, exit_began = done.stdout.split()
    assert flushed == "False"
    assert float(flush_s) < 2.0
    assert time.monotonic() - float(exit_began) < FLUSH_S + CLOSE_S + 3.0, done.stderr
    assert time.monotonic() - began > 3.0
    assert "the last requests were not exported" in done.stderr


def test_requests_of_a_multiprocessing_fork_are_exported(tmp_path: Path) -> None:
    """Such a child exits without running `atexit` handlers."""
    done = subprocess.run(
        [sys.executable, "-c", _FORK_PROGRAM, str(tmp_path / "spans")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "spans").read_text().split()) == ["child", "parent"]


_FORK_PROGRAM = """
import multiprocessing, sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

class ToFile(SpanExporter):
    def export(self, spans):
        with open(sys.argv[1], "a") as file:
            file.writelines(span.attributes.get("process", "") + "\\n" for span in spans)
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))
import otel_infer
otel_infer.instrument(tracer_provider=provider)

def work(process):
    from opentelemetry import trace
    with otel_infer.request("job"):
        trace.get_current_span().set_attribute("process", process)

work("parent")
child = multiprocessing.get_context("fork").Process(target=work, args=("child",))
child.start()
child.join()
"""

_SLOW_PROGRAM = """
import time
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

class Slow(SpanExporter):
    def export(self, spans):
        time.sleep(1)
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(Slow()))
import otel_infer
otel_infer.instrument(tracer_provider=provider)
for _ in range(60):
    with otel_infer.request("job"):
        pass
began = time.monotonic()
flushed = otel_infer.flush(1)
print(flushed, time.monotonic() - began, time.monotonic(), flush=True)
"""
