"""Defines the table of settings: the variable, default, meaning and parser of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from otel_infer.config import budget, slo, tenancy


class InvalidSetting(ValueError):
    """An environment variable whose value is not accepted; the message names both."""


class Setting(NamedTuple):
    """One row of the table of settings."""

    variable: str
    default: str
    meaning: str
    parse: Callable[[str], Any]


def parse_choice(*accepted: str) -> Callable[[str], str]:
    """Returns a parser that accepts these words, in upper or lower case."""

    def parse(text: str) -> str:
        if text.lower() not in accepted:
            raise ValueError("one of " + ", ".join(accepted))
        return text.lower()

    return parse


def _parse_bool(text: str) -> bool:
    values = {
        "1": True,
        "true": True,
        "on": True,
        "yes": True,
        "0": False,
        "false": False,
        "off": False,
        "no": False,
    }
    if text.lower() not in values:
        raise ValueError("on or off")
    return values[text.lower()]


def parse_count(text: str) -> int:
    """Returns a whole number, 0 or more."""
    if not text.isdigit():
        raise ValueError("a whole number, 0 or more")
    return int(text)


def parse_ratio(text: str) -> float:
    """Returns a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError("a number from 0 to 1")
    return value


def parse_seconds(text: str) -> float:
    """Returns a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("a number of seconds above 0")
    return value


def _parse_percent(text: str) -> int:
    if not text.isdigit() or int(text) > 100:
        raise ValueError("a whole number from 0 to 100")
    return int(text)


def _validated_text(parse: Callable[[str], Any]) -> Callable[[str], str]:
    """Returns a parser that checks a text and keeps it unparsed, because another process parses it again."""

    def check_text(text: str) -> str:
        parse(text)
        return text

    return check_text


def parse_milliseconds(text: str) -> int:
    """Returns a whole number, 1 or more."""
    if not text.isdigit() or int(text) == 0:
        raise ValueError("a whole number of milliseconds, 1 or more")
    return int(text)


def _parse_path(text: str) -> str:
    """Returns an absolute path, because the sidecar and child processes have other working directories."""
    return os.path.abspath(text)


def _parse_log_target(text: str) -> str:
    """Returns an absolute path, `stderr`, or an empty text for `off`."""
    words = {"off": "", STDERR: STDERR}
    return words[text.lower()] if text.lower() in words else _parse_path(text)


def _parse_address(text: str) -> str:
    """Returns the text if it is `PORT` or `ADDRESS:PORT`."""
    address, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536 or (":" in text and not address):
        raise ValueError("a port, or ADDRESS:PORT")
    return text


def parse_names(text: str) -> tuple[str, ...]:
    """Returns the names of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


STDERR = "stderr"
"""Value in place of a file: standard error of the server."""

SETTINGS: dict[str, Setting] = {
    "enabled": Setting(
        "OTEL_INFER_ENABLED",
        "auto",
        "`on`: record and export, to the default endpoint if none is configured; `off`: do nothing; `auto`: "
        "on if an OTLP endpoint or a local output is configured: console, request log, tape, dumps, "
        "metrics port",
        parse_choice("auto", "on", "off", "1", "0", "true", "false"),
    ),
    "mode": Setting(
        "OTEL_INFER_MODE",
        "auto",
        "`sidecar`: a separate process reads and exports; `in-process`: a thread of the server does, at a "
        "higher cost; `auto`: sidecar if one can be started",
        parse_choice("auto", "sidecar", "in-process"),
    ),
    "steps": Setting(
        "OTEL_INFER_STEPS",
        "auto",
        "decode-step spans: `all`, `auto` (within the budget), `off` (then no request has a keep reason, "
        "and the request log is empty)",
        parse_choice("all", "auto", "off"),
    ),
    "native": Setting(
        "OTEL_INFER_NATIVE",
        "on",
        "`on`: compiled code writes the rings, where it was built; `off`: Python code does, at a higher cost",
        _parse_bool,
    ),
    "device_timing": Setting(
        "OTEL_INFER_DEVICE_TIMING",
        "auto",
        "`auto`: time GPU work by events on its streams, limited to about 0.3 % of the time by their expected cost; `off`: "
        "use the host's clock only",
        parse_choice("auto", "off"),
    ),
    "stacks": Setting(
        "OTEL_INFER_STACKS",
        "on",
        "`on`: while an event loop, a step or a request is late, the file, line and function that each thread is in are "
        "recorded, without values; `off`: never. They are written by a real-time signal that the "
        "program does not use",
        _parse_bool,
    ),
    "gpu_metrics": Setting(
        "OTEL_INFER_GPU_METRICS",
        "on",
        "export the state of NVIDIA GPUs every 5 s, as reported by NVML: `on`, `off`",
        _parse_bool,
    ),
    "step_budget": Setting(
        "OTEL_INFER_STEP_BUDGET", "2000", "decode-step spans per second and server, in `auto`", parse_count
    ),
    "budget": Setting(
        "OTEL_INFER_BUDGET",
        "cpu=25%,memory=256MiB",
        "CPU (of one core) and memory that the sidecar may use; above it, the sidecar exports fewer step "
        "spans",
        _validated_text(budget.parse_budget),
    ),
    "slo": Setting(
        "OTEL_INFER_SLO",
        "",
        "latency objectives: `ttft=1s,itl=200ms,tpot=50ms,e2e=30s,queue=500ms`; for one model or route "
        "after `;`: `model:NAME ttft=3s`. The steps of a request that missed an objective are exported. If "
        "a request ends while it waits for a token, that wait counts. A request that its client cancelled "
        "has no `e2e`",
        _validated_text(slo.parse_objectives),
    ),
    "slow_percent": Setting(
        "OTEL_INFER_SLOW_PERCENT",
        "5",
        "percentage of the requests of each size that count as slow; their steps are exported; `0`: none",
        _parse_percent,
    ),
    "keep_unsampled": Setting(
        "OTEL_INFER_KEEP_UNSAMPLED",
        "off",
        "also export requests whose context is not sampled, marked `infer.unsampled`; with a "
        "`tracer_provider`, its sampler decides",
        _parse_bool,
    ),
    "rings": Setting(
        "OTEL_INFER_RINGS",
        "",
        "folder on tmpfs for the shared memory of one server; default: a private folder under /dev/shm",
        _parse_path,
    ),
    "console": Setting("OTEL_INFER_CONSOLE", "off", "print one line for each finished request", _parse_bool),
    "request_log": Setting(
        "OTEL_INFER_REQUEST_LOG",
        "",
        "file, or `stderr`: one JSON line for each request with an error, abort, preemption, missed "
        "objective or slow duration, or that delayed such a request. A line has the trace id, stages and "
        "latency breakdown. At most 10 per second",
        _parse_log_target,
    ),
    "tape": Setting(
        "OTEL_INFER_TAPE",
        "",
        "file that all events are saved to, for `otel-infer replay`; an existing file is kept under a "
        "numbered name",
        _parse_path,
    ),
    "dump_on_slo": Setting(
        "OTEL_INFER_DUMP_ON_SLO",
        "",
        "folder for tapes: when 3 requests miss objectives (`OTEL_INFER_SLO`) within 10 s, the sidecar "
        "writes a tape of the last 120 s. At most one per minute, fewer while a breach continues; the "
        "newest 20 of breaches are kept",
        _parse_path,
    ),
    "dump_port": Setting(
        "OTEL_INFER_DUMP_PORT",
        "",
        "port, on loopback unless it is ADDRESS:PORT: `POST /dump`, for example from Alertmanager, makes "
        "the sidecar write such a tape",
        _parse_address,
    ),
    "metrics_port": Setting(
        "OTEL_INFER_METRICS_PORT",
        "",
        "port, on loopback unless it is ADDRESS:PORT: `GET /metrics` for Prometheus, with the names and "
        "labels of OTLP, and exemplars. One server per port. Not together with OTLP metrics that are "
        "`delta`, `lowmemory` or exponential",
        _parse_address,
    ),
    "integrations": Setting(
        "OTEL_INFER_INTEGRATIONS",
        "",
        "comma-separated: only these integrations; default: all that are found",
        parse_names,
    ),
    "latency_attributes": Setting(
        "OTEL_INFER_LATENCY_ATTRIBUTES",
        "off",
        "also set the `gen_ai.latency.*` attributes of vLLM and SGLang on the request span, with vLLM's "
        "meaning",
        _parse_bool,
    ),
    "response_headers": Setting(
        "OTEL_INFER_RESPONSE_HEADERS",
        "off",
        "add response headers for HTTP clients: `traceresponse` (ids of the trace and of the server's span) "
        "and `Server-Timing` (ms from arrival to response start), which `otel_infer.instrumentation.httpx` "
        "reads",
        _parse_bool,
    ),
    "tenant": Setting(
        "OTEL_INFER_TENANT",
        "",
        "source of a request's tenant, exported as `infer.tenant`: `header:NAME` of the HTTP request (or of "
        "`otel_infer.request`), `baggage:KEY`, or `lora`, the adapter's name (vLLM); cut to 64 characters",
        _validated_text(tenancy.parse_tenant_source),
    ),
    "tenant_hash_key": Setting(
        "OTEL_INFER_TENANT_HASH_KEY",
        "",
        "any secret text: every output has the hash of a tenant with this key (16 hex digits) instead of "
        "its name",
        str,
    ),
    "tenants": Setting(
        "OTEL_INFER_TENANTS",
        "",
        "comma-separated, at most 50: the tenants that metrics name; every other is `_OTHER`. With a hash "
        "key, write the names here; metrics have the hashes",
        tenancy.parse_tenants,
    ),
    "traffic_class": Setting(
        "OTEL_INFER_TRAFFIC_CLASS",
        "",
        "rules for the traffic class of a request, `batch` or `interactive`, exported as "
        "`infer.traffic.class`; comma-separated. `header:NAME`: the header contains the class. "
        "`route:/v1/batches=batch`: the class of that path and below, without the header; `{…}` matches any "
        "one segment, and the first match decides. Any other request is `interactive`",
        _validated_text(tenancy.parse_traffic_rules),
    ),
    "log": Setting("OTEL_INFER_LOG", "", "file for the log of the sidecar; default: no log", _parse_path),
}
"""The settings by field of `Config`. The table in the docs is generated from this."""
