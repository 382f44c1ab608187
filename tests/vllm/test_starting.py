"""Ways to start an instrumented vLLM server, and what the instrumentation leaves unchanged."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.arrivals import assert_nothing_came_twice
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.trees import trace, tree
from tests.vllm.asking import CHAT, prompt, send_request
from tests.vllm.conftest import Serve
from tests.vllm.serving import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
TREE = [
    "POST /v1/chat/completions",
    "  chat tiny",
    "    ingress",
    "    tokenize",
    "    queue",
    "    prefill",
    "    decode",
    "      decode step ×3",
    "    postprocess",
]


def served(
    serve: Serve, receiver: OtlpReceiver, *options: str, **how: Any
) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the tree and the spans of one request of such a server."""
    server = serve(*options, **how)
    messages = [{"role": "user", "content": prompt(8)}]
    answer = send_request(server.port, CHAT, messages=messages, max_tokens=4)
    assert answer.status == 200
    spans = trace(receiver, answer.trace_id, "chat tiny")
    server.stop()
    assert_nothing_came_twice(receiver)
    return tree(spans, answer.parent_id), spans


def test_opentelemetry_instrument_traces_vllm_together_with_its_own_spans(
    serve: Serve, receiver: OtlpReceiver
) -> None:
    launcher = (str(Path(sys.executable).parent / "opentelemetry-instrument"),)
    found, spans = served(
        serve, receiver, "--otlp-traces-endpoint", f"{receiver.endpoint}/v1/traces",
        launcher=launcher, environ={"OTEL_TRACES_EXPORTER": "otlp", "OTEL_METRICS_EXPORTER": "otlp"},
    )  # fmt: skip
    assert [line.strip() for line in found].count("llm_request") == 1
    other_spans = (
        "llm_request",
        " http receive",
        " http send",
    )  # the spans of vLLM and of the ASGI instrumentation
    assert [line for line in found if not line.endswith(other_spans)] == TREE
    (request,) = [span for span in spans if span["name"] == "chat tiny"]
    (vllm_span,) = [span for span in spans if span["name"] == "llm_request"]
    assert vllm_span["parent_span_id"] == request["span_id"]


WHERE = """
import json, numpy, google.protobuf, grpc, torch
print(json.dumps([module.__file__ for module in (numpy, google.protobuf, grpc, torch)]))
"""


def test_our_tree_first_on_path_changes_no_imports() -> None:
    found = []
    for path in ("", str(ROOT), str(ROOT / "otel_infer" / "bootstrap")):
        environ = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", WHERE], capture_output=True, text=True, env=environ, cwd="/"
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1] == found[2]


def test_installing_the_wheel_changes_no_installed_version(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=200
    )
    (wheel,) = tmp_path.glob("otel_infer-*.whl")
    report = tmp_path / "report.json"
    command = [*pip, "install", "--dry-run", "--report", str(report), str(wheel)]
    subprocess.run(command, check=True, timeout=200)
    wanted = {each["metadata"]["name"] for each in json.loads(report.read_text())["install"]}
    here = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    assert {name for name in wanted & here if name.lower() != "otel-infer"} == set()
