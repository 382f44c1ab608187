"""Numbers as axes, tiles and legends show them, by Grafana's names of units."""

from __future__ import annotations

import math
from collections.abc import Sequence

_TIME = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = tuple((1024.0**power, unit) for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))[::-1]
_MANY = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_AFTER = {"reqps": "req/s", "ops": "ops/s", "watt": "W", "joule": "J", "celsius": "°C"}
_FRACTIONS = (1.0, 2.0, 2.5, 5.0, 10.0)
_SIXTIETHS = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0)


def shown(value: float, unit: str, decimals: int | None = None) -> str:
    """With its unit, to three figures or so many decimals."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "–"
    if unit == "bool":
        return "yes" if value else "no"
    if unit == "percentunit":
        return f"{_figures(value * 100, decimals)} %"
    factor, scale = _scale(value, unit)
    after = scale + _AFTER.get(unit, "") if unit in ("watt", "joule") else f"{scale} {_AFTER.get(unit, '')}"
    apart = " " if unit in ("s", "bytes", "watt", "joule") else ""
    return f"{_figures(value / factor, decimals)}{apart}{after}".strip()


def _scale(value: float, unit: str) -> tuple[float, str]:
    """What to divide by, and what that is called."""
    if unit == "celsius":
        return 1.0, ""
    scales = {"s": _TIME, "bytes": _BYTES}.get(unit, _MANY)
    if value == 0:
        return 1.0, "s" if unit == "s" else "B" if unit == "bytes" else ""
    rounded = abs(value) * 1.0005
    return next((one for one in scales if rounded >= one[0]), scales[-1])


def _figures(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}"
    size = abs(value)
    said = f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"
    if "e" in said:
        return said
    return said.rstrip("0").rstrip(".") if "." in said else said


def ticks(top: float, unit: str, count: int) -> list[float]:
    """Round values from 0 on, the last of which is at or above `top`; about so many."""
    if not top > 0 or not math.isfinite(top):
        top = 1.0
    rough = top / max(count, 1)
    step = _round(rough, unit)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def _round(rough: float, unit: str) -> float:
    """The next round value from here on."""
    if unit == "bytes":
        return float(2 ** math.ceil(math.log2(rough)))
    if unit == "s" and rough > 1:
        within = next((scale for scale, _ in _TIME if rough >= scale), 1.0)
        if within < 3_600:
            return within * _next(rough / within, _SIXTIETHS)
    factor = 10.0 ** math.floor(math.log10(rough))
    return factor * _next(rough / factor, _FRACTIONS)


def _next(value: float, among: Sequence[float]) -> float:
    return next((one for one in among if one >= value * (1 - 1e-9)), among[-1])
