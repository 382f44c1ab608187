"""Formats numbers for axes, tiles and legends, by Grafana's names of units."""

from __future__ import annotations

import math

_TIME = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = tuple((1024.0**power, unit) for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))[::-1]
_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SCALES = {"s": _TIME, "bytes": _BYTES, "celsius": ((1.0, ""),)}
_SUFFIXES = {"reqps": " req/s", "ops": " ops/s", "watt": "W", "joule": "J", "celsius": " °C"}
_SPACED = ("s", "bytes", "watt", "joule")
_ZEROS = {"s": "0 s", "bytes": "0 B"}


def format_value(value: float, unit: str, decimals: int | None = None) -> str:
    """Returns a value with its unit, with three significant digits or the given number of decimals."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "–"
    if unit == "bool":
        return "yes" if value else "no"
    if unit == "percentunit":
        return f"{_format_digits(value * 100, decimals)} %"
    if value == 0 and unit in _ZEROS:
        return _ZEROS[unit]
    scales = _SCALES.get(unit, _DECIMAL)
    rounded = abs(value) * 1.0005
    at_zero = (1.0, "")
    factor, prefix = next(
        (scale for scale in scales if rounded >= scale[0]), scales[-1] if value else at_zero
    )
    space = " " if unit in _SPACED else ""
    return f"{_format_digits(value / factor, decimals)}{space}{prefix}{_SUFFIXES.get(unit, '')}".strip()


def _format_digits(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}"
    size = abs(value)
    text = f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
