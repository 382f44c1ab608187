"""Where two JSON values differ. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

VOLATILE_FIELDS = ("id", "version", "iteration")
"""What Grafana counts up in a dashboard: no part of its content."""

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_NEWER_FIELD = "keep_firing_for"
"""What older versions drop in silence: that it is absent there is no difference."""
_EXACT_FIELDS = ("labels", "annotations")
"""What Grafana adds nothing to: one more there is one too many."""
_DURATION_FIELDS = ("for", _NEWER_FIELD)


def stable_content(dashboard: dict[str, Any]) -> dict[str, Any]:
    """A dashboard as a file holds it."""
    return {key: value for key, value in dashboard.items() if key not in VOLATILE_FIELDS}


def find_differences(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Where they differ, such as `panels[3].targets[0].expr`. Null is the same as absent."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from find_differences(ours.get(key), theirs.get(key), f"{at}.{key}" if at else key)
    elif isinstance(ours, list) and isinstance(theirs, list):
        for index in range(max(len(ours), len(theirs))):
            pair = ours[index : index + 1], theirs[index : index + 1]
            if all(pair):
                yield from find_differences(pair[0][0], pair[1][0], f"{at}[{index}]")
            else:
                yield f"{at}[{index}]"
    elif ours != theirs or isinstance(ours, bool) != isinstance(theirs, bool):
        yield at


def is_same_rule(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether an alert rule in Grafana is what ours states. Grafana adds to a rule, and writes durations its own way;
    whether it is paused is for people to say."""
    stated = {key: value for key, value in _normalize_durations(ours).items() if key != "isPaused"}
    if _NEWER_FIELD not in theirs:
        stated.pop(_NEWER_FIELD, None)
    there = _select_stated_fields(_normalize_durations(theirs), stated)
    for key in _EXACT_FIELDS:
        stated[key], there[key] = ours.get(key) or {}, theirs.get(key) or {}
    return next(find_differences(stated, there), None) is None


def _select_stated_fields(theirs: Any, ours: Any) -> Any:
    """That of theirs about which ours says something."""
    if not theirs and not ours:
        return ours
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {key: _select_stated_fields(theirs.get(key), value) for key, value in ours.items()}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [_select_stated_fields(*pair) for pair in zip(theirs, ours)]
    return theirs


def _normalize_durations(rule: dict[str, Any]) -> dict[str, Any]:
    return {key: _duration_to_ms(value) if key in _DURATION_FIELDS else value for key, value in rule.items()}


def _duration_to_ms(duration: Any) -> Any:
    """Of `1m30s`; what is no duration stays as it is."""
    if not re.fullmatch(r"(\d+(ms|[smhdw]))+|0", str(duration)):
        return duration
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"(\d+)(ms|[smhdw])", str(duration)))
