"""The in-process reader: its thread and a flush exclude each other by a lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from otel_infer.config.environment import Config
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.sidecar.in_process import InProcessReader


def test_a_flush_holds_the_lock_except_while_sending() -> None:
    reader = InProcessReader(Config(), MemoryArena(), None, {})
    locked_in: dict[str, bool] = {}

    class LockObserver:
        def __getattr__(self, name: str) -> Any:
            def called(*args: Any) -> bool:
                locked_in[name] = reader._cycle_lock.locked()
                return True

            return called

    reader._built_pipeline = LockObserver()  # type: ignore[assignment]
    assert reader.flush(1.0)
    assert locked_in == {"run_cycle": True, "export_without_grace": True, "flush": True, "is_sent": False}


def test_a_failure_at_interpreter_shutdown_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = InProcessReader(Config(), MemoryArena(), None, {})

    def fail() -> Any:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    reader._build_pipeline = fail  # type: ignore[method-assign]
    reader.run()
    reader.close()
    other = InProcessReader(Config(), MemoryArena(), None, {})
    other._build_pipeline = fail  # type: ignore[method-assign]
    other.close()
    assert caplog.text.count("export stopped") == 2


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
