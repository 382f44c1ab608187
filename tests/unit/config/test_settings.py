"""Settings: read once, reported when invalid, and never fatal to the user's server."""

from __future__ import annotations

import os
import re
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest

from otel_infer.config import environment, tenancy
from otel_infer.config.environment import Config, from_env, from_env_or_defaults
from otel_infer.config.settings import SETTINGS, InvalidSetting

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}

BAD = {
    "OTEL_INFER_ENABLED": ("perhaps", "one of auto, on, off"),
    "OTEL_INFER_MODE": ("thread", "one of auto, sidecar, in-process"),
    "OTEL_INFER_STEPS": ("few", "one of all, auto, off"),
    "OTEL_INFER_DUMP_PORT": ("localhost:", "a port, or ADDRESS:PORT"),
    "OTEL_INFER_DEVICE_TIMING": ("on", "one of auto, off"),
    "OTEL_INFER_NATIVE": ("maybe", "on or off"),
    "OTEL_INFER_STACKS": ("maybe", "on or off"),
    "OTEL_INFER_GPU_METRICS": ("all", "on or off"),
    "OTEL_INFER_STEP_BUDGET": ("-1", "a whole number, 0 or more"),
    "OTEL_INFER_BUDGET": ("much", "like cpu=25%,memory=256MiB"),
    "OTEL_INFER_SLO": ("ttft=fast", "like ttft=1s,itl=200ms"),
    "OTEL_INFER_METRICS_PORT": ("metrics", "a port, or ADDRESS:PORT"),
    "OTEL_INFER_SLOW_PERCENT": ("101", "a whole number from 0 to 100"),
    "OTEL_INFER_KEEP_UNSAMPLED": ("2", "on or off"),
    "OTEL_INFER_CONSOLE": ("tty", "on or off"),
    "OTEL_INFER_LATENCY_ATTRIBUTES": ("vllm", "on or off"),
    "OTEL_INFER_RESPONSE_HEADERS": ("loud", "on or off"),
    "OTEL_INFER_TENANT": ("X-Tenant", "header:NAME, baggage:KEY or lora"),
    "OTEL_INFER_TENANTS": (",".join(map(str, range(51))), "at most 50 names"),
    "OTEL_INFER_TRAFFIC_CLASS": ("X-Class", "header:NAME and route:/PATH=interactive or route:/PATH=batch"),
    "OTEL_EXPORTER_OTLP_PROTOCOL": ("http/json", "one of http/protobuf, grpc"),
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": ("udp", "one of http/protobuf, grpc"),
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": ("udp", "one of http/protobuf, grpc"),
    "OTEL_METRIC_EXPORT_INTERVAL": ("0", "a whole number of milliseconds, 1 or more"),
    "OTEL_ATTRIBUTE_COUNT_LIMIT": ("-1", "a whole number, 0 or more"),
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": ("unlimited", "a whole number, 0 or more"),
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": ("1e3", "a whole number, 0 or more"),
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": ("-5", "a whole number, 0 or more"),
    "OTEL_SPAN_EVENT_COUNT_LIMIT": ("-1", "a whole number, 0 or more"),
    "OTEL_SPAN_LINK_COUNT_LIMIT": ("many", "a whole number, 0 or more"),
    "OTEL_EXPORTER_OTLP_COMPRESSION": ("zstd", "one of gzip, none, deflate"),
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": ("br", "one of gzip, none, deflate"),
    "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": ("br", "one of gzip, none, deflate"),
    "OTEL_EXPORTER_OTLP_TIMEOUT": ("10s", "a number of seconds above 0"),
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": ("inf", "a number of seconds above 0"),
    "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": ("0", "a number of seconds above 0"),
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": ("deltaa", "one of cumulative, delta, lowmemory"),
}
ACCEPTS_ANYTHING = {
    "OTEL_INFER_RINGS",
    "OTEL_INFER_TAPE",
    "OTEL_INFER_DUMP_ON_SLO",
    "OTEL_INFER_INTEGRATIONS",
    "OTEL_INFER_LOG",
    "OTEL_INFER_REQUEST_LOG",
    "OTEL_INFER_TENANT_HASH_KEY",
}


def test_defaults_match_the_settings_table() -> None:
    written = {setting.variable: setting.default for setting in SETTINGS.values()}
    assert from_env({}) == Config()
    assert from_env({name: default for name, default in written.items() if default}) == Config()


@pytest.mark.parametrize(
    ("value", "expected"), [("off", ""), ("STDERR", "stderr"), ("/var/log/a.jsonl", "/var/log/a.jsonl")]
)
def test_request_log_is_a_file_or_stderr(value: str, expected: str) -> None:
    settings = from_env({"OTEL_INFER_REQUEST_LOG": value})
    assert settings.request_log == expected and settings.exports is bool(expected)


def test_each_setting_is_checked_or_free_text() -> None:
    ours = {setting.variable for setting in SETTINGS.values()}
    assert ours == {name for name in (*BAD, *ACCEPTS_ANYTHING) if name.startswith("OTEL_INFER_")}


@pytest.mark.parametrize("variable", BAD)
def test_invalid_value_error_names_variable_value_and_format(variable: str) -> None:
    value, accepted = BAD[variable]
    with pytest.raises(InvalidSetting) as bad:
        from_env({variable: value})
    assert str(bad.value).startswith(f"{variable}={value!r}: expected {accepted}")


@pytest.mark.parametrize("variable", BAD)
def test_invalid_value_in_a_server_uses_the_default(variable: str) -> None:
    settings, errors = from_env_or_defaults({variable: BAD[variable][0], **ENDPOINT})
    assert settings == from_env(ENDPOINT)
    (error,) = errors
    assert variable in error
    assert "default" in error


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "grpc://host:4317"}, "http://host:4317 or https://host:4317"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"},
            "http://localhost:4318 or https://localhost:4318",
        ),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "host"}, "or OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc"),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "5"},
            "OTEL_TRACES_SAMPLER_ARG='5': expected a number from 0 to 1",
        ),
    ],
    ids=["grpc scheme", "no scheme", "traces only", "ratio"],
)
def test_standard_values_that_depend_on_others_are_checked(environ: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(expected)):
        from_env(environ)
    settings, (message,) = from_env_or_defaults(environ)
    assert expected in message
    assert not settings.exports_spans
    assert from_env({**environ, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_TRACES_SAMPLER": "always_on"})


def test_an_invalid_metrics_endpoint_disables_metrics_only() -> None:
    environ = {**ENDPOINT, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "collector"}
    settings, (message,) = from_env_or_defaults(environ)
    assert message.endswith("nothing is sent there")
    assert (True, False) == (settings.exports_spans, settings.exports_metrics)


@pytest.mark.parametrize(
    ("variable", "value", "instead"),
    [
        ("OTEL_TRACES_EXPORTER", "console", "set OTEL_INFER_CONSOLE=on"),
        ("OTEL_METRICS_EXPORTER", "otlp,prometheus", "set OTEL_INFER_METRICS_PORT=9464"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "only otlp and none"),
        ("OTEL_TRACES_SAMPLER", "xray", "using parentbased_always_on"),
    ],
)
def test_values_for_other_sdks_are_reported_and_not_refused(variable: str, value: str, instead: str) -> None:
    environ = {**ENDPOINT, variable: value}
    settings, (message,) = from_env_or_defaults(environ)
    assert variable in message
    assert instead in message
    assert settings == from_env(environ)


def test_the_sidecar_does_not_inherit_refused_standard_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporters read the environment at their start, and raise."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10s")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    environ = environment.sidecar_environment()
    assert "OTEL_EXPORTER_OTLP_TIMEOUT" not in environ
    assert environ["OTEL_EXPORTER_OTLP_COMPRESSION"] == "gzip"


def test_all_invalid_values_are_reported_at_once() -> None:
    bad = {variable: value for variable, (value, _) in BAD.items()}
    settings, errors = from_env_or_defaults({**bad, "OTEL_INFER_TAPE": "/tmp/a"})
    assert len(errors) == len(BAD)
    assert settings == Config(tape="/tmp/a")


def test_blanks_case_and_empty_values_are_ignored() -> None:
    settings = from_env(
        {"OTEL_INFER_STEPS": "  ALL ", "OTEL_INFER_STEP_BUDGET": "", "OTEL_INFER_CONSOLE": " "}
    )
    assert settings == Config(steps="all")
    assert from_env({"OTEL_EXPORTER_OTLP_PROTOCOL": "GRPC"}).traces_protocol == "grpc"


@pytest.mark.parametrize(
    ("environ", "spans", "metrics"),
    [
        ({}, False, False),
        (ENDPOINT, True, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}, True, True),
        ({"OTEL_INFER_ENABLED": "on"}, True, True),
        ({"OTEL_INFER_ENABLED": "1"}, True, True),
        ({"OTEL_INFER_ENABLED": "off", **ENDPOINT}, False, False),
        ({"OTEL_INFER_ENABLED": "off", "OTEL_INFER_CONSOLE": "on"}, False, False),
        ({"OTEL_SDK_DISABLED": "true", **ENDPOINT}, False, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_INFER_ENABLED": "on"}, False, False),
        ({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "otel_infer", **ENDPOINT}, False, False),
        ({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "flask, *", **ENDPOINT}, False, False),
        ({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "otel_infer_asgi", **ENDPOINT}, True, True),
        ({"OTEL_TRACES_EXPORTER": "none", **ENDPOINT}, False, True),
        ({"OTEL_METRICS_EXPORTER": "none", **ENDPOINT}, True, False),
        ({"OTEL_TRACES_EXPORTER": "console,otlp", **ENDPOINT}, True, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none", **ENDPOINT}, False, False),
    ],
)
def test_exported_signals_follow_the_standard_variables(
    environ: dict[str, str], spans: bool, metrics: bool
) -> None:
    settings = from_env(environ)
    assert (settings.exports_spans, settings.exports_metrics) == (spans, metrics)
    assert settings.exports == (spans or metrics)


def test_console_or_recording_records_without_exporting() -> None:
    for environ in (
        {"OTEL_INFER_CONSOLE": "on"},
        {"OTEL_INFER_TAPE": "/tmp/a.tape"},
        {"OTEL_INFER_DUMP_ON_SLO": "/tmp/tapes"},
    ):
        settings = from_env(environ)
        assert settings.exports
        assert not settings.exports_spans
        assert not settings.exports_metrics


def test_signal_variables_override_general_ones() -> None:
    settings = from_env(
        {
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
            "OTEL_PYTHON_EXCLUDED_URLS": "health",
            "OTEL_PYTHON_OTEL_INFER_EXCLUDED_URLS": "metrics",
        }
    )
    assert (settings.traces_protocol, settings.metrics_protocol) == ("grpc", "http/protobuf")
    assert settings.excluded_urls == "metrics"


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        ({"OTEL_SERVICE_NAME": "chat"}, "chat"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=chat"}, "chat"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=other", "OTEL_SERVICE_NAME": "chat"}, "chat"),
    ],
)
def test_service_name_comes_from_the_standard_variables(environ: dict[str, str], name: str) -> None:
    assert from_env(environ).service_name == name


def test_paths_are_relative_to_the_working_directory() -> None:
    settings = from_env({"OTEL_INFER_TAPE": "a.tape", "OTEL_INFER_LOG": "log", "OTEL_INFER_RINGS": "rings"})
    assert settings.tape == os.path.join(os.getcwd(), "a.tape")
    assert settings.log == os.path.join(os.getcwd(), "log")
    assert settings.rings == os.path.join(os.getcwd(), "rings")


def test_config_is_frozen_and_serializable() -> None:
    import json

    settings = from_env({"OTEL_INFER_INTEGRATIONS": "asgi, torch", **ENDPOINT})
    with pytest.raises(FrozenInstanceError):
        settings.mode = "sidecar"  # type: ignore[misc]
    assert environment.from_json_dict(json.loads(json.dumps(asdict(settings)))) == settings


def test_only_our_exported_variables_are_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_INFER_RINGS", "")
    environment.export_to_children(rings="/dev/shm/ours")
    environment.unset_ringbuffer_dir("/dev/shm/ours")
    assert "OTEL_INFER_RINGS" not in os.environ
    monkeypatch.setenv("OTEL_INFER_RINGS", "/dev/shm/other")
    environment.unset_ringbuffer_dir("/dev/shm/ours")
    assert os.environ["OTEL_INFER_RINGS"] == "/dev/shm/other"


def test_sidecar_environment_injects_and_instruments_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    injected = ("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "PYTHONPATH")
    for name in injected:
        monkeypatch.setenv(name, "/somewhere")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
    environ = environment.sidecar_environment()
    assert not set(injected) & set(environ)
    assert environ["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=secret"
    assert (environ["OTEL_INFER_ENABLED"], environ["CUDA_VISIBLE_DEVICES"]) == ("off", "")
    assert environ["MALLOC_TRIM_THRESHOLD_"] == str(8 << 20)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    assert environment.sidecar_environment()["MALLOC_TRIM_THRESHOLD_"] == "4096", "the user's value is kept"
    assert not environment.is_sidecar()
    monkeypatch.setenv(environment.SIDECAR_GUARD, "1")
    assert environment.is_sidecar()


def test_certificate_paths_are_relative_to_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "certs/ca.pem")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "/etc/key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", "")
    environ = environment.sidecar_environment()
    assert environ["OTEL_EXPORTER_OTLP_CERTIFICATE"] == str(tmp_path / "certs/ca.pem")
    assert environ["OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY"] == "/etc/key.pem"
    assert environ["SSL_CERT_FILE"] == ""


def test_hash_key_hashes_the_listed_tenants() -> None:
    listed = {"OTEL_INFER_TENANTS": "acme, umbrella"}
    assert from_env(listed).tenants == ("acme", "umbrella")
    hashed = from_env({**listed, "OTEL_INFER_TENANT_HASH_KEY": "secret"}).tenants
    assert hashed == tuple(
        tenancy.sanitize_tenant(name, tenancy.derive_hash_key("secret")) for name in ("acme", "umbrella")
    )


def test_hash_key_stays_in_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_INFER_TENANT_HASH_KEY", "secret")
    monkeypatch.setenv("OTEL_INFER_TENANTS", "acme")
    settings = from_env()
    assert settings.tenant_hash_key == "secret"
    assert "secret" not in repr(settings)
    plain = environment.to_json_dict(settings)
    assert "secret" not in repr(plain)
    assert environment.from_json_dict(plain) == replace(settings, tenant_hash_key="")
    assert not {"secret", "acme"} & set(environment.sidecar_environment().values())


@pytest.mark.parametrize("accepted", ["9465", "0.0.0.0:9465", "[::1]:9465", "localhost:1"])
def test_dump_port_accepts_an_address(accepted: str) -> None:
    assert from_env({"OTEL_INFER_DUMP_PORT": accepted}).dump_port == accepted


def test_metrics_port_records_without_exporting() -> None:
    settings = from_env({"OTEL_INFER_METRICS_PORT": "9466"})
    assert (settings.exports, settings.exports_spans, settings.exports_metrics) == (True, False, False)
    assert from_env({"OTEL_INFER_METRICS_PORT": "9466", "OTEL_SDK_DISABLED": "true"}).scrape_address == ""


WANTS_DELTA = {
    "OTEL_INFER_METRICS_PORT": "9466",
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta",
    "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram",
}


def test_delta_or_exponential_otlp_disables_scraping() -> None:
    settings = from_env(WANTS_DELTA)  # no OTLP export
    assert (settings.temporality, settings.exponential_histograms) == ("cumulative", False)
    sends = {**WANTS_DELTA, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://there"}
    with pytest.raises(InvalidSetting, match="OTEL_INFER_METRICS_PORT='9466'"):
        from_env(sends)
    settings, errors = from_env_or_defaults(sends)
    assert (settings.scrape_address, settings.temporality, settings.exponential_histograms) == (
        "",
        "delta",
        True,
    )
    assert "scrape" in errors[0]


@pytest.mark.parametrize("refused", ["0", "65536", "port", ":9465", "localhost", "9465:"])
def test_invalid_dump_port_is_refused(refused: str) -> None:
    with pytest.raises(InvalidSetting, match="a port, or ADDRESS:PORT"):
        from_env({"OTEL_INFER_DUMP_PORT": refused})
