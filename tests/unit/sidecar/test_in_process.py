"""The thread that reads where there can be no process: whoever flushes and the thread itself take turns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from otel_infer.config.environment import Config
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.sidecar.in_process import InProcessReader


def test_only_who_has_the_turn_works_on_sinks_and_others_wait_while_it_is_sent() -> None:
    reader = InProcessReader(Config(), MemoryArena(), None, {})
    seen: dict[str, bool] = {}

    class Watched:
        def __getattr__(self, name: str) -> Any:
            def called(*args: Any) -> bool:
                seen[name] = reader._cycle_lock.locked()
                return True

            return called

    reader._built_pipeline = Watched()  # type: ignore[assignment]
    assert reader.flush(1.0)
    assert seen == {"run_cycle": True, "export_without_grace": True, "flush": True, "is_sent": False}


def test_a_reader_that_cannot_be_made_any_more_at_the_end_of_a_program_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = InProcessReader(Config(), MemoryArena(), None, {})

    def late() -> Any:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    reader._build_pipeline = late  # type: ignore[method-assign]
    reader.run()
    reader.close()
    other = InProcessReader(Config(), MemoryArena(), None, {})
    other._build_pipeline = late  # type: ignore[method-assign]
    other.close()
    assert caplog.text.count("nothing is exported any more") == 2


def test_what_a_forked_child_of_multiprocessing_did_is_exported(tmp_path: Path) -> None:
    """Such a child leaves without what `atexit` has to do."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKING, str(tmp_path / "spans")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "spans").read_text().split()) == ["child", "parent"]


_FORKING = """
import multiprocessing, sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

class ToFile(SpanExporter):
    def export(self, spans):
        with open(sys.argv[1], "a") as file:
            file.writelines(span.attributes.get("who", "") + "\\n" for span in spans)
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))
import otel_infer
otel_infer.instrument(tracer_provider=provider)

def work(who):
    from opentelemetry import trace
    with otel_infer.request("job"):
        trace.get_current_span().set_attribute("who", who)

work("parent")
child = multiprocessing.get_context("fork").Process(target=work, args=("child",))
child.start()
child.join()
"""
