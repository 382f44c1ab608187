"""What the operator promises: how long a request may take at most, by model and route. Pure text in, comparisons out.

    ttft=1s,itl=200ms; model:llama-70b ttft=3s; route:/v1/embeddings e2e=500ms

A section without a selector holds for all requests; of a section that names a model or a route, what it says goes before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

TTFT, ITL, TPOT, E2E, QUEUE = OBJECTIVE_NAMES = ("ttft", "itl", "tpot", "e2e", "queue")
"""Arrival to first token; the longest gap between tokens; their mean; arrival to last byte; time in both queues."""
_UNITS = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m)")
_SELECTORS = ("model", "route")


class ObjectiveSection(NamedTuple):
    """Limits in ns by objective, for the requests with this model or route; both empty: for all."""

    model: str
    route: str
    limits: Mapping[str, int]

    def applies_to(self, model: str, route: str) -> bool:
        return self.model in ("", model) and self.route in ("", route)


class Objectives(NamedTuple):
    """The sections as written."""

    sections: tuple[ObjectiveSection, ...] = ()

    def find_missed(self, model: str, route: str, lengths: Mapping[str, int]) -> tuple[str, ...]:
        """Which objectives a request with these lengths (ns) has missed; one that it does not have is not missed."""
        limits: dict[str, int] = {}
        for section in sorted(self.sections, key=lambda section: bool(section.model) + bool(section.route)):
            if section.applies_to(model, route):
                limits.update(section.limits)
        return tuple(
            name for name in OBJECTIVE_NAMES if name in limits and lengths.get(name, 0) > limits[name]
        )


def parse_objectives(text: str) -> Objectives:
    """The objectives in a setting; raises `ValueError` with what is accepted."""
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
        chosen["model"], chosen["route"], dict(_parse_limit(one) for one in limits.split(",") if one)
    )


def _parse_limit(text: str) -> tuple[str, int]:
    name, _, length = text.partition("=")
    found = _DURATION.fullmatch(length)
    if name not in OBJECTIVE_NAMES or found is None:
        raise ValueError(
            f"like ttft=1s,itl=200ms (of {', '.join(OBJECTIVE_NAMES)}; in us, ms, s, m), not {text!r}"
        )
    return name, round(float(found[1]) * _UNITS[found[2]])
