"""Settings: read once, named when they are bad, and never the end of somebody's server."""

from __future__ import annotations

import os
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


def test_defaults_are_those_of_the_table() -> None:
    written = {setting.variable: setting.default for setting in SETTINGS.values()}
    assert from_env({}) == Config()
    assert from_env({name: default for name, default in written.items() if default}) == Config()


@pytest.mark.parametrize(
    ("said", "taken"), [("off", ""), ("STDERR", "stderr"), ("/var/log/a.jsonl", "/var/log/a.jsonl")]
)
def test_the_log_of_requests_goes_to_a_file_or_to_where_the_server_says_things(said: str, taken: str) -> None:
    settings = from_env({"OTEL_INFER_REQUEST_LOG": said})
    assert settings.request_log == taken and settings.exports is bool(taken)


def test_every_setting_is_either_checked_or_free_text() -> None:
    ours = {setting.variable for setting in SETTINGS.values()}
    assert ours == {name for name in (*BAD, *ACCEPTS_ANYTHING) if name.startswith("OTEL_INFER_")}


@pytest.mark.parametrize("variable", BAD)
def test_a_bad_value_names_the_variable_the_value_and_what_is_accepted(variable: str) -> None:
    value, accepted = BAD[variable]
    with pytest.raises(InvalidSetting) as bad:
        from_env({variable: value})
    assert str(bad.value).startswith(f"{variable}={value!r}: expected {accepted}")


@pytest.mark.parametrize("variable", BAD)
def test_in_the_users_server_a_bad_value_is_said_and_the_default_is_used(variable: str) -> None:
    settings, complaints = from_env_or_defaults({variable: BAD[variable][0], **ENDPOINT})
    assert settings == from_env(ENDPOINT)
    (complaint,) = complaints
    assert variable in complaint
    assert complaint.endswith("using the default")


def test_all_bad_values_are_said_at_once_and_the_good_ones_are_used() -> None:
    bad = {variable: value for variable, (value, _) in BAD.items()}
    settings, complaints = from_env_or_defaults({**bad, "OTEL_INFER_TAPE": "/tmp/a"})
    assert len(complaints) == len(BAD)
    assert settings == Config(tape="/tmp/a")


def test_surrounding_blanks_case_and_empty_values_mean_nothing() -> None:
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
def test_what_is_sent_follows_from_the_standard_variables(
    environ: dict[str, str], spans: bool, metrics: bool
) -> None:
    settings = from_env(environ)
    assert (settings.exports_spans, settings.exports_metrics) == (spans, metrics)
    assert settings.exports == (spans or metrics)


def test_a_console_or_a_tape_records_without_sending() -> None:
    for environ in (
        {"OTEL_INFER_CONSOLE": "on"},
        {"OTEL_INFER_TAPE": "/tmp/a.tape"},
        {"OTEL_INFER_DUMP_ON_SLO": "/tmp/tapes"},
    ):
        settings = from_env(environ)
        assert settings.exports
        assert not settings.exports_spans
        assert not settings.exports_metrics


def test_a_signals_own_variables_go_before_the_general_ones() -> None:
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
def test_the_service_name_is_the_users(environ: dict[str, str], name: str) -> None:
    assert from_env(environ).service_name == name


def test_paths_are_those_of_where_the_server_was_started() -> None:
    settings = from_env({"OTEL_INFER_TAPE": "a.tape", "OTEL_INFER_LOG": "log", "OTEL_INFER_RINGS": "rings"})
    assert settings.tape == os.path.join(os.getcwd(), "a.tape")
    assert settings.log == os.path.join(os.getcwd(), "log")
    assert settings.rings == os.path.join(os.getcwd(), "rings")


def test_a_configuration_is_frozen_and_survives_the_way_to_the_sidecar() -> None:
    import json

    settings = from_env({"OTEL_INFER_INTEGRATIONS": "asgi, torch", **ENDPOINT})
    with pytest.raises(FrozenInstanceError):
        settings.mode = "sidecar"  # type: ignore[misc]
    assert environment.from_json_dict(json.loads(json.dumps(asdict(settings)))) == settings


def test_what_was_exported_for_children_is_taken_back_only_if_it_is_still_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_INFER_RINGS", "")
    environment.export_to_children(rings="/dev/shm/ours")
    environment.unset_ringbuffer_dir("/dev/shm/ours")
    assert "OTEL_INFER_RINGS" not in os.environ
    monkeypatch.setenv("OTEL_INFER_RINGS", "/dev/shm/theirs")
    environment.unset_ringbuffer_dir("/dev/shm/ours")
    assert os.environ["OTEL_INFER_RINGS"] == "/dev/shm/theirs"


def test_the_sidecars_environment_injects_and_instruments_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert environment.sidecar_environment()["MALLOC_TRIM_THRESHOLD_"] == "4096", "whoever says so knows why"
    assert not environment.is_sidecar()
    monkeypatch.setenv(environment.SIDECAR_GUARD, "1")
    assert environment.is_sidecar()


def test_a_certificate_is_looked_for_where_the_server_was_started(
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


def test_with_a_hash_key_the_tenants_that_metrics_may_name_are_hashes() -> None:
    listed = {"OTEL_INFER_TENANTS": "acme, umbrella"}
    assert from_env(listed).tenants == ("acme", "umbrella")
    hashed = from_env({**listed, "OTEL_INFER_TENANT_HASH_KEY": "secret"}).tenants
    assert hashed == tuple(
        tenancy.sanitize_tenant(name, tenancy.derive_hash_key("secret")) for name in ("acme", "umbrella")
    )


def test_the_hash_key_stays_in_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_port_of_the_webhook_may_have_an_address(accepted: str) -> None:
    assert from_env({"OTEL_INFER_DUMP_PORT": accepted}).dump_port == accepted


def test_a_port_to_scrape_is_a_reason_to_record_and_none_to_send() -> None:
    settings = from_env({"OTEL_INFER_METRICS_PORT": "9466"})
    assert (settings.exports, settings.exports_spans, settings.exports_metrics) == (True, False, False)
    assert from_env({"OTEL_INFER_METRICS_PORT": "9466", "OTEL_SDK_DISABLED": "true"}).scrape_address == ""


WANTS_DELTA = {
    "OTEL_INFER_METRICS_PORT": "9466",
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta",
    "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram",
}


def test_what_otlp_would_have_otherwise_cannot_be_scraped_and_that_is_said() -> None:
    settings = from_env(WANTS_DELTA)  # nothing leaves over OTLP
    assert (settings.temporality, settings.exponential_histograms) == ("cumulative", False)
    sends = {**WANTS_DELTA, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://there"}
    with pytest.raises(InvalidSetting, match="OTEL_INFER_METRICS_PORT='9466': expected cumulative sums"):
        from_env(sends)
    settings, complaints = from_env_or_defaults(sends)
    assert (settings.scrape_address, settings.temporality, settings.exponential_histograms) == (
        "",
        "delta",
        True,
    )
    assert complaints[0].endswith("nothing can be scraped")


@pytest.mark.parametrize("refused", ["0", "65536", "port", ":9465", "localhost", "9465:"])
def test_what_is_no_port_of_the_webhook_is_refused(refused: str) -> None:
    with pytest.raises(InvalidSetting, match="a port, or ADDRESS:PORT"):
        from_env({"OTEL_INFER_DUMP_PORT": refused})
