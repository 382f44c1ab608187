"""Many calls of `generate` at once, a thread each: every request has its prefill, its steps and its first token."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.battery import draw
from benchmarks.battery.faults import Case
from benchmarks.battery.load import Load, TimedRequest
from benchmarks.battery.servers import SERVERS
from otel_infer import semconv
from otel_infer.assembly.assembler import Assembler
from otel_infer.cli.demo.command import wait_until_healthy
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.cli.replay import read_records

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(180)]
REQUESTS, TOKENS = 60, 6


def test_sixty_threads_that_generate_are_complete(tmp_path: Path) -> None:
    server, port = SERVERS["generate-threads"], find_free_port()
    model = draw.make_model(server, tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    process = draw.start_server(server, Case([]), folder, port, model, {})
    try:
        assert wait_until_healthy(f"http://127.0.0.1:{port}", lambda: process.poll() is None, 60)
        answers = Load(port, server.kind, str(model), [TimedRequest(0, 16, TOKENS)] * REQUESTS).run()
    finally:
        draw.stop_server(process)
    assert [answer.status for answer in answers] == [200] * REQUESTS
    records = [record for record in read_records(folder / "server.tape", Assembler()) if record.operation]
    assert len(records) == REQUESTS
    for record in records:
        assert record.ttft_ns > 0 and not record.telemetry_lost
        assert record.find_stage(semconv.SPAN_PREFILL) is not None
        assert record.steps is not None and len(record.steps) == TOKENS
