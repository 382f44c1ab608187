"""What workers and their devices said: how long they were at the steps of engines, and what memory is left. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter

from otel_infer.assembly.engine.step_log import StepLog
from otel_infer.assembly.engine.types import Execution
from otel_infer.ringbuffer import events

_AT = itemgetter(0)
MOST_REMEMBERED = 4096
"""Instants at which free memory became another; each process tells it once a second."""
MOST_IN_FLIGHT = 64
MOST_STOOD_FOR = 1024
"""Steps, by one that was timed: where more are missing, facts were lost, or it is another engine's."""


class _Sampled:
    """The steps of one worker, of which a device timed some (`gpu.pacing`): for how many each of these stands, so that sums over
    them are about all steps. One with a prompt in it stands for those with prompts before it that were not timed, one without
    for those without. A gap is known only if the step before was timed, too, and stands for those that are not known.
    """

    def __init__(self) -> None:
        self._last = self._unknown = 0
        self._untimed = [0, 0]

    def stands_for(self, step: int, has_gap: bool, has_prompt: Callable[[int], bool]) -> tuple[int, int]:
        """How many steps, and how many gaps."""
        if step <= min(self._last - MOST_IN_FLIGHT, MOST_IN_FLIGHT):  # of an engine that begins
            self._last = 0
        if step <= self._last:
            return 1, 1
        missing = range(self._last + 1, step) if self._last and step - self._last <= MOST_STOOD_FOR else ()
        between = len(missing)
        for one in missing:
            self._untimed[has_prompt(one)] += 1
        self._last, kind = step, has_prompt(step)
        steps, self._untimed[kind] = 1 + min(self._untimed[kind], MOST_STOOD_FOR), 0
        self._unknown = min(self._unknown + between, MOST_STOOD_FOR)
        gaps = 1
        if has_gap:
            gaps, self._unknown = gaps + self._unknown, 0
        elif between:
            self._unknown += 1
        return steps, gaps


class Devices:
    """Of all processes, known by the rings they write to. `executions`: not drained yet."""

    def __init__(self) -> None:
        self.executions: list[Execution] = []
        self._logs: dict[tuple[int, str, int], StepLog] = {}
        self._pids: dict[int, int] = {}
        self._memory: dict[tuple[int, str], events.MemorySeen] = {}
        self._free: list[tuple[int, int]] = []
        self._blocks: dict[tuple[int, str, int], int] = {}
        self._sampled: dict[tuple[int, str, int, int], _Sampled] = {}

    def process(self, ring: int, pid: int) -> None:
        """A process is there."""
        self._pids[ring] = pid

    def engine(self, fact: events.EngineSeen, engine: StepLog) -> None:
        """An engine is there; who does not say which of a process's it was means the first."""
        self._logs[fact.pid, fact.engine, fact.log] = engine
        self._logs.setdefault((fact.pid, fact.engine, 0), engine)
        engine.block_tokens = self._blocks.get((fact.pid, fact.engine, fact.log), 0)

    def died(self, ring: int) -> None:
        """The process is gone, with its engines."""
        pid = self._pids.pop(ring, 0)
        self._blocks = {key: tokens for key, tokens in self._blocks.items() if key[0] != pid}
        self._memory = {key: fact for key, fact in self._memory.items() if key[0] != ring}
        self._logs = {key: engine for key, engine in self._logs.items() if engine.process != ring}
        self._sampled = {key: sampled for key, sampled in self._sampled.items() if key[0] != pid}

    def sized(self, fact: events.BlocksSized) -> None:
        """Said by an engine, whose ring may be found later."""
        key = fact.pid, fact.engine, fact.log
        self._blocks[key] = fact.tokens
        if key in self._logs:
            self._logs[key].block_tokens = fact.tokens

    def worked(self, fact: events.StepExecuted | events.StepTimed, is_new: bool) -> None:
        """A worker's host or its device was at a step; steps have what the first of several ranks says."""
        length = max(fact.at - fact.started_at, 0)
        done, engine = Execution(*fact[2:5], length), self._logs.get((fact.pid, fact.engine, fact.log))
        if engine is not None:
            engine.ranks = max(engine.ranks, fact.rank + 1)
        if isinstance(fact, events.StepTimed):
            done = self._on_device(done, fact, engine)
        if is_new:
            self.executions.append(done)
        if engine is None or fact.rank:
            return
        if isinstance(fact, events.StepTimed):
            engine.timed(fact)
        else:
            engine.executed(fact.step, length)

    def _on_device(self, done: Execution, fact: events.StepTimed, engine: StepLog | None) -> Execution:
        worker, gap = (fact.pid, fact.engine, fact.log, fact.rank), events.known_ns(fact.gap_ns)
        tokens_of = engine.table.prefill_tokens if engine is not None else lambda step: 0
        sampled = self._sampled.setdefault(worker, _Sampled())
        steps, gaps = sampled.stands_for(fact.step, gap >= 0, lambda step: tokens_of(step) > 0)
        return done._replace(on_device=True, queued_ns=fact.queued_ns, gap_ns=gap, steps=steps, gaps=gaps)

    def drain(self) -> list[Execution]:
        """What was done since the last call."""
        executions, self.executions = self.executions, []
        return executions

    def memory(self, ring: int, fact: events.MemorySeen) -> None:
        """What a process says of one of its devices; the last word counts."""
        self._memory[ring, fact.uuid] = fact
        least = min([fact.free for fact in self._memory.values() if fact.total], default=0)
        if not self._free or self._free[-1][1] != least:
            self._free.append((fact.at, least))
            if len(self._free) > 2 * MOST_REMEMBERED:
                del self._free[:MOST_REMEMBERED]

    def least_free(self, instant: int) -> int:
        """Of the device that had least then, bytes; 0 = nobody knows, or the instant is 0."""
        place = bisect_right(self._free, instant, key=_AT)
        return self._free[place - 1][1] if place else 0

    def memory_by_process(self) -> list[tuple[int, events.MemorySeen]]:
        """What was said last of each device, by the process id of who said it."""
        return [(self._pids.get(ring, 0), fact) for (ring, _), fact in self._memory.items()]
