"""Renders a report as one HTML page that loads nothing.

Text from a tape is escaped by `escape_text` or `json_for_script`. Scripts are allowed by their hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import resources

from otel_infer import semconv
from otel_infer._version import VERSION
from otel_infer.analysis.diagnosis.rules import Diagnosis
from otel_infer.analysis.diagnosis.symptoms import SYMPTOMS
from otel_infer.cli.report.html_helpers import (
    COLOURS,
    MISSED_COLOUR,
    PAUSE_COLOUR,
    PROMPT_COLOUR,
    QUEUE_COLOUR,
    RUNNING_COLOUR,
    STEP_COLOUR,
    colour_swatch,
    duration_cell,
    escape_text,
    format_share,
    link_request,
    number_cell,
    render_cause_bar,
    render_table,
)
from otel_infer.cli.report.request import COLUMN_HEADS, make_page_context, render_rows
from otel_infer.cli.report.summary import (
    BIN_COUNT,
    MAX_INTERFERERS,
    MAX_REQUESTS,
    Percentiles,
    ReportView,
    TimelineBin,
)
from otel_infer.export.console import format_duration
from otel_infer.ringbuffer import events

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def render_page(view: ReportView, source: str) -> str:
    """Returns the HTML of the page. `source`: the file name of the tape."""
    template = (resources.files("otel_infer.cli.report") / "report.html").read_text(encoding="utf-8")
    scripts = " ".join(f"'sha256-{_script_hash(script)}'" for script in _SCRIPT.findall(template))
    parts = {
        "scripts": scripts,
        "title": escape_text(f"{source}: otel-infer report"),
        "about": _render_about(view, source),
        "verdict": _render_verdict(view),
        "latencies": _render_percentiles(
            "Client-side latency of successful requests", "latency", view.latencies
        ),
        "stages": _render_percentiles("All requests; share of all request time", "stage", view.stages),
        "causes": _render_causes(view),
        "timeline": _render_timeline(view),
        "requests": _render_requests(view),
        "interferers": _render_interferers(view),
        "version": escape_text(VERSION),
    }
    return _PLACEHOLDER.sub(lambda place: parts[place[1]], template)


def _script_hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# ── verdict ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _render_about(view: ReportView, source: str) -> str:
    recording = view.recording
    seconds = (view.ended - view.began) / 1e9
    counts = [f"{len(recording.records):,} requests"]
    counts += [
        f"{count:,} {text}"
        for count, text in (
            (view.count_outcome(events.ERROR), "failed"),
            (view.count_outcome(events.ABORTED), "aborted"),
            (len(view.missed_objectives), "missed an objective"),
            (len(recording.unfinished_arrivals), "still in flight at its end"),
            (recording.non_engine_requests, "that reached no engine"),
        )
        if count
    ]
    when = f"from {_format_utc(view.began + view.wall_offset)}, " if recording.records else ""
    return f"<code>{escape_text(source)}</code>: {when}{seconds:,.1f} s; {', '.join(counts)}; {len(recording.steps):,} engine steps"


def _format_utc(unix_ns: int) -> str:
    try:
        at = datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _render_verdict(view: ReportView) -> str:
    diagnosis = view.diagnosis
    if not diagnosis.findings:
        head = {"healthy": "No problem found", "insufficient": "Insufficient evidence"}.get(
            diagnosis.verdict, ""
        )
        nothing = "" if view.recording.records else " There are no requests on this tape."
        note = escape_text(diagnosis.note)
        return f'<h2 id="verdict" data-verdict="{escape_text(diagnosis.verdict)}">{head}</h2><p>{note}.{nothing}</p>'
    return "".join(_render_finding(view, diagnosis, i) for i in range(len(diagnosis.findings)))


def _render_finding(view: ReportView, diagnosis: Diagnosis, number: int) -> str:
    finding = diagnosis.findings[number]
    row = SYMPTOMS[finding.symptom]
    lines = (diagnosis.describe_share(finding), *finding.evidence)
    evidence = "".join(f"<li>{_link_trace_ids(view, escape_text(line))}</li>" for line in lines)
    head = f"“{escape_text(row.complaint)}”: {escape_text(row.meaning)}"
    title = (
        f'<h2 id="verdict" data-verdict="{escape_text(diagnosis.verdict)}">{head}</h2>'
        if number == 0
        else f"<h3>Also: {head}</h3>"
    )
    return (
        f'{title}<ul>{evidence}</ul><p class="change"><b>Change first:</b> {escape_text(finding.change)}</p>'
    )


def _link_trace_ids(view: ReportView, line: str) -> str:
    """Links the trace ids in a line to the rows of their requests."""
    shown = {record.trace_id.hex(): record.span_id.hex() for record in view.shown}

    def link_trace(match: re.Match[str]) -> str:
        span_id = shown.get(match[0])
        return f'<a href="#r-{span_id}">{match[0]}</a>' if span_id else match[0]

    return re.sub(r"\b[0-9a-f]{32}\b", link_trace, line)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _render_percentiles(caption: str, what: str, spreads: Sequence[Percentiles]) -> str:
    if not spreads:
        return f'<p class="dim">{caption}: none.</p>'
    shares = any(spread.share is not None for spread in spreads)
    lines = [
        f'<th scope="row">{escape_text(spread.name)}</th>{number_cell(spread.values)}'
        f"{duration_cell(spread.p50)}{duration_cell(spread.p95)}{duration_cell(spread.p99)}{duration_cell(spread.longest)}"
        + (f'<td class="n">{format_share(spread.share)}</td>' if spread.share is not None else "")
        for spread in spreads
    ]
    heads = (what, "#values", "#p50", "#p95", "#p99", "#max", *(["#share"] if shares else []))
    return render_table(caption, heads, lines)


def _render_causes(view: ReportView) -> str:
    if not view.causes:
        return '<p class="dim">No latency breakdown.</p>'
    lines = [
        f'<th scope="row">{colour_swatch(COLOURS.get(row.cause, STEP_COLOUR))}{escape_text(row.cause.replace("_", " "))}</th>'
        f'<td class="n">{format_share(row.slowest_share)}</td><td class="n">{format_share(row.overall_share)}</td>'
        f'<td class="dim">{escape_text(semconv.describe_cause(row.cause))}</td>'
        for row in view.causes
    ]
    heads = ("cause", "#slowest tenth", "#all requests", "meaning")
    bar = render_cause_bar([(row.cause, row.slowest_share) for row in view.causes])
    return bar + render_table("Share of these requests' time", heads, lines)


def _render_requests(view: ReportView) -> str:
    total = len(view.recording.records)
    shown = f"all {total:,}" if total == len(view.shown) else f"{len(view.shown)} of {total:,}"
    caption = (
        f"{shown}, {'missed objectives, then longest' if view.missed_objectives else 'longest'} first; "
        "open a request by its trace id."
        + (f" At most {MAX_REQUESTS} are shown: the slowest by end to end, first token and gap, and their interferers."
           if total > len(view.shown) else "")
    )  # fmt: skip
    page = make_page_context(view.began, view.shown, view.missed_objectives)
    lines = [render_rows(record, page) for record in view.shown]
    return (
        render_table(caption, COLUMN_HEADS, lines, "requests")
        if lines
        else '<p class="dim">None on this tape.</p>'
    )


def _render_interferers(view: ReportView) -> str:
    if not view.interferers:
        return '<p class="dim">No request was delayed by others for 2 % or more of its duration.</p>'
    shown = {record.span_id for record in view.shown}
    lines = []
    for row in view.interferers:
        prompt_tokens = f"{row.record.input_tokens:,}" if row.record is not None else "not on this tape"
        worst = link_request(
            row.worst_affected.trace_id, row.worst_affected.span_id, row.worst_affected.span_id in shown
        )
        lines.append(
            f"<td>{link_request(row.trace_id, row.span_id, row.span_id in shown)}</td>"
            f'<td class="n">{prompt_tokens}</td>{number_cell(row.affected_requests)}{duration_cell(row.total_delay_ns)}<td>{worst} {format_duration(row.worst_delay_ns)}</td>'
        )
    caption = f"Sorted by the total delay that they caused as main interferer; at most {MAX_INTERFERERS}"
    heads = ("request", "#prompt tokens", "#delayed requests", "#total delay", "longest delay")
    return render_table(caption, heads, lines)


# ── timeline ─────────────────────────────────────────────────────────────────────────────────────────────────────

_WIDTH, _LANE_HEIGHT, _GAP = 1000, 80, 26
_LANES: tuple[tuple[str, str, Callable[[TimelineBin], float], str], ...] = (
    ("concurrent requests: running, and queued on top", QUEUE_COLOUR, lambda b: b.running + b.queued, ""),
    ("longest step", STEP_COLOUR, lambda b: b.longest_step, "ns"),
    ("prompt tokens computed", PROMPT_COLOUR, lambda b: b.prompt_tokens, ""),
)


def _render_timeline(view: ReportView) -> str:
    if not view.recording.records and not view.recording.steps:
        return '<p class="dim">There are no requests and no steps on this tape.</p>'
    drawn = []
    for lane, (name, colour, value_of, unit) in enumerate(_LANES):
        top = lane * (_LANE_HEIGHT + _GAP) + _GAP
        highest = max(map(value_of, view.bins))
        maximum = format_duration(highest) if unit == "ns" else f"{highest:,.0f}"
        if lane == 0:  # the two maxima may be at different instants
            maximum = f"{max(b.running for b in view.bins):,} and {max(b.queued for b in view.bins):,}"
        drawn.append(
            f'<text x="0" y="{top - 7}">{name} (max: {maximum})</text>{_render_area(view.bins, value_of, highest, top, colour)}'
        )
        if lane == 0:
            drawn.append(_render_area(view.bins, lambda b: b.running, highest, top, RUNNING_COLOUR))
        drawn.append(f'<line x1="0" x2="{_WIDTH}" y1="{top + _LANE_HEIGHT}" y2="{top + _LANE_HEIGHT}"/>')
    height = len(_LANES) * (_LANE_HEIGHT + _GAP)
    drawn += _render_pauses(view, height) + _render_missed(view, height)
    return (
        f'<svg class="time" viewBox="0 0 {_WIDTH} {height + 22}" role="img" aria-label="Concurrent requests, longest step and '
        f'prompt tokens over the tape; the numbers are in the table below">{"".join(drawn)}{_render_ticks(view, height)}</svg>'
        f"{_render_legend(view)}{_render_bins(view)}"
    )


def _render_area(
    bins: Sequence[TimelineBin],
    value_of: Callable[[TimelineBin], float],
    highest: float,
    top: int,
    colour: str,
) -> str:
    width = _WIDTH / BIN_COUNT
    bottom, points = top + _LANE_HEIGHT, ""
    for place, value in enumerate(map(value_of, bins)):
        points += f"H{place * width:g}V{bottom - _LANE_HEIGHT * value / (highest or 1):.1f}"
    return f'<path d="M0 {bottom}{points}H{_WIDTH}V{bottom}Z" fill="{colour}"/>'


def _render_pauses(view: ReportView, height: int) -> list[str]:
    scale = _WIDTH / max(view.ended - view.began, 1)
    return [
        f'<rect class="pause" x="{(pause.started_at - view.began) * scale:.1f}" y="{_GAP}" height="{height - _GAP}" '
        f'width="{max((pause.ended_at - pause.started_at) * scale, 1.5):.1f}" fill="{PAUSE_COLOUR}">'
        f"<title>{escape_text(pause.cause)} {format_duration(pause.ended_at - pause.started_at)}</title></rect>"
        for pause in view.pauses
    ]


def _render_missed(view: ReportView, height: int) -> list[str]:
    """Returns a line at the end of each request that missed an objective, because it is known only then."""
    scale = _WIDTH / max(view.ended - view.began, 1)
    return [
        f'<line class="missed" x1="{x:.1f}" x2="{x:.1f}" y1="{_GAP}" y2="{height}"><title>{record.trace_id.hex()[:8]} '
        f"missed {', '.join(view.missed_objectives[record.span_id])}</title></line>"
        for record in view.shown
        if record.span_id in view.missed_objectives
        for x in [(record.ended_at - view.began) * scale]
    ]


def _render_ticks(view: ReportView, height: int) -> str:
    seconds = (view.ended - view.began) / 1e9
    anchors = ("start", "middle", "middle", "middle", "end")
    return "".join(
        f'<text x="{_WIDTH * i / 4:g}" y="{height + 17}" text-anchor="{where}">{seconds * i / 4:,.2f} s</text>'
        for i, where in enumerate(anchors)
    )


def _render_legend(view: ReportView) -> str:
    entries = [(RUNNING_COLOUR, "running"), (QUEUE_COLOUR, "queued"), (STEP_COLOUR, "longest step"),
               (PROMPT_COLOUR, "prompt tokens")]  # fmt: skip
    if view.pauses:
        causes = ", ".join(sorted({escape_text(pause.cause) for pause in view.pauses})[:8])
        entries.append(
            (PAUSE_COLOUR, f"pauses of the whole process ({causes}), {len(view.recording.pauses):,} in total")
        )
    if view.missed_objectives:
        entries.append((MISSED_COLOUR, "end of a request that missed an objective"))
    return (
        '<p class="legend">'
        + " ".join(f"<span>{colour_swatch(c)}{text}</span>" for c, text in entries)
        + "</p>"
    )


def _render_bins(view: ReportView) -> str:
    width = (view.ended - view.began) / BIN_COUNT
    lines = [
        f'<td class="n">{place * width / 1e9:,.2f} s</td>{number_cell(b.running)}{number_cell(b.queued)}{duration_cell(b.median_step)}'
        f"{duration_cell(b.longest_step)}{number_cell(b.prompt_tokens)}"
        for place, b in enumerate(view.bins)
    ]
    heads = ("#from", "#running", "#queued", "#median step", "#longest step", "#prompt tokens")
    inside = render_table(f"Each row covers {format_duration(width)}", heads, lines)
    return f"<details><summary>Show as a table</summary>{inside}</details>"
