"""Measures the cost and the accuracy of GPU timing: one command, some minutes on one GPU.

    python -m benchmarks.gpu_verify [--out FOLDER] [--only PART …]

Writes FOLDER/gpu-<name>.json, the table as Markdown, and recording-<name>.json, which ordinary tests replay. Exit
status 1 if a gate failed, 2 without a GPU. `tests/gpu` asserts the gates.

The part `whole` is `transformers serve` with 1, 32 and 128 streams. It takes nine minutes, so it runs only if `--only` names it.
It writes FOLDER/whole-gpu-<name>.json, the table as Markdown, and the rounds of each load in FOLDER/rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, verdict
from benchmarks.verdict import Figure, Gate, Line, make_exact, make_line
from otel_infer import _clock, gpu

RESULTS = Path(__file__).parent / "results"
STEP_OVERHEAD, HOST_COST_US, DURATION_US, END_US = 1.0, 12.0, 5.0, 25.0
"""Gates: % of a step, µs of the host per step, and errors (µs) at p95."""
CALLS = 2000
ONLY_IF_NAMED = ("whole",)


def main() -> int:
    """Runs the parts, writes the files and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_verify", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    parts = arguments.only or [name for name in PARTS if name not in ONLY_IF_NAMED]
    import torch

    if not torch.cuda.is_available():
        print(f"no CUDA device; skipped: {', '.join(parts)}", file=sys.stderr)
        return 2
    torch.set_grad_enabled(False)
    lines: list[Line] = []
    without_server: list[Line] = []
    environment = describe_device(torch)
    for name in parts:
        began = time.monotonic()
        measured = PARTS[name](arguments.out)
        torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        lines += measured
        if name not in ONLY_IF_NAMED:
            without_server += measured
            write_results(arguments.out, "gpu", without_server, environment)
    from benchmarks.__main__ import show_lines

    show_lines(lines, environment)
    return int(any(line.verdict == verdict.FAIL for line in lines))


def describe_device(torch: Any) -> dict[str, str]:
    """Returns the device, its driver, and the software versions."""
    from otel_infer.gpu import nvml

    return {
        "GPU": torch.cuda.get_device_name(0),
        "driver": nvml.query_state().driver or "unknown",
        "CUDA": str(torch.version.cuda),
        "torch": torch.__version__,
        "sources": hash_sources(),
        **machine.describe_machine(),
    }


def hash_sources() -> str:
    """Returns a hash of the code of `otel_infer.gpu`, to detect changes since the verification."""
    digest = hashlib.sha256()
    for path in sorted(Path(gpu.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def make_slug(name: str) -> str:
    """Returns a device's name for a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write_results(folder: Path, kind: str, lines: list[Line], environment: dict[str, str]) -> None:
    """Writes the rows as JSON and as a table in Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{kind}-{make_slug(environment['GPU'])}"
    verdict.save_lines(lines, folder / f"{name}.json", environment)
    rows = ["| claim | gate | measured | bounds | control | verdict |", "|---|---|---|---|---|---|"]
    rows += ["| " + " | ".join(row) + " |" for row in verdict.format_rows(lines)]
    description = ", ".join(f"{key} {value}" for key, value in environment.items())
    (folder / f"{name}.md").write_text(f"Measured on: {description}.\n\n" + "\n".join(rows) + "\n")


# ── the cost of each call ─────────────────────────────────────────────────────────────────────────────────────────


def measure_calls(out: Path) -> list[Line]:
    """Returns the host's cost of each call (µs)."""
    import torch

    from otel_infer.gpu.clock_sync import ClockMap
    from otel_infer.gpu.device import TorchDevice
    from otel_infer.gpu.timeline import Timeline

    device = TorchDevice(torch, "cuda", 0)
    clocks, stream = ClockMap(device), device.current_stream()
    timeline = Timeline(device, clocks)
    timeline.warm_up(device.create_idle_stream())
    clocks.add_anchor()
    first, second = device.create_event(), device.create_event()
    first.record(stream)
    second.record(stream)
    torch.cuda.synchronize()

    def time_span() -> None:
        begun = timeline.begin_span()
        if begun is not None:
            timeline.end_span(begun, lambda timed: None)
        timeline.collect_spans()

    operations: dict[str, Callable[[], object]] = {
        "event.record(stream)": lambda: second.record(stream),
        "event.query()": first.query,
        "start.elapsed_time(end)": lambda: first.elapsed_time(first),
        "is this thread capturing": device.is_capturing,
        "the current stream": device.current_stream,
        "begin, end and harvest of a span, nothing else running": time_span,
        "an anchor of the clocks (the tender's thread)": clocks.add_anchor,
        "the allocator's figures": torch.cuda.memory_stats_as_nested_dict,
        "free device memory (cudaMemGetInfo)": torch.cuda.mem_get_info,
    }
    lines = [make_line(f"host cost: {name}", "µs", _measure_cost(call)) for name, call in operations.items()]
    torch.cuda.synchronize()
    return lines


def _measure_cost(call: Callable[[], object], times: int = CALLS) -> Figure:
    """Returns the median of single calls (µs), with p5 and p95 as bounds."""
    lengths = []
    for _ in range(times):
        before = _clock.now()
        call()
        lengths.append(_clock.now() - before)
    return Figure(*(float(np.percentile(lengths, at)) / 1000 for at in (50, 5, 95)))


# ── the clocks ───────────────────────────────────────────────────────────────────────────────────────────────────


def measure_clocks(out: Path) -> list[Line]:
    """Returns the width of anchors, and the error with which earlier anchors predict them."""
    import torch

    from otel_infer.gpu.clock_sync import ClockMap
    from otel_infer.gpu.device import TorchDevice

    device = TorchDevice(torch, "cuda", 0)
    mapped = ClockMap(device)
    halves, rates, misses, outside = [], [], [], 0
    for _ in range(40):
        before = mapped.anchor
        if not mapped.add_anchor():
            continue
        anchor = mapped.anchor
        assert anchor is not None
        halves.append(anchor.bound_ns / 1000)
        if before is not None and before.drift < 50e-6:
            at, bound = mapped.to_host_time(before, before.event.elapsed_time(anchor.event))
            misses.append(abs(at - anchor.host_at) / 1000)
            outside += abs(at - anchor.host_at) > bound + anchor.bound_ns
            rates.append((anchor.rate - 1) * 1e6)
        time.sleep(0.5)
    return [
        make_line("an anchor of the clocks is known to ±", "µs", verdict.estimate_median(halves)),
        make_line("the device's clock against the host's", "ppm", verdict.estimate_median(rates)),
        make_line("where the next anchor was expected, off by", "µs", verdict.estimate_median(misses)),
        make_line("anchors outside of the bound", "", make_exact(float(outside)), Gate(0)),
    ]


# ── accuracy ───────────────────────────────────────────────────────────────────────────────────────────────


def accuracy(out: Path) -> list[Line]:
    """Compares device times with torch.profiler's kernels, and writes the recording."""
    import torch

    from benchmarks import gpu_accuracy

    measured = gpu_accuracy.measure()
    name = make_slug(torch.cuda.get_device_name(0))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"recording-{name}.json").write_text(json.dumps(measured.make_recording(), indent=1) + "\n")
    lines = []
    for kind in ("prefill", "eager", "graph"):
        off = gpu_accuracy.compute_errors([row for row in measured.rows if row.kind == kind])
        lines += [
            make_line(
                f"{kind}: length against the kernels', p95",
                "µs",
                _compute_p95(off["duration"]),
                Gate(DURATION_US),
            ),
            make_line(f"{kind}: end against the kernels', p95", "µs", _compute_p95(off["end"]), Gate(END_US)),
        ]
    off = gpu_accuracy.compute_errors(measured.rows)
    lines.append(make_line("bound of a mapped instant", "µs", verdict.estimate_median(list(off["bound"]))))
    outside = float(np.sum(off["outside"] > 0))
    note = f"{len(measured.rows)} stages"
    return [
        *lines,
        make_line("mapped instants outside of their bound", "", make_exact(outside), Gate(0), note=note),
    ]


def _compute_p95(off: Any) -> Figure:
    return make_exact(float(np.percentile(np.abs(off), 95))) if len(off) else make_exact(float("nan"))


# ── the cost of a step ─────────────────────────────────────────────────────────────────────────────────────────


def measure_overhead(out: Path) -> list[Line]:
    """Compares steps with and without marks in turns, and measures the host's cost of marks."""
    from benchmarks.gpu_steps import make_lines

    lines = []
    for batch in (1, 32):
        for kind in ("graph", "eager"):
            for ahead in (False, True):
                lines += make_lines(batch, kind, ahead, (STEP_OVERHEAD, HOST_COST_US))
    return lines


def check_safety(out: Path) -> list[Line]:
    """Checks for synchronization and for broken captures of graphs."""
    from benchmarks import gpu_safety

    return gpu_safety.check_safety()


def measure_whole(out: Path) -> list[Line]:
    """Switches hooks and marks in a running `transformers serve`. The rows until then are written after each round."""
    import torch

    from benchmarks import gpu_server

    environment = describe_device(torch)
    return gpu_server.measure(
        out / "rounds", lambda lines: write_results(out, "whole-gpu", lines, environment)
    )


PARTS: dict[str, Callable[[Path], list[Line]]] = {
    "calls": measure_calls,
    "clocks": measure_clocks,
    "accuracy": accuracy,
    "overhead": measure_overhead,
    "safety": check_safety,
    "whole": measure_whole,
}

if __name__ == "__main__":
    sys.exit(main())
