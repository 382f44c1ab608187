"""Checks of versions, configuration and GPU driver, which need no trial."""

from __future__ import annotations

import difflib
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from otel_infer._version import GPU_TIMING_STATUS, VERSION
from otel_infer.cli.doctor.check import Check, State
from otel_infer.config import environment, propagators
from otel_infer.config.environment import Config
from otel_infer.config.settings import SETTINGS
from otel_infer.gpu.nvml import NvmlState

REQUIRED_PACKAGES = (
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-http",
    "wrapt",
    "numpy",
    "protobuf",
)
REPORTED_PACKAGES = (*REQUIRED_PACKAGES, "opentelemetry-exporter-otlp-proto-grpc")
_URLLIB3_REPLACED = "urllib3 is replaced by urllib3-future: exports of a forked process may be lost"
_URLLIB3_REMEDY = (
    f"install otel-infer[grafana] in a separate environment; here: {sys.executable} -m pip uninstall urllib3-future urllib3, "
    "and install urllib3 again"
)
HOST_TIMING = f"the time of steps is the host's; GPU timing: {GPU_TIMING_STATUS}"


def installed_version(distribution: str) -> str | None:
    """Returns the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def is_urllib3_replaced() -> bool:
    """Returns whether urllib3-future, a dependency of grafana-client, has replaced urllib3."""
    spec = find_spec("urllib3")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "_async").is_dir()


def check_versions(
    installed: Callable[[str], str | None] = installed_version,
    is_replaced: Callable[[], bool] = is_urllib3_replaced,
) -> Check:
    """Checks which packages are installed for this interpreter."""
    versions = {name: installed(name) for name in REPORTED_PACKAGES}
    parts = [f"otel-infer {VERSION}", f"Python {platform.python_version()} ({sys.executable})"]
    parts += [f"{name} {version}" for name, version in versions.items() if version]
    missing = [name for name in REQUIRED_PACKAGES if not versions[name]]
    if not missing and is_replaced():
        return Check("versions", "warn", f"{', '.join(parts)}; {_URLLIB3_REPLACED}", _URLLIB3_REMEDY)
    if not missing:
        return Check("versions", "ok", ", ".join(parts))
    parts.append(f"not installed: {', '.join(missing)}")
    return Check("versions", "fail", ", ".join(parts), f"{sys.executable} -m pip install {' '.join(missing)}")


def check_configuration(environ: Mapping[str, str]) -> Check:
    """Checks the environment variables: invalid values, unknown OTEL_INFER_* names, and the destinations."""
    settings, errors = environment.from_env_or_defaults(environ)
    found = list(errors)
    do = [f"set {error.partition('=')[0]} to a value it accepts, or unset it" for error in errors]
    unusable = propagators.describe_unusable()
    if unusable:
        found.append(unusable)
        do.append(f"install the propagator, or change {propagators.VARIABLE}")
    for name, similar in _find_unknown_variables(environ):
        found.append(f"{name} is not a setting")
        do.append(f"set {similar} instead" if similar else f"unset {name}")
    if settings.is_disabled:
        found.append(f"switched off by {_disabling_variable(settings)}")
        do.append(f"unset {_disabling_variable(settings)}")
    elif settings.exports:
        found.append(_describe_destinations(settings, environ))
    else:
        found.append("nothing is exported")
        do.append(
            "set OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:4318, or start the server with `otel-infer run`"
        )
    state: State = "fail" if errors else "warn" if do else "ok"
    return Check("configuration", state, "; ".join(found), "; ".join(do))


def resolve_endpoint(signal: str, protocol: str, environ: Mapping[str, str]) -> str:
    """Returns the URL for `traces` or `metrics`, by the rules of the OTLP exporters."""
    own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    if protocol == "grpc":
        return own or base or "http://localhost:4317"
    return own or f"{(base or 'http://localhost:4318').rstrip('/')}/v1/{signal}"


def _describe_destinations(settings: Config, environ: Mapping[str, str]) -> str:
    destinations = []
    for signal, name, exporter, sends, protocol in (
        ("traces", "spans", settings.traces_exporter, settings.exports_spans, settings.traces_protocol),
        (
            "metrics",
            "metrics",
            settings.metrics_exporter,
            settings.exports_metrics,
            settings.metrics_protocol,
        ),
    ):
        reason = "without an endpoint" if exporter == "otlp" else f"by OTEL_{signal.upper()}_EXPORTER"
        target = f"to {resolve_endpoint(signal, protocol, environ)} ({protocol})"
        destinations.append(f"{name} {target}" if sends else f"no {name}, {reason}")
    if settings.console:
        destinations.append("a line for each request")
    if settings.request_log:
        destinations.append(f"a log of requests with a priority keep reason to {settings.request_log}")
    if settings.tape:
        destinations.append(f"a tape to {settings.tape}")
    if settings.scrape_address:
        destinations.append(f"metrics to scrape at {settings.scrape_address}")
    if settings.dump_on_slo:
        destinations.append(f"tapes of breaches to {settings.dump_on_slo}")
    if settings.dump_port:
        destinations.append(f"a webhook at {settings.dump_port}")
    return ", ".join(destinations)


def _find_unknown_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (unknown OTEL_INFER_* variable, the most similar setting).

    The setting is empty if none is similar.
    """
    known = [setting.variable for setting in SETTINGS.values()]
    for name in sorted(environ):
        if name.startswith("OTEL_INFER_") and name not in (*known, environment.SIDECAR_GUARD):
            yield name, next(iter(difflib.get_close_matches(name, known, 1)), "")


def _disabling_variable(settings: Config) -> str:
    if settings.sdk_disabled:
        return "OTEL_SDK_DISABLED"
    if settings.enabled in ("off", "0", "false"):
        return SETTINGS["enabled"].variable
    return "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"


def check_gpu(nvml: NvmlState) -> Check:
    """Checks NVML. A machine without an NVIDIA GPU is `ok`."""
    match nvml.status:
        case "ready":
            devices = ", ".join(nvml.devices) or "no device"
            return Check(
                "gpu", "ok", f"NVIDIA driver {nvml.driver}: {devices}; GPU timing: {GPU_TIMING_STATUS}"
            )
        case "no driver":
            return Check("gpu", "ok", f"no NVIDIA driver: GPU metrics are absent; {HOST_TIMING}")
        case "no library":
            found = "the kernel has an NVIDIA driver, but libnvidia-ml was not found"
            do = "start the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        case "no permission":
            found, do = (
                "this user has no permission for NVML",
                "give this user access to /dev/nvidiactl and /dev/nvidia*",
            )
        case "no package":
            found, do = "nvidia-ml-py is not installed", f"{sys.executable} -m pip install nvidia-ml-py"
        case "broken":
            found, do = (
                f"NVML does not answer ({nvml.reason})",
                "run nvidia-smi to see why",
            )
    return Check("gpu", "warn", f"{found}: GPU metrics are absent; {HOST_TIMING}", do)
