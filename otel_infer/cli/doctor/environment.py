"""Versions, configuration, GPU driver: what can be read without trying anything."""

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
from otel_infer.config import environment
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
_URLLIB3_REPLACED = "urllib3 is replaced by urllib3-future: what a server exports after a fork may be lost"
_URLLIB3_REMEDY = (
    f"install otel-infer[grafana] in an environment of its own; here: {sys.executable} -m pip uninstall urllib3-future urllib3, "
    "and install urllib3 again"
)
HOST_TIMING = f"the time of steps is the host's; GPU timing: {GPU_TIMING_STATUS}"


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, or None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def is_urllib3_replaced() -> bool:
    """Whether urllib3-future (which grafana-client asks for) lies where urllib3 was."""
    found = find_spec("urllib3")
    return found is not None and found.origin is not None and (Path(found.origin).parent / "_async").is_dir()


def check_versions(
    installed: Callable[[str], str | None] = installed_version,
    is_replaced: Callable[[], bool] = is_urllib3_replaced,
) -> Check:
    """What is installed for this interpreter."""
    found = {name: installed(name) for name in REPORTED_PACKAGES}
    said = [f"otel-infer {VERSION}", f"Python {platform.python_version()} ({sys.executable})"]
    said += [f"{name} {version}" for name, version in found.items() if version]
    missing = [name for name in REQUIRED_PACKAGES if not found[name]]
    if not missing and is_replaced():
        return Check("versions", "warn", f"{', '.join(said)}; {_URLLIB3_REPLACED}", _URLLIB3_REMEDY)
    if not missing:
        return Check("versions", "ok", ", ".join(said))
    said.append(f"not installed: {', '.join(missing)}")
    return Check("versions", "fail", ", ".join(said), f"{sys.executable} -m pip install {' '.join(missing)}")


def check_configuration(environ: Mapping[str, str]) -> Check:
    """Bad values, variables of ours that do not exist, and where things go."""
    settings, complaints = environment.from_env_or_defaults(environ)
    found = list(complaints)
    do = [f"set {said.partition('=')[0]} to a value it accepts, or unset it" for said in complaints]
    for name, meant in _find_unknown_variables(environ):
        found.append(f"{name} is no setting")
        do.append(f"set {meant} instead" if meant else f"unset {name}")
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
    state: State = "fail" if complaints else "warn" if do else "ok"
    return Check("configuration", state, "; ".join(found), "; ".join(do))


def resolve_endpoint(signal: str, protocol: str, environ: Mapping[str, str]) -> str:
    """Where `traces` or `metrics` are sent, by the rules of the exporters."""
    own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    if protocol == "grpc":
        return own or base or "http://localhost:4317"
    return own or f"{(base or 'http://localhost:4318').rstrip('/')}/v1/{signal}"


def _describe_destinations(settings: Config, environ: Mapping[str, str]) -> str:
    said = []
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
        why = "without an endpoint" if exporter == "otlp" else f"by OTEL_{signal.upper()}_EXPORTER"
        where = f"to {resolve_endpoint(signal, protocol, environ)} ({protocol})"
        said.append(f"{name} {where}" if sends else f"no {name}, {why}")
    if settings.console:
        said.append("a line for each request")
    if settings.request_log:
        said.append(f"a log of kept requests to {settings.request_log}")
    if settings.tape:
        said.append(f"a tape to {settings.tape}")
    if settings.scrape_address:
        said.append(f"metrics to scrape at {settings.scrape_address}")
    if settings.dump_on_slo:
        said.append(f"tapes of breaches to {settings.dump_on_slo}")
    if settings.dump_port:
        said.append(f"a webhook at {settings.dump_port}")
    return ", ".join(said)


def _find_unknown_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(variable that nobody reads, the one that was probably meant)."""
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
    """What NVML answers. To have no NVIDIA GPU is no fault."""
    match nvml.status:
        case "ready":
            devices = ", ".join(nvml.devices) or "no device"
            return Check(
                "gpu", "ok", f"NVIDIA driver {nvml.driver}: {devices}; GPU timing: {GPU_TIMING_STATUS}"
            )
        case "no driver":
            return Check("gpu", "ok", f"no NVIDIA driver: GPU metrics are absent; {HOST_TIMING}")
        case "no library":
            found = "the kernel has an NVIDIA driver, but libnvidia-ml is not found here"
            do = "start the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        case "no permission":
            found, do = "NVML refuses this user", "give this user access to /dev/nvidiactl and /dev/nvidia*"
        case "no package":
            found, do = "nvidia-ml-py is not installed", f"{sys.executable} -m pip install nvidia-ml-py"
        case "broken":
            found, do = (
                f"NVML does not answer ({nvml.reason})",
                "run nvidia-smi, which says what the driver lacks",
            )
    return Check("gpu", "warn", f"{found}: GPU metrics are absent; {HOST_TIMING}", do)
