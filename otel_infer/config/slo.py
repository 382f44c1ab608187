"""Parses latency objectives by model and route, and finds the objectives that a request missed. Pure.

    ttft=1s,itl=200ms; model:llama-70b ttft=3s; route:/v1/embeddings e2e=500ms

A section without a selector applies to all requests. A section with a model or a route overrides it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

TTFT, ITL, TPOT, E2E, QUEUE = OBJECTIVE_NAMES = ("ttft", "itl", "tpot", "e2e", "queue")
"""Arrival to first token; longest gap between tokens; mean gap between tokens; arrival to last byte; time in
both queues.
"""
_UNITS = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m)")
_SELECTORS = ("model", "route")


class ObjectiveSection(NamedTuple):
    """Limits in ns by objective, for requests with this model and route; an empty name matches all."""

    model: str
    route: str
    limits: Mapping[str, int]

    def applies_to(self, model: str, route: str) -> bool:
        """Returns whether the section covers requests with this model and route."""
        return self.model in ("", model) and self.route in ("", route)


class Objectives(NamedTuple):
    """The sections of a setting, in their written order."""

    sections: tuple[ObjectiveSection, ...] = ()

    def find_missed(self, model: str, route: str, lengths: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the objectives that a request with these durations (ns) missed.

        An absent duration misses no objective.
        """
        limits: dict[str, int] = {}
        for section in sorted(self.sections, key=lambda section: bool(section.model) + bool(section.route)):
            if section.applies_to(model, route):
                limits.update(section.limits)
        return tuple(
            name for name in OBJECTIVE_NAMES if name in limits and lengths.get(name, 0) > limits[name]
        )


def parse_objectives(text: str) -> Objectives:
    """Returns the objectives of a setting; raises `ValueError` with the accepted syntax."""
    return Objectives(tuple(_parse_section(part) for part in text.split(";") if part.strip()))


def _parse_section(text: str) -> ObjectiveSection:
    *selectors, limits = text.split()
    chosen = dict.fromkeys(_SELECTORS, "")
    for selector in selectors:
        kind, _, name = selector.partition(":")
        if kind not in chosen or not name:
            raise ValueError(f"model:NAME or route:PATH before the limits, not {selector!r}")
        chosen[kind] = name
    return ObjectiveSection(
        chosen["model"], chosen["route"], dict(_parse_limit(limit) for limit in limits.split(",") if limit)
    )


def _parse_limit(text: str) -> tuple[str, int]:
    name, _, length = text.partition("=")
    match = _DURATION.fullmatch(length)
    if name not in OBJECTIVE_NAMES or match is None:
        raise ValueError(
            f"like ttft=1s,itl=200ms (of {', '.join(OBJECTIVE_NAMES)}; in us, ms, s, m), not {text!r}"
        )
    return name, round(float(match[1]) * _UNITS[match[2]])
