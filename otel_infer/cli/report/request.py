"""Renders one request of a report: its row, and the details: waterfall, step strip and latency breakdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.code_places import describe_place
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli.report.html_helpers import (
    COLOURS,
    PAUSE_COLOUR,
    STEP_COLOUR,
    colour_swatch,
    duration_cell,
    escape_text,
    format_share,
    json_for_script,
    link_request,
    number_cell,
    render_cause_bar,
    render_table,
    request_anchor,
)
from otel_infer.export.console import format_duration
from otel_infer.export.spans.tree import request_name
from otel_infer.ringbuffer import events

MAX_BARS, MAX_BARS_PER_PAGE = 2000, 100_000
"""Bars of one strip, and of all strips. With more steps, the slowest step of each group is drawn."""
MAX_STAGES = 16
MAX_ATTRIBUTES = 4
"""Attributes shown per stage; per request, twice as many."""
MAX_STEPS = 8
"""Slowest steps in the table below a strip."""
MAX_PAUSES = 50
MAX_CAUSES = 4
"""Causes of pauses per request, one line each."""
COLUMN_HEADS = (
    "trace", "request", "ended", "#end to end", "#first token", "#longest gap", "#prompt", "#tokens", "top cause",
    "delayed by",
)  # fmt: skip


class PageContext(NamedTuple):
    """The page around a request.

    `began`: when the tape began (monotonic ns). `shown`: span ids of the requests on the page. `bars`:
    maximum bars of a strip. `missed`: the missed objectives by span id.
    """

    began: int
    shown: frozenset[bytes]
    bars: int
    missed: Mapping[bytes, tuple[str, ...]]


def make_page_context(
    began: int, shown: Sequence[RequestRecord], missed: Mapping[bytes, tuple[str, ...]]
) -> PageContext:
    """Returns the context that all requests of a page share."""
    bars = min(MAX_BARS, MAX_BARS_PER_PAGE // max(len(shown), 1))
    return PageContext(began, frozenset(record.span_id for record in shown), bars, missed)


def render_rows(record: RequestRecord, page: PageContext) -> str:
    """Returns two table rows: the summary and the details of a request."""
    return _render_summary_row(record, page) + "\n" + _render_detail_row(record, page)


def _render_summary_row(record: RequestRecord, page: PageContext) -> str:
    key = request_anchor(record.span_id)
    ended = events.OUTCOME_NAMES.get(record.outcome, "") + (
        f" ({record.error_type})" if record.error_type else ""
    )
    missed = page.missed.get(record.span_id, ())
    ended += f", missed {', '.join(missed)}" if missed else ""
    top = record.breakdown.top_cause if record.breakdown is not None else ""
    share = (
        record.breakdown.causes[top] / max(record.duration_ns, 1)
        if record.breakdown is not None and top
        else 0.0
    )
    top_text = (
        f"{colour_swatch(COLOURS.get(top, STEP_COLOUR))}{escape_text(top.replace('_', ' '))} {format_share(share)}"
        if top
        else "–"
    )
    interferer = record.breakdown.interferer if record.breakdown is not None else None
    by = (
        link_request(interferer.trace_id, interferer.span_id, interferer.span_id in page.shown)
        if interferer
        else "–"
    )
    bad = ' class="bad"' if record.outcome != events.OK or missed else ""
    return (
        f'<tr class="row"><td><a class="open" href="#{key}" aria-controls="{key}" aria-expanded="false">'
        f"<code>{record.trace_id.hex()[:8]}</code></a></td><td>{escape_text(request_name(record))}</td><td{bad}>{escape_text(ended)}</td>"
        f"{duration_cell(record.duration_ns)}{duration_cell(record.ttft_ns)}{duration_cell(record.summary.gap_max)}"
        f"{number_cell(record.input_tokens)}{number_cell(record.output_tokens)}"
        f'<td data-v="{share:.4f}">{top_text}</td><td>{by}{f" {format_duration(interferer.length)}" if interferer else ""}</td></tr>'
    )


def _render_detail_row(record: RequestRecord, page: PageContext) -> str:
    return (
        f'<tr class="detail" id="{request_anchor(record.span_id)}"><td colspan="{len(COLUMN_HEADS)}"><div class="in">'
        f"{_render_about(record, page.began)}{_render_waterfall(record)}{_render_step_strip(record, page.bars)}{_render_breakdown(record, page)}</div></td></tr>"
    )


def _render_about(record: RequestRecord, began: int) -> str:
    """Returns the attributes of a request. Attributes set by the application are not shown."""
    fields: dict[str, object] = {
        "trace": record.trace_id.hex(),
        "span": record.span_id.hex(),
        "arrived at": f"{(record.arrived_at - began) / 1e9:.3f} s",
        "model": record.model,
        "engine": record.engine,
        "finished": ", ".join(map(str, record.finish_reasons)),
        "error": record.error_type,
        "failed in": record.failed_stage,
        "preemptions": record.preemptions,
        "sequences": record.sequences if record.sequences > 1 else 0,
        "telemetry lost": "yes: the data shown is correct but incomplete" if record.telemetry_lost else "",
    }
    shown_keys = (semconv.RESPONSE_ID, semconv.HTTP_ROUTE)
    attributes = [
        (k, v) for k, v in sorted(record.attributes.items()) if k in shown_keys or k.startswith("infer.")
    ]
    fields |= dict(attributes[: 2 * MAX_ATTRIBUTES])
    return (
        "<dl>"
        + "".join(f"<dt>{escape_text(k)}</dt><dd>{escape_text(v)}</dd>" for k, v in fields.items() if v)
        + "</dl>"
    )


# ── waterfall ────────────────────────────────────────────────────────────────────────────────────────────────────


def _render_waterfall(record: RequestRecord) -> str:
    stages = record.stages[:MAX_STAGES]
    lines = []
    for stage in stages:
        colour = COLOURS.get(
            semconv.STAGE_CAUSES.get(stage.name, stage.name), COLOURS[semconv.CAUSE_APPLICATION]
        )
        bar = _render_bars(record, [(stage.started_at, stage.ended_at)], colour)
        attributes = escape_text(
            ", ".join(f"{k} = {v}" for k, v in [*stage.attributes.items()][:MAX_ATTRIBUTES]), 240
        )
        lines.append(
            f'<th scope="row">{escape_text(stage.name)}</th><td class="bar">{bar}</td>'
            f'<td class="n">{_format_duration(stage.started_at - record.arrived_at)}</td>'
            f'<td class="n">{_format_duration(stage.ended_at - stage.started_at)}</td><td class="dim">{attributes}</td>'
        )
    pauses = _longest_pauses(record)
    for cause in sorted({pause.cause for pause in pauses})[:MAX_CAUSES]:
        intervals = [(pause.started_at, pause.ended_at) for pause in pauses if pause.cause == cause]
        total = sum(min(end, record.ended_at) - max(begin, record.arrived_at) for begin, end in intervals)
        lines.append(
            f'<th scope="row">pause: {escape_text(cause)}</th><td class="bar">{_render_bars(record, intervals, PAUSE_COLOUR)}</td>'
            f'<td class="n">{len(intervals)} ×</td><td class="n">{_format_duration(total)}</td><td class="dim">{_PAUSE_NOTES.get(cause, "the whole process was paused")}</td>'
        )
    lines += map(partial(_render_sample, record), record.code_samples[:MAX_CAUSES])
    hidden = len(record.stages) - len(stages)
    caption = "Stages" + (f"; {hidden} more are on the tape" if hidden else "")
    return render_table(caption, ("stage", "", "#begins", "#takes", ""), lines, "fall")


def _render_sample(record: RequestRecord, sample: events.CodeLocated) -> str:
    """Returns a row: the code that a late thread was in."""
    bar = _render_bars(record, [(sample.since, sample.at)], PAUSE_COLOUR)
    begins = _format_duration(sample.since - record.arrived_at)
    return (
        f'<th scope="row">late {escape_text(sample.reason.replace("_", " "))}</th><td class="bar">{bar}</td>'
        f'<td class="n">{begins}</td><td class="n">{_format_duration(sample.at - sample.since)}</td>'
        f'<td class="dim">{escape_text(describe_place(sample), 240)}</td>'
    )


_PAUSE_NOTES = {semconv.CAUSE_EVENT_LOOP: "the event loop was blocked, not the engine"}


def _format_duration(ns: int) -> str:
    return format_duration(max(ns, 0))


def _render_bars(record: RequestRecord, intervals: Sequence[tuple[int, int]], colour: str) -> str:
    """Draws intervals on the scale of the request, with a minimum width."""
    scale = 1000 / max(record.duration_ns, 1)
    boxes = []
    for begin, end in intervals:
        begin, end = max(begin, record.arrived_at), min(end, record.ended_at)
        left = min((begin - record.arrived_at) * scale, 998)
        width = min(max((end - begin) * scale, 2), 1000 - left)
        boxes.append(f'<rect x="{left:.1f}" width="{width:.1f}" height="10" fill="{colour}"/>')
    return f'<svg viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">{"".join(boxes)}</svg>'


def _longest_pauses(record: RequestRecord) -> list[Pause]:
    """Returns at most `MAX_PAUSES` pauses in order of time: those with the longest part in the request."""

    def time_inside(pause: Pause) -> int:
        return min(pause.ended_at, record.ended_at) - max(pause.started_at, record.arrived_at)

    return sorted(sorted(record.all_pauses, key=lambda pause: (-time_inside(pause), pause))[:MAX_PAUSES])


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _render_step_strip(record: RequestRecord, bars: int) -> str:
    """Renders the decode steps.

    A script draws the bars when the row is opened; the slowest steps are also a table.
    """
    rows = record.steps
    if rows is None or len(rows) < 2:
        return '<p class="dim">No decode steps of this request are on the tape.</p>'
    began, ended = rows.started_at[1:], rows.ended_at[1:]
    lengths, idle = ended - began, np.maximum(began - rows.ended_at[:-1], 0)
    paused = _find_paused_steps(record, rows.ended_at[:-1], ended)
    columns = (rows.step[1:], ended - record.arrived_at, lengths, idle, *rows.table[3:, 1:])
    keep = slowest_per_group(lengths + idle, bars)
    slowest = np.argsort(-(lengths + idle), kind="stable")[:MAX_STEPS]
    return (
        f'<h4>Decode steps</h4><p class="caption">{_strip_caption(lengths, keep)}</p>'
        '<div class="strip"><noscript>A script draws the bars; the slowest steps are below.</noscript></div>'
        f'<script type="application/json">{json_for_script(_encode_steps(columns, paused, keep))}</script>'
        f"{_render_slowest_steps(columns, paused, slowest)}"
    )


def _strip_caption(lengths: Any, keep: Any) -> str:
    median, longest = format_duration(float(np.median(lengths))), format_duration(int(lengths.max()))
    reduced = "" if len(keep) == len(lengths) else f" (the slowest of each group: {len(keep):,} bars)"
    return (
        f"{len(lengths):,} steps that gave this request a token{reduced}; median {median}, longest {longest}"
    )


def slowest_per_group(lengths: Any, bars: int) -> Any:
    """Returns the indices of the steps to draw: all, or the slowest of each of `bars` groups."""
    if len(lengths) <= bars:
        return np.arange(len(lengths))
    begins = np.arange(bars) * len(lengths) // bars
    return np.array([
        begin + int(group.argmax()) for begin, group in zip(begins, np.split(lengths, begins[1:]))
    ])  # fmt: skip


def _find_paused_steps(record: RequestRecord, since: Any, until: Any) -> Any:
    """Returns for each step whether the process was paused before or during it."""
    paused = np.zeros(len(until), bool)
    for pause in record.pauses:
        paused |= (since < pause.ended_at) & (until > pause.started_at)
    return paused


def _encode_steps(columns: Sequence[Any], paused: Any, keep: Any) -> dict[str, list[int]]:
    """Encodes the steps for the script.

    Lengths and instants in µs; steps and instants as differences, to save space.
    """
    step, at, lengths, idle, tokens, size, others = (column[keep] for column in columns)
    return {
        "step": np.diff(step, prepend=0).tolist(),
        "at": np.diff(at // 1000, prepend=0).tolist(),
        "length": (lengths // 1000).tolist(),
        "idle": (idle // 1000).tolist(),
        "tokens": tokens.tolist(),
        "batch": size.tolist(),
        "others": others.tolist(),
        "paused": np.flatnonzero(paused[keep]).tolist(),
    }


def _render_slowest_steps(columns: Sequence[Any], paused: Any, slowest: Any) -> str:
    lines = []
    for i in slowest.tolist():
        step, at, length, idle, tokens, size, others = (int(column[i]) for column in columns)
        mark = ("▲ others' prompt " if others else "") + ("❚❚ pause" if paused[i] else "")
        cells = (
            str(step),
            f"{at / 1e9:.3f} s",
            format_duration(length),
            format_duration(idle) if idle else "–",
        )
        lines.append(
            "".join(f'<td class="n">{cell}</td>' for cell in (*cells, size, others, tokens))
            + f"<td>{mark}</td>"
        )
    heads = (
        "#step",
        "#ends at",
        "#takes",
        "#idle before",
        "#batch",
        "#others' prompt tokens",
        "#own tokens",
        "",
    )
    return render_table("Slowest steps", heads, lines)


# ── latency breakdown ────────────────────────────────────────────────────────────────────────────────────────────


def _render_breakdown(record: RequestRecord, page: PageContext) -> str:
    if record.breakdown is None or not record.breakdown.causes:
        return ""
    whole = max(record.duration_ns, 1)
    causes = sorted(record.breakdown.causes.items(), key=lambda item: (-item[1], item[0]))
    lines = [
        f'<th scope="row">{colour_swatch(COLOURS.get(cause, STEP_COLOUR))}{escape_text(cause.replace("_", " "))}</th>'
        f'<td class="n">{length / 1e6:,.1f} ms</td><td class="n">{format_share(length / whole)}</td>'
        f'<td class="dim">{escape_text(semconv.describe_cause(cause))}</td>'
        for cause, length in causes
    ]
    caption = "Where its time went; the parts sum to its duration"
    interferer = record.breakdown.interferer
    if interferer is not None:
        link = link_request(interferer.trace_id, interferer.span_id, interferer.span_id in page.shown)
        caption += f". Main interferer: {link}, {format_duration(interferer.length)}"
    bar = render_cause_bar([(cause, length / whole) for cause, length in causes])
    return f"{bar}{render_table(caption, ('cause', '#time', '#share', 'meaning'), lines)}"
