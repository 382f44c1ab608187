"""HTML helpers of the report: escaping of outside text, lengths, colours and tables."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from otel_infer import semconv
from otel_infer.export.console import format_duration

MAX_TEXT_BYTES = 120
"""Maximum length of a text from a server in the page, after escaping."""
COLOURS = {row.name: row.colour for row in semconv.CAUSE_TABLE}
"""Colours of causes, and of stages with the same name; light enough for black text."""
QUEUE_COLOUR = COLOURS[semconv.CAUSE_SCHEDULER_QUEUE]
RUNNING_COLOUR = COLOURS[semconv.CAUSE_DECODE]
PAUSE_COLOUR = COLOURS[semconv.CAUSE_GC]
PROMPT_COLOUR = COLOURS[semconv.CAUSE_INTERFERENCE]
MISSED_COLOUR = "#d1362b"
STEP_COLOUR = COLOURS[semconv.CAUSE_INGRESS]

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def escape_text(value: object, most: int = MAX_TEXT_BYTES) -> str:
    """Returns text that is safe anywhere in a page, including attribute values.

    It is one line without markup, cut at `most` bytes.
    """
    text = _UNPRINTABLE.sub("�", str(value))[: most + 1]
    escaped = html.escape(text, quote=True)
    if len(escaped.encode()) <= most:
        return escaped
    sizes = accumulate(len(html.escape(letter, quote=True).encode()) for letter in text)
    letters = sum(size < most for size in sizes)
    return html.escape(text[:letters], quote=True) + "…"


def json_for_script(value: Any) -> str:
    """Returns JSON that is safe in a script element, whatever its values."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def request_anchor(span_id: bytes) -> str:
    """Returns the anchor of a request in the page."""
    return f"r-{span_id.hex()}"


def link_request(trace_id: bytes, span_id: bytes, shown: bool) -> str:
    """Returns the begin of a trace id, with a link if the request is shown on the page."""
    text = f"<code>{trace_id.hex()[:8]}</code>"
    return f'<a href="#{request_anchor(span_id)}">{text}</a>' if shown else text


def format_share(part: float) -> str:
    """Returns a share (0 to 1) as `41.6 %`."""
    return f"{100 * part:.1f} %"


def colour_swatch(colour: str) -> str:
    """Returns a coloured square, to put before a name."""
    return f'<i class="spot" style="background:{colour}"></i>'


def number_cell(value: float, text: str | None = None) -> str:
    """Returns a numeric cell; the table can be sorted by its value."""
    return f'<td class="n" data-v="{value:g}">{escape_text(f"{value:,.0f}") if text is None else text}</td>'


def duration_cell(ns: float) -> str:
    """Returns a cell with a length; 0 is shown as `–`."""
    return f'<td class="n" data-v="{ns:.0f}">{format_duration(ns) if ns else "–"}</td>'


def render_table(caption: str, heads: Iterable[str], rows: Iterable[str], name: str = "") -> str:
    """Returns a table.

    A head that begins with `#` marks a numeric column. Cells and caption must be markup already.
    """
    columns = "".join(
        f'<th scope="col" class="n">{head[1:]}</th>'
        if head.startswith("#")
        else f'<th scope="col">{head}</th>'
        for head in heads
    )
    body = "\n".join(f"<tr>{row}</tr>" if not row.startswith("<tr") else row for row in rows)
    return (
        f'<div class="wide"><table class="{name}"><caption>{caption}</caption><thead><tr>{columns}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def render_cause_bar(parts: Iterable[tuple[str, float]]) -> str:
    """Returns a stacked bar of causes. Parts of 9 % or more carry their name; the table has all of them."""
    boxes = []
    for cause, share in parts:
        if share >= 0.002:
            text = f"{cause.replace('_', ' ')} {100 * share:.0f} %" if share >= 0.09 else ""
            colour = COLOURS.get(cause, COLOURS[semconv.CAUSE_UNEXPLAINED])
            boxes.append(
                f'<span style="flex:{share:.4f} 0 0;background:{colour}" title="{escape_text(cause)} {format_share(share)}">{escape_text(text)}</span>'
            )
    return f'<div class="stack" aria-hidden="true">{"".join(boxes)}</div>'
