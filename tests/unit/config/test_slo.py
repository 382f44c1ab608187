"""Service level objectives, parsed from text."""

from __future__ import annotations

import pytest

from otel_infer.config.slo import Objectives, parse_objectives

MS = 1_000_000


def test_objective_applies_to_every_request() -> None:
    objectives = parse_objectives("ttft=1s,itl=200ms,e2e=1.5m,queue=500us")
    assert objectives.find_missed("any", "/any", {"ttft": 1000 * MS, "itl": 200 * MS}) == ()
    assert objectives.find_missed("any", "/any", {"itl": 200 * MS + 1, "e2e": 90_001 * MS}) == ("itl", "e2e")
    assert objectives.find_missed("any", "/any", {"queue": MS}) == ("queue",)


def test_specific_section_overrides_the_general_one() -> None:
    objectives = parse_objectives("model:large ttft=5s; ttft=1s,e2e=10s; route:/v1/embeddings e2e=100ms")
    assert objectives.find_missed("large", "", {"ttft": 3000 * MS, "e2e": 11_000 * MS}) == ("e2e",)
    assert objectives.find_missed("small", "", {"ttft": 3000 * MS}) == ("ttft",)
    assert objectives.find_missed("small", "/v1/embeddings", {"e2e": 101 * MS}) == ("e2e",)


def test_section_with_model_and_route_needs_both() -> None:
    objectives = parse_objectives("model:large route:/chat ttft=1ms")
    assert objectives.find_missed("large", "/chat", {"ttft": 2 * MS}) == ("ttft",)
    assert objectives.find_missed("large", "/other", {"ttft": 2 * MS}) == ()


def test_absent_measurement_is_not_missed() -> None:
    assert parse_objectives("ttft=1ms,itl=1ms,tpot=1ms").find_missed("", "", {}) == ()


def test_default_has_no_objectives() -> None:
    assert parse_objectives(" ; ") == Objectives() == parse_objectives("")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=1", "in us, ms, s, m"),
        ("speed=1s", "of ttft, itl, tpot, e2e, queue"),
        ("ttft", "like ttft=1s"),
        ("tenant:big ttft=1s", "model:NAME or route:PATH"),
        ("model: ttft=1s", "model:NAME"),
    ],
)
def test_parse_error_names_the_accepted_format(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_objectives(text)
