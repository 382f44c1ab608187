"""The startup message: destinations without credentials, because logs have many readers."""

from __future__ import annotations

import pytest

from otel_infer._bootstrap import startup_message
from otel_infer.config import environment


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("https://user:SECRET@otlp.vendor.io/v1", "OTLP to https://otlp.vendor.io/v1 ("),
        ("https://otlp.vendor.io:4318/?api-key=SECRET", "OTLP to https://otlp.vendor.io:4318/ ("),
        ("http://localhost:4318", "OTLP to http://localhost:4318 ("),
    ],
)
def test_endpoint_is_logged_without_credentials(endpoint: str, expected: str) -> None:
    settings = environment.from_env({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
    line = startup_message.format_message(settings, [], False, "")
    assert expected in line
    assert "SECRET" not in line


def test_different_destinations_are_both_named() -> None:
    """A variable of one signal leaves the other signal at the SDK's default destination."""
    settings = environment.from_env(
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://mimir:9009/otlp/v1/metrics"}
    )
    line = startup_message.format_message(settings, [], False, "")
    assert (
        "OTLP: spans to localhost (http/protobuf), metrics to http://mimir:9009/otlp/v1/metrics (http/protobuf)"
        in line
    )


def test_disabled_signal_is_not_mentioned() -> None:
    settings = environment.from_env(
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://tempo:4318/v1/traces", "OTEL_METRICS_EXPORTER": "none"}
    )
    assert "OTLP to http://tempo:4318/v1/traces (http/protobuf) ·" in startup_message.format_message(
        settings, [], False, ""
    )
