"""The line that a server says of us goes into logs that many read."""

from __future__ import annotations

import pytest

from otel_infer._bootstrap import startup_message
from otel_infer.config import environment


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("https://user:SECRET@otlp.vendor.io/v1", "OTLP to https://otlp.vendor.io/v1 ("),
        ("https://otlp.vendor.io:4318/?api-key=SECRET", "OTLP to https://otlp.vendor.io:4318/ ("),
        ("http://localhost:4318", "OTLP to http://localhost:4318 ("),
    ],
)
def test_an_endpoint_is_named_without_its_credentials(endpoint: str, said: str) -> None:
    settings = environment.from_env({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
    line = startup_message.format_message(settings, [], False, "")
    assert said in line
    assert "SECRET" not in line


def test_where_spans_and_metrics_go_apart_both_are_named() -> None:
    """A variable of one signal says nothing of the other, which goes to where the SDK sends by default."""
    settings = environment.from_env(
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://mimir:9009/otlp/v1/metrics"}
    )
    line = startup_message.format_message(settings, [], False, "")
    assert (
        "OTLP: spans to localhost (http/protobuf), metrics to http://mimir:9009/otlp/v1/metrics (http/protobuf)"
        in line
    )


def test_of_a_signal_that_is_not_sent_nothing_is_said() -> None:
    settings = environment.from_env(
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://tempo:4318/v1/traces", "OTEL_METRICS_EXPORTER": "none"}
    )
    assert "OTLP to http://tempo:4318/v1/traces (http/protobuf) ·" in startup_message.format_message(
        settings, [], False, ""
    )
