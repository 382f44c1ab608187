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
from otel_infer.cli.doctor.environment import installed_version, resolve_endpoint
from otel_infer.config import environment
from otel_infer.config.environment import Config

TIMEOUT_VARIABLE = "OTEL_EXPORTER_OTLP_TIMEOUT"
DEFAULT_TIMEOUT_S = 3.0
IMPORT_TIMEOUT_S = 30.0

_START_HINT = "start a collector there, or set OTEL_EXPORTER_OTLP_ENDPOINT to where one listens"
_HTTP_HINT = "is this the gRPC port 4317? use OTEL_EXPORTER_OTLP_PROTOCOL=grpc or port 4318"
_GRPC_HINT = "is this the HTTP port 4318? use OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf or port 4317"
_PATH_HINT = "correct the path of the endpoint: OTEL_EXPORTER_OTLP_ENDPOINT gets /v1/… appended, the variables of one signal not"
_LOG_HINT = "read the destination's own log"
_NO_METRICS_HINT = "if it takes no metrics, set OTEL_METRICS_EXPORTER=none"

_KNOWN_ERRORS: tuple[tuple[str, str, str], ...] = (
    (r"[Cc]onnection refused", "connection refused", _START_HINT),
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
    (r"HTTP 40[45]|UNIMPLEMENTED", "", _PATH_HINT),
    (
        r"HTTP 413|HTTP 429|RESOURCE_EXHAUSTED",
        "",
        "raise the destination's limits, or lower OTEL_INFER_STEP_BUDGET",
    ),
    (r"HTTP 5\d\d|Service Unavailable|INTERNAL|UNAVAILABLE", "", _LOG_HINT),
    (r"HTTP [34]\d\d|INVALID_ARGUMENT", "", _LOG_HINT),
    (
        r"[Tt]imeout|timed out|took longer|DEADLINE_EXCEEDED",
        "timed out",
        f"{_START_HINT}; if it is slow, raise {TIMEOUT_VARIABLE} (s)",
    ),
)
"""What is recognised in an exporter's words, what to call it (nothing: as it is), what to do. The first counts."""


def check_exporter(settings: Config, environ: Mapping[str, str]) -> list[Check]:
    """The exporters' private seam, then one check for each signal that is sent."""
    limit = IMPORT_TIMEOUT_S + 2 * _read_timeout(environ)
    told = {"config": environment.to_json_dict(settings)}
    found, trouble = probe_process.run_in_subprocess(
        "exporter", told, {TIMEOUT_VARIABLE: f"{DEFAULT_TIMEOUT_S:g}", **environ}, limit
    )
    said = {line["what"]: line for line in found}
    checks = [check_sdk_adapter(said.get("seam", {"error": "", "text": trouble}), settings.traces_protocol)]
    if not settings.exports:
        untried = "not tried: nothing is exported"
        return [*checks, Check("exporter", "warn", untried, "first do what configuration says")]
    no_answer = {"accepted": 0, "reason": trouble, "log": ""}
    for signal, sends, protocol in (
        ("spans", settings.exports_spans, settings.traces_protocol),
        ("metrics", settings.exports_metrics, settings.metrics_protocol),
    ):
        if sends and checks[0].state == "ok":
            where = resolve_endpoint("traces" if signal == "spans" else signal, protocol, environ)
            checks.append(check_signal(signal, where, said.get(signal, no_answer)))
    return checks


def _read_timeout(environ: Mapping[str, str]) -> float:
    try:
        return float(environ.get(TIMEOUT_VARIABLE, "") or DEFAULT_TIMEOUT_S)
    except ValueError:
        return DEFAULT_TIMEOUT_S


# ── in the other process ─────────────────────────────────────────────────────────────────────────────────────────


def run_probe(told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rehearses the seam, then sends what is configured to be sent."""
    from otel_infer.export.otlp import transport

    settings = environment.from_json_dict(told["config"])
    with _ExportLog() as heard:
        try:
            outlet = transport.make_transport(settings.traces_protocol, settings.traces_compression)
        except Exception as refusal:
            yield {"what": "seam", "error": type(refusal).__name__, "text": str(refusal)}
            return
        yield {"what": "seam", "error": "", "text": ""}
        if settings.exports_spans:
            yield {"what": "spans", **_send_span(outlet, heard)}
        if settings.exports_metrics:
            yield {"what": "metrics", **_send_metrics(settings.metrics_protocol, heard)}


class _ExportLog(logging.Handler):
    """What the SDK says and meets while it sends: the exporters return no reason, and log one only now and then."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.status = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def reset_log(self) -> None:
        """From here on for the next signal."""
        self.lines, self.status = [], ""
        for name in list(logging.Logger.manager.loggerDict):  # one of them leaves out what it has just said
            if name.startswith("opentelemetry."):
                logging.getLogger(name).filters.clear()

    def __enter__(self) -> _ExportLog:
        logging.getLogger().addHandler(self)
        with contextlib.suppress(ImportError):
            self._patch_session(importlib.import_module("requests").Session)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def _patch_session(self, session: Any) -> None:
        send = session.send

        def send_and_record(*args: Any, **options: Any) -> Any:
            try:
                response = send(*args, **options)
            except Exception as error:
                self.lines.append(f"{type(error).__name__}: {error}")
                raise
            self.status = f"HTTP {response.status_code}"
            return response

        session.send = send_and_record  # for good: this process does nothing else


def _send_span(outlet: Any, heard: _ExportLog) -> dict[str, Any]:
    from otel_infer._bootstrap.install import detect_resource
    from otel_infer.export import otlp
    from otel_infer.export.spans.exporter import encode_resource_and_scope

    at = _clock.read_clocks()[1]
    trace_id, span_id = secrets.token_bytes(16), secrets.token_bytes(8)
    span = otlp.Span(
        trace_id, span_id, b"", semconv.SPAN_DOCTOR, 1, at, at + 1000, {semconv.DOCTOR: True}, flags=1
    )
    identity = encode_resource_and_scope({semconv.SERVICE_NAME: "otel-infer", **detect_resource()})
    heard.reset_log()
    sent = outlet.send_spans(otlp.build_export_request(*identity, [otlp.encode_span(span)]), 1)
    said = {"accepted": sent.accepted, "reason": sent.reason or "", "log": "\n".join(heard.lines)}
    return {**said, "trace": trace_id.hex()}


def _send_metrics(protocol: str, heard: _ExportLog) -> dict[str, Any]:
    from opentelemetry.sdk.metrics.export import MetricsData

    from otel_infer.export.metrics.sender import make_metric_exporter

    heard.reset_log()
    try:
        accepted = make_metric_exporter(protocol).export(MetricsData(resource_metrics=[])).name == "SUCCESS"
    except Exception as refusal:
        return {
            "accepted": 0,
            "reason": type(refusal).__name__,
            "log": "\n".join([*heard.lines, str(refusal)]),
        }
    return {"accepted": int(accepted), "reason": heard.status, "log": "\n".join(heard.lines)}


# ── what to say of it ────────────────────────────────────────────────────────────────────────────────────────────


def check_sdk_adapter(said: Mapping[str, str], protocol: str) -> Check:
    """Whether the installed exporter takes batches that are encoded already."""
    package = f"opentelemetry-exporter-otlp-proto-{'grpc' if protocol == 'grpc' else 'http'}"
    if not said["error"] and not said["text"]:
        return Check("SDK seam", "ok", f"{package} {installed_version(package)} takes encoded batches")
    if not said["error"]:
        do = f"run `{sys.executable} -c 'import otel_infer.export.otlp.transport'` to see why"
        return Check("SDK seam", "fail", f"the trial {said['text']}", do)
    do = {
        "ImportError": f"{sys.executable} -m pip install {package}",
        "IncompatibleSdk": f"install another release of {package}, or give instrument() a tracer_provider",
    }.get(said["error"], "correct the OTEL_EXPORTER_OTLP_* variable that this is about")
    return Check("SDK seam", "fail", f"{said['error']}: {said['text']}", do)


def check_signal(signal: str, where: str, said: Mapping[str, Any]) -> Check:
    """What became of one signal."""
    name, reason = f"exporter {signal}", str(said["reason"])
    if reason.startswith("partial success"):
        message = reason.partition(": ")[2] or "no reason given"
        if said["accepted"]:
            return Check(name, "warn", f"{where}: accepted, but with a warning: {message}", _LOG_HINT)
        return Check(name, "fail", f"{where}: partial success, 1 rejected: {message}", _LOG_HINT)
    if said["accepted"]:
        found = f"; look for trace {said['trace']}" if "trace" in said else ""
        return Check(name, "ok", f"{where}: accepted{found}")
    # What comes with a status is the destination's own text, which may name somebody else's trouble.
    label, do = identify_error(reason if reason.startswith("HTTP ") else f"{reason}\n{said['log']}")
    if signal == "metrics" and do == _PATH_HINT:
        do = f"{do}; {_NO_METRICS_HINT}"
    return Check(
        name, "fail", f"{where}: {label or reason or 'not accepted, no reason given'}", do or _START_HINT
    )


def identify_error(words: str) -> tuple[str, str]:
    """(what it is called, what to do) of what an exporter said; empty where we do not know it."""
    for pattern, label, do in _KNOWN_ERRORS:
        found = re.search(pattern, words)
        if found:
            return label or found[0], do
    return "", ""
