"""Adds 50 ms to each stage of the engines of `make test-engines`, below our hooks, and measures which stages grow.

One request at a time, in this process, with the real library and a tiny model. Needs `.venv-engines`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.truth_engines import ENGINES, Engine, Place, lay_all_beneath
from benchmarks.verdict import Gate, Line, make_exact, make_line
from otel_infer.instrumentation.registry import load_instrumentors
from tests.support.rings import Recording

CALLS, QUICK_CALLS, WARM_UP = 20, 5, 3
DELAY_MS, TOLERANCE_MS = 50.0, 5.0


def measure(quick: bool) -> list[Line]:
    """Returns the rows: for each stage, how far its growth, and that of any other stage, is off."""
    lay_all_beneath()
    for instrumentor in load_instrumentors():
        instrumentor.install()
    recording = Recording()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for make in ENGINES:
            engine = make(Path(folder))
            print(f"  {engine.title} …", file=sys.stderr, flush=True)
            lines += _compare_stages(engine, recording, QUICK_CALLS if quick else CALLS)
    recording.stop()
    return lines


def _compare_stages(engine: Engine, recording: Recording, calls: int) -> list[Line]:
    lines = []
    for place in engine.places:
        usual, delayed = _measure_in_turn(engine, recording, place, calls)
        growth = {
            name: delayed.get(name, 0.0) - usual.get(name, 0.0)
            for name in sorted({*usual, *delayed, place.stage})
        }
        off = max(
            abs(length - DELAY_MS * (name == place.stage))
            for name, length in growth.items()
            if name == place.stage or name not in engine.outer
        )
        note = ", ".join(f"{name} {length:+.1f}" for name, length in growth.items()) + " ms"
        claim = f"truth: {engine.title}, {DELAY_MS:.0f} ms added to {place.stage}: largest error of any stage"
        lines.append(make_line(claim, "ms", make_exact(off), Gate(TOLERANCE_MS), note=note))
    return lines


@contextlib.contextmanager
def _delay(place: Place) -> Iterator[None]:
    original = getattr(place.owner, place.name)

    @functools.wraps(original)
    def delayed(*args: Any, **kwargs: Any) -> Any:
        if place.when(*args, **kwargs):
            time.sleep(DELAY_MS / 1000)
        return original(*args, **kwargs)

    with mock.patch.object(place.owner, place.name, delayed):
        yield


def _measure_in_turn(
    engine: Engine, recording: Recording, place: Place, calls: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the median length of each stage of a request without and with the delay, ms: the sum of those with one name.

    Requests without and with the delay are made in turn, so a machine that becomes slower does so for both.
    """
    usual, delayed = dict[str, list[float]](), dict[str, list[float]]()
    recording.records()
    for number in range(WARM_UP + calls):
        for lengths, change in ((usual, contextlib.nullcontext()), (delayed, _delay(place))):
            with change:
                engine.call()
            _add_stages(lengths, recording, calls, number - WARM_UP)
    return (
        {name: float(np.median(column)) for name, column in usual.items()},
        {name: float(np.median(column)) for name, column in delayed.items()},
    )


def _add_stages(lengths: dict[str, list[float]], recording: Recording, calls: int, number: int) -> None:
    """Adds the stages of the records since the last call, unless `number` is one of a warm-up."""
    for record in recording.records():
        for stage in record.stages if number >= 0 else ():
            column = lengths.setdefault(stage.name, [0.0] * calls)
            column[number] += (stage.ended_at - stage.started_at) / 1e6
