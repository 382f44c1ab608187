"""What the operator promises: how long a request may take at most, by model and route. Pure text in, comparisons out.

    ttft=1s,itl=200ms; model:llama-70b ttft=3s; route:/v1/embeddings e2e=500ms

A section without a selector holds for all requests; of a section that names a model or a route, what it says goes before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

TTFT, ITL, TPOT, E2E, QUEUE = NAMES = ("ttft", "itl", "tpot", "e2e", "queue")
"""Arrival to first token; the longest gap between tokens; their mean; arrival to last byte; time in both queues."""
_UNITS = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m)")
_SELECTORS = ("model", "route")


class Section(NamedTuple):
    """Limits in ns by objective, for the requests with this model or route; both empty: for all."""

    model: str
    route: str
    limits: Mapping[str, int]

    def is_about(self, model: str, route: str) -> bool:
        return self.model in ("", model) and self.route in ("", route)


class Objectives(NamedTuple):
    """The sections as written."""

    sections: tuple[Section, ...] = ()

    def missed(self, model: str, route: str, lengths: Mapping[str, int]) -> tuple[str, ...]:
        """Which objectives a request with these lengths (ns) has missed; one that it does not have is not missed."""
        limits: dict[str, int] = {}
        for section in sorted(self.sections, key=lambda section: bool(section.model) + bool(section.route)):
            if section.is_about(model, route):
                limits.update(section.limits)
        return tuple(name for name in NAMES if name in limits and lengths.get(name, 0) > limits[name])


def parse(text: str) -> Objectives:
    """The objectives in a setting; raises `ValueError` with what is accepted."""
    return Objectives(tuple(_section(part) for part in text.split(";") if part.strip()))


def _section(text: str) -> Section:
    *selectors, limits = text.split()
    chosen = dict.fromkeys(_SELECTORS, "")
    for selector in selectors:
        kind, _, name = selector.partition(":")
        if kind not in chosen or not name:
            raise ValueError(f"model:NAME or route:PATH before the limits, not {selector!r}")
        chosen[kind] = name
    return Section(chosen["model"], chosen["route"], dict(_limit(one) for one in limits.split(",") if one))


def _limit(text: str) -> tuple[str, int]:
    name, _, length = text.partition("=")
    found = _LENGTH.fullmatch(length)
    if name not in NAMES or found is None:
        raise ValueError(f"like ttft=1s,itl=200ms (of {', '.join(NAMES)}; in us, ms, s, m), not {text!r}")
    return name, round(float(found[1]) * _UNITS[found[2]])
