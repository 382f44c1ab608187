"""TODO config.settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from otel_infer.config import budget as governor
from otel_infer.config import slo as objectives
from otel_infer.config import tenancy


class InvalidSetting(ValueError):
    """A variable has a value that it does not accept."""


class Setting(NamedTuple):
    """One row of the configuration table."""

    variable: str
    default: str
    meaning: str
    parse: Callable[[str], Any]


def _choice_parser(*accepted: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in accepted:
            raise ValueError("one of " + ", ".join(accepted))
        return text.lower()

    return parse


def _parse_bool(text: str) -> bool:
    known = {
        "1": True,
        "true": True,
        "on": True,
        "yes": True,
        "0": False,
        "false": False,
        "off": False,
        "no": False,
    }
    if text.lower() not in known:
        raise ValueError("on or off")
    return known[text.lower()]


def _parse_count(text: str) -> int:
    if not text.isdigit():
        raise ValueError("a whole number, 0 or more")
    return int(text)


def _parse_percent(text: str) -> int:
    if not text.isdigit() or int(text) > 100:
        raise ValueError("a whole number from 0 to 100")
    return int(text)


def _validated_text(parse: Callable[[str], Any]) -> Callable[[str], str]:
    """Checked here, and kept as text for whoever reads it again in another process."""

    def check_text(text: str) -> str:
        parse(text)
        return text

    return check_text


def _parse_milliseconds(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise ValueError("a whole number of milliseconds, 1 or more")
    return int(text)


def _parse_path(text: str) -> str:
    """Absolute: the sidecar and the server's children are elsewhere."""
    return os.path.abspath(text)


def _parse_log_target(text: str) -> str:
    """A file, or where the server says things."""
    words = {"off": "", STDERR: STDERR}
    return words[text.lower()] if text.lower() in words else _parse_path(text)


def _parse_address(text: str) -> str:
    """`PORT`, or `ADDRESS:PORT`."""
    address, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536 or (":" in text and not address):
        raise ValueError("a port, or ADDRESS:PORT")
    return text


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


STDERR = "stderr"
"""Where a server says things, in place of a file."""

SETTINGS: dict[str, Setting] = {
    "enabled": Setting(
        "OTEL_INFER_ENABLED",
        "auto",
        "`on`: record and export, to the default endpoint if none is named; `off`: do nothing; `auto`: on if an OTLP "
        "endpoint is configured, or what needs none: console, request log, tape, dumps, metrics port",
        _choice_parser("auto", "on", "off", "1", "0", "true", "false"),
    ),
    "mode": Setting(
        "OTEL_INFER_MODE",
        "auto",
        "`sidecar`: a process of its own reads and exports; `in-process`: a thread of the server does, costlier; "
        "`auto`: sidecar where one can be had",
        _choice_parser("auto", "sidecar", "in-process"),
    ),
    "steps": Setting(
        "OTEL_INFER_STEPS",
        "auto",
        "decode-step spans: `all`, `auto` (inside the budget), `off` (no request has a reason to be kept then, and the request "
        "log is empty)",
        _choice_parser("all", "auto", "off"),
    ),
    "device_timing": Setting(
        "OTEL_INFER_DEVICE_TIMING",
        "auto",
        "time GPUs by events on their streams, in some 0.3 % of the time: `auto`; `off`: the host's clock alone",
        _choice_parser("auto", "off"),
    ),
    "gpu_metrics": Setting(
        "OTEL_INFER_GPU_METRICS",
        "on",
        "the state of NVIDIA GPUs every 5 s, as NVML has it: `on`, `off`",
        _parse_bool,
    ),
    "step_budget": Setting(
        "OTEL_INFER_STEP_BUDGET", "2000", "decode-step spans a second and server, in `auto`", _parse_count
    ),
    "budget": Setting(
        "OTEL_INFER_BUDGET",
        "cpu=25%,memory=256MiB",
        "what the sidecar may take, of one core and of memory: above it, it makes fewer step spans",
        _validated_text(governor.parse_budget),
    ),
    "slo": Setting(
        "OTEL_INFER_SLO",
        "",
        "what a request may take at most: `ttft=1s,itl=200ms,tpot=50ms,e2e=30s,queue=500ms`, for a model or route apart "
        "after `;`: `model:NAME ttft=3s`; the steps of one that took longer are kept. Who ended waiting for a token has waited so "
        "long; who was stopped by its client has no `e2e`",
        _validated_text(objectives.parse_objectives),
    ),
    "slow_percent": Setting(
        "OTEL_INFER_SLOW_PERCENT",
        "5",
        "of the requests of each size, so many percent count as slow, and their steps are kept; `0`: none",
        _parse_percent,
    ),
    "keep_unsampled": Setting(
        "OTEL_INFER_KEEP_UNSAMPLED",
        "off",
        "export requests whose context says not sampled, marked `infer.unsampled`; a `tracer_provider` of one's own keeps to its sampler",
        _parse_bool,
    ),
    "rings": Setting(
        "OTEL_INFER_RINGS",
        "",
        "folder on tmpfs for the shared memory of one server; by default a private one under /dev/shm",
        _parse_path,
    ),
    "console": Setting("OTEL_INFER_CONSOLE", "off", "print one line for each finished request", _parse_bool),
    "request_log": Setting(
        "OTEL_INFER_REQUEST_LOG",
        "",
        "file, or `stderr`: one JSON line for each request that is kept for a reason of its own, with its trace id, stages and "
        "where its time went; at most 10 a second",
        _parse_log_target,
    ),
    "tape": Setting(
        "OTEL_INFER_TAPE",
        "",
        "file to save all facts to, for `otel-infer replay`; one that is there already is kept beside it, numbered",
        _parse_path,
    ),
    "dump_on_slo": Setting(
        "OTEL_INFER_DUMP_ON_SLO",
        "",
        "folder: when 3 requests miss objectives (`OTEL_INFER_SLO`) within 10 s, the sidecar writes a tape of the last 120 s "
        "into it; at most one a minute, of a breach that lasts ever fewer, and the newest 20 stay",
        _parse_path,
    ),
    "dump_port": Setting(
        "OTEL_INFER_DUMP_PORT",
        "",
        "port, on loopback unless it is ADDRESS:PORT: `POST /dump`, by an Alertmanager say, has the sidecar write such a tape",
        _parse_address,
    ),
    "metrics_port": Setting(
        "OTEL_INFER_METRICS_PORT",
        "",
        "port, on loopback unless it is ADDRESS:PORT: `GET /metrics`, for Prometheus to scrape: the same names and labels as over "
        "OTLP, with exemplars; one server a port; not beside metrics over OTLP that are `delta`, `lowmemory` or exponential",
        _parse_address,
    ),
    "integrations": Setting(
        "OTEL_INFER_INTEGRATIONS",
        "",
        "comma-separated: only these integrations; by default all that are found",
        _parse_names,
    ),
    "latency_attributes": Setting(
        "OTEL_INFER_LATENCY_ATTRIBUTES",
        "off",
        "also put the `gen_ai.latency.*` attributes of vLLM and SGLang on the request span, with vLLM's meaning",
        _parse_bool,
    ),
    "response_headers": Setting(
        "OTEL_INFER_RESPONSE_HEADERS",
        "off",
        "tell HTTP clients in the response: `traceresponse` (ids of the trace and of the server's span) and `Server-Timing` "
        "(ms from arrival to response start), which `otel_infer.instrumentation.httpx` reads",
        _parse_bool,
    ),
    "tenant": Setting(
        "OTEL_INFER_TENANT",
        "",
        "whose a request is, as `infer.tenant`: `header:NAME` of the HTTP request (or of `otel_infer.request`), `baggage:KEY`, or `lora`, the adapter's "
        "name (vLLM's); cut to 64 characters",
        _validated_text(tenancy.parse_tenant_source),
    ),
    "tenant_hash_key": Setting(
        "OTEL_INFER_TENANT_HASH_KEY",
        "",
        "any secret text: instead of a tenant's name, its hash with this key (16 hex digits) is written, everywhere",
        str,
    ),
    "tenants": Setting(
        "OTEL_INFER_TENANTS",
        "",
        "comma-separated, at most 50: the tenants that metrics name; every other is `_OTHER`. With a hash key their names "
        "are written here all the same, and metrics have the hashes",
        tenancy.parse_tenants,
    ),
    "traffic_class": Setting(
        "OTEL_INFER_TRAFFIC_CLASS",
        "",
        "which requests are `batch` and which `interactive`, as `infer.traffic.class`: `header:NAME` says one of the two, "
        "and without it `route:/v1/batches=batch` does (that path and below, `{…}` is any one segment; the first that fits); "
        "comma-separated; whatever else is `interactive`",
        _validated_text(tenancy.parse_traffic_rules),
    ),
    "log": Setting(
        "OTEL_INFER_LOG", "", "file for what the sidecar has to say; by default it is silent", _parse_path
    ),
}
"""Field of `Config` → its variable. The table in the docs is generated from this."""
