"""OpenTelemetry's warnings about a caller's headers do not quote them."""

from __future__ import annotations

import logging

import pytest
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator

from otel_infer.tracing import context, propagator_warnings

CANARY = "canary-77c1"
BAD_HEADERS = [
    {"baggage": f"{CANARY}"},
    {"baggage": f"{CANARY}" * 2000},
    {"baggage": f"a=b,{CANARY};c,=x"},
    {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": f"{CANARY} x=1"},
    {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": f"a=1,a={CANARY}"},
    {"traceparent": CANARY, "tracestate": f"A{CANARY}=1"},
]


class _Loud:
    """A propagator of another distribution, which quotes what it reads."""

    fields = frozenset(("x-loud",))

    def extract(self, carrier: dict[str, str], context: Context, getter: object = None) -> Context:
        logging.getLogger(__name__).warning("bad header %s", carrier)
        return context


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagator_warnings, "_logged", set())


@pytest.mark.parametrize("headers", BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_no_header_is_logged(caplog: pytest.LogCaptureFixture, headers: dict[str, str]) -> None:
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            context.extract(headers, Context())
    assert CANARY not in caplog.text
    assert len(caplog.records) <= 1


def test_the_first_warning_of_a_logger_stays(caplog: pytest.LogCaptureFixture) -> None:
    context.extract(BAD_HEADERS[0], Context())
    assert "header was rejected" in caplog.text


def test_other_propagators_are_covered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    propagator = CompositePropagator([_Loud()])  # type: ignore[list-item]
    monkeypatch.setattr(propagate, "get_global_textmap", lambda: propagator)
    context.extract({"x-loud": CANARY}, Context())
    assert "header was rejected" in caplog.text
    assert CANARY not in caplog.text


def test_calls_of_other_libraries_are_logged_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    context.extract(BAD_HEADERS[0], Context())
    propagate.extract(BAD_HEADERS[0])
    assert CANARY in caplog.text
