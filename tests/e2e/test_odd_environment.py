"""Spans and metrics arrive whatever bytes and standard values the environment of a server holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.toy_server import Toy

ROOT = Path(__file__).parents[2]
HTTP, GRPC = "http/protobuf", "grpc"
SERVER = """
import otel_infer
otel_infer.instrument()
with otel_infer.request("chat", model="m\\udce9") as request:
    request.set_attribute("note\\udce9", "value\\udce9")
    request.set_attribute("gen_ai.request.model", "name\\udce9")
    request.submitted(input_tokens=3, max_tokens=3)
    request.finished("stop")
assert otel_infer.flush(20)
"""
"""One request, with texts that are no valid Unicode."""


@pytest.mark.parametrize(
    ("protocol", "environ"),
    [
        (HTTP, {"OTEL_SERVICE_NAME": "caf\udce9"}),
        (HTTP, {"OTEL_RESOURCE_ATTRIBUTES": "place=caf\udce9"}),
        (HTTP, {"OTEL_INFER_TENANT_HASH_KEY": "caf\udce9"}),
        (HTTP, {"OTEL_SERVICE_NAME": "caf\udce9", "OTEL_INFER_MODE": "in-process"}),
        (GRPC, {"OTEL_SERVICE_NAME": "caf\udce9"}),
        (GRPC, {"OTEL_EXPORTER_OTLP_COMPRESSION": "none"}),
        (GRPC, {"OTEL_EXPORTER_OTLP_COMPRESSION": "deflate"}),
        (GRPC, {"OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "none"}),
        (GRPC, {"OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "gzip"}),
        (HTTP, {"OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "deflate"}),
        (HTTP, {"OTEL_EXPORTER_OTLP_TIMEOUT": "10s"}),
        (HTTP, {"OTEL_EXPORTER_OTLP_TIMEOUT": "10s", "OTEL_INFER_MODE": "in-process"}),
        (HTTP, {"OTEL_SPAN_EVENT_COUNT_LIMIT": "-1", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "unlimited"}),
        (HTTP, {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "some", "OTEL_ATTRIBUTE_COUNT_LIMIT": "-1"}),
        (HTTP, {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "some", "OTEL_INFER_MODE": "in-process"}),
        (HTTP, {"OTEL_PROPAGATORS": "tracecontext,baggage,xray"}),
    ],
    ids=str,
)
def test_spans_and_metrics_arrive(protocol: str, environ: dict[str, str]) -> None:
    with OtlpReceiver(protocol) as receiver:
        done = subprocess.run(
            [sys.executable, "-c", SERVER],
            env={**os.environ, "PYTHONPATH": str(ROOT), **receiver.environ, **environ},
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        models = {span["attributes"].get(semconv.REQUEST_MODEL) for span in receiver.spans}
        assert "name?" in models
        assert semconv.REQUEST_DURATION.name in {metric["name"] for metric in receiver.metrics}


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_the_log_holds_no_credential_of_the_endpoint(tmp_path: Path, protocol: str) -> None:
    """The exporters' libraries log the URL of a failed export."""
    log, secret = tmp_path / "side.log", "canary-b81c"
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://user:{secret}@127.0.0.1:9/v1?key={secret}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_HEADERS": f"x-key={secret}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_INFER_LOG": str(log),
    }
    with Toy(tmp_path / "log", environ) as toy:
        assert toy.chat().status == 200
        toy.post("/flush", {"timeout": 8})
        toy.state()
        toy.stop()
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text()
    assert secret not in log.read_text() + toy.read_log()
