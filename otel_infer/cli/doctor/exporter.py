"""What the destination answers when a real span, and a real export of metrics without any, are sent.

In a process of its own: the exporters retry, log and may wait for long.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from otel_infer import _clock, semconv
from otel_infer.cli.doctor import probe_process
from otel_infer.cli.doctor.check import Check
from otel_infer.cli.doctor.environment import destination, installed_version
from otel_infer.config import environment
from otel_infer.config.environment import Config

TIMEOUT = "OTEL_EXPORTER_OTLP_TIMEOUT"
DEFAULT_S = 3.0
IMPORTS_S = 30.0

_START = "start a collector there, or set OTEL_EXPORTER_OTLP_ENDPOINT to where one listens"
_HTTP_HINT = "is this the gRPC port 4317? use OTEL_EXPORTER_OTLP_PROTOCOL=grpc or port 4318"
_GRPC_HINT = "is this the HTTP port 4318? use OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf or port 4317"
_PATH = "correct the path of the endpoint: OTEL_EXPORTER_OTLP_ENDPOINT gets /v1/… appended, the variables of one signal not"
_LOG = "read the destination's own log"
_NO_METRICS = "if it takes no metrics, set OTEL_METRICS_EXPORTER=none"

_KNOWN: tuple[tuple[str, str, str], ...] = (
    (r"[Cc]onnection refused", "connection refused", _START),
    (r"BadStatusLine", "what listens there speaks no HTTP/1", _HTTP_HINT),
    (r"parsing HTTP/2|http1\.x|protocol error.*HTTP", "what listens there speaks no gRPC", _GRPC_HINT),
    (
        r"not resolved|NameResolution|Name or service|errors resolving|DNS resolution|lookup failed",
        "the host name is not known",
        "correct the host in OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    (
        r"ImportError|ModuleNotFoundError",
        "its exporter is not installed",
        f"{sys.executable} -m pip install opentelemetry-exporter-otlp",
    ),
    (
        r"ProxyError|HTTP 407",
        "the proxy refuses",
        "add the host to NO_PROXY, or correct HTTP_PROXY and HTTPS_PROXY",
    ),
    (
        r"TLS|SSL",
        "TLS error",
        "use http:// where there is no TLS, else set OTEL_EXPORTER_OTLP_CERTIFICATE to its authority",
    ),
    (
        r"HTTP 40[13]|UNAUTHENTICATED|PERMISSION_DENIED",
        "",
        "set OTEL_EXPORTER_OTLP_HEADERS to what the destination wants, such as Authorization=Bearer%20TOKEN",
    ),
    (r"HTTP 40[45]|UNIMPLEMENTED", "", _PATH),
    (
        r"HTTP 413|HTTP 429|RESOURCE_EXHAUSTED",
        "",
        "raise the destination's limits, or lower OTEL_INFER_STEP_BUDGET",
    ),
    (r"HTTP 5\d\d|Service Unavailable|INTERNAL|UNAVAILABLE", "", _LOG),
    (r"HTTP [34]\d\d|INVALID_ARGUMENT", "", _LOG),
    (
        r"[Tt]imeout|timed out|took longer|DEADLINE_EXCEEDED",
        "timed out",
        f"{_START}; if it is slow, raise {TIMEOUT} (s)",
    ),
)
"""What is recognised in an exporter's words, what to call it (nothing: as it is), what to do. The first counts."""


def exporter(settings: Config, environ: Mapping[str, str]) -> list[Check]:
    """The exporters' private seam, then one check for each signal that is sent."""
    limit = IMPORTS_S + 2 * _timeout(environ)
    told = {"config": environment.to_plain(settings)}
    found, trouble = probe_process.ask("exporter", told, {TIMEOUT: f"{DEFAULT_S:g}", **environ}, limit)
    said = {line["what"]: line for line in found}
    checks = [seam(said.get("seam", {"error": "", "text": trouble}), settings.traces_protocol)]
    if not settings.exports:
        untried = "not tried: nothing is exported"
        return [*checks, Check("exporter", "warn", untried, "first do what configuration says")]
    no_answer = {"accepted": 0, "reason": trouble, "log": ""}
    for signal, sends, protocol in (
        ("spans", settings.sends_spans, settings.traces_protocol),
        ("metrics", settings.sends_metrics, settings.metrics_protocol),
    ):
        if sends and checks[0].state == "ok":
            where = destination("traces" if signal == "spans" else signal, protocol, environ)
            checks.append(answered(signal, where, said.get(signal, no_answer)))
    return checks


def _timeout(environ: Mapping[str, str]) -> float:
    try:
        return float(environ.get(TIMEOUT, "") or DEFAULT_S)
    except ValueError:
        return DEFAULT_S


# ── in the other process ─────────────────────────────────────────────────────────────────────────────────────────


def answers(told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rehearses the seam, then sends what is configured to be sent."""
    from otel_infer.export.otlp import transport

    settings = environment.from_plain(told["config"])
    with _Heard() as heard:
        try:
            outlet = transport.transport(settings.traces_protocol, settings.traces_compression)
        except Exception as refusal:
            yield {"what": "seam", "error": type(refusal).__name__, "text": str(refusal)}
            return
        yield {"what": "seam", "error": "", "text": ""}
        if settings.sends_spans:
            yield {"what": "spans", **_send_span(outlet, heard)}
        if settings.sends_metrics:
            yield {"what": "metrics", **_send_metrics(settings.metrics_protocol, heard)}


class _Heard(logging.Handler):
    """What the SDK says and meets while it sends: the exporters return no reason, and log one only now and then."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.status = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def forget(self) -> None:
        """From here on for the next signal."""
        self.lines, self.status = [], ""
        for name in list(logging.Logger.manager.loggerDict):  # one of them leaves out what it has just said
            if name.startswith("opentelemetry."):
                logging.getLogger(name).filters.clear()

    def __enter__(self) -> _Heard:
        logging.getLogger().addHandler(self)
        with contextlib.suppress(ImportError):
            self._listen(importlib.import_module("requests").Session)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def _listen(self, session: Any) -> None:
        send = session.send

        def listened(*args: Any, **options: Any) -> Any:
            try:
                response = send(*args, **options)
            except Exception as error:
                self.lines.append(f"{type(error).__name__}: {error}")
                raise
            self.status = f"HTTP {response.status_code}"
            return response

        session.send = listened  # for good: this process does nothing else


def _send_span(outlet: Any, heard: _Heard) -> dict[str, Any]:
    from otel_infer._bootstrap.install import resource
    from otel_infer.export import otlp
    from otel_infer.export.spans.exporter import encoded_identity

    at = _clock.wall_pair()[1]
    trace_id, span_id = secrets.token_bytes(16), secrets.token_bytes(8)
    span = otlp.Span(
        trace_id, span_id, b"", semconv.SPAN_DOCTOR, 1, at, at + 1000, {semconv.DOCTOR: True}, flags=1
    )
    identity = encoded_identity({semconv.SERVICE_NAME: "otel-infer", **resource()})
    heard.forget()
    sent = outlet.send_spans(otlp.envelope(*identity, [otlp.encode_span(span)]), 1)
    said = {"accepted": sent.accepted, "reason": sent.reason or "", "log": "\n".join(heard.lines)}
    return {**said, "trace": trace_id.hex()}


def _send_metrics(protocol: str, heard: _Heard) -> dict[str, Any]:
    from opentelemetry.sdk.metrics.export import MetricsData

    from otel_infer.export.metrics.sender import metric_exporter

    heard.forget()
    try:
        accepted = metric_exporter(protocol).export(MetricsData(resource_metrics=[])).name == "SUCCESS"
    except Exception as refusal:
        return {
            "accepted": 0,
            "reason": type(refusal).__name__,
            "log": "\n".join([*heard.lines, str(refusal)]),
        }
    return {"accepted": int(accepted), "reason": heard.status, "log": "\n".join(heard.lines)}


# ── what to say of it ────────────────────────────────────────────────────────────────────────────────────────────


def seam(said: Mapping[str, str], protocol: str) -> Check:
    """Whether the installed exporter takes batches that are encoded already."""
    package = f"opentelemetry-exporter-otlp-proto-{'grpc' if protocol == 'grpc' else 'http'}"
    if not said["error"] and not said["text"]:
        return Check("SDK seam", "ok", f"{package} {installed_version(package)} takes encoded batches")
    if not said["error"]:
        do = f"run `{sys.executable} -c 'import otel_infer.export.otlp.transport'` to see why"
        return Check("SDK seam", "fail", f"the trial {said['text']}", do)
    do = {
        "ImportError": f"{sys.executable} -m pip install {package}",
        "SeamDrift": f"install another release of {package}, or give instrument() a tracer_provider",
    }.get(said["error"], "correct the OTEL_EXPORTER_OTLP_* variable that this is about")
    return Check("SDK seam", "fail", f"{said['error']}: {said['text']}", do)


def answered(signal: str, where: str, said: Mapping[str, Any]) -> Check:
    """What became of one signal."""
    name, reason = f"exporter {signal}", str(said["reason"])
    if reason.startswith("partial success"):
        message = reason.partition(": ")[2] or "no reason given"
        if said["accepted"]:
            return Check(name, "warn", f"{where}: accepted, but with a warning: {message}", _LOG)
        return Check(name, "fail", f"{where}: partial success, 1 rejected: {message}", _LOG)
    if said["accepted"]:
        found = f"; look for trace {said['trace']}" if "trace" in said else ""
        return Check(name, "ok", f"{where}: accepted{found}")
    # What comes with a status is the destination's own text, which may name somebody else's trouble.
    label, do = recognised(reason if reason.startswith("HTTP ") else f"{reason}\n{said['log']}")
    if signal == "metrics" and do == _PATH:
        do = f"{do}; {_NO_METRICS}"
    return Check(name, "fail", f"{where}: {label or reason or 'not accepted, no reason given'}", do or _START)


def recognised(words: str) -> tuple[str, str]:
    """(what it is called, what to do) of what an exporter said; empty where we do not know it."""
    for pattern, label, do in _KNOWN:
        found = re.search(pattern, words)
        if found:
            return label or found[0], do
    return "", ""
