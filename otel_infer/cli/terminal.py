"""Formats records for the terminal: percentiles per stage, and one request as a waterfall.

On a terminal `rich` adds colours. On a pipe the output is plain lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from otel_infer import semconv
from otel_infer.assembly.engine.device_steps import BY_EVENT
from otel_infer.assembly.records.request import RequestRecord, Stage
from otel_infer.cli.latency import collect_latencies
from otel_infer.export.console import format_duration
from otel_infer.export.spans.tree import request_name

BARS = "▁▂▃▄▅▆▇█"
PIPED_WIDTH = 10_000
QUANTILES = (50, 95, 99)
COLOURS = {
    semconv.SPAN_ACCEPT: "blue",
    semconv.SPAN_INGRESS: "cyan",
    semconv.SPAN_TOKENIZE: "blue",
    semconv.SPAN_QUEUE: "yellow",
    semconv.SPAN_PREFILL: "magenta",
    semconv.SPAN_DECODE: "green",
    semconv.SPAN_POSTPROCESS: "cyan",
}


def make_console() -> Console:
    """Returns the console of stdout. On a pipe it has no colours and never wraps a line."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH, no_color=True)


def make_stages_table(records: Sequence[RequestRecord]) -> Table:
    """Returns a table of the stages: p50, p95, p99 and share of all request time.

    It has GPU columns (time and bottleneck) if a GPU was timed in at least one stage.
    """
    by_name: dict[str, list[Stage]] = {}
    for stage in [stage for record in records for stage in record.stages]:
        by_name.setdefault(stage.name, []).append(stage)
    on_gpu = {
        name: gpu for name, stages in by_name.items() if (gpu := [*map(_gpu_time, stages)]) and any(gpu)
    }
    gpu_columns = ("GPU p50", "GPU p99", "bottleneck") if on_gpu else ()
    table = _make_table(
        "where the time went",
        "stage",
        "requests",
        "p50",
        "p95",
        "p99",
        "max",
        "share of all time",
        *gpu_columns,
    )
    total = sum(record.duration_ns for record in records) or 1
    ordered = [name for name in semconv.STAGES if name in by_name]
    for name in ordered + sorted(set(by_name) - set(ordered)):
        lengths = [stage.ended_at - stage.started_at for stage in by_name[name]]
        share = f"{100 * sum(lengths) / total:.1f} %"
        row = [name, str(len(lengths)), *_format_quantiles(lengths), format_duration(max(lengths)), share]
        table.add_row(*row, *(_gpu_columns(on_gpu.get(name, [])) if gpu_columns else ()))
    return table


def format_device_line(records: Sequence[RequestRecord]) -> str:
    """Returns a sentence on the GPU timing: the number of timed steps and the error bound of each instant."""
    stages = [stage for record in records for stage in record.stages if _gpu_time(stage)]
    if not stages:
        return "no GPU was timed: all times are the host's"
    steps = sum(int(_get_number(stage, semconv.DEVICE_STEPS)) for stage in stages)
    bound = max(_get_number(stage, semconv.DEVICE_CLOCK_ERROR) for stage in stages)
    return (
        f"GPU: {steps} steps timed by events on its streams, each instant within ±{bound * 1e6:.0f} µs; "
        "the time of the other steps is estimated in proportion"
    )


def _gpu_time(stage: Stage) -> tuple[int, str] | None:
    """Returns the GPU time of a stage (ns) and its bottleneck; None if the stage was not timed by GPU events.

    If only some of its steps were timed, the time is scaled up to all of them.
    """
    if stage.attributes.get(semconv.DEVICE_METHOD) != BY_EVENT:
        return None
    timed, steps = _get_number(stage, semconv.DEVICE_STEPS), _get_number(stage, semconv.DEVICE_STEPS_ALL)
    length = _get_number(stage, semconv.DEVICE_DURATION) * 1e9 / max(timed, 1) * max(steps, 1)
    return round(length), str(stage.attributes.get(semconv.DEVICE_BOTTLENECK, ""))


def _get_number(stage: Stage, key: str) -> float:
    value = stage.attributes.get(key, 0)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _gpu_columns(stages: Sequence[tuple[int, str] | None]) -> tuple[str, ...]:
    timed = [stage for stage in stages if stage is not None]
    if not timed:
        return "", "", ""
    p50, _, p99 = _format_quantiles([length for length, _ in timed])
    ((bottleneck, _),) = Counter(bottleneck for _, bottleneck in timed).most_common(1)
    return p50, p99, bottleneck


def make_latency_table(records: Sequence[RequestRecord]) -> Table:
    """Returns a table of TTFT, inter-token latency and end-to-end latency of successful requests."""
    table = _make_table("client-side latency", "latency", "values", "p50", "p95", "p99", "max")
    for name, values in collect_latencies(records):
        table.add_row(
            name, str(len(values)), *_format_quantiles(values), format_duration(int(np.max(values)))
        )
    return table


def render_waterfall(record: RequestRecord, width: int = 64) -> Iterable[Text]:
    """Yields one request as lines: one per stage on a common time scale, then one bar per decode step."""
    head = f"{request_name(record)}  trace {record.trace_id.hex()}  {format_duration(record.duration_ns)}"
    yield Text(f"{head}  {record.input_tokens} → {record.output_tokens} tokens", style="bold")
    for stage in record.stages:
        yield _render_stage(record, stage, width)
    yield from _render_steps(record, width)


def _render_stage(record: RequestRecord, stage: Stage, width: int) -> Text:
    scale = width / max(record.duration_ns, 1)
    begin = min(int((stage.started_at - record.arrived_at) * scale), width - 1)
    length = max(round((stage.ended_at - stage.started_at) * scale), 1)
    length = min(length, width - begin)
    bar = " " * begin + "█" * length + " " * (width - begin - length)
    line = Text(f"  {stage.name[:14]:<14} ")
    line.append(bar, COLOURS.get(stage.name, "white"))
    return line.append(f" {format_duration(stage.ended_at - stage.started_at):>8}")


def _render_steps(record: RequestRecord, width: int) -> Iterable[Text]:
    """Yields the decode steps as bars. The height is the step's length; red is more than twice the median."""
    if record.steps is None or len(record.steps) < 2:
        return
    rows = record.steps
    lengths = (rows.ended_at - rows.started_at)[1:]
    others_prefill = rows.others_prefill_tokens[1:]
    median, longest = float(np.median(lengths)), int(lengths.max())
    caption = f"{len(lengths)} decode steps, one bar each: median {format_duration(median)}, longest {format_duration(longest)}"
    if others_prefill.max() > 0:
        caption += "; ▲ = another request's prompt in the same step"
    yield Text("  " + caption)
    for begin in range(0, len(lengths), width):
        bars, marks = Text("                 "), Text("                 ")
        for length, prompt in zip(
            lengths[begin : begin + width].tolist(), others_prefill[begin : begin + width].tolist()
        ):
            height = BARS[min(int(length / max(longest, 1) * (len(BARS) - 1) + 0.5), len(BARS) - 1)]
            bars.append(height, "red" if length > 2 * median else "green")
            marks.append("▲" if prompt else " ", "yellow")
        yield bars
        if marks.plain.strip():
            yield marks


def _format_quantiles(values: Sequence[int]) -> list[str]:
    return [format_duration(value) for value in np.percentile(np.array(values), QUANTILES).tolist()]


def _make_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table
