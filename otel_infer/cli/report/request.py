"""One request of a report: its row, and what the row opens to: waterfall, step strip, blame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli.report.html_helpers import (
    COLOURS,
    PAUSE_COLOUR,
    STEP_COLOUR,
    anchor,
    data,
    length,
    linked,
    number,
    safe,
    share,
    stacked,
    swatch,
    table,
)
from otel_infer.export.console import milliseconds
from otel_infer.export.spans.tree import request_name
from otel_infer.ringbuffer import events

MOST_BARS, BARS_TOGETHER = 2000, 100_000
"""Of one strip, and of all; of more steps the slowest of each group is drawn."""
MOST_STAGES = 16
MOST_ATTRIBUTES = 4
"""Of one stage; of a request, twice as many."""
MOST_STEPS = 8
"""Slowest steps in the table below a strip."""
MOST_PAUSES = 50
MOST_CAUSES = 4
"""Causes of pauses of one request, each a line."""
HEADS = (
    "trace", "request", "ended", "#end to end", "#first token", "#longest gap", "#prompt", "#tokens", "most of it",
    "held up by",
)  # fmt: skip
OUTCOMES = {events.OK: "ok", events.ERROR: "error", events.ABORTED: "aborted"}


class Place(NamedTuple):
    """Where a request stands: when the tape began, which requests (span ids) are in the page too, bars of a strip.

    `missed`: by span id, the objectives that a request did not meet.
    """

    began: int
    shown: frozenset[bytes]
    bars: int
    missed: Mapping[bytes, tuple[str, ...]]


def place_of(began: int, shown: Sequence[RequestRecord], missed: Mapping[bytes, tuple[str, ...]]) -> Place:
    """The same for all requests of a page."""
    bars = min(MOST_BARS, BARS_TOGETHER // max(len(shown), 1))
    return Place(began, frozenset(record.span_id for record in shown), bars, missed)


def rows(record: RequestRecord, page: Place) -> str:
    """Two rows: what it came to, and all about it."""
    return _row(record, page) + "\n" + _detail(record, page)


def _row(record: RequestRecord, page: Place) -> str:
    key = anchor(record.span_id)
    ended = OUTCOMES.get(record.outcome, "") + (f" ({record.error_type})" if record.error_type else "")
    missed = page.missed.get(record.span_id, ())
    ended += f", missed {', '.join(missed)}" if missed else ""
    top = record.blame.top if record.blame is not None else ""
    part = record.blame.causes[top] / max(record.duration_ns, 1) if record.blame is not None and top else 0.0
    most = (
        f"{swatch(COLOURS.get(top, STEP_COLOUR))}{safe(top.replace('_', ' '))} {share(part)}" if top else "–"
    )
    offender = record.blame.offender if record.blame is not None else None
    by = linked(offender.trace_id, offender.span_id, offender.span_id in page.shown) if offender else "–"
    bad = ' class="bad"' if record.outcome != events.OK or missed else ""
    return (
        f'<tr class="row"><td><a class="open" href="#{key}" aria-controls="{key}" aria-expanded="false">'
        f"<code>{record.trace_id.hex()[:8]}</code></a></td><td>{safe(request_name(record))}</td><td{bad}>{safe(ended)}</td>"
        f"{length(record.duration_ns)}{length(record.ttft_ns)}{length(record.summary.gap_max)}"
        f"{number(record.input_tokens)}{number(record.output_tokens)}"
        f'<td data-v="{part:.4f}">{most}</td><td>{by}{f" {milliseconds(offender.length)}" if offender else ""}</td></tr>'
    )


def _detail(record: RequestRecord, page: Place) -> str:
    return (
        f'<tr class="detail" id="{anchor(record.span_id)}"><td colspan="{len(HEADS)}"><div class="in">'
        f"{_about(record, page.began)}{_waterfall(record)}{_strip(record, page.bars)}{_blame(record, page)}</div></td></tr>"
    )


def _about(record: RequestRecord, began: int) -> str:
    """What is said of it under names that are ours or the conventions'; an application's own attributes stay on the tape."""
    said: dict[str, object] = {
        "trace": record.trace_id.hex(),
        "span": record.span_id.hex(),
        "arrived at": f"{(record.arrived_at - began) / 1e9:.3f} s",
        "model": record.model,
        "engine": record.engine,
        "finished": ", ".join(map(str, record.finish_reasons)),
        "error": record.error_type,
        "died in": record.died_in,
        "preemptions": record.preemptions,
        "sequences": record.sequences if record.sequences > 1 else 0,
        "telemetry lost": "yes: what is here is true, but not all of it" if record.telemetry_lost else "",
    }
    known = (semconv.RESPONSE_ID, semconv.HTTP_ROUTE)
    more = [(k, v) for k, v in sorted(record.attributes.items()) if k in known or k.startswith("infer.")]
    said |= dict(more[: 2 * MOST_ATTRIBUTES])
    return "<dl>" + "".join(f"<dt>{safe(k)}</dt><dd>{safe(v)}</dd>" for k, v in said.items() if v) + "</dl>"


# ── waterfall ────────────────────────────────────────────────────────────────────────────────────────────────────


def _waterfall(record: RequestRecord) -> str:
    stages = record.stages[:MOST_STAGES]
    lines = []
    for stage in stages:
        colour = COLOURS.get(_STAGE_CAUSES.get(stage.name, stage.name), COLOURS[semconv.CAUSE_APPLICATION])
        bar = _bars(record, [(stage.started_at, stage.ended_at)], colour)
        more = safe(", ".join(f"{k} = {v}" for k, v in [*stage.attributes.items()][:MOST_ATTRIBUTES]), 240)
        lines.append(
            f'<th scope="row">{safe(stage.name)}</th><td class="bar">{bar}</td>'
            f'<td class="n">{_ms(stage.started_at - record.arrived_at)}</td>'
            f'<td class="n">{_ms(stage.ended_at - stage.started_at)}</td><td class="dim">{more}</td>'
        )
    pauses = _longest(record)
    for cause in sorted({pause.cause for pause in pauses})[:MOST_CAUSES]:
        there = [(pause.started_at, pause.ended_at) for pause in pauses if pause.cause == cause]
        total = sum(min(end, record.ended_at) - max(begin, record.arrived_at) for begin, end in there)
        lines.append(
            f'<th scope="row">pause: {safe(cause)}</th><td class="bar">{_bars(record, there, PAUSE_COLOUR)}</td>'
            f'<td class="n">{len(there)} ×</td><td class="n">{_ms(total)}</td><td class="dim">{_STOOD_STILL.get(cause, "the whole process stood still")}</td>'
        )
    left = len(record.stages) - len(stages)
    caption = "Stages" + (f"; {left} more are on the tape" if left else "")
    return table(caption, ("stage", "", "#begins", "#takes", ""), lines, "fall")


_STOOD_STILL = {semconv.CAUSE_EVENT_LOOP: "the event loop stood still, not the engine"}

_STAGE_CAUSES = {
    semconv.SPAN_FETCH_MEDIA: semconv.CAUSE_MEDIA,
    semconv.SPAN_PREPARE_MEDIA: semconv.CAUSE_MEDIA,
    semconv.SPAN_KV_TRANSFER: semconv.CAUSE_KV_TRANSFER,
    semconv.SPAN_QUEUE: semconv.CAUSE_SCHEDULER_QUEUE,
    semconv.SPAN_POSTPROCESS: semconv.CAUSE_EGRESS,
    semconv.SPAN_FORWARD: semconv.CAUSE_DECODE,
    semconv.SPAN_H2D: semconv.CAUSE_TRANSFER,
    semconv.SPAN_D2H: semconv.CAUSE_TRANSFER,
}


def _ms(ns: int) -> str:
    return milliseconds(max(ns, 0))


def _bars(record: RequestRecord, intervals: Sequence[tuple[int, int]], colour: str) -> str:
    """Intervals on the scale of the request; none is too short to be seen."""
    scale = 1000 / max(record.duration_ns, 1)
    boxes = []
    for begin, end in intervals:
        begin, end = max(begin, record.arrived_at), min(end, record.ended_at)
        left = min((begin - record.arrived_at) * scale, 998)
        width = min(max((end - begin) * scale, 2), 1000 - left)
        boxes.append(f'<rect x="{left:.1f}" width="{width:.1f}" height="10" fill="{colour}"/>')
    return f'<svg viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">{"".join(boxes)}</svg>'


def _longest(record: RequestRecord) -> list[Pause]:
    """What of them lies inside the request counts."""

    def inside(pause: Pause) -> int:
        return min(pause.ended_at, record.ended_at) - max(pause.started_at, record.arrived_at)

    return sorted(sorted(record.all_pauses, key=lambda pause: (-inside(pause), pause))[:MOST_PAUSES])


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _strip(record: RequestRecord, bars: int) -> str:
    """The bars are drawn from the numbers when the row is opened; the slowest are a table for whoever cannot see them."""
    rows = record.steps
    if rows is None or len(rows) < 2:
        return '<p class="dim">No decode steps of this request are on the tape.</p>'
    began, ended = rows.started_at[1:], rows.ended_at[1:]
    lengths, idle = ended - began, np.maximum(began - rows.ended_at[:-1], 0)
    held = _paused(record, rows.ended_at[:-1], ended)
    columns = (rows.step[1:], ended - record.arrived_at, lengths, idle, *rows.table[3:, 1:])
    keep = slowest_of_each(lengths + idle, bars)
    slowest = np.argsort(-(lengths + idle), kind="stable")[:MOST_STEPS]
    return (
        f'<h4>Decode steps</h4><p class="caption">{_caption(lengths, keep)}</p>'
        '<div class="strip"><noscript>The bars are drawn by a script; the slowest steps are below.</noscript></div>'
        f'<script type="application/json">{data(_numbers(columns, held, keep))}</script>'
        f"{_slowest_table(columns, held, slowest, record.pauses)}"
    )


def _caption(lengths: Any, keep: Any) -> str:
    median, longest = milliseconds(float(np.median(lengths))), milliseconds(int(lengths.max()))
    some = "" if len(keep) == len(lengths) else f" (the slowest of each group: {len(keep):,} bars)"
    return f"{len(lengths):,} steps that gave this request a token{some}; median {median}, longest {longest}"


def slowest_of_each(lengths: Any, bars: int) -> Any:
    """The rows that are drawn."""
    if len(lengths) <= bars:
        return np.arange(len(lengths))
    begins = np.arange(bars) * len(lengths) // bars
    return np.array([
        begin + int(group.argmax()) for begin, group in zip(begins, np.split(lengths, begins[1:]))
    ])  # fmt: skip


def _paused(record: RequestRecord, since: Any, until: Any) -> Any:
    """Before or in which steps the process was held up."""
    held = np.zeros(len(until), bool)
    for pause in record.pauses:
        held |= (since < pause.ended_at) & (until > pause.started_at)
    return held


def _numbers(columns: Sequence[Any], held: Any, keep: Any) -> dict[str, list[int]]:
    """Lengths and instants in µs; steps and instants as differences, which are short."""
    step, at, lengths, idle, tokens, size, others = (column[keep] for column in columns)
    return {
        "step": np.diff(step, prepend=0).tolist(),
        "at": np.diff(at // 1000, prepend=0).tolist(),
        "length": (lengths // 1000).tolist(),
        "idle": (idle // 1000).tolist(),
        "tokens": tokens.tolist(),
        "batch": size.tolist(),
        "others": others.tolist(),
        "paused": np.flatnonzero(held[keep]).tolist(),
    }


def _slowest_table(columns: Sequence[Any], held: Any, slowest: Any, pauses: Sequence[Pause]) -> str:
    lines = []
    for i in slowest.tolist():
        step, at, took, idle, tokens, size, others = (int(column[i]) for column in columns)
        mark = ("▲ others' prompt " if others else "") + ("❚❚ pause" if held[i] else "")
        cells = (str(step), f"{at / 1e9:.3f} s", milliseconds(took), milliseconds(idle) if idle else "–")
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
    return table("Its slowest steps", heads, lines)


# ── blame ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _blame(record: RequestRecord, page: Place) -> str:
    if record.blame is None or not record.blame.causes:
        return ""
    whole = max(record.duration_ns, 1)
    causes = sorted(record.blame.causes.items(), key=lambda item: (-item[1], item[0]))
    lines = [
        f'<th scope="row">{swatch(COLOURS.get(cause, STEP_COLOUR))}{safe(cause.replace("_", " "))}</th>'
        f'<td class="n">{took / 1e6:,.1f} ms</td><td class="n">{share(took / whole)}</td>'
        f'<td class="dim">{safe(semconv.CAUSES.get(cause, ""))}</td>'
        for cause, took in causes
    ]
    said = "Where its time went; the parts sum to its duration"
    offender = record.blame.offender
    if offender is not None:
        who = linked(offender.trace_id, offender.span_id, offender.span_id in page.shown)
        said += f". Held up most by {who}: {milliseconds(offender.length)}"
    bar = stacked([(cause, took / whole) for cause, took in causes])
    return f"{bar}{table(said, ('cause', '#time', '#share', 'meaning'), lines)}"
