"""Reads OpenTelemetry's standard environment variables.

Meanings and defaults: OpenTelemetry specification, configuration/sdk-environment-variables.md and
protocol/exporter.md. An empty value counts as unset, as the specification demands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from otel_infer.config.redaction import redact_url
from otel_infer.config.settings import (
    parse_choice,
    parse_count,
    parse_milliseconds,
    parse_names,
    parse_ratio,
    parse_seconds,
)

_GRPC = "grpc"
_DEFAULT_LIMIT = 128
_SIGNALS = ("", "TRACES_", "METRICS_")
DEFAULT_SAMPLER = "parentbased_always_on"
SAMPLERS = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
_LIMITS = (
    "OTEL_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_EVENT_COUNT_LIMIT",
    "OTEL_SPAN_LINK_COUNT_LIMIT",
)
PARSERS: dict[str, Callable[[str], Any]] = {
    **{f"OTEL_EXPORTER_OTLP_{signal}PROTOCOL": parse_choice("http/protobuf", _GRPC) for signal in _SIGNALS},
    **{
        f"OTEL_EXPORTER_OTLP_{signal}COMPRESSION": parse_choice("gzip", "none", "deflate")
        for signal in _SIGNALS
    },
    **{f"OTEL_EXPORTER_OTLP_{signal}TIMEOUT": parse_seconds for signal in _SIGNALS},
    **dict.fromkeys(_LIMITS, parse_count),
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": parse_choice("cumulative", "delta", "lowmemory"),
    "OTEL_METRIC_EXPORT_INTERVAL": parse_milliseconds,
}
"""Standard variables of which only some values are accepted."""
_DESTINATION = ("ENDPOINT", "HEADERS", "INSECURE", "CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
_INSTEAD = {"console": "OTEL_INFER_CONSOLE=on", "prometheus": "OTEL_INFER_METRICS_PORT=9464"}
"""What has the effect of an exporter that is not supported."""


def find_errors(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (variable, what it must be) for each standard variable whose value is not accepted."""
    for variable, parse in PARSERS.items():
        yield from _find_error(variable, parse, environ)
    if "ratio" in _get(environ, "OTEL_TRACES_SAMPLER"):
        yield from _find_error("OTEL_TRACES_SAMPLER_ARG", parse_ratio, environ)
    for signal in _SIGNALS:
        variable = f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT"
        endpoint = _get(environ, variable)
        protocol = _protocol_of(environ, signal)
        if endpoint and protocol != _GRPC and not endpoint.lower().startswith(("http://", "https://")):
            host = redact_url(f"http://{endpoint.rpartition('://')[2]}").removeprefix("http://")
            yield variable, f"http://{host} or https://{host}, or OTEL_EXPORTER_OTLP_{signal}PROTOCOL=grpc"


def _find_error(
    variable: str, parse: Callable[[str], Any], environ: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    text = _get(environ, variable)
    try:
        if text:
            parse(text)
    except ValueError as expected:
        yield variable, str(expected)


def without_signals_of(endpoint_variable: str) -> dict[str, str]:
    """Returns the variables that turn off the signals for which an endpoint variable is read."""
    signals = [name for name in ("TRACES", "METRICS") if name in endpoint_variable] or ["TRACES", "METRICS"]
    return {f"OTEL_{signal}_EXPORTER": "none" for signal in signals}


def find_warnings(environ: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence for each sampler or exporter that other SDKs know and that is not supported here."""
    sampler = _get(environ, "OTEL_TRACES_SAMPLER")
    if sampler and sampler.lower() not in SAMPLERS:
        yield f"OTEL_TRACES_SAMPLER={sampler!r} is not supported: using {DEFAULT_SAMPLER}; one of {', '.join(SAMPLERS)}"
    for signal in ("TRACES", "METRICS"):
        variable = f"OTEL_{signal}_EXPORTER"
        for name in parse_names(_get(environ, variable).lower()):
            if not name.startswith("otlp") and name != "none":
                instead = f"; set {_INSTEAD[name]}" if name in _INSTEAD else ""
                yield f"{variable}={environ[variable]!r}: {name!r} is not supported, only otlp and none{instead}"


def read_values(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of `Config` that standard variables set; all of them must be accepted values."""

    def get(*names: str, default: str = "") -> str:
        return next(filter(None, (_get(environ, name) for name in names)), default)

    sampler = get("OTEL_TRACES_SAMPLER").lower()
    length = get("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT")
    return {
        "sdk_disabled": get("OTEL_SDK_DISABLED").lower() == "true",
        "disabled_integrations": parse_names(get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS")),
        "traces_exporter": _parse_exporter(get("OTEL_TRACES_EXPORTER", default="otlp")),
        "metrics_exporter": _parse_exporter(get("OTEL_METRICS_EXPORTER", default="otlp")),
        "endpoint": get(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
        ),
        "traces_endpoint": get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        "metrics_endpoint": get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        "traces_protocol": _protocol_of(environ, "TRACES_"),
        "metrics_protocol": _protocol_of(environ, "METRICS_"),
        "traces_compression": get(
            "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION"
        ).lower(),
        "metrics_compression": get(
            "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION"
        ).lower(),
        "service_name": _find_service_name(get("OTEL_SERVICE_NAME"), get("OTEL_RESOURCE_ATTRIBUTES")),
        "excluded_urls": get("OTEL_PYTHON_OTEL_INFER_EXCLUDED_URLS", "OTEL_PYTHON_EXCLUDED_URLS"),
        "metric_export_interval_ms": int(get("OTEL_METRIC_EXPORT_INTERVAL", default="10000")),
        "temporality": get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", default="cumulative").lower(),
        "exponential_histograms": "exponential"
        in get("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"),
        "exemplars": get("OTEL_METRICS_EXEMPLAR_FILTER", default="trace_based").lower() != "always_off",
        "sampler": sampler if sampler in SAMPLERS else DEFAULT_SAMPLER,
        "sampler_argument": get("OTEL_TRACES_SAMPLER_ARG"),
        "attribute_limit": int(
            get("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT", default=str(_DEFAULT_LIMIT))
        ),
        "attribute_length_limit": int(length) if length else None,
        "event_limit": int(get("OTEL_SPAN_EVENT_COUNT_LIMIT", default=str(_DEFAULT_LIMIT))),
        "link_limit": int(get("OTEL_SPAN_LINK_COUNT_LIMIT", default=str(_DEFAULT_LIMIT))),
        # The server's value: the sidecar's own hides all devices from every library in the sidecar.
        "visible_devices": environ.get("CUDA_VISIBLE_DEVICES"),
    }


def read_destination(environ: Mapping[str, str], signal: str) -> dict[str, str]:
    """Returns the values that determine where, and with whose credentials, a signal (`TRACES`) is sent."""
    values = {
        name: _get(environ, f"OTEL_EXPORTER_OTLP_{signal}_{name}")
        or _get(environ, f"OTEL_EXPORTER_OTLP_{name}")
        for name in _DESTINATION
    }
    return {**values, "PROTOCOL": _protocol_of(environ, f"{signal}_")}


def _get(environ: Mapping[str, str], name: str) -> str:
    return replace_invalid(environ.get(name, "").strip())


def replace_invalid(text: str) -> str:
    """Returns the text with `?` for each byte that is not UTF-8, and for lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _protocol_of(environ: Mapping[str, str], signal: str) -> str:
    common = "OTEL_EXPORTER_OTLP_PROTOCOL"
    own = _get(environ, f"OTEL_EXPORTER_OTLP_{signal}PROTOCOL")
    return (own or _get(environ, common) or "http/protobuf").lower()


def _parse_exporter(text: str) -> str:
    """Returns `otlp` if the exporters include it (`otlp_proto_http` and `otlp_proto_grpc` count), else
    `none`.
    """
    return "otlp" if any(name.startswith("otlp") for name in parse_names(text.lower())) else "none"


def _find_service_name(name: str, attributes: str) -> str:
    if name:
        return name
    pairs = (pair.partition("=") for pair in attributes.split(","))
    return next((value.strip() for key, _, value in pairs if key.strip() == "service.name"), "")
