"""Every setting, read once from the environment and frozen. Nobody else reads or writes `os.environ`.

A bad value raises `BadSetting`, which names the variable and what it accepts. It stops our own commands; in the user's
server the caller reports it in one line and goes on with the default. Long, since the table of settings is in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from otel_infer.config import tenancy
from otel_infer.config.settings import (
    SETTINGS,
    InvalidSetting,
    _choice_parser,
    _parse_milliseconds,
    _parse_names,
)

_parse_protocol = _choice_parser("http/protobuf", "grpc")
_STANDARD_PARSERS: dict[str, Callable[[str], Any]] = {
    "OTEL_EXPORTER_OTLP_PROTOCOL": _parse_protocol,
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": _parse_protocol,
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": _parse_protocol,
    "OTEL_METRIC_EXPORT_INTERVAL": _parse_milliseconds,
}
"""Standard variables of which we do not take every value."""
_DISABLED_NAMES = ("otel_infer", "*")


@dataclass(frozen=True)
class Config:
    """What was configured. Standard variables of OpenTelemetry are here too, so that they are read in one place."""

    enabled: str = "auto"
    mode: str = "auto"
    steps: str = "auto"
    device_timing: str = "auto"
    gpu_metrics: bool = True
    step_budget: int = 2000
    budget: str = "cpu=25%,memory=256MiB"
    slo: str = ""
    slow_percent: int = 5
    keep_unsampled: bool = False
    rings: str = ""
    console: bool = False
    request_log: str = ""
    tape: str = ""
    dump_on_slo: str = ""
    dump_port: str = ""
    metrics_port: str = ""
    integrations: tuple[str, ...] = ()
    latency_attributes: bool = False
    response_headers: bool = False
    tenant: str = ""
    tenant_hash_key: str = field(default="", repr=False)
    tenants: tuple[str, ...] = ()
    traffic_class: str = ""
    log: str = ""
    sdk_disabled: bool = False
    disabled_integrations: tuple[str, ...] = ()
    traces_exporter: str = "otlp"
    metrics_exporter: str = "otlp"
    endpoint: str = ""
    traces_endpoint: str = ""
    metrics_endpoint: str = ""
    traces_protocol: str = "http/protobuf"
    metrics_protocol: str = "http/protobuf"
    traces_compression: str = ""
    service_name: str = ""
    excluded_urls: str = ""
    metric_export_interval_ms: int = 10_000
    temporality: str = "cumulative"
    exponential_histograms: bool = False
    exemplars: bool = True
    sampler: str = "parentbased_always_on"
    sampler_argument: str = ""
    visible_devices: str | None = None

    @property
    def exports(self) -> bool:
        """Whether anything is to be sent anywhere."""
        sends = self.exports_spans or self.exports_metrics
        kept_here = bool(
            self.console
            or self.request_log
            or self.tape
            or self.dump_on_slo
            or self.dump_port
            or self.scrape_address
        )
        return not self.is_disabled and (sends or kept_here)

    @property
    def is_disabled(self) -> bool:
        """Whether somebody said no."""
        off = self.enabled in ("off", "0", "false") or self.sdk_disabled
        return off or any(name in _DISABLED_NAMES for name in self.disabled_integrations)

    @property
    def exports_spans(self) -> bool:
        """Whether spans leave over OTLP."""
        return self._has_destination and self.traces_exporter == "otlp"

    @property
    def exports_metrics(self) -> bool:
        """Whether metrics leave over OTLP."""
        return self._has_destination and self.metrics_exporter == "otlp"

    @property
    def scrape_address(self) -> str:
        """Where metrics may be scraped; empty if nowhere."""
        return "" if self.is_disabled else self.metrics_port

    @property
    def _has_destination(self) -> bool:
        return not self.is_disabled and (self.enabled in ("on", "1", "true") or bool(self.endpoint))

    @property
    def ratio_sampling(self) -> bool:
        """Whether the sampler was set to a ratio."""
        return "ratio" in self.sampler


def _read_standard(environ: Mapping[str, str]) -> dict[str, Any]:
    """The standard variables, each with its standard meaning and default (but for the export interval)."""

    def get(*names: str, default: str = "") -> str:
        return next((environ[name].strip() for name in names if environ.get(name, "").strip()), default)

    protocol = "OTEL_EXPORTER_OTLP_PROTOCOL"
    aggregation = get("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION")
    return {
        "sdk_disabled": get("OTEL_SDK_DISABLED").lower() == "true",
        "disabled_integrations": _parse_names(get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS")),
        "traces_exporter": _parse_exporter(get("OTEL_TRACES_EXPORTER", default="otlp")),
        "metrics_exporter": _parse_exporter(get("OTEL_METRICS_EXPORTER", default="otlp")),
        "endpoint": get(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
        ),
        "traces_endpoint": get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        "metrics_endpoint": get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        "traces_protocol": get(
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol, default="http/protobuf"
        ).lower(),
        "metrics_protocol": get(
            "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", protocol, default="http/protobuf"
        ).lower(),
        "traces_compression": get(
            "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION"
        ).lower(),
        "service_name": _find_service_name(get("OTEL_SERVICE_NAME"), get("OTEL_RESOURCE_ATTRIBUTES")),
        "excluded_urls": get("OTEL_PYTHON_OTEL_INFER_EXCLUDED_URLS", "OTEL_PYTHON_EXCLUDED_URLS"),
        "metric_export_interval_ms": int(get("OTEL_METRIC_EXPORT_INTERVAL", default="10000")),
        "temporality": get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", default="cumulative").lower(),
        "exponential_histograms": "exponential" in aggregation,
        "exemplars": get("OTEL_METRICS_EXEMPLAR_FILTER", default="trace_based").lower() != "always_off",
        "sampler": get("OTEL_TRACES_SAMPLER", default="parentbased_always_on").lower(),
        "sampler_argument": get("OTEL_TRACES_SAMPLER_ARG"),
        # The sidecar's own hides all devices, from whoever would use one there.
        "visible_devices": environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _parse_exporter(text: str) -> str:
    """`otlp` if it is among the exporters asked for (`otlp_proto_http` and `otlp_proto_grpc` count), else `none`."""
    return "otlp" if any(name.startswith("otlp") for name in _parse_names(text.lower())) else "none"


def _find_service_name(name: str, attributes: str) -> str:
    if name:
        return name
    pairs = (pair.partition("=") for pair in attributes.split(","))
    return next((value.strip() for key, _, value in pairs if key.strip() == "service.name"), "")


def from_env(environ: Mapping[str, str] | None = None) -> Config:
    """The configuration of this process; raises `BadSetting` for the first value that is not accepted."""
    environ = os.environ if environ is None else environ
    for variable, parse in _STANDARD_PARSERS.items():
        _parse_variable(variable, parse, environ)
    values = _read_standard(environ)
    for name, setting in SETTINGS.items():
        if environ.get(setting.variable, "").strip():
            values[name] = _parse_variable(setting.variable, setting.parse, environ)
    key = tenancy.derive_hash_key(values.get("tenant_hash_key", ""))
    values["tenants"] = tuple(tenancy.sanitize_tenant(name, key) for name in values.get("tenants", ()))
    return _check_scrapable(Config(**values))


def _check_scrapable(settings: Config) -> Config:
    """Whoever scrapes needs sums since the beginning, and buckets with bounds; raises `BadSetting` where OTLP asks for others."""
    if not settings.scrape_address or (
        settings.temporality == "cumulative" and not settings.exponential_histograms
    ):
        return settings
    if settings.exports_metrics:
        raise InvalidSetting(
            f"{SETTINGS['metrics_port'].variable}={settings.metrics_port!r}: expected cumulative sums and explicit buckets, "
            "not what OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE or "
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION asks for"
        )
    return replace(settings, temporality="cumulative", exponential_histograms=False)


def _parse_variable(variable: str, parse: Callable[[str], Any], environ: Mapping[str, str]) -> Any:
    """The value of a variable, None where it is not set; raises `BadSetting`."""
    text = environ.get(variable, "").strip()
    try:
        return parse(text) if text else None
    except ValueError as expected:
        raise InvalidSetting(f"{variable}={text!r}: expected {expected}") from None


def from_env_or_defaults(environ: Mapping[str, str] | None = None) -> tuple[Config, list[str]]:
    """As `from_env`, for the user's server: bad values fall back to their defaults, and are said."""
    remaining = dict(os.environ if environ is None else environ)
    complaints: list[str] = []
    for variable, parse in {**{s.variable: s.parse for s in SETTINGS.values()}, **_STANDARD_PARSERS}.items():
        try:
            _parse_variable(variable, parse, remaining)
        except InvalidSetting as bad:
            complaints.append(f"{bad}; using the default")
            del remaining[variable]
    try:
        return from_env(remaining), complaints
    except InvalidSetting as bad:
        del remaining[SETTINGS["metrics_port"].variable]
        return from_env(remaining), [*complaints, f"{bad}; nothing can be scraped"]


def to_json_dict(settings: Config) -> dict[str, Any]:
    """For JSON, to a process of ours: all but the key, which only the server needs."""
    return {**asdict(settings), "tenant_hash_key": ""}


def from_json_dict(values: Mapping[str, Any]) -> Config:
    """The configuration that a parent process read, as it came through JSON."""
    plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Config(**plain)


def export_to_children(**values: str) -> None:
    """Sets variables of ours (by field name) for the processes that this one will start."""
    for name, value in values.items():
        os.environ[SETTINGS[name].variable] = value


def unset_ringbuffer_dir(folder: str) -> None:
    """Takes back what was exported for children, if it is still ours."""
    variable = SETTINGS["rings"].variable
    if os.environ.get(variable) == folder:
        del os.environ[variable]


def export_startup_ids(ids: str) -> None:
    """Leaves the ids of a server's start, in hex, to the processes that this one will start."""
    os.environ[_STARTUP_IDS] = ids


def inherited_startup_ids() -> str:
    """The ids that the process which started this one left; empty if it left none."""
    return os.environ.get(_STARTUP_IDS, "")


def grafana_token() -> str:
    """Of a service account (or `user:password`), for our own commands; never among the settings, which are passed on."""
    return os.environ.get("GRAFANA_TOKEN", "")


def is_sidecar() -> bool:
    """Whether this process is a sidecar of ours, or one of its helpers: nothing is instrumented there."""
    return SIDECAR_GUARD in os.environ


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with variables of ours (by field name) changed, for a child to be started."""
    return {**os.environ, **{SETTINGS[name].variable: value for name, value in changes.items()}}


def prepend_python_path(environ: Mapping[str, str], first: str) -> str:
    """PYTHONPATH with `first` in front of what it holds."""
    return os.pathsep.join([first, *filter(None, [environ.get("PYTHONPATH", "")])])


assert set(SETTINGS) <= {field.name for field in fields(Config)}


SIDECAR_GUARD = "OTEL_INFER_SIDECAR"
_STARTUP_IDS = "OTEL_INFER_START"
_SIDECAR_EXCLUDED = (
    "LD_PRELOAD",
    "LD_AUDIT",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "PYTHONPATH",
)


# mallopt(3): columns come and go in the same sizes; without this they are given back and mapped anew each time.
_MALLOC_DEFAULTS = {"MALLOC_TRIM_THRESHOLD_": str(8 << 20), "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}


_PATH_VARIABLES = {
    f"OTEL_EXPORTER_OTLP_{signal}{what}"
    for signal in ("", "TRACES_", "METRICS_")
    for what in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
} | {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"}


def sidecar_environment() -> dict[str, str]:
    """The environment of the sidecar: ours, but nothing is injected into it and it instruments nothing."""
    ours = (SETTINGS[name].variable for name in ("tenant_hash_key", "tenants"))  # it is told what it needs
    left_out = {*_SIDECAR_EXCLUDED, *ours}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    for name in _PATH_VARIABLES & kept.keys():  # its working directory is another
        kept[name] = os.path.abspath(kept[name]) if kept[name] else ""
    return {
        SIDECAR_GUARD: "1",
        **_MALLOC_DEFAULTS,
        **kept,
        "OTEL_INFER_ENABLED": "off",
        "CUDA_VISIBLE_DEVICES": "",
    }
