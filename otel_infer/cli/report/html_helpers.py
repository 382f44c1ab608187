"""What the parts of a report are written with: text from outside made harmless, lengths, colours, and tables."""

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
"""Of any text that came from a server, as it stands in the page."""
COLOURS = {row.name: row.colour for row in semconv.CAUSE_TABLE}
"""Of causes, and of the stages that are called as they are: light enough to be written on in black."""
QUEUE_COLOUR = COLOURS[semconv.CAUSE_SCHEDULER_QUEUE]
RUNNING_COLOUR = COLOURS[semconv.CAUSE_DECODE]
PAUSE_COLOUR = COLOURS[semconv.CAUSE_GC]
PROMPT_COLOUR = COLOURS[semconv.CAUSE_INTERFERENCE]
MISSED_COLOUR = "#d1362b"
STEP_COLOUR = COLOURS[semconv.CAUSE_INGRESS]

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def escape_text(said: object, most: int = MAX_TEXT_BYTES) -> str:
    """Text for any place in a page, an attribute's value among them: short, on one line, no markup."""
    text = _UNPRINTABLE.sub("�", str(said))[: most + 1]
    escaped = html.escape(text, quote=True)
    if len(escaped.encode()) <= most:
        return escaped
    sizes = accumulate(len(html.escape(letter, quote=True).encode()) for letter in text)
    letters = sum(size < most for size in sizes)
    return html.escape(text[:letters], quote=True) + "…"


def json_for_script(value: Any) -> str:
    """JSON that can stand in a script element, whatever it says."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def request_anchor(span_id: bytes) -> str:
    """What a request is called inside the page."""
    return f"r-{span_id.hex()}"


def link_request(trace_id: bytes, span_id: bytes, shown: bool) -> str:
    """The beginning of a trace id; a link where the request is in the page."""
    text = f"<code>{trace_id.hex()[:8]}</code>"
    return f'<a href="#{request_anchor(span_id)}">{text}</a>' if shown else text


def format_share(part: float) -> str:
    """`41.6 %`."""
    return f"{100 * part:.1f} %"


def colour_swatch(colour: str) -> str:
    """A spot of colour beside its name."""
    return f'<i class="spot" style="background:{colour}"></i>'


def number_cell(value: float, text: str | None = None) -> str:
    """A cell by which a table can be sorted."""
    return f'<td class="n" data-v="{value:g}">{escape_text(f"{value:,.0f}") if text is None else text}</td>'


def duration_cell(ns: float) -> str:
    """A cell with a length."""
    return f'<td class="n" data-v="{ns:.0f}">{format_duration(ns) if ns else "–"}</td>'


def render_table(caption: str, heads: Iterable[str], rows: Iterable[str], name: str = "") -> str:
    """A real table; a head that begins with `#` is of numbers. Cells and caption are markup already."""
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
    """One bar of causes; those with room carry their names, all of them are in the table beside."""
    boxes = []
    for cause, part in parts:
        if part >= 0.002:
            text = f"{cause.replace('_', ' ')} {100 * part:.0f} %" if part >= 0.09 else ""
            colour = COLOURS.get(cause, COLOURS[semconv.CAUSE_UNEXPLAINED])
            boxes.append(
                f'<span style="flex:{part:.4f} 0 0;background:{colour}" title="{escape_text(cause)} {format_share(part)}">{escape_text(text)}</span>'
            )
    return f'<div class="stack" aria-hidden="true">{"".join(boxes)}</div>'
