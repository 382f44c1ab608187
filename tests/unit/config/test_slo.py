"""What the operator promises, as text."""

from __future__ import annotations

import pytest

from otel_infer.config.slo import Objectives, parse_objectives

MS = 1_000_000


def test_a_limit_holds_for_every_request() -> None:
    promised = parse_objectives("ttft=1s,itl=200ms,e2e=1.5m,queue=500us")
    assert promised.find_missed("any", "/any", {"ttft": 1000 * MS, "itl": 200 * MS}) == ()
    assert promised.find_missed("any", "/any", {"itl": 200 * MS + 1, "e2e": 90_001 * MS}) == ("itl", "e2e")
    assert promised.find_missed("any", "/any", {"queue": MS}) == ("queue",)


def test_a_section_of_its_own_goes_before_what_holds_for_all_wherever_it_stands() -> None:
    promised = parse_objectives("model:large ttft=5s; ttft=1s,e2e=10s; route:/v1/embeddings e2e=100ms")
    assert promised.find_missed("large", "", {"ttft": 3000 * MS, "e2e": 11_000 * MS}) == ("e2e",)
    assert promised.find_missed("small", "", {"ttft": 3000 * MS}) == ("ttft",)
    assert promised.find_missed("small", "/v1/embeddings", {"e2e": 101 * MS}) == ("e2e",)


def test_of_one_that_names_a_model_and_a_route_both_have_to_be_right() -> None:
    promised = parse_objectives("model:large route:/chat ttft=1ms")
    assert promised.find_missed("large", "/chat", {"ttft": 2 * MS}) == ("ttft",)
    assert promised.find_missed("large", "/other", {"ttft": 2 * MS}) == ()


def test_what_a_request_does_not_have_is_not_missed() -> None:
    assert parse_objectives("ttft=1ms,itl=1ms,tpot=1ms").find_missed("", "", {}) == ()


def test_nothing_is_promised_by_default() -> None:
    assert parse_objectives(" ; ") == Objectives() == parse_objectives("")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft=1", "in us, ms, s, m"),
        ("speed=1s", "of ttft, itl, tpot, e2e, queue"),
        ("ttft", "like ttft=1s"),
        ("tenant:big ttft=1s", "model:NAME or route:PATH"),
        ("model: ttft=1s", "model:NAME"),
    ],
)
def test_what_is_not_understood_says_what_would_be(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_objectives(text)
