"""HTTP requests of WSGI servers: parent, stages, outcome, and requests that need no span."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import otel_infer
from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.instrumentation import wsgi
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.wsgi import waitress_queue
from otel_infer.instrumentation.wsgi.exchange import ENVIRON_KEY
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from tests.support.rings import Recording

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
Environ = dict[str, Any]


def make_environ(method: str = "POST", path: str = "/v1/score", **more: Any) -> Environ:
    return {
        "REQUEST_METHOD": method, "PATH_INFO": path, "wsgi.url_scheme": "http", "HTTP_TRACEPARENT": TRACEPARENT, **more,
    }  # fmt: skip


def reach_model() -> None:
    """Records what an instrumented model records."""
    request = start.current_request()
    assert request is not None
    request.set_operation("inference", "torch", "scorer")
    request.record_submitted("toy")


def score(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
    reach_model()
    start_response("200 OK", [("content-type", "text/plain")])
    return [b"0.", b"5"]


def call(app: Any, environ: Environ) -> tuple[str, bytes]:
    """Calls an application as a server does. Returns status and body."""
    statuses: list[str] = []
    body = wsgi.wrap(app)(environ, lambda status, headers, exc_info=None: statuses.append(status))
    try:
        content = b"".join(body)
        return "".join(statuses), content
    finally:
        if hasattr(body, "close"):
            body.close()


def find_record(recording: Recording) -> RequestRecord:
    (record,) = recording.records()
    return record


def test_request_is_a_child_of_its_caller(recording: Recording) -> None:
    assert call(score, make_environ()) == ("200 OK", b"0.5")
    record = find_record(recording)
    assert record.trace_id.hex() == TRACE
    assert record.parent_span_id.hex() == PARENT
    assert (record.outcome, record.status_code) == (events.OK, 200)


def test_wrapping_twice_records_once(recording: Recording) -> None:
    call(wsgi.wrap(score), make_environ())
    assert len(recording.records()) == 1


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_method_that_infers_nothing_has_a_span_if_a_model_is_reached(
    method: str, recording: Recording
) -> None:
    call(score, make_environ(method))
    record = find_record(recording)
    assert (record.trace_id.hex(), record.operation) == (TRACE, "inference")


def test_health_check_is_counted_without_a_span(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    call(score, make_environ())
    recording.records()
    monkeypatch.setattr(recorder, "record_process", seen.append)

    def answer(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("204 No Content", [])
        return []

    call(answer, make_environ("GET", "/health"))
    assert recording.records() == []
    (served,) = [event for event in seen if isinstance(event, events.HttpServed)]
    assert (served.method, served.scheme, served.status_code, served.error_type) == ("GET", "http", 204, "")


def test_body_is_computed_in_the_context_of_its_request(recording: Recording) -> None:
    def stream(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("200 OK", [])
        for _ in range(3):
            reach_model()
            yield b"x"
        assert start.current_request() is not None

    assert call(stream, make_environ()) == ("200 OK", b"xxx")
    assert start.current_request() is None
    assert find_record(recording).outcome == events.OK


@pytest.mark.parametrize(("length", "is_current_at_end"), [("2", False), ("3", True), ("two", True)])
def test_a_body_of_known_length_is_complete_with_its_last_byte(
    length: str, is_current_at_end: bool, recording: Recording
) -> None:
    current: list[bool] = []

    def answer(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        reach_model()
        start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", length)])
        for _ in range(2):
            current.append(start.current_request() is not None)
            yield b"x"
        current.append(start.current_request() is not None)

    assert call(answer, make_environ()) == ("200 OK", b"xx")
    assert current == [True, True, is_current_at_end]
    record = find_record(recording)
    assert (record.outcome, record.chunks, record.error_type) == (events.OK, 2, "")


def test_headers_that_are_an_iterator_are_left_to_the_server(recording: Recording) -> None:
    sent: list[tuple[str, str]] = []

    def answer(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", iter([("Content-Length", "2")]))
        return [b"xx"]

    body = wsgi.wrap(answer)(make_environ(), lambda status, headers: sent.extend(headers))
    assert (b"".join(body), sent) == (b"xx", [("Content-Length", "2")])


def test_thread_is_known_while_it_works_for_its_request(recording: Recording) -> None:
    """The sidecar finds the code of a late request by its thread."""

    def list_threads() -> list[int]:
        writer = recorder.requests
        assert writer is not None
        words = writer.threads.tolist()
        return [words[i + 1] for i in range(0, len(words), layout.THREAD_WORDS) if words[i]]

    def stream(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"x" if list_threads() == [threading.get_native_id()] else b""

    assert call(stream, make_environ()) == ("200 OK", b"x")
    assert list_threads() == []


def test_exception_of_the_application_is_its_own(recording: Recording) -> None:
    def fail(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        reach_model()
        raise KeyError("secret")

    with pytest.raises(KeyError, match="secret"):
        call(fail, make_environ())
    record = find_record(recording)
    assert (record.outcome, record.error_type, record.status_code) == (events.ERROR, "KeyError", 500)


def test_exception_in_the_body_is_an_error(recording: Recording) -> None:
    def fail(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("200 OK", [])
        reach_model()
        yield b"x"
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        call(fail, make_environ())
    record = find_record(recording)
    assert (record.outcome, record.error_type) == (events.ERROR, "ValueError")


def test_server_that_stops_reading_has_lost_its_client(recording: Recording) -> None:
    closed: list[bool] = []

    class Body:
        def __iter__(self) -> Iterator[bytes]:
            while True:
                yield b"x"

        def close(self) -> None:
            closed.append(True)

    def stream(environ: Environ, start_response: Callable[..., Any]) -> Any:
        start_response("200 OK", [])
        reach_model()
        return Body()

    body = wsgi.wrap(stream)(make_environ(), lambda *args: None)
    assert next(iter(body)) == b"x"
    body.close()
    assert closed == [True]
    record = find_record(recording)
    assert (record.outcome, record.error_type) == (events.ABORTED, "client_disconnect")


def test_length_of_a_body_is_that_of_the_application(recording: Recording) -> None:
    """Servers state the length of a response that is one chunk."""

    def answer(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [])
        return [b"whole"] if environ["PATH_INFO"] == "/list" else iter([b"whole"])

    app = wsgi.wrap(answer)
    assert len(app(make_environ(path="/list"), lambda *args: None)) == 1  # type: ignore[arg-type]
    assert not hasattr(app(make_environ(path="/iterator"), lambda *args: None), "__len__")


def test_file_that_the_server_sends_is_unchanged(recording: Recording) -> None:
    class FileWrapper:
        pass

    file = FileWrapper()

    def answer(environ: Environ, start_response: Callable[..., Any]) -> Any:
        reach_model()
        start_response("200 OK", [])
        return file

    assert wsgi.wrap(answer)(make_environ(**{"wsgi.file_wrapper": FileWrapper}), lambda *args: None) is file
    assert find_record(recording).outcome == events.OK


@pytest.mark.parametrize("reaches_model", [True, False])
def test_span_of_another_instrumentation_is_the_parent(
    reaches_model: bool, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that reaches a model is below that span. Any other has no span of ours."""
    name = "opentelemetry.instrumentation.flask"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    tracer = TracerProvider().get_tracer("other")
    spans: list[trace.Span] = []

    def traced(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        with tracer.start_as_current_span("POST /v1/score") as span:
            spans.append(span)
            if reaches_model:
                reach_model()
            start_response("200 OK", [])
            return [b"ok"]

    assert call(traced, make_environ()) == ("200 OK", b"ok")
    records = recording.records()
    parents = [(record.trace_id, record.parent_span_id) for record in records]
    context = spans[0].get_span_context()
    expected = [(context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big"))]
    assert parents == (expected if reaches_model else [])


def test_work_after_a_deferred_request_opens_no_request_of_it(recording: Recording) -> None:
    """A thread that outlives its request may reach a model later."""
    contexts: list[contextvars.Context] = []

    def answer(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        contexts.append(contextvars.copy_context())
        start_response("200 OK", [])
        return [b"ok"]

    call(answer, make_environ("GET"))
    assert contexts[0].run(start.current_request) is None
    assert recording.records() == []


# ── a server ─────────────────────────────────────────────────────────────────────────────────────────────────────


class QuietHandler(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hooked(recording: Recording) -> Iterator[Recording]:
    wsgi.instrumentor.install()
    yield recording
    wsgi.instrumentor.remove()


def test_hooked_server_records_its_requests(hooked: Recording) -> None:
    with make_server("127.0.0.1", 0, score, WSGIServer, QuietHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1/score"
        request = urllib.request.Request(url, b"text", {"traceparent": TRACEPARENT})
        assert urllib.request.urlopen(request, timeout=5).read() == b"0.5"
        thread.join(5)
    record = find_record(hooked)
    assert (record.trace_id.hex(), record.outcome, record.status_code) == (TRACE, events.OK, 200)


def test_removed_hooks_leave_the_server_as_it_was(hooked: Recording) -> None:
    patched = WSGIServer.set_app
    wsgi.instrumentor.remove()
    assert WSGIServer.set_app is not patched
    with make_server("127.0.0.1", 0, score, WSGIServer, QuietHandler) as server:
        assert server.get_app() is score


def test_stage_of_the_application_is_below_its_request(recording: Recording) -> None:
    def staged(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        with otel_infer.stage("rerank"):
            reach_model()
        start_response("200 OK", [])
        return [b"ok"]

    call(staged, make_environ())
    assert find_record(recording).find_stage("rerank") is not None


# ── waitress ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Channel:
    """What otel_infer sees of waitress: a server with four threads, and its connection."""

    socket = None

    class server:  # noqa: N801 - as the attribute is called
        class adj:  # noqa: N801
            threads = 4

    def check_client_disconnected(self) -> bool:
        return False


def test_a_wait_for_a_thread_of_waitress_is_recorded(recording: Recording) -> None:
    channel, queued = Channel(), []
    add_task = waitress_queue.patch_add_task(lambda server, task: queued.append(task), Hook("add_task"))
    add_task(None, channel)
    time.sleep(0.02)
    environ = make_environ(**{waitress_queue.CHANNEL_KEY: queued[0].check_client_disconnected})
    call(score, environ)
    record = find_record(recording)
    (wait,) = [stage for stage in record.stages if stage.name == semconv.SPAN_POOL_WAIT]
    assert wait.started_at == record.arrived_at and wait.ended_at - wait.started_at >= 20_000_000
    assert list(wait.attributes.values()) == [4]


def test_a_second_request_of_a_connection_has_not_waited(recording: Recording) -> None:
    channel = Channel()
    channel.otel_infer_put_at = 1  # type: ignore[attr-defined]
    environ = make_environ(**{waitress_queue.CHANNEL_KEY: channel.check_client_disconnected})
    assert waitress_queue.find_task(environ).put_at == 1
    assert waitress_queue.find_task(environ).put_at == 0


@pytest.mark.parametrize(
    ("before", "after", "headers", "route"),
    [
        ("", "", {}, "/score/<name>"),
        ("", "/models/a", {}, "/models/a/score/<name>"),
        ("/proxied", "/proxied/a", {}, "/a/score/<name>"),
        ("/proxied", "/proxied", {}, "/score/<name>"),
        ("", "/secret", {"HTTP_X_FORWARDED_PREFIX": "/secret"}, "/score/<name>"),
        ("", "/secret", {"HTTP_X_SCRIPT_NAME": "secret/"}, "/score/<name>"),
    ],
)
def test_the_route_has_the_prefix_of_a_dispatcher_but_none_of_a_header(
    recording: Recording, before: str, after: str, headers: dict[str, str], route: str
) -> None:
    def dispatch(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["SCRIPT_NAME"], environ["PATH_INFO"] = after, "/score/a"
        environ[ENVIRON_KEY].note_route("/score/<name>")
        return score(environ, start_response)

    call(dispatch, make_environ(path=f"{after}/score/a", SCRIPT_NAME=before, **headers))
    assert find_record(recording).attributes[semconv.HTTP_ROUTE] == route
