"""The log of kept requests: to a file or stderr by the sidecar, to `logging` in-process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_server import RUN, Toy, wait_until


def parse_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("launcher", [(), RUN], ids=["one-line", "otel-infer-run"])
@pytest.mark.parametrize("where", ["file", "stderr"])
def test_sidecar_logs_kept_requests_without_an_exporter(
    tmp_path: Path, where: str, launcher: tuple[str, ...]
) -> None:
    log = tmp_path / "requests.log"
    environ = {
        "OTEL_INFER_REQUEST_LOG": str(log) if where == "file" else "stderr",
        "OTEL_INFER_SLO": "e2e=200ms",
    }
    with Toy(tmp_path / "log", environ, launcher) as toy:
        ordinary, slow, failed = toy.chat(tokens=2), toy.chat(tokens=40), toy.chat(fail="canary")

        def read_log() -> list[dict[str, Any]]:
            return parse_lines(log.read_text() if where == "file" and log.exists() else toy.read_log())

        wait_until(lambda: len(read_log()) >= 2)
        logged = {line["trace_id"]: line for line in read_log()}
        assert set(logged) == {slow.trace_id, failed.trace_id} and ordinary.status == 200
        assert (logged[slow.trace_id]["keep_reason"], logged[slow.trace_id]["missed"]) == ("slo", ["e2e"])
        assert logged[slow.trace_id]["stages_ms"]["decode"] > 200
        assert logged[failed.trace_id]["error_type"] == "ValueError"
        assert "canary" not in json.dumps(list(logged.values()))
        toy.stop()


IN_PROCESS = """
import logging, sys
import otel_infer
from opentelemetry.sdk.trace import TracerProvider
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("%(name)s %(keep_reason)s %(trace_id)s"))
logging.getLogger("otel_infer.requests").addHandler(handler)
logging.getLogger("otel_infer.requests").setLevel(logging.INFO)
otel_infer.instrument(tracer_provider=TracerProvider())
try:
    with otel_infer.request("chat", model="toy") as request:
        request.submitted(input_tokens=1, max_tokens=1)
        raise ValueError("canary")
except ValueError:
    pass
otel_infer.flush(10)
"""


def test_in_process_requests_go_to_the_users_logging() -> None:
    done = subprocess.run([sys.executable, "-c", IN_PROCESS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    name, reason, trace_id = done.stdout.split()
    assert (name, reason, len(trace_id)) == ("otel_infer.requests", "error", 32)
