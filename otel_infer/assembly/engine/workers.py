"""What workers and their devices said: how long they were at the steps of engines, and what memory is left. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter

from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.engine.types import Execution
from otel_infer.ringbuffer import events

_INSTANT = itemgetter(0)
MAX_MEMORY_SAMPLES = 4096
"""Instants at which free memory became another; each process tells it once a second."""
MAX_STEPS_IN_FLIGHT = 64
MAX_STEPS_REPRESENTED = 1024
"""Steps, by one that was timed: where more are missing, facts were lost, or it is another engine's."""


class _SampleWeights:
    """The steps of one worker, of which a device timed some (`gpu.pacing`): for how many each of these stands, so that sums over
    them are about all steps. One with a prompt in it stands for those with prompts before it that were not timed, one without
    for those without. A gap is known only if the step before was timed, too, and stands for those that are not known.
    """

    def __init__(self) -> None:
        self._last = self._unknown_gaps = 0
        self._untimed = [0, 0]

    def weigh_step(self, step: int, has_gap: bool, has_prompt: Callable[[int], bool]) -> tuple[int, int]:
        """How many steps, and how many gaps."""
        if step <= min(self._last - MAX_STEPS_IN_FLIGHT, MAX_STEPS_IN_FLIGHT):  # of an engine that begins
            self._last = 0
        if step <= self._last:
            return 1, 1
        missing = (
            range(self._last + 1, step) if self._last and step - self._last <= MAX_STEPS_REPRESENTED else ()
        )
        between = len(missing)
        for one in missing:
            self._untimed[has_prompt(one)] += 1
        self._last, kind = step, has_prompt(step)
        steps, self._untimed[kind] = 1 + min(self._untimed[kind], MAX_STEPS_REPRESENTED), 0
        self._unknown_gaps = min(self._unknown_gaps + between, MAX_STEPS_REPRESENTED)
        gaps = 1
        if has_gap:
            gaps, self._unknown_gaps = gaps + self._unknown_gaps, 0
        elif between:
            self._unknown_gaps += 1
        return steps, gaps


class WorkerState:
    """Of all processes, known by the rings they write to. `executions`: not drained yet."""

    def __init__(self) -> None:
        self.executions: list[Execution] = []
        self._logs: dict[tuple[int, str, int], EngineStepLog] = {}
        self._pids: dict[int, int] = {}
        self._memory: dict[tuple[int, str], events.MemorySeen] = {}
        self._free_memory: list[tuple[int, int]] = []
        self._block_sizes: dict[tuple[int, str, int], int] = {}
        self._sample_weights: dict[tuple[int, str, int, int], _SampleWeights] = {}

    def add_process(self, ring: int, pid: int) -> None:
        """A process is there."""
        self._pids[ring] = pid

    def add_engine(self, fact: events.EngineSeen, engine: EngineStepLog) -> None:
        """An engine is there; who does not say which of a process's it was means the first."""
        self._logs[fact.pid, fact.engine, fact.log] = engine
        self._logs.setdefault((fact.pid, fact.engine, 0), engine)
        engine.block_tokens = self._block_sizes.get((fact.pid, fact.engine, fact.log), 0)

    def remove_process(self, ring: int) -> None:
        """The process is gone, with its engines."""
        pid = self._pids.pop(ring, 0)
        self._block_sizes = {key: tokens for key, tokens in self._block_sizes.items() if key[0] != pid}
        self._memory = {key: fact for key, fact in self._memory.items() if key[0] != ring}
        self._logs = {key: engine for key, engine in self._logs.items() if engine.process != ring}
        self._sample_weights = {
            key: sampled for key, sampled in self._sample_weights.items() if key[0] != pid
        }

    def set_block_size(self, fact: events.BlocksSized) -> None:
        """Said by an engine, whose ring may be found later."""
        key = fact.pid, fact.engine, fact.log
        self._block_sizes[key] = fact.tokens
        if key in self._logs:
            self._logs[key].block_tokens = fact.tokens

    def add_execution(self, fact: events.StepExecuted | events.StepTimed, is_new: bool) -> None:
        """A worker's host or its device was at a step; steps have what the first of several ranks says."""
        length = max(fact.at - fact.started_at, 0)
        done, engine = Execution(*fact[2:5], length), self._logs.get((fact.pid, fact.engine, fact.log))
        if engine is not None:
            engine.ranks = max(engine.ranks, fact.rank + 1)
        if isinstance(fact, events.StepTimed):
            done = self._with_device_time(done, fact, engine)
        if is_new:
            self.executions.append(done)
        if engine is None or fact.rank:
            return
        if isinstance(fact, events.StepTimed):
            engine.add_device_time(fact)
        else:
            engine.add_host_time(fact.step, length)

    def _with_device_time(
        self, done: Execution, fact: events.StepTimed, engine: EngineStepLog | None
    ) -> Execution:
        worker, gap = (fact.pid, fact.engine, fact.log, fact.rank), events.decode_ns(fact.gap_ns)
        tokens_of = engine.table.prefill_tokens if engine is not None else lambda step: 0
        sampled = self._sample_weights.setdefault(worker, _SampleWeights())
        steps, gaps = sampled.weigh_step(fact.step, gap >= 0, lambda step: tokens_of(step) > 0)
        return done._replace(on_device=True, queued_ns=fact.queued_ns, gap_ns=gap, steps=steps, gaps=gaps)

    def drain_executions(self) -> list[Execution]:
        """What was done since the last call."""
        executions, self.executions = self.executions, []
        return executions

    def set_memory(self, ring: int, fact: events.MemorySeen) -> None:
        """What a process says of one of its devices; the last word counts."""
        self._memory[ring, fact.uuid] = fact
        least = min([fact.free for fact in self._memory.values() if fact.total], default=0)
        if not self._free_memory or self._free_memory[-1][1] != least:
            self._free_memory.append((fact.at, least))
            if len(self._free_memory) > 2 * MAX_MEMORY_SAMPLES:
                del self._free_memory[:MAX_MEMORY_SAMPLES]

    def min_free_memory(self, instant: int) -> int:
        """Of the device that had least then, bytes; 0 = nobody knows, or the instant is 0."""
        place = bisect_right(self._free_memory, instant, key=_INSTANT)
        return self._free_memory[place - 1][1] if place else 0

    def memory_by_process(self) -> list[tuple[int, events.MemorySeen]]:
        """What was said last of each device, by the process id of who said it."""
        return [(self._pids.get(ring, 0), fact) for (ring, _), fact in self._memory.items()]
