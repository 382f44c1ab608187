"""Draws the panels of a dashboard: a function for each type of panel that queries Prometheus."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.dates import AutoDateLocator, date2num, num2date
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import Locator, MaxNLocator, MultipleLocator

from scripts.preview.canvas import FAINT, GREY, INK, Box, Canvas, cut_text, estimate_width
from scripts.preview.queries import (
    Exemplar,
    PanelData,
    Series,
    TimeRange,
    Values,
    column_names,
    find_default,
    find_overrides,
    label_columns,
)
from scripts.preview.units import format_value

Panel = Mapping[str, Any]

AXIS, MARGIN, TITLE, TIME = 62.0, 14.0, 34.0, 20.0
"""px beside a plot for its axis or without one, above it for the title, and below it for the time."""
EXEMPLAR_COLOR = "magenta"
PALETTE = colormaps["tab10"]
MAX_LINES = 40
LEGEND_ROW, LEGEND_SIZE, TABLE_ROW = 14.0, 9.0, 26.0


class StyledSeries(NamedTuple):
    """A series with its colour, unit and axis."""

    series: Series
    color: str
    unit: str
    on_right: bool


# ── lines and areas ──────────────────────────────────────────────────────────────────────────────────────────────


def draw_timeseries(canvas: Canvas, panel: Panel, data: PanelData, time_range: TimeRange, box: Box) -> None:
    """Draws lines or stacked areas, and a legend with the last and the largest value of each."""
    lines = _style_series(panel, data.series)
    legend_height = _draw_legend(canvas, lines, len(data.series), box)
    has_right = any(line.on_right for line in lines)
    plot = box.shrink(AXIS, TITLE, AXIS if has_right else MARGIN, TIME + legend_height)
    axes = canvas.add_axes(plot)
    unit, maximum = str(find_default(panel, "unit")), find_default(panel, "max")
    mode = find_default(panel, "custom")["stacking"]["mode"]
    times = _dates(time_range.times(len(lines[0].series.values) - 1))
    if mode == "none":
        _draw_lines(axes, [line for line in lines if not line.on_right], times, unit, maximum, plot)
        if has_right:
            right = [line for line in lines if line.on_right]
            other = axes.twinx()
            other.tick_params(length=0, labelsize=9, labelcolor=GREY)
            other.set_frame_on(False)
            _draw_lines(other, right, times, right[0].unit, None, plot)
        _draw_exemplars(axes, data.exemplars, [exemplar.value for exemplar in data.exemplars])
    else:
        _draw_stack(axes, lines, times, mode, unit, maximum, plot)
    _format_time(axes, time_range, plot)


def _style_series(panel: Panel, series: Sequence[Series]) -> list[StyledSeries]:
    """Returns at most `MAX_LINES` series, those with the largest values, in their order."""
    styled = []
    for i, line in enumerate(series):
        override = find_overrides(panel, line.name)
        fixed = override.get("color", {}).get("fixedColor")
        unit = str(override.get("unit", find_default(panel, "unit")))
        on_right = override.get("custom.axisPlacement") == "right"
        styled.append(StyledSeries(line, fixed or to_hex(PALETTE(i % PALETTE.N)), unit, on_right))
    largest = sorted(styled, key=lambda line: -float(np.nanmax(line.series.values)))[:MAX_LINES]
    return [line for line in styled if line in largest] if len(styled) > MAX_LINES else styled


def _draw_lines(
    axes: Axes, lines: Sequence[StyledSeries], times: Values, unit: str, maximum: float | None, plot: Box
) -> None:
    for line in lines:
        values = line.series.values
        padded = np.isfinite(np.pad(values, 1, constant_values=np.nan))
        alone = np.flatnonzero(padded[1:-1] & ~padded[:-2] & ~padded[2:]).tolist()
        axes.plot(times, values, color=line.color, linewidth=1.4, marker=".", markersize=3, markevery=alone)
    top = max((float(np.nanmax(line.series.values)) for line in lines), default=0.0)
    _format_values(axes, unit, maximum or top, plot.height)


def _draw_stack(
    axes: Axes,
    lines: Sequence[StyledSeries],
    times: Values,
    mode: str,
    unit: str,
    maximum: float | None,
    plot: Box,
) -> None:
    values = np.nan_to_num(np.array([line.series.values for line in lines]))
    if mode == "percent":
        unit, maximum = "percentunit", 1.0
        total = values.sum(axis=0)
        values = values / np.where(total > 0, total, 1.0)
    axes.stackplot(times, values, colors=[line.color for line in lines], alpha=0.6, linewidth=0)
    _format_values(axes, unit, maximum or float(values.sum(axis=0).max()), plot.height)


def _draw_legend(canvas: Canvas, lines: Sequence[StyledSeries], count: int, box: Box) -> float:
    """Draws as many entries as fit below the plot and states how many are missing. Returns the height in px."""
    labels = [
        f"{cut_text(line.series.name or 'value', box.width * 0.4, LEGEND_SIZE)}  {format_value(line.series.last, line.unit)}, "
        f"max {format_value(float(np.nanmax(line.series.values)), line.unit)}"
        for line in lines
    ]
    widest = max(estimate_width(label, LEGEND_SIZE) for label in labels) + 40
    columns = max(1, min(int((box.width - 2 * MARGIN) // widest), len(labels)))
    max_entries = max(int((box.height - 100) * 0.5 // LEGEND_ROW), 1) * columns
    if count > max_entries:
        labels = labels[: max_entries - 1]
    handles = [Line2D([], [], color=line.color, linewidth=3) for line in lines[: len(labels)]]
    if count > len(labels):
        handles.append(Line2D([], [], color="none"))
        labels.append(f"and {count - len(labels)} more")
    height = math.ceil(len(labels) / columns) * LEGEND_ROW + 6
    _add_legend(canvas, handles, labels, columns, box, height)
    return height


def _add_legend(
    canvas: Canvas, handles: Sequence[Any], labels: Sequence[str], columns: int, box: Box, height: float
) -> None:
    corner = ((box.left + MARGIN) / canvas.width, 1 - (box.bottom - height) / canvas.height)
    legend = canvas.figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=corner, ncols=columns, frameon=False, borderpad=0,
        borderaxespad=0, fontsize=LEGEND_SIZE, labelcolor=GREY, handlelength=1.2, labelspacing=0.45, columnspacing=1.5,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


# ── axes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _dates(times: Values | Sequence[float]) -> Values:
    """Returns unix s as matplotlib's days."""
    days: Values = date2num(np.asarray(np.asarray(times) * 1e3, "datetime64[ms]"))
    return days


def _format_time(axes: Axes, time_range: TimeRange, plot: Box) -> None:
    start, end = _dates([time_range.start, time_range.end])
    locator = AutoDateLocator(minticks=2, maxticks=max(int(plot.width // 75), 2))
    ticks = [tick for tick in locator.tick_values(num2date(start), num2date(end)) if start <= tick <= end]
    axes.set_xlim(start, end)
    axes.set_xticks(ticks, [f"{num2date(tick):%H:%M}" for tick in ticks])
    axes.tick_params(axis="x", pad=7)


def _format_values(axes: Axes, unit: str, top: float, height: float) -> None:
    """Scales an axis from 0 to a round value at or above `top`."""
    top = top if top > 0 else 1.0
    locator = _find_locator(unit, top, max(int(height // 36), 2))
    ticks = [tick for tick in locator.tick_values(0, top) if tick >= 0]
    limit = next((tick for tick in ticks if tick >= top * 0.999), top)
    ticks = [tick for tick in ticks if tick <= limit]
    axes.set_ylim(0, limit)
    axes.set_yticks(ticks, [format_value(tick, unit) if tick else "0" for tick in ticks])


def _find_locator(unit: str, top: float, ticks: int) -> Locator:
    """Returns round steps: powers of two of bytes, minutes and hours of long times, else decimal ones."""
    if unit == "bytes":
        return MultipleLocator(2.0 ** math.ceil(math.log2(top / ticks)))
    if unit == "s" and top > 120:
        base = 60.0 if top < 7200 else 3600.0
        return MultipleLocator(base * max(math.ceil(top / base / ticks), 1))
    return MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10])


def _draw_exemplars(axes: Axes, exemplars: Sequence[Exemplar], heights: Sequence[float]) -> None:
    at = _dates([exemplar.at for exemplar in exemplars])
    axes.scatter(
        at, heights, s=14, marker="D", color=EXEMPLAR_COLOR, edgecolors="white", linewidths=0.5, zorder=3
    )


# ── heatmaps and states ──────────────────────────────────────────────────────────────────────────────────────────


def draw_heatmap(canvas: Canvas, panel: Panel, data: PanelData, time_range: TimeRange, box: Box) -> None:
    """Draws a cell for each bucket and time, and a diamond for each exemplar."""
    ordered = sorted(data.series, key=lambda series: float(series.labels["le"]))
    bounds = [float(series.labels["le"]) for series in ordered]
    totals = np.array([np.nan_to_num(series.values) for series in ordered])
    counts = np.diff(totals, axis=0, prepend=0.0).clip(0)[:, 1:]
    plot = box.shrink(AXIS, TITLE, MARGIN, TIME + LEGEND_ROW + 6)
    axes = canvas.add_axes(plot)
    axes.grid(visible=False)
    start, end = _dates([time_range.start, time_range.end])
    axes.imshow(
        np.ma.masked_less_equal(np.sqrt(counts), 1e-9), origin="lower", aspect="auto", interpolation="nearest",
        cmap="Spectral_r", extent=(start, end, 0, len(bounds)),
    )  # fmt: skip
    rows = [min(int(np.searchsorted(bounds, exemplar.value)), len(bounds) - 1) for exemplar in data.exemplars]
    _draw_exemplars(axes, data.exemplars, [row + 0.5 for row in rows])
    every = max(1, math.ceil(13 * len(bounds) / plot.height))
    ticks = [*range(len(bounds), 0, -every)]
    unit = str(find_default(panel, "unit"))
    axes.set_yticks(ticks, [format_value(bounds[tick - 1], unit) for tick in ticks])
    _format_time(axes, time_range, plot)
    note = f"blue: few, red: up to {format_value(float(counts.max()), 'short')} in a cell"
    note += "; a diamond is a request with its trace" if data.exemplars else ""
    canvas.add_text(plot.left, box.bottom - 8, note, plot.width, LEGEND_SIZE)


def draw_states(canvas: Canvas, panel: Panel, data: PanelData, time_range: TimeRange, box: Box) -> None:
    """Draws a bar for each series, in the colour of its state over time."""
    (states,) = [item["options"] for item in find_default(panel, "mappings") if item["type"] == "value"]
    names = max(estimate_width(series.name, 9) for series in data.series)
    plot = box.shrink(min(names, box.width * 0.4) + MARGIN, TITLE, MARGIN, TIME + LEGEND_ROW + 6)
    kept = data.series[: max(int(plot.height // 13), 1)]
    axes = canvas.add_axes(plot)
    times = _dates(time_range.times(len(kept[0].values) - 1))
    width = float(times[1] - times[0])
    for row, series in enumerate(kept):
        for value, state in states.items():
            bars = [(at, width) for at, each in zip(times, series.values) if f"{each:g}" == value]
            axes.broken_barh(bars, (row + 0.1, 0.8), color=state["color"], linewidth=0)
    room = plot.left - box.left - 6
    axes.set_yticks([row + 0.5 for row in range(len(kept))], [cut_text(one.name, room, 9) for one in kept])
    axes.set_ylim(len(kept), 0)
    _format_time(axes, time_range, plot)
    handles = [Patch(color=state["color"]) for state in states.values()]
    labels = [state["text"] for state in states.values()]
    if len(kept) < len(data.series):
        handles.append(Patch(color="none"))
        labels.append(f"and {len(data.series) - len(kept)} more")
    _add_legend(canvas, handles, labels, len(labels), box, LEGEND_ROW + 6)


# ── tiles and tables ─────────────────────────────────────────────────────────────────────────────────────────────


def draw_stat(canvas: Canvas, panel: Panel, data: PanelData, time_range: TimeRange, box: Box) -> None:
    """Draws the last value over its values in time."""
    series = data.series[0]
    text = format_value(series.last, str(find_default(panel, "unit")), find_default(panel, "decimals"))
    color = find_threshold_color(panel, series.last)
    axes = canvas.add_axes(box.shrink(1, box.height * 0.68, 1, 1))
    axes.set_axis_off()
    times = time_range.times(len(series.values) - 1)
    axes.fill_between(times, series.values, color=color, alpha=0.1, linewidth=0)
    axes.plot(times, series.values, color=color, alpha=0.45, linewidth=1.2)
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(0, float(np.nanmax(series.values)) * 1.05 or 1.0)
    room = box.width - 2 * MARGIN
    size = next((size for size in (32, 28, 24, 20, 16) if estimate_width(text, size) <= room), 13)
    canvas.add_text(
        box.left + box.width / 2,
        box.top + box.height / 2 + 12,
        text,
        room,
        size,
        color,
        ha="center",
        weight="bold",
    )


def find_threshold_color(panel: Panel, value: float) -> str:
    """Returns the colour of the highest threshold that the value reaches."""
    if find_default(panel, "color")["mode"] != "thresholds":
        return INK
    steps = find_default(panel, "thresholds")["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return str(reached[-1])


def draw_table(canvas: Canvas, panel: Panel, data: PanelData, time_range: TimeRange, box: Box) -> None:
    """Draws as many rows as fit; columns of labels are wider than columns of numbers."""
    names = column_names(panel)
    labels = {names[field] for field in label_columns(panel)}
    shares = [1.7 if name in labels else 1.0 for name in names.values()]
    widths = [(box.width - 2 * MARGIN) * share / sum(shares) for share in shares]
    max_rows = int((box.height - TITLE - TABLE_ROW - 6) // TABLE_ROW)
    kept = data.rows if len(data.rows) <= max_rows else data.rows[: max_rows - 1]
    y = box.top + TITLE + 14
    for cells in [
        [(name, FAINT) for name in names.values()],
        *([_format_cell(panel, row, name) for name in names.values()] for row in kept),
    ]:
        left = box.left + MARGIN
        for (text, color), name, width in zip(cells, names.values(), widths):
            x, align = (left, "left") if name in labels else (left + width - 6, "right")
            canvas.add_text(x, y, text, width - 14, color=color, ha=align)
            left += width
        y += TABLE_ROW
    if len(kept) < len(data.rows):
        canvas.add_text(box.left + MARGIN, y, f"and {len(data.rows) - len(kept)} more", 200, color=FAINT)


def _format_cell(panel: Panel, row: Mapping[str, str | float], name: str) -> tuple[str, str]:
    """Returns the text of a cell and its colour."""
    value = row.get(name, math.nan)
    if isinstance(value, str):
        return value or "–", INK
    if math.isnan(value):
        return str(find_default(panel, "noValue")), FAINT
    return format_value(value, str(find_overrides(panel, name).get("unit", find_default(panel, "unit")))), INK


DRAW_BY_TYPE = {
    "timeseries": draw_timeseries,
    "heatmap": draw_heatmap,
    "state-timeline": draw_states,
    "stat": draw_stat,
    "table": draw_table,
}
