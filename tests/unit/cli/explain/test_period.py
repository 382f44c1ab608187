"""Requests are selected by the time of their arrival."""

from __future__ import annotations

import argparse
from datetime import datetime, time, timedelta
from typing import Any

import pytest

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli.errors import CommandError
from otel_infer.cli.explain.period import Period, parse_time, read_period, select_requests

NOON = datetime(2026, 7, 30, 12, 0, 0).astimezone()


def make_requests(*seconds: float) -> list[RequestRecord]:
    """Returns requests that arrived so long after noon and took 0.1 s."""
    wall_offset = round(NOON.timestamp() * 1e9)
    ids = dict.fromkeys(("trace_id", "span_id", "parent_span_id", "server_span_id"), b"")
    names: dict[str, Any] = dict.fromkeys(("name", "operation", "provider", "model", "engine"), "")
    return [
        RequestRecord(
            **ids, **names, sampled=True, remote_parent=False,
            arrived_at=round(at * 1e9), ended_at=round((at + 0.1) * 1e9), wall_offset=wall_offset,
        )
        for at in seconds
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("14:05", time(14, 5)),
        ("14:05:30", time(14, 5, 30)),
        ("2026-07-30T12:00:00", NOON),
        (NOON.isoformat(), NOON),
    ],
)
def test_a_time_is_a_time_of_day_or_an_instant(text: str, parsed: time | datetime) -> None:
    assert parse_time(text) == parsed


def test_what_is_no_time_names_the_forms() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'noon' is no time: write 14:05, 14:05:30 or"):
        parse_time("noon")


def test_a_period_selects_requests_of_one_tape() -> None:
    arguments = argparse.Namespace(since=time(14, 5), until=None, against="before.tape")
    with pytest.raises(CommandError, match="cannot be combined with --against"):
        read_period(arguments)
    arguments.against = None
    assert read_period(arguments) == Period(time(14, 5))


def test_bounds_are_those_of_arrivals() -> None:
    requests = make_requests(0, 30, 60, 90)
    bounds = Period(since=time(12, 0, 30), until=NOON + timedelta(seconds=90))
    assert select_requests(requests, bounds) == requests[1:3]
    assert select_requests(requests, Period()) == requests


def test_a_time_of_day_after_the_last_request_is_that_of_the_day_before() -> None:
    requests = make_requests(0, 60)
    assert select_requests(requests, Period(since=time(23, 0))) == requests


def test_a_period_without_requests_is_an_error() -> None:
    with pytest.raises(CommandError, match="there are 2 from 2026-07-30 12:00:00 to 12:01:00"):
        select_requests(make_requests(0, 60), Period(until=time(11, 0)))
    assert select_requests([], Period(until=time(11, 0))) == []
