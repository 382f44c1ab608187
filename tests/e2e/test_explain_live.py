"""`otel-infer explain` of a running server: without a tape, and without leftover files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from benchmarks.proxy import DelayingProxy
from otel_infer.cli import main
from otel_infer.instrumentation.httpx import instrument_client
from otel_infer.ringbuffer import directory
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, chat, transformers_serve
from tests.support.toy_server import Toy, wait_until


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def explain(*arguments: str, **environ: str) -> Any:
    """Runs the command in an empty folder, and asserts that it leaves no file there."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-m", "otel_infer", "explain", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        environ = {**inherited, **environ, "TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder, env=environ)
        assert os.listdir(folder) == []
    return done


def wait_for_rings(toy: Toy) -> Path:
    """Returns the folder of the rings once the sidecar runs."""
    folder = Path(toy.state()["folder"])
    wait_until(lambda: directory.is_held(folder / directory.SIDECAR_LOCK))
    return folder


def test_running_server_is_explained_without_leftovers(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Toy(tmp_path / "log", receiver.environ) as toy:
        replies = [toy.chat(tokens=5, flags=flags) for flags in ("01", "00") * 7]
        folder = wait_for_rings(toy)
        done = explain("--rings", str(folder), "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["requests"] == len(replies)
        assert {request["trace_id"] for request in report["worst"]} <= {reply.trace_id for reply in replies}
        assert [name for name in os.listdir(folder) if directory.is_dump(name)] == []
        again = explain(OTEL_INFER_RINGS=str(folder))
        assert again.returncode == 0 and "slowest" in again.stdout
        toy.stop()


def test_answered_request_is_explained_immediately(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Toy(tmp_path / "log", receiver.environ) as toy:
        reply = toy.chat(tokens=5)
        rings = str(wait_for_rings(toy))
        done = explain("--rings", rings, "--request", reply.trace_id, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["output_tokens"] == 5
        unknown = explain("--rings", rings, "--request", "f" * 32)
        assert unknown.returncode == 2
        assert "no finished request of 1 " in unknown.stderr
        toy.stop()


def test_running_server_is_compared_with_a_tape(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Toy(tmp_path / "log", receiver.environ) as toy:
        for _ in range(13):
            toy.chat(tokens=2)
        rings = str(wait_for_rings(toy))
        before = tmp_path / "before.tape"
        assert main(["dump", "--rings", rings, "--out", str(before)]) == 0
        toy.chat(tokens=2)
        done = explain("--rings", rings, "--against", str(before))
        assert done.returncode == 0, done.stderr
        assert "13 requests before, 14 after" in done.stdout
        toy.stop()


@pytest.mark.real
def test_request_is_found_by_its_response_id(
    tmp_path: Path, tiny_llama: Path, receiver: OtlpReceiver
) -> None:
    with transformers_serve(tiny_llama, tmp_path / "log", receiver.environ, batching=True) as server:
        answers = [chat(server.port, tiny_llama, tokens=4, stream=False) for _ in range(2)]
        for answer in answers:
            done = explain("--rings", str(rings_of(server)), "--request", answer.body["id"], "--json")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["trace_id"] == answer.trace_id


@pytest.mark.real
def test_network_time_comes_from_client_spans(
    tmp_path: Path, tiny_llama: Path, receiver: OtlpReceiver
) -> None:
    delay, spans = 0.15, tmp_path / "spans.json"
    with (
        transformers_serve(tiny_llama, tmp_path / "log", receiver.environ, batching=True) as server,
        DelayingProxy(server.port, delay) as proxy,
    ):
        stream_as_client(f"http://127.0.0.1:{proxy.port}/v1/chat/completions", str(tiny_llama), spans)
        done = explain("--rings", str(rings_of(server)), "--client", str(spans), "--json")
        assert done.returncode == 0, done.stderr
    latency = json.loads(done.stdout)["client_latency"]
    assert latency["requests"] == 3
    assert latency["outside_p50_ms"] >= 2 * delay * 1e3
    assert latency["outside_p50_ms"] + latency["server_p95_ms"] >= 0.9 * latency["client_p50_ms"]
    assert latency["share"] > 0.5


def stream_as_client(url: str, model: str, spans: Path) -> None:
    """Reads three streamed answers, and writes the client spans to a file."""
    provider = TracerProvider()
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 4,
        "stream": True,
    }
    with spans.open("w") as out:
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=out)))
        for _ in range(3):
            with instrument_client(httpx.Client(timeout=60), tracer_provider=provider) as client:
                with client.stream("POST", url, json=body) as response:
                    assert response.status_code == 200 and list(response.iter_lines())


def rings_of(server: Server) -> Path:
    assert server.process is not None
    (folder,) = Path(f"/dev/shm/otel_infer-{os.getuid()}").glob(f"{server.process.pid}-*")
    return folder


def test_missing_or_ambiguous_server_is_an_error(tmp_path: Path, receiver: OtlpReceiver) -> None:
    done = explain("--rings", str(tmp_path))
    assert done.returncode == 2
    assert f"no sidecar is running below {tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr
    both = explain(str(tmp_path / "a.tape"), "--server", "1")
    assert both.returncode == 2 and "not both" in both.stderr
    with Toy(tmp_path / "a", receiver.environ) as first, Toy(tmp_path / "b", receiver.environ) as second:
        first.chat(), second.chat()
        parent = str(wait_for_rings(first).parent)
        wait_for_rings(second)
        ambiguous = explain("--rings", parent)
        assert ambiguous.returncode == 2
        assert f"--server {second.state()['pid']} " in ambiguous.stderr
        chosen = explain("--rings", parent, "--server", str(first.state()["pid"]))
        assert chosen.returncode == 0 and "insufficient" in chosen.stdout
        first.stop()
        second.stop()
