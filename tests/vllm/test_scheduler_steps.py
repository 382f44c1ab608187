"""The step log of vLLM's real scheduler equals what the scheduler did, over random schedules; no model runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.instrumentation.hooks import probe
from otel_infer.instrumentation.vllm import engine_core, instrumentor
from otel_infer.instrumentation.vllm import scheduler_steps as steps_module
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.recorder import recorder
from tests.vllm.modelfree import RandomEngine, ReadSteps

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

OPERATIONS = 500
CASES: dict[str, dict[str, Any]] = {
    "one after another": {},
    "asynchronous": {"is_async": True},
    "priority": {"options": {"scheduling_policy": "priority"}},
    "asynchronous, priority": {"is_async": True, "options": {"scheduling_policy": "priority"}},
    "little memory": {"blocks": 14, "caching": False},
    "asynchronous, little memory": {"is_async": True, "blocks": 14},
    "small chunks": {"options": {"max_num_batched_tokens": 7, "max_num_seqs": 5}},
    "asynchronous, small chunks": {
        "is_async": True,
        "options": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    },
    "few running": {"options": {"max_num_seqs": 3}},
}


@pytest.fixture
def hooked() -> Iterator[None]:
    recorder.start(MemoryArena, lambda: None, lambda reason: None)
    instrumentor.install()
    yield
    instrumentor.remove()
    recorder.stop()


def run_random(engine: RandomEngine) -> ReadSteps:
    """Runs random operations, mostly steps, and returns what a reader of the ring sees."""
    handles: dict[str, int] = {}
    engine.add()
    steps = steps_module.get_scheduler_steps(engine.scheduler)
    assert steps is not None
    read = ReadSteps(steps.writer._writer.memory)
    operations = (
        [engine.step] * 70 + [engine.add] * 9 + [engine.abort] * 3 + [engine.extend] * 2
        + [engine.reset_cache, engine.reinstall_hooks]
    )  # fmt: skip
    for _ in range(OPERATIONS):
        engine.random.choice(operations)()
        for request_id in engine.ids:
            if request_id not in handles:
                handles[request_id] = len(handles) + 1
        read.poll()
    return read


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_step_log_equals_what_the_scheduler_did(
    hooked: None, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, case: str, seed: int
) -> None:
    if seed % 2:
        monkeypatch.setattr(steps_module, "MIN_REPORTED", 0)
    how = dict(CASES[case])
    engine = RandomEngine(tiny_llama, seed, **how.pop("options", {}), **how)
    names: dict[int, str] = {}
    original = engine_core._record_received

    def bind(scheduler: Any, request: Any) -> None:
        """Gives each request a handle, as its trace headers would."""
        steps = steps_module.get_scheduler_steps(scheduler)
        assert steps is not None
        if request.request_id not in scheduler.requests:
            names[len(names) + 1] = request.request_id
            steps.writer.handles.bind_handle(request.request_id, len(names))
        original(scheduler, request)

    changed: list[Any] = []
    record_scheduled = steps_module.SchedulerSteps.record_scheduled

    def count_changed(*arguments: Any) -> None:
        if arguments[-1].num_scheduled_tokens:
            changed.append(arguments)
        record_scheduled(*arguments)

    monkeypatch.setattr(engine_core, "_record_received", bind)
    monkeypatch.setattr(steps_module.SchedulerSteps, "record_scheduled", count_changed)
    read = run_random(engine)
    assert probe.count_errors() == 0
    for step, truth in engine.scheduled.items():
        members, *load = read.scheduled[step]
        named = [(names.get(handle, ""), tokens) for handle, tokens in members]
        known = set(names.values())
        assert named == [(member if member in known else "", tokens) for member, tokens in truth.members], (
            step
        )
        assert load == list(truth[1:]), step
    assert {step: read.done.get(step) for step in engine.done} == engine.done
    assert engine.scheduled and engine.done
    if how.get("blocks") is None and "options" not in CASES[case]:
        assert len(engine.scheduled) - len(changed) > 20
