"""The line that a server says of us goes into logs that many read."""

from __future__ import annotations

import pytest

from otel_infer import config, greeting


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("https://user:SECRET@otlp.vendor.io/v1", "OTLP to https://otlp.vendor.io/v1 ("),
        ("https://otlp.vendor.io:4318/?api-key=SECRET", "OTLP to https://otlp.vendor.io:4318/ ("),
        ("http://localhost:4318", "OTLP to http://localhost:4318 ("),
    ],
)
def test_an_endpoint_is_named_without_its_credentials(endpoint: str, said: str) -> None:
    settings = config.from_env({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
    line = greeting.line(settings, [], False, "")
    assert said in line
    assert "SECRET" not in line
