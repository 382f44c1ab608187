"""Checks the destination with a real span, and with a metric point of the configured kind.

The exports run in a separate process, because the exporters retry, log and may wait for long.
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

_START_HINT = "start a collector there, or set OTEL_EXPORTER_OTLP_ENDPOINT to the address of a collector"
_HTTP_HINT = "is this the gRPC port 4317? use OTEL_EXPORTER_OTLP_PROTOCOL=grpc or port 4318"
_GRPC_HINT = "is this the HTTP port 4318? use OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf or port 4317"
_PATH_HINT = "correct the path of the endpoint: /v1/… is appended to OTEL_EXPORTER_OTLP_ENDPOINT, not to the variables of one signal"
_LOG_HINT = "read the log of the destination"
_NO_METRICS_HINT = "if it accepts no metrics, set OTEL_METRICS_EXPORTER=none"

_KNOWN_ERRORS: tuple[tuple[str, str, str], ...] = (
    (r"[Cc]onnection refused", "connection refused", _START_HINT),
    (r"BadStatusLine", "the server there speaks no HTTP/1", _HTTP_HINT),
    (r"[Cc]onnection reset|[Cc]onnection aborted|RemoteDisconnected", "connection reset", _HTTP_HINT),
    (r"parsing HTTP/2|http1\.x|protocol error.*HTTP", "the server there speaks no gRPC", _GRPC_HINT),
    (
        r"not resolved|NameResolution|Name or service|errors resolving|DNS resolution|lookup failed",
        "the host name cannot be resolved",
        "correct the host in OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    (
        r"ImportError|ModuleNotFoundError",
        "its exporter is not installed",
        f"{sys.executable} -m pip install opentelemetry-exporter-otlp",
    ),
    (
        r"ProxyError|HTTP 407",
        "the proxy refused the connection",
        "add the host to NO_PROXY, or correct HTTP_PROXY and HTTPS_PROXY",
    ),
    (
        r"TLS|SSL",
        "TLS error",
        "use http:// without TLS, else set OTEL_EXPORTER_OTLP_CERTIFICATE to the CA certificate file",
    ),
    (
        r"HTTP 40[13]|UNAUTHENTICATED|PERMISSION_DENIED",
        "",
        "set OTEL_EXPORTER_OTLP_HEADERS to the credentials of the destination, such as Authorization=Bearer%20TOKEN",
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
"""(pattern in an exporter's error text, label, remedy).

An empty label means the matched text. The first match counts.
"""


def check_exporter(settings: Config, environ: Mapping[str, str]) -> list[Check]:
    """Checks the adapter to the exporters' private API, then each exported signal."""
    limit = IMPORT_TIMEOUT_S + 2 * _read_timeout(environ)
    options = {"config": environment.to_json_dict(settings)}
    lines, error = probe_process.run_in_subprocess(
        "exporter", options, {TIMEOUT_VARIABLE: f"{DEFAULT_TIMEOUT_S:g}", **environ}, limit
    )
    results = {line["what"]: line for line in lines}
    checks = [check_sdk_adapter(results.get("sdk", {"error": "", "text": error}), settings.traces_protocol)]
    if not settings.exports:
        not_tried = "not tried: nothing is exported"
        return [*checks, Check("exporter", "warn", not_tried, "first fix the configuration, see above")]
    no_answer = {"accepted": 0, "reason": error, "log": ""}
    for signal, sends, protocol in (
        ("spans", settings.exports_spans, settings.traces_protocol),
        ("metrics", settings.exports_metrics, settings.metrics_protocol),
    ):
        if sends and checks[0].state == "ok":
            url = resolve_endpoint("traces" if signal == "spans" else signal, protocol, environ)
            checks.append(check_signal(signal, url, results.get(signal, no_answer)))
    return checks


def _read_timeout(environ: Mapping[str, str]) -> float:
    try:
        return float(environ.get(TIMEOUT_VARIABLE, "") or DEFAULT_TIMEOUT_S)
    except ValueError:
        return DEFAULT_TIMEOUT_S


# ── in the child process ─────────────────────────────────────────────────────────────────────────────────────────


def run_probe(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Builds the transport, then sends one span and one metrics export, as far as they are configured."""
    from otel_infer.export.otlp import transport

    settings = environment.from_json_dict(options["config"])
    with _ExportLog() as log:
        try:
            sender = transport.make_transport(settings.traces_protocol, settings.traces_compression)
        except Exception as error:
            yield {"what": "sdk", "error": type(error).__name__, "text": str(error)}
            return
        yield {"what": "sdk", "error": "", "text": ""}
        if settings.exports_spans:
            yield {"what": "spans", **_send_span(sender, log)}
        if settings.exports_metrics:
            yield {"what": "metrics", **_send_metrics(settings, log)}


class _ExportLog(logging.Handler):
    """Collects log lines, exceptions and the HTTP status of an export.

    The exporters return no reason for a failure, and log it only sometimes.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.status = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def reset_log(self) -> None:
        """Clears the log before the next signal is sent."""
        self.lines, self.status = [], ""
        for name in list(logging.Logger.manager.loggerDict):  # the SDK filters repeated messages
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

        session.send = send_and_record  # never restored, because the process only runs this probe


def _send_span(sender: Any, log: _ExportLog) -> dict[str, Any]:
    from otel_infer.config.resource import detect_resource
    from otel_infer.export import otlp
    from otel_infer.export.spans.exporter import encode_resource_and_scope

    now = _clock.read_clocks()[1]
    trace_id, span_id = secrets.token_bytes(16), secrets.token_bytes(8)
    span = otlp.Span(
        trace_id, span_id, b"", semconv.SPAN_DOCTOR, 1, now, now + 1000, {semconv.DOCTOR: True}, flags=1
    )
    identity = encode_resource_and_scope({semconv.SERVICE_NAME: "otel-infer", **detect_resource()})
    log.reset_log()
    sent = sender.send_spans(otlp.build_export_request(*identity, [otlp.encode_span(span)]), 1)
    result = {"accepted": sent.accepted, "reason": sent.reason or "", "log": "\n".join(log.lines)}
    return {**result, "trace": trace_id.hex()}


def _send_metrics(settings: environment.Config, log: _ExportLog) -> dict[str, Any]:
    """Sends one point with the value 0: some receivers accept an empty export and refuse the temporality."""
    from otel_infer.export.metrics.aggregator import MetricsAggregator
    from otel_infer.export.metrics.sender import make_metric_exporter

    aggregator = MetricsAggregator(
        resource={semconv.SERVICE_NAME: "otel-infer", semconv.DOCTOR: True},
        temporality=settings.temporality,
        exponential=settings.exponential_histograms,
        started_at_unix_ns=_clock.read_clocks()[1],
    )
    aggregator.set_value(semconv.SELF_SPANS, {}, 0)
    log.reset_log()
    try:
        exporter = make_metric_exporter(settings.metrics_protocol, settings.metrics_compression)
        accepted = exporter.export(aggregator.collect(_clock.read_clocks()[1])).name == "SUCCESS"
    except Exception as error:
        return {
            "accepted": 0,
            "reason": type(error).__name__,
            "log": "\n".join([*log.lines, str(error)]),
        }
    return {"accepted": int(accepted), "reason": log.status, "log": "\n".join(log.lines)}


# ── as checks ────────────────────────────────────────────────────────────────────────────────────────────────────


def check_sdk_adapter(result: Mapping[str, str], protocol: str) -> Check:
    """Checks whether the installed exporter accepts encoded batches, which needs its private API."""
    package = f"opentelemetry-exporter-otlp-proto-{'grpc' if protocol == 'grpc' else 'http'}"
    if not result["error"] and not result["text"]:
        return Check("SDK exporter", "ok", f"{package} {installed_version(package)} accepts encoded batches")
    if not result["error"]:
        do = f"run `{sys.executable} -c 'import otel_infer.export.otlp.transport'` to see why"
        return Check("SDK exporter", "fail", f"the trial export {result['text']}", do)
    do = {
        "ImportError": f"{sys.executable} -m pip install {package}",
        "IncompatibleSdk": f"install another release of {package}, or give instrument() a tracer_provider",
    }.get(result["error"], "correct the OTEL_EXPORTER_OTLP_* variable that the message names")
    return Check("SDK exporter", "fail", f"{result['error']}: {result['text']}", do)


def check_signal(signal: str, url: str, result: Mapping[str, Any]) -> Check:
    """Returns the check of one signal from the result of its export. `url`: the URL it was sent to."""
    name, reason = f"exporter {signal}", str(result["reason"])
    if reason.startswith("partial success"):
        message = reason.partition(": ")[2] or "no reason given"
        if result["accepted"]:
            return Check(name, "warn", f"{url}: accepted, but with a warning: {message}", _LOG_HINT)
        return Check(name, "fail", f"{url}: partial success, 1 rejected: {message}", _LOG_HINT)
    if result["accepted"]:
        hint = f"; look for trace {result['trace']}" if "trace" in result else ""
        return Check(name, "ok", f"{url}: accepted{hint}")
    # With an HTTP status, the log holds the text of the destination, which may describe an unrelated error.
    label, do = identify_error(reason if reason.startswith("HTTP ") else f"{reason}\n{result['log']}")
    if signal == "metrics" and do == _PATH_HINT:
        do = f"{do}; {_NO_METRICS_HINT}"
    return Check(
        name, "fail", f"{url}: {label or reason or 'not accepted, no reason given'}", do or _START_HINT
    )


def identify_error(text: str) -> tuple[str, str]:
    """Returns (label, remedy) for the error text of an exporter; both are empty if it is unknown."""
    for pattern, label, do in _KNOWN_ERRORS:
        match = re.search(pattern, text)
        if match:
            return label or match[0], do
    return "", ""
