"""Compares dashboards and alert rules with their state in Grafana. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

VOLATILE_FIELDS = ("id", "version", "iteration")
"""Fields of a dashboard that Grafana counts up itself, and that are no content."""

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_NEWER_FIELD = "keep_firing_for"
"""A field that older versions of Grafana drop silently, so its absence is no difference."""
_EXACT_FIELDS = ("labels", "annotations")
"""Fields to which Grafana adds nothing, so an additional entry is a difference."""
_DURATION_FIELDS = ("for", _NEWER_FIELD)


def stable_content(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Returns a dashboard without its volatile fields, as its file holds it."""
    return {key: value for key, value in dashboard.items() if key not in VOLATILE_FIELDS}


def find_differences(expected: Any, stored: Any, at: str = "") -> Iterator[str]:
    """Yields the paths at which two JSON values differ, such as `panels[3].targets[0].expr`.

    Null equals absent. `at`: path of both values.
    """
    if isinstance(expected, dict) and isinstance(stored, dict):
        for key in sorted(expected.keys() | stored.keys()):
            yield from find_differences(expected.get(key), stored.get(key), f"{at}.{key}" if at else key)
    elif isinstance(expected, list) and isinstance(stored, list):
        for index in range(max(len(expected), len(stored))):
            pair = expected[index : index + 1], stored[index : index + 1]
            if all(pair):
                yield from find_differences(pair[0][0], pair[1][0], f"{at}[{index}]")
            else:
                yield f"{at}[{index}]"
    elif expected != stored or isinstance(expected, bool) != isinstance(stored, bool):
        yield at


def is_same_rule(expected: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Whether an alert rule in Grafana has all that our rule states.

    Grafana adds fields to a rule, and writes durations in another form. Whether the rule is paused does not
    count, because users decide that in Grafana.
    """
    required = {key: value for key, value in _normalize_durations(expected).items() if key != "isPaused"}
    if _NEWER_FIELD not in stored:
        required.pop(_NEWER_FIELD, None)
    actual = _select_stated_fields(_normalize_durations(stored), required)
    for key in _EXACT_FIELDS:
        required[key], actual[key] = expected.get(key) or {}, stored.get(key) or {}
    return next(find_differences(required, actual), None) is None


def _select_stated_fields(stored: Any, expected: Any) -> Any:
    """Returns the parts of the stored value for which our value has an entry."""
    if not stored and not expected:
        return expected
    if isinstance(expected, dict) and isinstance(stored, dict):
        return {key: _select_stated_fields(stored.get(key), value) for key, value in expected.items()}
    if isinstance(expected, list) and isinstance(stored, list) and len(expected) == len(stored):
        return [_select_stated_fields(*pair) for pair in zip(stored, expected)]
    return stored


def _normalize_durations(rule: dict[str, Any]) -> dict[str, Any]:
    return {key: _duration_to_ms(value) if key in _DURATION_FIELDS else value for key, value in rule.items()}


def _duration_to_ms(duration: Any) -> Any:
    """Returns the ms of a duration such as `1m30s`; any other value unchanged."""
    if not re.fullmatch(r"(\d+(ms|[smhdw]))+|0", str(duration)):
        return duration
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"(\d+)(ms|[smhdw])", str(duration)))
