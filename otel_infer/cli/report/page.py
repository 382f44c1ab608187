"""A report as one HTML page that loads nothing. Everything from a tape goes through `safe` or `data`; scripts by their hash."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib import resources

from otel_infer import semconv
from otel_infer._version import VERSION
from otel_infer.analysis.diagnosis.rules import Diagnosis
from otel_infer.analysis.diagnosis.symptoms import COMPLAINTS
from otel_infer.cli.report.html_helpers import (
    COLOURS,
    MISSED_COLOUR,
    PAUSE_COLOUR,
    PROMPT_COLOUR,
    QUEUE_COLOUR,
    RUNNING_COLOUR,
    STEP_COLOUR,
    length,
    linked,
    number,
    safe,
    share,
    stacked,
    swatch,
    table,
)
from otel_infer.cli.report.request import HEADS, place_of, rows
from otel_infer.cli.report.summary import BINS, MOST_OFFENDERS, MOST_REQUESTS, Bin, Spread, View
from otel_infer.export.console import milliseconds
from otel_infer.ringbuffer import events

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def rendered(view: View, source: str) -> str:
    """The page; `source` is what the tape is called."""
    template = (resources.files("otel_infer.cli.report") / "report.html").read_text(encoding="utf-8")
    scripts = " ".join(f"'sha256-{_digest(script)}'" for script in _SCRIPT.findall(template))
    parts = {
        "scripts": scripts,
        "title": safe(f"{source}: otel-infer report"),
        "about": _about(view, source),
        "verdict": _verdict(view),
        "latencies": _spreads("What the reader felt; successful requests", "latency", view.latencies),
        "stages": _spreads("All requests; share of all time", "stage", view.stages),
        "causes": _causes(view),
        "timeline": _timeline(view),
        "requests": _requests(view),
        "offenders": _offenders(view),
        "version": safe(VERSION),
    }
    return _PLACE.sub(lambda place: parts[place[1]], template)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# ── verdict ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _about(view: View, source: str) -> str:
    told = view.told
    seconds = (view.ended - view.began) / 1e9
    counts = [f"{len(told.records):,} requests"]
    counts += [
        f"{many:,} {word}"
        for many, word in (
            (view.outcomes(events.ERROR), "failed"),
            (view.outcomes(events.ABORTED), "aborted"),
            (len(view.missed), "missed an objective"),
            (len(told.unfinished), "still in flight at its end"),
            (told.elsewhere, "that reached no engine"),
        )
        if many
    ]
    when = f"from {_utc(view.began + view.wall_offset)}, " if told.records else ""
    return f"<code>{safe(source)}</code>: {when}{seconds:,.1f} s; {', '.join(counts)}; {len(told.steps):,} engine steps"


def _utc(unix_ns: int) -> str:
    try:
        at = datetime.fromtimestamp(unix_ns // 1_000_000_000, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _verdict(view: View) -> str:
    diagnosis = view.diagnosis
    if not diagnosis.findings:
        head = {"healthy": "No complaint", "insufficient": "Insufficient evidence"}.get(diagnosis.verdict, "")
        nothing = "" if view.told.records else " There are no requests on this tape."
        note = safe(diagnosis.note)
        return f'<h2 id="verdict" data-verdict="{safe(diagnosis.verdict)}">{head}</h2><p>{note}.{nothing}</p>'
    return "".join(_finding(view, diagnosis, i) for i in range(len(diagnosis.findings)))


def _finding(view: View, diagnosis: Diagnosis, number: int) -> str:
    finding = diagnosis.findings[number]
    row = COMPLAINTS[finding.complaint]
    evidence = "".join(f"<li>{_with_links(view, safe(line))}</li>" for line in finding.evidence)
    head = f"“{safe(row.said)}”: {safe(row.happens)}"
    title = (
        f'<h2 id="verdict" data-verdict="{safe(diagnosis.verdict)}">{head}</h2>'
        if number == 0
        else f"<h3>Also: {head}</h3>"
    )
    return f'{title}<ul>{evidence}</ul><p class="change"><b>Change first:</b> {safe(finding.change)}</p>'


def _with_links(view: View, line: str) -> str:
    """Trace ids in a sentence lead to their rows."""
    shown = {record.trace_id.hex(): record.span_id.hex() for record in view.shown}

    def link(found: re.Match[str]) -> str:
        span_id = shown.get(found[0])
        return f'<a href="#r-{span_id}">{found[0]}</a>' if span_id else found[0]

    return re.sub(r"\b[0-9a-f]{32}\b", link, line)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _spreads(caption: str, what: str, spreads: Sequence[Spread]) -> str:
    if not spreads:
        return f'<p class="dim">{caption}: none.</p>'
    shares = any(spread.share is not None for spread in spreads)
    lines = [
        f'<th scope="row">{safe(spread.name)}</th>{number(spread.values)}'
        f"{length(spread.p50)}{length(spread.p95)}{length(spread.p99)}{length(spread.longest)}"
        + (f'<td class="n">{share(spread.share)}</td>' if spread.share is not None else "")
        for spread in spreads
    ]
    heads = (what, "#values", "#p50", "#p95", "#p99", "#max", *(["#share"] if shares else []))
    return table(caption, heads, lines)


def _causes(view: View) -> str:
    if not view.causes:
        return '<p class="dim">Nothing to divide.</p>'
    lines = [
        f'<th scope="row">{swatch(COLOURS.get(row.cause, STEP_COLOUR))}{safe(row.cause.replace("_", " "))}</th>'
        f'<td class="n">{share(row.slowest)}</td><td class="n">{share(row.everybody)}</td>'
        f'<td class="dim">{safe(semconv.CAUSES.get(row.cause, ""))}</td>'
        for row in view.causes
    ]
    heads = ("cause", "#slowest tenth", "#everybody", "meaning")
    bar = stacked([(row.cause, row.slowest) for row in view.causes])
    return bar + table("Share of these requests' time", heads, lines)


def _requests(view: View) -> str:
    many = len(view.told.records)
    some = f"all {many:,}" if many == len(view.shown) else f"{len(view.shown)} of {many:,}"
    caption = (
        f"{some}, {'those that missed an objective and then the longest' if view.missed else 'longest'} first; "
        "open one by its trace id."
        + (f" At most {MOST_REQUESTS} are shown: the slowest by end to end, first token and gap, and those who held them up."
           if many > len(view.shown) else "")
    )  # fmt: skip
    page = place_of(view.began, view.shown, view.missed)
    lines = [rows(record, page) for record in view.shown]
    return table(caption, HEADS, lines, "requests") if lines else '<p class="dim">None on this tape.</p>'


def _offenders(view: View) -> str:
    if not view.offenders:
        return '<p class="dim">Nobody held up another for a fiftieth of its time or more.</p>'
    shown = {record.span_id for record in view.shown}
    lines = []
    for row in view.offenders:
        own = f"{row.record.input_tokens:,}" if row.record is not None else "not on this tape"
        worst = linked(row.worst.trace_id, row.worst.span_id, row.worst.span_id in shown)
        lines.append(
            f"<td>{linked(row.trace_id, row.span_id, row.span_id in shown)}</td>"
            f'<td class="n">{own}</td>{number(row.victims)}{length(row.total)}<td>{worst} {milliseconds(row.worst_length)}</td>'
        )
    caption = f"By the time they took from those who name them first; at most {MOST_OFFENDERS}"
    heads = ("who", "#its prompt tokens", "#held up", "#total time", "worst hit")
    return table(caption, heads, lines)


# ── over the tape ────────────────────────────────────────────────────────────────────────────────────────────────

_WIDTH, _LANE, _GAP = 1000, 80, 26
_LANES: tuple[tuple[str, str, Callable[[Bin], float], str], ...] = (
    ("requests at once: running, and queued on top", QUEUE_COLOUR, lambda b: b.running + b.queued, ""),
    ("longest step", STEP_COLOUR, lambda b: b.longest, "ns"),
    ("prompt tokens computed", PROMPT_COLOUR, lambda b: b.prompt_tokens, ""),
)


def _timeline(view: View) -> str:
    if not view.told.records and not view.told.steps:
        return '<p class="dim">Nothing happened on this tape.</p>'
    drawn = []
    for place, (name, colour, of, unit) in enumerate(_LANES):
        top = place * (_LANE + _GAP) + _GAP
        most = max(map(of, view.bins))
        said = milliseconds(most) if unit == "ns" else f"{most:,.0f}"
        if place == 0:  # not at the same instant
            said = f"{max(b.running for b in view.bins):,} and {max(b.queued for b in view.bins):,}"
        drawn.append(
            f'<text x="0" y="{top - 7}">{name} (most: {said})</text>{_area(view.bins, of, most, top, colour)}'
        )
        if place == 0:
            drawn.append(_area(view.bins, lambda b: b.running, most, top, RUNNING_COLOUR))
        drawn.append(f'<line x1="0" x2="{_WIDTH}" y1="{top + _LANE}" y2="{top + _LANE}"/>')
    height = len(_LANES) * (_LANE + _GAP)
    drawn += _pauses(view, height) + _misses(view, height)
    return (
        f'<svg class="time" viewBox="0 0 {_WIDTH} {height + 22}" role="img" aria-label="Requests at once, longest step and '
        f'prompt tokens over the tape; the numbers are in the table below">{"".join(drawn)}{_ticks(view, height)}</svg>'
        f"{_legend(view)}{_timetable(view)}"
    )


def _area(bins: Sequence[Bin], of: Callable[[Bin], float], most: float, top: int, colour: str) -> str:
    width = _WIDTH / BINS
    bottom, points = top + _LANE, ""
    for place, value in enumerate(map(of, bins)):
        points += f"H{place * width:g}V{bottom - _LANE * value / (most or 1):.1f}"
    return f'<path d="M0 {bottom}{points}H{_WIDTH}V{bottom}Z" fill="{colour}"/>'


def _pauses(view: View, height: int) -> list[str]:
    scale = _WIDTH / max(view.ended - view.began, 1)
    return [
        f'<rect class="pause" x="{(pause.started_at - view.began) * scale:.1f}" y="{_GAP}" height="{height - _GAP}" '
        f'width="{max((pause.ended_at - pause.started_at) * scale, 1.5):.1f}" fill="{PAUSE_COLOUR}">'
        f"<title>{safe(pause.cause)} {milliseconds(pause.ended_at - pause.started_at)}</title></rect>"
        for pause in view.pauses
    ]


def _misses(view: View, height: int) -> list[str]:
    """A line where each request ended that missed an objective: that is when it was known."""
    scale = _WIDTH / max(view.ended - view.began, 1)
    return [
        f'<line class="missed" x1="{x:.1f}" x2="{x:.1f}" y1="{_GAP}" y2="{height}"><title>{record.trace_id.hex()[:8]} '
        f"missed {', '.join(view.missed[record.span_id])}</title></line>"
        for record in view.shown
        if record.span_id in view.missed
        for x in [(record.ended_at - view.began) * scale]
    ]


def _ticks(view: View, height: int) -> str:
    seconds = (view.ended - view.began) / 1e9
    anchors = ("start", "middle", "middle", "middle", "end")
    return "".join(
        f'<text x="{_WIDTH * i / 4:g}" y="{height + 17}" text-anchor="{where}">{seconds * i / 4:,.2f} s</text>'
        for i, where in enumerate(anchors)
    )


def _legend(view: View) -> str:
    entries = [(RUNNING_COLOUR, "running"), (QUEUE_COLOUR, "queued"), (STEP_COLOUR, "longest step"),
               (PROMPT_COLOUR, "prompt tokens")]  # fmt: skip
    if view.pauses:
        causes = ", ".join(sorted({safe(pause.cause) for pause in view.pauses})[:8])
        entries.append(
            (PAUSE_COLOUR, f"pauses of the whole process ({causes}), {len(view.told.pauses):,} in all")
        )
    if view.missed:
        entries.append((MISSED_COLOUR, "a request ended that missed an objective"))
    return '<p class="legend">' + " ".join(f"<span>{swatch(c)}{text}</span>" for c, text in entries) + "</p>"


def _timetable(view: View) -> str:
    width = (view.ended - view.began) / BINS
    lines = [
        f'<td class="n">{place * width / 1e9:,.2f} s</td>{number(b.running)}{number(b.queued)}{length(b.usual)}'
        f"{length(b.longest)}{number(b.prompt_tokens)}"
        for place, b in enumerate(view.bins)
    ]
    heads = ("#from", "#running", "#queued", "#usual step", "#longest step", "#prompt tokens")
    inside = table(f"Each row is {milliseconds(width)}", heads, lines)
    return f"<details><summary>The same as a table</summary>{inside}</details>"
