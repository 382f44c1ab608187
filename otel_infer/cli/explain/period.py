"""The period of the requests to explain: `--since` and `--until`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime, time, timedelta
from typing import NamedTuple

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli.errors import CommandError


class Period(NamedTuple):
    """The bounds of arrivals, each a time of day, an instant, or none."""

    since: time | datetime | None = None
    until: time | datetime | None = None


ALWAYS = Period()


def read_period(arguments: argparse.Namespace) -> Period:
    """Returns the period that the options of `add_arguments` name. Raises `CommandError` beside `--against`."""
    period = Period(arguments.since, arguments.until)
    if arguments.against and period != ALWAYS:
        raise CommandError(
            "--since and --until select requests of one tape, so they cannot be combined with --against"
        )
    return period


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "--since", type=parse_time, metavar="TIME",
        help="only requests that arrived at 14:05, 14:05:30 or 2026-11-27T14:05:30 (local time) or later",
    )  # fmt: skip
    parser.add_argument(
        "--until", type=parse_time, metavar="TIME", help="only requests that arrived before this time"
    )


def parse_time(text: str) -> time | datetime:
    """Returns a time of day or an instant with its zone. Raises `argparse.ArgumentTypeError`."""
    for parse in (time.fromisoformat, datetime.fromisoformat):
        try:
            parsed = parse(text)
        except ValueError:
            continue
        return parsed.astimezone() if isinstance(parsed, datetime) else parsed
    raise argparse.ArgumentTypeError(f"{text!r} is no time: write 14:05, 14:05:30 or 2026-11-27T14:05:30")


def select_requests(records: Sequence[RequestRecord], period: Period) -> list[RequestRecord]:
    """Returns the requests that arrived in the period. Raises `CommandError` if there are requests, but none did."""
    if not records or period == ALWAYS:
        return list(records)
    last = max(record.ended_at + record.wall_offset for record in records)
    since, until = (_to_unix_ns(bound, last) for bound in period)
    selected = [
        record
        for record in records
        if (since is None or record.arrived_at + record.wall_offset >= since)
        and (until is None or record.arrived_at + record.wall_offset < until)
    ]
    if not selected:
        first = min(record.arrived_at + record.wall_offset for record in records)
        begin, end = (datetime.fromtimestamp(at / 1e9).astimezone() for at in (first, last))
        raise CommandError(
            f"no request arrived in this period; there are {len(records)} from {begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S}"
        )
    return selected


def _to_unix_ns(bound: time | datetime | None, last: int) -> int | None:
    """Returns an instant. A time of day is the latest one that is not after the last request."""
    if bound is None:
        return None
    if isinstance(bound, time):
        ended = datetime.fromtimestamp(last / 1e9).astimezone()
        bound = datetime.combine(ended.date(), bound, bound.tzinfo or ended.tzinfo)
        if bound > ended:
            bound -= timedelta(days=1)
    return round(bound.timestamp() * 1e9)
