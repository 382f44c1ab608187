"""Encoded bytes, sent through the SDK's exporters to a real receiver over real sockets, with both protocols."""

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
    """Removes all settings and sets a timeout of 5 s. It is in whole seconds, because old releases read only those."""
    for name in [name for name in os.environ if name.startswith("OTEL_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")


@pytest.fixture
def transport(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    sender = make_transport(receiver.protocol)
    yield sender
    sender.shutdown()


@pytest.fixture(scope="module")
def body() -> bytes:
    """A request span and its decode steps."""
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


def test_parts_arrive_as_one_unchanged_message(
    receiver: OtlpReceiver, transport: Transport, body: bytes
) -> None:
    assert SendResult(COUNT, 0, None) == transport.send_spans([body[:7], memoryview(body)[7:]], COUNT)

    (request,) = receiver.requests
    assert ("traces", len(body)) == (request.signal, request.raw_bytes)
    assert ["chat tiny", *["decode step"] * (COUNT - 1)] == [span["name"] for span in receiver.spans]
    assert {"service.name": "x"} == receiver.spans[0]["resource"]
    assert ("otel_infer", "1") == (receiver.spans[0]["scope"]["name"], receiver.spans[0]["scope"]["version"])
    assert {"infer.step.id": 1, "infer.batch.size": 2} == receiver.spans[2]["attributes"]


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"])
def test_user_headers_and_exporter_headers_are_sent(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, body: bytes, variable: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv(variable, "api-key=secret,x-tenant=a")
    assert SendResult(COUNT, 0, None) == make_transport(receiver.protocol).send_spans([body], COUNT)
    headers = receiver.requests[0].headers
    assert ("secret", "a") == (headers["api-key"], headers["x-tenant"])
    # Before 1.36, gRPC overwrote the exporter's user agent.
    assert "python" in headers["user-agent"].lower()


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_endpoint_comes_from_the_environment(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, body: bytes, variable: str
) -> None:
    path = "/v1/traces" if receiver.protocol == HTTP and "TRACES" in variable else ""
    monkeypatch.setenv(variable, receiver.endpoint + path)
    assert SendResult(COUNT, 0, None) == make_transport(receiver.protocol).send_spans([body], COUNT)


@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
def test_http_bodies_are_gzip_by_default(
    monkeypatch: pytest.MonkeyPatch, body: bytes, compression: str
) -> None:
    # The SDK must not apply the variable itself, because it would compress a second time.
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
def test_http_compression_can_be_changed(
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
    """A port that relays one connection to `port`, and the lengths of the data sent there."""
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
def test_grpc_messages_are_compressed_unless_disabled(
    monkeypatch: pytest.MonkeyPatch, body: bytes, compression: str
) -> None:
    with OtlpReceiver(GRPC) as receiver, counting_relay(receiver.port) as (port, lengths):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        sender = make_transport(GRPC, compression)
        assert SendResult(COUNT, 0, None) == sender.send_spans([body], COUNT)
        sender.shutdown()
    assert len(body) == receiver.requests[0].raw_bytes
    assert (compression == "none") == (sum(lengths) > len(body))


def test_retryable_response_is_retried(receiver: OtlpReceiver, transport: Transport, body: bytes) -> None:
    receiver.answer(status(503, retry_after=0), then=ok())
    assert SendResult(COUNT, 0, None) == transport.send_spans([body], COUNT)
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
def test_refusal_is_counted_with_its_reason(
    receiver: OtlpReceiver, transport: Transport, body: bytes, code: int, http: str, grpc: str
) -> None:
    receiver.answer(status(code))
    expected = http if receiver.protocol == HTTP else grpc
    assert SendResult(0, COUNT, expected) == transport.send_spans([body], COUNT)
    assert 1 == len(receiver.requests)


@pytest.mark.parametrize("redirect_options", [{"allow_redirects": False}, {}], ids=["new", "old"])
def test_redirect_to_a_login_page_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, body: bytes, redirect_options: dict[str, bool]
) -> None:
    """Old exporters leave the redirect option unset, so that redirects are followed."""
    session = import_module("requests").Session()
    request = session.request
    monkeypatch.setattr(
        session,
        "request",
        lambda *args, **options: request(*args, **_without_redirect_option(options), **redirect_options),
    )
    monkeypatch.setattr(sdk_adapter, "make_http_session", lambda: session)
    with OtlpReceiver(HTTP) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        receiver.answer(Answer(302, location="/login"))
        assert SendResult(0, COUNT, "HTTP 302") == HttpTransport().send_spans([body], COUNT)
    assert 1 == len(receiver.requests)


def _without_redirect_option(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "allow_redirects"}


@bounded
@pytest.mark.parametrize(
    ("code", "grpc"), [(500, "INTERNAL"), (503, "UNAVAILABLE"), (429, "RESOURCE_EXHAUSTED")]
)
def test_permanently_failing_receiver_is_abandoned(
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
def test_partial_success_is_counted(
    receiver: OtlpReceiver, transport: Transport, body: bytes, answer: Answer, expected: SendResult
) -> None:
    receiver.answer(answer)
    assert expected == transport.send_spans([body], COUNT)


@pytest.mark.parametrize("answer", [b"{}", b"<html>", b"\xff" * 20])
def test_unparsable_success_response_is_a_success(
    receiver: OtlpReceiver, transport: Transport, body: bytes, answer: bytes
) -> None:
    receiver.answer(Answer(body=answer))
    assert SendResult(COUNT, 0, None) == transport.send_spans([body], COUNT)


def test_batch_after_a_failure_is_judged_separately(
    receiver: OtlpReceiver, transport: Transport, body: bytes
) -> None:
    receiver.answer(status(400), partial_success(3, "no"), then=ok())
    rejected = [transport.send_spans([body], COUNT).rejected for _ in range(3)]
    assert [COUNT, 3, 0] == rejected


@bounded
def test_unreachable_receiver_is_reported_and_used_again(
    monkeypatch: pytest.MonkeyPatch, receiver: OtlpReceiver, body: bytes
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    transport = make_transport(receiver.protocol)
    assert SendResult(COUNT, 0, None) == transport.send_spans([body], COUNT)
    receiver.refuse()
    expected = "connection refused" if receiver.protocol == HTTP else "UNAVAILABLE"
    assert SendResult(0, COUNT, expected) == transport.send_spans([body], COUNT)
    receiver.listen()
    # gRPC reconnects on its own schedule.
    assert SendResult(COUNT, 0, None) in (transport.send_spans([body], COUNT) for _ in range(5))
    assert 2 * COUNT == len(receiver.spans)


@bounded
def test_slow_receiver_times_out(
    monkeypatch: pytest.MonkeyPatch, receiver: OtlpReceiver, body: bytes
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    receiver.answer(slow(20))
    began = time.monotonic()
    expected = "timeout" if receiver.protocol == HTTP else "DEADLINE_EXCEEDED"
    assert SendResult(0, COUNT, expected) == make_transport(receiver.protocol).send_spans([body], COUNT)
    assert time.monotonic() - began < 10


def test_unresolvable_host_name_is_reported(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.invalid:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    assert SendResult(0, COUNT, "name not resolved") == make_transport(HTTP).send_spans([body], COUNT)


def test_a_retry_after_the_deadline_keeps_the_first_reason(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    """The exporter's last attempt has a timeout of 0 s, which `requests` refuses with a ValueError."""
    errors = iter([ConnectionRefusedError(), *([ValueError("timeout <= 0")] * 9)])

    def refuse(*_: object, **__: object) -> None:
        raise next(errors)

    monkeypatch.setattr("requests.Session.send", refuse)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    transport = make_transport(HTTP)
    for _ in range(2):
        with contextlib.suppress(ConnectionError, ValueError):
            transport._send_and_record(None)  # type: ignore[attr-defined]
    assert transport._outcome.reason == "connection refused"  # type: ignore[attr-defined]


def test_tls_to_a_plaintext_receiver_is_reported(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    with OtlpReceiver(HTTP) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint.replace("http:", "https:"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        assert SendResult(0, COUNT, "TLS error") == make_transport(HTTP).send_spans([body], COUNT)


def test_invalid_endpoint_is_a_failure_not_incompatibility(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector")
    result = make_transport(HTTP).send_spans([body], COUNT)
    assert (0, COUNT) == (result.accepted, result.rejected)
    # Newer exporters log such an error and do not raise it.
    assert result.reason in ("not sent", "MissingSchema")


def test_http_proxy_from_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """The receiver is not a proxy and answers an absolute address with 404. Without the proxy, the name would not resolve."""
    with OtlpReceiver(HTTP) as receiver:
        monkeypatch.setenv("http_proxy", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.invalid:4318")
        assert SendResult(0, COUNT, "HTTP 404") == make_transport(HTTP).send_spans([body], COUNT)


def test_spans_after_shutdown_are_rejected(receiver: OtlpReceiver, transport: Transport, body: bytes) -> None:
    transport.shutdown()
    transport.shutdown()
    assert SendResult(0, COUNT, "shut down") == transport.send_spans([body], COUNT)
    assert [] == receiver.requests


@bounded
def test_shutdown_from_another_thread_ends_a_retry(
    receiver: OtlpReceiver, transport: Transport, body: bytes
) -> None:
    receiver.answer(status(503, retry_after=4))
    threading.Timer(0.3, transport.shutdown).start()
    began = time.monotonic()
    assert 0 == transport.send_spans([body], COUNT).accepted
    assert time.monotonic() - began < 3


def test_stock_exporter_in_the_process_still_works(receiver: OtlpReceiver, transport: Transport) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    short = "http" if receiver.protocol == HTTP else "grpc"
    exporter = import_module(f"opentelemetry.exporter.otlp.proto.{short}.trace_exporter").OTLPSpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("stock").start_span("stock span").end()
    provider.shutdown()
    assert ["stock span"] == [span["name"] for span in receiver.spans]


def http_module() -> Any:
    return import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")


def test_http_exporter_without_encode_spans_is_incompatible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(http_module(), "encode_spans")
    release = metadata.version("opentelemetry-exporter-otlp-proto-http")
    with pytest.raises(IncompatibleSdk, match=rf"proto-http {release} .*`encode_spans`"):
        HttpTransport()


def test_http_exporter_not_calling_encode_spans_is_incompatible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module().OTLPSpanExporter, "export", lambda self, spans: None)
    with pytest.raises(IncompatibleSdk, match="calls no `encode_spans`"):
        HttpTransport()


def test_http_exporter_without_session_is_incompatible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module(), "OTLPSpanExporter", lambda endpoint, compression: None)
    with pytest.raises(IncompatibleSdk, match="takes no `session`"):
        HttpTransport()


def test_grpc_exporter_without_translate_data_is_incompatible(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    monkeypatch.setattr(module.OTLPSpanExporter, "export", lambda self, spans: None)
    release = metadata.version("opentelemetry-exporter-otlp-proto-grpc")
    with pytest.raises(IncompatibleSdk, match=rf"proto-grpc {release} .*`_translate_data`"):
        GrpcTransport()


def test_compatibility_check_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    with OtlpReceiver(GRPC) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        HttpTransport().shutdown()
        GrpcTransport().shutdown()
        assert [] == receiver.requests


@pytest.mark.parametrize("protocol", [HTTP, GRPC])
def test_missing_exporter_package_is_named(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    short = "http" if protocol == HTTP else "grpc"
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{short}.trace_exporter", None)
    with pytest.raises(ImportError, match=f"needs opentelemetry-exporter-otlp-proto-{short}"):
        make_transport(protocol)


def test_unsupported_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match=r"http/json.*http/protobuf or grpc"):
        make_transport("http/json")


def test_credential_provider_session_is_used_and_kept(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    module = http_module()
    if not hasattr(module, "_load_session_from_envvar"):
        pytest.skip("this release of the exporter knows no credential providers")
    session = import_module("requests").Session()
    session.headers["authorization"] = "Bearer provider-token"
    loaded: list[str] = []
    monkeypatch.setattr(module, "_load_session_from_envvar", lambda name: loaded.append(name) or session)
    with OtlpReceiver(HTTP) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        assert SendResult(COUNT, 0, None) == HttpTransport().send_spans([body], COUNT)
    assert "Bearer provider-token" == receiver.requests[0].headers["authorization"]
    assert {"OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"} == set(loaded)


def test_encoded_batch_length_is_its_span_count() -> None:
    batch = sdk_adapter.EncodedBatch(b"x", 7)
    assert (7, b"x", b"x") == (len(batch), batch.SerializeToString(), batch.SerializePartialToString())
