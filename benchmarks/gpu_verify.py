"""What timing a GPU costs it, and how true it is: one command, some minutes on one GPU.

    python -m benchmarks.gpu_verify [--out FOLDER] [--only PART …]

Writes FOLDER/gpu-<name>.json, the table beside it as Markdown, and recording-<name>.json, which ordinary tests replay. Exit
status 1 if a gate failed, 2 where there is no GPU. `tests/gpu` asserts the lines that have a gate.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, verdict
from benchmarks.verdict import Figure, Gate, Line, exactly, line
from otel_infer import _clock, gpu

RESULTS = Path(__file__).parent / "results"
STEP_OVERHEAD, HOST_COST_US, DURATION_US, END_US = 1.0, 12.0, 5.0, 25.0
"""Gates: % of a step, µs of the host per step, and errors at p95."""
CALLS = 2000


def main() -> int:
    """Runs the parts, writes the files, prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_verify", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing is verified", file=sys.stderr)
        return 2
    torch.set_grad_enabled(False)
    lines: list[Line] = []
    for name in arguments.only or PARTS:
        began = time.monotonic()
        lines += PARTS[name](arguments.out)
        torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    about = described(torch)
    _write(arguments.out, lines, about)
    from benchmarks.__main__ import show

    show(lines, about)
    return int(any(one.verdict == verdict.FAIL for one in lines))


def described(torch: Any) -> dict[str, str]:
    """The device, its driver, and what it is driven by."""
    from otel_infer.gpu import nvml

    return {
        "GPU": torch.cuda.get_device_name(0),
        "driver": nvml.query_state().driver or "unknown",
        "CUDA": str(torch.version.cuda),
        "torch": torch.__version__,
        "sources": sources(),
        **machine.described(),
    }


def sources() -> str:
    """By which one sees whether the code that marks and reads devices is still what was verified."""
    digest = hashlib.sha256()
    for path in sorted(Path(gpu.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def slug(name: str) -> str:
    """A device's name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _write(folder: Path, lines: list[Line], about: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = slug(about["GPU"])
    verdict.saved(lines, folder / f"gpu-{name}.json", about)
    rows = ["| claim | gate | measured | bounds | control | verdict |", "|---|---|---|---|---|---|"]
    rows += ["| " + " | ".join(row) + " |" for row in verdict.rows_of(lines)]
    said = ", ".join(f"{key} {value}" for key, value in about.items())
    (folder / f"gpu-{name}.md").write_text(f"Measured on: {said}.\n\n" + "\n".join(rows) + "\n")


# ── what each call costs ─────────────────────────────────────────────────────────────────────────────────────────


def calls(out: Path) -> list[Line]:
    """µs of the host for every call that we make."""
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

    def span() -> None:
        begun = timeline.begin_span()
        if begun is not None:
            timeline.end_span(begun, lambda timed: None)
        timeline.collect_spans()

    asked: dict[str, Callable[[], object]] = {
        "event.record(stream)": lambda: second.record(stream),
        "event.query()": first.query,
        "start.elapsed_time(end)": lambda: first.elapsed_time(first),
        "is this thread capturing": device.is_capturing,
        "the current stream": device.current_stream,
        "begin, end and harvest of a span, nothing else running": span,
        "an anchor of the clocks (the tender's thread)": clocks.add_anchor,
        "the allocator's figures": torch.cuda.memory_stats_as_nested_dict,
        "free device memory (cudaMemGetInfo)": torch.cuda.mem_get_info,
    }
    lines = [line(f"host cost: {name}", "µs", _cost(call)) for name, call in asked.items()]
    torch.cuda.synchronize()
    return [*lines, *_nvml_costs()]


def _cost(call: Callable[[], object], times: int = CALLS) -> Figure:
    """Median of single calls, with p5 and p95 as its bounds."""
    lengths = []
    for _ in range(times):
        before = _clock.now()
        call()
        lengths.append(_clock.now() - before)
    return Figure(*(float(np.percentile(lengths, at)) / 1000 for at in (50, 5, 95)))


def _nvml_costs() -> list[Line]:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    asked = {
        "utilization": pynvml.nvmlDeviceGetUtilizationRates,
        "memory": pynvml.nvmlDeviceGetMemoryInfo,
        "power": pynvml.nvmlDeviceGetPowerUsage,
        "energy": pynvml.nvmlDeviceGetTotalEnergyConsumption,
        "throttle reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons,
    }
    lines = []
    for name, call in asked.items():
        cost = _cost(lambda call=call: call(handle), 50)
        lines.append(line(f"NVML, in the sidecar: {name}", "µs", cost))
    pynvml.nvmlShutdown()
    return lines


# ── the clocks ───────────────────────────────────────────────────────────────────────────────────────────────────


def clocks(out: Path) -> list[Line]:
    """Anchors for some seconds: how wide they are, and how far each is from where the others would have put it."""
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
        line("an anchor of the clocks is known to ±", "µs", verdict.median(halves)),
        line("the device's clock against the host's", "ppm", verdict.median(rates)),
        line("where the next anchor was expected, off by", "µs", verdict.median(misses)),
        line("anchors outside of the bound", "", exactly(float(outside)), Gate(0)),
    ]


# ── how true it is ───────────────────────────────────────────────────────────────────────────────────────────────


def accuracy(out: Path) -> list[Line]:
    """Against torch.profiler's kernels; writes the recording."""
    import torch

    from benchmarks import gpu_accuracy

    found = gpu_accuracy.measure()
    name = slug(torch.cuda.get_device_name(0))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"recording-{name}.json").write_text(json.dumps(found.recording(), indent=1) + "\n")
    lines = []
    for kind in ("prefill", "eager", "graph"):
        off = gpu_accuracy.errors([row for row in found.rows if row.kind == kind])
        lines += [
            line(f"{kind}: length against the kernels', p95", "µs", _p95(off["duration"]), Gate(DURATION_US)),
            line(f"{kind}: end against the kernels', p95", "µs", _p95(off["end"]), Gate(END_US)),
        ]
    off = gpu_accuracy.errors(found.rows)
    lines.append(line("bound of a mapped instant", "µs", verdict.median(list(off["bound"]))))
    outside = float(np.sum(off["outside"] > 0))
    note = f"{len(found.rows)} stages"
    return [*lines, line("mapped instants outside of their bound", "", exactly(outside), Gate(0), note=note)]


def _p95(off: Any) -> Figure:
    return exactly(float(np.percentile(np.abs(off), 95))) if len(off) else exactly(float("nan"))


# ── what it costs a step ─────────────────────────────────────────────────────────────────────────────────────────


def overhead(out: Path) -> list[Line]:
    """Steps with marks against steps without, in turns; and what the host spends on the marks."""
    from benchmarks.gpu_steps import measured

    lines = []
    for batch in (1, 32):
        for kind in ("graph", "eager"):
            for ahead in (False, True):
                lines += measured(batch, kind, ahead, (STEP_OVERHEAD, HOST_COST_US))
    return lines


# ── what must not happen ─────────────────────────────────────────────────────────────────────────────────────────


def safety(out: Path) -> list[Line]:
    """Under torch's sync debugging, and while graphs are captured."""
    return [*_no_sync(), *_captures()]


def _no_sync() -> list[Line]:
    import torch

    from otel_infer.gpu.clock_sync import ClockMap
    from otel_infer.gpu.device import TorchDevice
    from otel_infer.gpu.timeline import Timeline

    device = TorchDevice(torch, "cuda", 0)
    mapped = ClockMap(device)
    timeline = Timeline(device, mapped)
    mapped.add_anchor()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    torch.cuda.set_sync_debug_mode("error")
    began, failed = _clock.now(), 0
    try:
        for _ in range(50):
            span = timeline.begin_span()
            assert span is not None
            timeline.end_span(span, lambda timed: None)
            timeline.collect_spans()
    except RuntimeError:
        failed = 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    taken, is_busy = (_clock.now() - began) / 1e6, not device.current_stream().query()
    torch.cuda.synchronize()
    claim = "50 spans while the device is busy for 200 ms"
    return [
        line(f"{claim}: errors under sync debugging", "", exactly(float(failed)), Gate(0)),
        line(f"{claim}: the host takes", "ms", exactly(taken), Gate(50)),
        line(f"{claim}: the device was no longer busy", "", exactly(float(not is_busy)), Gate(0)),
    ]


def _captures() -> list[Line]:
    lines = []
    for said, announced in (("announced", True), ("that nobody told of", False)):
        for mode in ("global", "thread_local"):
            broken, seen = _captured(mode, announced)
            claim = f"captures {said}, {mode}: broken, of 5"
            lines.append(line(claim, "", exactly(float(broken)), Gate(0), note=f"{seen} harvests meanwhile"))
    return lines


def _captured(mode: str, announced: bool) -> tuple[int, int]:
    """Captures while another thread, prepared as the tender is, harvests and anchors as fast as it can."""
    import torch

    from otel_infer.gpu import graph_capture

    broken, data = 0, torch.zeros(1024, device="cuda")
    with _tending() as count:
        for _ in range(5):
            graph = torch.cuda.CUDAGraph()
            data.zero_()
            torch.cuda.synchronize()
            try:
                if announced:
                    graph_capture.begin_capture()
                with torch.cuda.graph(graph, capture_error_mode=mode):
                    for _ in range(50):
                        data.add_(1)
                        time.sleep(0.001)
                graph.replay()
                torch.cuda.synchronize()
                broken += float(data[0]) != 50.0
            except RuntimeError:
                broken += 1
            finally:
                if announced:
                    graph_capture.end_capture()
        return broken, count[0]


@contextmanager
def _tending() -> Iterator[list[int]]:
    import torch

    from otel_infer.gpu import graph_capture
    from otel_infer.gpu.clock_sync import ClockMap
    from otel_infer.gpu.device import TorchDevice
    from otel_infer.gpu.timeline import Timeline

    device, over, count = TorchDevice(torch, "cuda", 0), threading.Event(), [0]
    mapped = ClockMap(device)
    mapped.add_anchor()
    timeline = Timeline(device, mapped)
    timeline.warm_up(device.create_idle_stream())
    torch.cuda.synchronize()

    def tend() -> None:
        device.prepare_thread()
        busy = device.create_idle_stream()
        while not over.wait(0.0005):
            if graph_capture.open_captures:
                continue
            count[0] += 1
            span = timeline.begin_span(busy)
            if span is not None:
                timeline.end_span(span, lambda timed: None)
            timeline.collect_spans()
            if count[0] % 20 == 0:
                mapped.add_anchor()

    thread = threading.Thread(target=tend, daemon=True)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join(5)


PARTS: dict[str, Callable[[Path], list[Line]]] = {
    "calls": calls,
    "clocks": clocks,
    "accuracy": accuracy,
    "overhead": overhead,
    "safety": safety,
}

if __name__ == "__main__":
    sys.exit(main())
