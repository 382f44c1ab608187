"""Reads every setting once from the environment into a frozen `Config`.

Other modules do not use `os.environ`. A bad value raises `InvalidSetting`, which names the variable and the
accepted values. It stops the `otel-infer` commands. In the user's server the caller reports it in one line and
uses the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from otel_infer.config import standard_variables, tenancy
from otel_infer.config.redaction import describe_value, list_secrets, mask_secrets
from otel_infer.config.settings import SETTINGS, InvalidSetting

_DISABLED_NAMES = ("otel_infer", "*")
SIDECAR_GUARD = "OTEL_INFER_SIDECAR"
_STARTUP_IDS, _STARTUP_REPORTED = "OTEL_INFER_START", "OTEL_INFER_START_REPORTED"
_SIDECAR_EXCLUDED = (
    "LD_PRELOAD",
    "LD_AUDIT",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "PYTHONPATH",
)
# mallopt(3): columns are allocated and freed in the same sizes, which malloc unmaps and maps anew by default.
_MALLOC_DEFAULTS = {"MALLOC_TRIM_THRESHOLD_": str(8 << 20), "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}
_PATH_VARIABLES = {
    f"OTEL_EXPORTER_OTLP_{signal}{what}"
    for signal in ("", "TRACES_", "METRICS_")
    for what in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
} | {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"}


@dataclass(frozen=True)
class Config:
    """The configuration of a process.

    It includes OpenTelemetry's standard variables, so that they are read in one place.
    """

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
    native: bool = True
    stacks: bool = True
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
    metrics_compression: str = ""
    service_name: str = ""
    excluded_urls: str = ""
    metric_export_interval_ms: int = 10_000
    temporality: str = "cumulative"
    exponential_histograms: bool = False
    exemplars: bool = True
    sampler: str = "parentbased_always_on"
    sampler_argument: str = ""
    attribute_limit: int = 128
    attribute_length_limit: int | None = None
    event_limit: int = 128
    link_limit: int = 128
    visible_devices: str | None = None

    @property
    def exports(self) -> bool:
        """Whether there is any output: spans or metrics over OTLP, or a local output."""
        uses_otlp = self.exports_spans or self.exports_metrics
        has_local_output = bool(
            self.console
            or self.request_log
            or self.tape
            or self.dump_on_slo
            or self.dump_port
            or self.scrape_address
        )
        return not self.is_disabled and (uses_otlp or has_local_output)

    @property
    def is_disabled(self) -> bool:
        """Whether a variable disables otel_infer."""
        off = self.enabled in ("off", "0", "false") or self.sdk_disabled
        return off or any(name in _DISABLED_NAMES for name in self.disabled_integrations)

    @property
    def exports_spans(self) -> bool:
        """Whether spans are exported over OTLP."""
        return self._has_destination and self.traces_exporter == "otlp"

    @property
    def exports_metrics(self) -> bool:
        """Whether metrics are exported over OTLP."""
        return self._has_destination and self.metrics_exporter == "otlp"

    @property
    def scrape_address(self) -> str:
        """The address where metrics can be scraped; empty = none."""
        return "" if self.is_disabled else self.metrics_port

    @property
    def _has_destination(self) -> bool:
        return not self.is_disabled and (self.enabled in ("on", "1", "true") or bool(self.endpoint))

    @property
    def ratio_sampling(self) -> bool:
        """Whether the configured sampler is a ratio sampler."""
        return "ratio" in self.sampler


def from_env(environ: Mapping[str, str] | None = None) -> Config:
    """Returns the configuration of this process; raises `InvalidSetting` for the first value that is not
    accepted.
    """
    environ = os.environ if environ is None else environ
    for variable, expected in standard_variables.find_errors(environ):
        raise InvalidSetting(
            f"{variable}={describe_value(variable, environ[variable].strip())}: expected {expected}"
        )
    values = standard_variables.read_values(environ)
    for name, setting in SETTINGS.items():
        if environ.get(setting.variable, "").strip():
            values[name] = _parse_variable(setting.variable, setting.parse, environ)
    key = tenancy.derive_hash_key(values.get("tenant_hash_key", ""))
    values["tenants"] = tuple(tenancy.sanitize_tenant(name, key) for name in values.get("tenants", ()))
    return _check_scrapable(Config(**values))


def _check_scrapable(settings: Config) -> Config:
    """Returns settings whose metrics can be scraped: cumulative sums and buckets with explicit bounds.

    Raises `InvalidSetting` if metrics over OTLP are configured otherwise.
    """
    if not settings.scrape_address or (
        settings.temporality == "cumulative" and not settings.exponential_histograms
    ):
        return settings
    if settings.exports_metrics:
        raise InvalidSetting(
            f"{SETTINGS['metrics_port'].variable}={settings.metrics_port!r}: expected cumulative sums and explicit buckets, "
            "which OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE or "
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION overrides"
        )
    return replace(settings, temporality="cumulative", exponential_histograms=False)


def _parse_variable(variable: str, parse: Callable[[str], Any], environ: Mapping[str, str]) -> Any:
    """Returns the parsed value of a variable, None if it is not set; raises `InvalidSetting`."""
    text = environ.get(variable, "").strip()
    try:
        return parse(text) if text else None
    except ValueError as expected:
        raise InvalidSetting(f"{variable}={describe_value(variable, text)}: expected {expected}") from None


def from_env_or_defaults(environ: Mapping[str, str] | None = None) -> tuple[Config, list[str]]:
    """Returns the configuration for the user's server, and a message for each bad value; a bad value has its
    default.
    """
    remaining = dict(os.environ if environ is None else environ)
    messages: list[str] = []
    for setting in SETTINGS.values():
        try:
            _parse_variable(setting.variable, setting.parse, remaining)
        except InvalidSetting as bad:
            messages.append(f"{bad}; using the default")
            del remaining[setting.variable]
    for variable, expected in [*standard_variables.find_errors(remaining)]:
        instead = "using the default"
        if variable.endswith("_ENDPOINT"):  # the default endpoint is not what was meant
            instead = "nothing is sent there"
            remaining.update(standard_variables.without_signals_of(variable))
        value = describe_value(variable, remaining.pop(variable).strip())
        messages.append(f"{variable}={value}: expected {expected}; {instead}")
    messages += standard_variables.find_warnings(remaining)
    try:
        return from_env(remaining), messages
    except InvalidSetting as bad:
        del remaining[SETTINGS["metrics_port"].variable]
        return from_env(remaining), [*messages, f"{bad}; nothing can be scraped"]


def to_json_dict(settings: Config) -> dict[str, Any]:
    """Returns the settings as JSON for a child process, without the hash key, which only the server needs."""
    return {**asdict(settings), "tenant_hash_key": ""}


def from_json_dict(values: Mapping[str, Any]) -> Config:
    """Returns the configuration that a parent process sent as JSON."""
    plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Config(**plain)


def export_to_children(**values: str) -> None:
    """Sets variables (by field name) for the processes that this process starts."""
    for name, value in values.items():
        os.environ[SETTINGS[name].variable] = value


def unset_ringbuffer_dir(folder: str) -> None:
    """Removes the exported folder of the rings, if it is still `folder`."""
    variable = SETTINGS["rings"].variable
    if folder and os.environ.get(variable) == folder:
        del os.environ[variable]


def export_startup_ids(ids: str) -> None:
    """Exports the ids of a server's start, in hex, to the processes that this process starts."""
    os.environ[_STARTUP_IDS] = ids


def inherited_startup_ids() -> str:
    """Returns the start ids that the parent process exported; empty if it exported none."""
    return os.environ.get(_STARTUP_IDS, "")


def export_startup_reported() -> None:
    """Tells the processes that this process starts that it has printed the startup message of the server."""
    os.environ[_STARTUP_REPORTED] = "1"


def is_startup_reported() -> bool:
    """Returns whether the process that started this one, or one above it, has printed the startup message."""
    return _STARTUP_REPORTED in os.environ


def grafana_token() -> str:
    """Returns the token of a service account (or `user:password`), for the `otel-infer` commands.

    It is not a setting, because settings are passed to other processes.
    """
    return os.environ.get("GRAFANA_TOKEN", "")


def mask_configured_secrets(text: str) -> str:
    """Returns a text for a log or a terminal, without the credentials that this environment configures."""
    return mask_secrets(text, list_secrets(os.environ))


def is_sidecar() -> bool:
    """Returns whether this process is a sidecar, or a helper of one; neither is instrumented."""
    return SIDECAR_GUARD in os.environ


def child_environment(**changes: str) -> dict[str, str]:
    """Returns the environment of this process with some variables (by field name) changed, for a child
    process.
    """
    return {**os.environ, **{SETTINGS[name].variable: value for name, value in changes.items()}}


@contextmanager
def hide_refused_values() -> Iterator[None]:
    """Removes the standard variables whose values are not accepted, while the block runs."""
    refused = {
        variable: os.environ.pop(variable) for variable, _ in [*standard_variables.find_errors(os.environ)]
    }
    try:
        yield
    finally:
        os.environ.update(refused)


def prepend_python_path(environ: Mapping[str, str], first: str) -> str:
    """Returns PYTHONPATH with `first` in front."""
    return os.pathsep.join([first, *filter(None, [environ.get("PYTHONPATH", "")])])


@contextmanager
def put_on_python_path(folder: str) -> Iterator[None]:
    """Puts a folder first on PYTHONPATH, for processes that are started while the block runs."""
    before = os.environ.get("PYTHONPATH")
    if before is not None and folder in before.split(os.pathsep):
        yield
        return
    os.environ["PYTHONPATH"] = prepend_python_path(os.environ, folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


def sidecar_environment() -> dict[str, str]:
    """Returns the environment of the sidecar: like this process's, without injection and instrumentation."""
    sent_separately = (
        SETTINGS[name].variable for name in ("tenant_hash_key", "tenants")
    )  # the boot message has what it needs
    refused = (
        variable for variable, _ in standard_variables.find_errors(os.environ)
    )  # its exporters would raise
    excluded = {*_SIDECAR_EXCLUDED, *sent_separately, *refused}
    inherited = {name: value for name, value in os.environ.items() if name not in excluded}
    for name in _PATH_VARIABLES & inherited.keys():  # the sidecar has another working directory
        inherited[name] = os.path.abspath(inherited[name]) if inherited[name] else ""
    return {
        SIDECAR_GUARD: "1",
        **_MALLOC_DEFAULTS,
        **inherited,
        "OTEL_INFER_ENABLED": "off",
        "CUDA_VISIBLE_DEVICES": "",
    }


def read_destination(settings: Config) -> dict[str, dict[str, str]]:
    """Returns, by exported signal, the variables that determine where the sidecar sends it. They hold secrets."""
    environ = sidecar_environment()
    exported = {"TRACES": settings.exports_spans, "METRICS": settings.exports_metrics}
    return {
        signal: standard_variables.read_destination(environ, signal)
        for signal, is_exported in exported.items()
        if is_exported
    }


assert set(SETTINGS) <= {field.name for field in fields(Config)}
