"""The installed release of vLLM, and a changed copy of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from otel_infer import semconv
from tests.instrumentation.vllm.releases import LIBRARY
from tests.support import releases
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.trees import trace, tree
from tests.vllm.asking import CHAT, prompt, send_request
from tests.vllm.conftest import Serve
from tests.vllm.serving import ENVIRON, ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
RENAMED = ("vllm/v1/core/sched", "_preempt_request", "_put_back_request")


def test_installed_hooks_bind_as_the_sources_predict() -> None:
    assert releases.bound(LIBRARY) == releases.installed_binds(LIBRARY)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a copy of vLLM in which one function is renamed everywhere."""
    return releases.changed("vllm", *RENAMED, into=tmp_path_factory.mktemp("changed"))


def test_doctor_reports_the_changed_function_and_its_process(changed: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ |= {**ENVIRON, "PYTHONPATH": f"{changed}{os.pathsep}{ROOT}", "OTEL_TRACES_EXPORTER": "none"}
    command = [sys.executable, "-m", "otel_infer", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=changed)
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    check = checks["integration vllm"]
    assert check["state"] == "fail", check
    assert "Scheduler._preempt_request: there is no _preempt_request" in check["found"]
    assert "preemptions is not recorded" in check["found"]
    assert "engine core 11 of 12" in check["found"], check["found"]


def test_a_changed_release_still_serves_and_exports(
    changed: Path, serve: Serve, receiver: OtlpReceiver
) -> None:
    """The wheel and a destination are enough: vLLM loads the plugin itself. vLLM keeps no statistics here."""
    environ = {"PYTHONPATH": f"{changed}{os.pathsep}{ROOT}"}
    server = serve("--disable-log-stats", launcher=(), environ=environ)
    answer = send_request(server.port, CHAT, messages=[{"role": "user", "content": prompt(8)}], max_tokens=4)
    assert answer.status == 200
    spans = trace(receiver, answer.trace_id, "chat tiny")
    assert [line.strip() for line in tree(spans, answer.parent_id)] == [
        "POST /v1/chat/completions", "chat tiny", "ingress", "tokenize", "queue", "prefill", "decode",
        f"{semconv.SPAN_DECODE_STEP} ×3", "postprocess",
    ]  # fmt: skip
    assert "Scheduler._preempt_request: there is no _preempt_request" in server.log.read_text(
        errors="replace"
    )
