"""Ready bytes through the SDK's exporters to a real receiver over real sockets, both protocols."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

import numpy as np
import pytest

from otel_infer.export import otlp
from otel_infer.export.otlp import sdk_adapter
from otel_infer.export.otlp.transport import (
    GrpcTransport,
    HttpTransport,
    IncompatibleSdk,
    SendResult,
    Transport,
    make_transport,
)
from tests.support.otlp_receiver import GRPC, HTTP, Answer, OtlpReceiver, ok, partial_success, slow, status

COUNT = 50
RELEASE = tuple(map(int, metadata.version("opentelemetry-exporter-otlp").split(".")[:2]))

bounded = pytest.mark.skipif(
    RELEASE < (1, 36), reason="exporters before 1.36 retry for a minute, whatever the timeout"
)


@pytest.fixture(params=[HTTP, GRPC])
def receiver(request: pytest.FixtureRequest) -> Iterator[OtlpReceiver]:
    with OtlpReceiver(request.param) as receiver:
        yield receiver


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing configured but a timeout of 5 s; in whole seconds, for old releases read no others."""
    for name in [name for name in os.environ if name.startswith("OTEL_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")


@pytest.fixture
def to(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    sender = make_transport(receiver.protocol)
    yield sender
    sender.shutdown()


@pytest.fixture(scope="module")
def body() -> bytes:
    """A request span and the decode steps of it."""
    request = otlp.Span(b"t" * 16, b"r" * 8, b"", "chat tiny", 1, 10, 90, {"gen_ai.request.model": "tiny"})
    steps = np.arange(COUNT - 1, dtype=np.int64)
    columns = otlp.StepColumns(
        np.zeros(COUNT - 1, np.uint32),
        steps,
        steps + 5,
        steps,
        steps + 1,
        np.ones_like(steps),
        np.zeros_like(steps),
        np.zeros_like(steps),
    )
    trace, parent = np.full((1, 16), ord("t"), np.uint8), np.full((1, 8), ord("r"), np.uint8)
    encoder = otlp.StepEncoder(
        "decode step", "infer.step.id", "infer.batch.size", "infer.step.tokens", "p", "d"
    )
    rows, count = encoder.encode_steps(columns, otlp.StepOwners(trace, parent, parent))
    parts = [otlp.encode_span(request), rows]
    assert count == COUNT - 1
    identity = otlp.encode_resource({"service.name": "x"}), otlp.encode_scope("otel_infer", "1")
    return b"".join(otlp.build_export_request(*identity, parts))


def test_parts_arrive_as_one_message_as_they_were_given(
    receiver: OtlpReceiver, to: Transport, body: bytes
) -> None:
    assert SendResult(COUNT, 0, None) == to.send_spans([body[:7], memoryview(body)[7:]], COUNT)

    (request,) = receiver.requests
    assert ("traces", len(body)) == (request.signal, request.raw_bytes)
    assert ["chat tiny", *["decode step"] * (COUNT - 1)] == [span["name"] for span in receiver.spans]
    assert {"service.name": "x"} == receiver.spans[0]["resource"]
    assert ("otel_infer", "1") == (receiver.spans[0]["scope"]["name"], receiver.spans[0]["scope"]["version"])
    assert {"infer.step.id": 1, "infer.batch.size": 2} == receiver.spans[2]["attributes"]


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"])
def test_the_users_headers_and_the_exporters_own_are_sent(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, body: bytes, variable: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv(variable, "api-key=secret,x-tenant=a")
    assert SendResult(COUNT, 0, None) == make_transport(receiver.protocol).send_spans([body], COUNT)
    headers = receiver.requests[0].headers
    assert ("secret", "a") == (headers["api-key"], headers["x-tenant"])
    # Before 1.36 gRPC overwrote the exporter's.
    assert "python" in headers["user-agent"].lower()


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_the_endpoint_follows_from_the_environment(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, body: bytes, variable: str
) -> None:
    path = "/v1/traces" if receiver.protocol == HTTP and "TRACES" in variable else ""
    monkeypatch.setenv(variable, receiver.endpoint + path)
    assert SendResult(COUNT, 0, None) == make_transport(receiver.protocol).send_spans([body], COUNT)


@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
def test_http_bodies_are_gzip_unless_another_compression_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, body: bytes, compression: str
) -> None:
    # What the SDK makes of the variable by itself is no matter: it would compress a second time.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with OtlpReceiver(HTTP) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        assert SendResult(COUNT, 0, None) == HttpTransport(compression).send_spans([body], COUNT)
    (request,) = receiver.requests
    assert ("gzip", "application/x-protobuf") == (
        request.headers["content-encoding"],
        request.headers["content-type"],
    )
    assert len(otlp.gzip_parts([body])) == request.wire_bytes < request.raw_bytes / 3


@pytest.mark.parametrize(("compression", "encoding"), [("none", None), ("deflate", "deflate")])
def test_http_bodies_can_go_another_way(
    monkeypatch: pytest.MonkeyPatch, body: bytes, compression: str, encoding: str | None
) -> None:
    with OtlpReceiver(HTTP) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        assert SendResult(COUNT, 0, None) == make_transport(HTTP, compression).send_spans([body], COUNT)
    (request,) = receiver.requests
    assert encoding == request.headers.get("content-encoding")
    assert (compression == "none") == (request.wire_bytes == len(body))


@contextlib.contextmanager
def counting_relay(port: int) -> Iterator[tuple[int, list[int]]]:
    """A port that relays one connection to `port`, and the lengths of what went there."""
    lengths: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source is ends[0]:
                    lengths.append(len(data))
                target.sendall(data)

    def relay() -> None:
        with contextlib.suppress(OSError):
            ends.extend((listener.accept()[0], socket.create_connection(("127.0.0.1", port))))
            back = threading.Thread(target=pump, args=(ends[1], ends[0]))
            back.start()
            pump(*ends)
            back.join()

    thread = threading.Thread(target=relay)
    thread.start()
    yield listener.getsockname()[1], lengths
    for each in (listener, *ends):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
    thread.join()


@pytest.mark.parametrize("compression", ["", "deflate", "none"])
def test_grpc_messages_are_compressed_unless_that_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, body: bytes, compression: str
) -> None:
    with OtlpReceiver(GRPC) as receiver, counting_relay(receiver.port) as (port, lengths):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        sender = make_transport(GRPC, compression)
        assert SendResult(COUNT, 0, None) == sender.send_spans([body], COUNT)
        sender.shutdown()
    assert len(body) == receiver.requests[0].raw_bytes
    assert (compression == "none") == (sum(lengths) > len(body))


def test_an_answer_that_asks_for_patience_is_retried(
    receiver: OtlpReceiver, to: Transport, body: bytes
) -> None:
    receiver.answer(status(503, retry_after=0), then=ok())
    assert SendResult(COUNT, 0, None) == to.send_spans([body], COUNT)
    assert [503, 200] == [request.answer.code for request in receiver.requests]
    assert [len(body)] * 2 == [request.raw_bytes for request in receiver.requests]
    assert COUNT == len({span["span_id"] for span in receiver.spans})


@pytest.mark.parametrize(
    ("code", "http", "grpc"),
    [
        (400, "HTTP 400", "INVALID_ARGUMENT"),
        (401, "HTTP 401", "UNAUTHENTICATED"),
        (301, "HTTP 301", "UNKNOWN"),
    ],
)
def test_a_refusal_is_counted_and_named(
    receiver: OtlpReceiver, to: Transport, body: bytes, code: int, http: str, grpc: str
) -> None:
    receiver.answer(status(code))
    expected = http if receiver.protocol == HTTP else grpc
    assert SendResult(0, COUNT, expected) == to.send_spans([body], COUNT)
    assert 1 == len(receiver.requests)


@pytest.mark.parametrize("says", [{"allow_redirects": False}, {}], ids=["new", "old"])
def test_a_page_to_log_in_at_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, body: bytes, says: dict[str, bool]
) -> None:
    """Old exporters do not say whether redirects are followed, and so they are."""
    session = import_module("requests").Session()
    request = session.request
    monkeypatch.setattr(session, "request", lambda *args, **options: request(*args, **_but(options), **says))
    monkeypatch.setattr(sdk_adapter, "make_http_session", lambda: session)
    with OtlpReceiver(HTTP) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        receiver.answer(Answer(302, location="/login"))
        assert SendResult(0, COUNT, "HTTP 302") == HttpTransport().send_spans([body], COUNT)
    assert 1 == len(receiver.requests)


def _but(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "allow_redirects"}


@bounded
@pytest.mark.parametrize(
    ("code", "grpc"), [(500, "INTERNAL"), (503, "UNAVAILABLE"), (429, "RESOURCE_EXHAUSTED")]
)
def test_a_receiver_that_never_recovers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, receiver: OtlpReceiver, body: bytes, code: int, grpc: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    receiver.answer(status(code, retry_after=30))
    expected = f"HTTP {code}" if receiver.protocol == HTTP else grpc
    assert SendResult(0, COUNT, expected) == make_transport(receiver.protocol).send_spans([body], COUNT)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (partial_success(7, "trace too large"), SendResult(COUNT - 7, 7, "partial success: trace too large")),
        (partial_success(7), SendResult(COUNT - 7, 7, "partial success")),
        (partial_success(0, "deprecated"), SendResult(COUNT, 0, "partial success: deprecated")),
        (partial_success(7, "x" * 5000), SendResult(COUNT - 7, 7, "partial success: " + "x" * 100)),
        (partial_success(10 * COUNT), SendResult(0, COUNT, "partial success")),
    ],
)
def test_a_partial_success_is_counted(
    receiver: OtlpReceiver, to: Transport, body: bytes, answer: Answer, expected: SendResult
) -> None:
    receiver.answer(answer)
    assert expected == to.send_spans([body], COUNT)


@pytest.mark.parametrize("answer", [b"{}", b"<html>", b"\xff" * 20])
def test_an_acceptance_in_no_known_words_is_an_acceptance(
    receiver: OtlpReceiver, to: Transport, body: bytes, answer: bytes
) -> None:
    receiver.answer(Answer(body=answer))
    assert SendResult(COUNT, 0, None) == to.send_spans([body], COUNT)


def test_a_batch_after_a_failed_one_is_judged_by_itself(
    receiver: OtlpReceiver, to: Transport, body: bytes
) -> None:
    receiver.answer(status(400), partial_success(3, "no"), then=ok())
    rejected = [to.send_spans([body], COUNT).rejected for _ in range(3)]
    assert [COUNT, 3, 0] == rejected


@bounded
def test_a_receiver_that_is_not_there_is_named_and_used_again_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, receiver: OtlpReceiver, body: bytes
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    to = make_transport(receiver.protocol)
    assert SendResult(COUNT, 0, None) == to.send_spans([body], COUNT)
    receiver.refuse()
    expected = "connection refused" if receiver.protocol == HTTP else "UNAVAILABLE"
    assert SendResult(0, COUNT, expected) == to.send_spans([body], COUNT)
    receiver.listen()
    # gRPC connects again in its own time.
    assert SendResult(COUNT, 0, None) in (to.send_spans([body], COUNT) for _ in range(5))
    assert 2 * COUNT == len(receiver.spans)


@bounded
def test_a_receiver_that_is_too_slow_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, receiver: OtlpReceiver, body: bytes
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    receiver.answer(slow(20))
    began = time.monotonic()
    expected = "timeout" if receiver.protocol == HTTP else "DEADLINE_EXCEEDED"
    assert SendResult(0, COUNT, expected) == make_transport(receiver.protocol).send_spans([body], COUNT)
    assert time.monotonic() - began < 10


def test_a_name_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.invalid:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    assert SendResult(0, COUNT, "name not resolved") == make_transport(HTTP).send_spans([body], COUNT)


def test_tls_to_a_receiver_without_it_is_named(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    with OtlpReceiver(HTTP) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint.replace("http:", "https:"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        assert SendResult(0, COUNT, "TLS error") == make_transport(HTTP).send_spans([body], COUNT)


def test_an_endpoint_that_is_no_url_is_a_failure_and_no_drift(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector")
    sent = make_transport(HTTP).send_spans([body], COUNT)
    assert (0, COUNT) == (sent.accepted, sent.rejected)
    # Newer exporters log such an error and keep it to themselves.
    assert sent.reason in ("not sent", "MissingSchema")


def test_the_users_proxy_is_used(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """The receiver is no proxy and answers 404 to an absolute address; a name that does not resolve would say so."""
    with OtlpReceiver(HTTP) as receiver:
        monkeypatch.setenv("http_proxy", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.invalid:4318")
        assert SendResult(0, COUNT, "HTTP 404") == make_transport(HTTP).send_spans([body], COUNT)


def test_after_shutdown_everything_is_rejected(receiver: OtlpReceiver, to: Transport, body: bytes) -> None:
    to.shutdown()
    to.shutdown()
    assert SendResult(0, COUNT, "shut down") == to.send_spans([body], COUNT)
    assert [] == receiver.requests


@bounded
def test_shutdown_from_another_thread_ends_a_retry(
    receiver: OtlpReceiver, to: Transport, body: bytes
) -> None:
    receiver.answer(status(503, retry_after=4))
    threading.Timer(0.3, to.shutdown).start()
    began = time.monotonic()
    assert 0 == to.send_spans([body], COUNT).accepted
    assert time.monotonic() - began < 3


def test_the_stock_exporter_in_the_same_process_works_as_before(
    receiver: OtlpReceiver, to: Transport
) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    short = "http" if receiver.protocol == HTTP else "grpc"
    exporter = import_module(f"opentelemetry.exporter.otlp.proto.{short}.trace_exporter").OTLPSpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("stock").start_span("theirs").end()
    provider.shutdown()
    assert ["theirs"] == [span["name"] for span in receiver.spans]


def http_module() -> Any:
    return import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")


def test_an_http_exporter_without_the_name_we_use_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(http_module(), "encode_spans")
    release = metadata.version("opentelemetry-exporter-otlp-proto-http")
    with pytest.raises(IncompatibleSdk, match=rf"proto-http {release} .*`encode_spans`"):
        HttpTransport()


def test_an_http_exporter_that_no_longer_calls_the_name_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module().OTLPSpanExporter, "export", lambda self, spans: None)
    with pytest.raises(IncompatibleSdk, match="calls no `encode_spans`"):
        HttpTransport()


def test_an_http_exporter_that_takes_no_session_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module(), "OTLPSpanExporter", lambda endpoint, compression: None)
    with pytest.raises(IncompatibleSdk, match="takes no `session`"):
        HttpTransport()


def test_a_grpc_exporter_that_sends_some_other_way_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    monkeypatch.setattr(module.OTLPSpanExporter, "export", lambda self, spans: None)
    release = metadata.version("opentelemetry-exporter-otlp-proto-grpc")
    with pytest.raises(IncompatibleSdk, match=rf"proto-grpc {release} .*`_translate_data`"):
        GrpcTransport()


def test_the_rehearsal_touches_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    with OtlpReceiver(GRPC) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        HttpTransport().shutdown()
        GrpcTransport().shutdown()
        assert [] == receiver.requests


@pytest.mark.parametrize("protocol", [HTTP, GRPC])
def test_an_exporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    short = "http" if protocol == HTTP else "grpc"
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{short}.trace_exporter", None)
    with pytest.raises(ImportError, match=f"needs opentelemetry-exporter-otlp-proto-{short}"):
        make_transport(protocol)


def test_a_protocol_we_do_not_speak_is_refused() -> None:
    with pytest.raises(ValueError, match=r"http/json.*http/protobuf or grpc"):
        make_transport("http/json")


def test_a_credential_providers_session_is_used_and_kept(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    module = http_module()
    if not hasattr(module, "_load_session_from_envvar"):
        pytest.skip("this release of the exporter knows no credential providers")
    session = import_module("requests").Session()
    session.headers["authorization"] = "Bearer of-the-provider"
    asked: list[str] = []
    monkeypatch.setattr(module, "_load_session_from_envvar", lambda name: asked.append(name) or session)
    with OtlpReceiver(HTTP) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        assert SendResult(COUNT, 0, None) == HttpTransport().send_spans([body], COUNT)
    assert "Bearer of-the-provider" == receiver.requests[0].headers["authorization"]
    assert {"OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"} == set(asked)


def test_a_ready_batch_is_as_long_as_it_has_spans() -> None:
    batch = sdk_adapter.EncodedBatch(b"x", 7)
    assert (7, b"x", b"x") == (len(batch), batch.SerializeToString(), batch.SerializePartialToString())
