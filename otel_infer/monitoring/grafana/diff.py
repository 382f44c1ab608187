"""Where two JSON values differ. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

NOT_OURS = ("id", "version", "iteration")
"""What Grafana counts up in a dashboard: no part of its content."""

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_NEW = "keep_firing_for"
"""What older versions drop in silence: that it is absent there is no difference."""
_WHOLE = ("labels", "annotations")
"""What Grafana adds nothing to: one more there is one too many."""
_DURATIONS = ("for", _NEW)


def content(dashboard: dict[str, Any]) -> dict[str, Any]:
    """A dashboard as a file holds it."""
    return {key: value for key, value in dashboard.items() if key not in NOT_OURS}


def paths(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Where they differ, such as `panels[3].targets[0].expr`. Null is the same as absent."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from paths(ours.get(key), theirs.get(key), f"{at}.{key}" if at else key)
    elif isinstance(ours, list) and isinstance(theirs, list):
        for index in range(max(len(ours), len(theirs))):
            pair = ours[index : index + 1], theirs[index : index + 1]
            if all(pair):
                yield from paths(pair[0][0], pair[1][0], f"{at}[{index}]")
            else:
                yield f"{at}[{index}]"
    elif ours != theirs or isinstance(ours, bool) != isinstance(theirs, bool):
        yield at


def is_same_rule(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether an alert rule in Grafana is what ours states. Grafana adds to a rule, and writes durations its own way;
    whether it is paused is for people to say."""
    stated = {key: value for key, value in _timed(ours).items() if key != "isPaused"}
    if _NEW not in theirs:
        stated.pop(_NEW, None)
    there = _stated(_timed(theirs), stated)
    for key in _WHOLE:
        stated[key], there[key] = ours.get(key) or {}, theirs.get(key) or {}
    return next(paths(stated, there), None) is None


def _stated(theirs: Any, ours: Any) -> Any:
    """That of theirs about which ours says something."""
    if not theirs and not ours:
        return ours
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {key: _stated(theirs.get(key), value) for key, value in ours.items()}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [_stated(*pair) for pair in zip(theirs, ours)]
    return theirs


def _timed(rule: dict[str, Any]) -> dict[str, Any]:
    return {key: _milliseconds(value) if key in _DURATIONS else value for key, value in rule.items()}


def _milliseconds(duration: Any) -> Any:
    """Of `1m30s`; what is no duration stays as it is."""
    if not re.fullmatch(r"(\d+(ms|[smhdw]))+|0", str(duration)):
        return duration
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"(\d+)(ms|[smhdw])", str(duration)))
