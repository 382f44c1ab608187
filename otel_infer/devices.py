"""What workers and their devices said: how long they were at the steps of engines, and what memory is left. Pure."""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter

from otel_infer import facts
from otel_infer.records import Execution
from otel_infer.steplog import StepLog

_AT = itemgetter(0)
MOST_REMEMBERED = 4096
"""Instants at which free memory became another; each process tells it once a second."""


class Devices:
    """Of all processes, known by the rings they write to. `executions`: not drained yet."""

    def __init__(self) -> None:
        self.executions: list[Execution] = []
        self._logs: dict[tuple[int, str, int], StepLog] = {}
        self._pids: dict[int, int] = {}
        self._memory: dict[tuple[int, str], facts.MemorySeen] = {}
        self._free: list[tuple[int, int]] = []
        self._blocks: dict[tuple[int, str, int], int] = {}

    def process(self, ring: int, pid: int) -> None:
        """A process is there."""
        self._pids[ring] = pid

    def engine(self, fact: facts.EngineSeen, engine: StepLog) -> None:
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

    def sized(self, fact: facts.BlocksSized) -> None:
        """Said by an engine, whose ring may be found later."""
        key = fact.pid, fact.engine, fact.log
        self._blocks[key] = fact.tokens
        if key in self._logs:
            self._logs[key].block_tokens = fact.tokens

    def worked(self, fact: facts.StepExecuted | facts.StepTimed, is_new: bool) -> None:
        """A worker's host or its device was at a step; steps have what the first of several ranks says."""
        length = max(fact.at - fact.started_at, 0)
        done, engine = Execution(*fact[2:5], length), self._logs.get((fact.pid, fact.engine, fact.log))
        if isinstance(fact, facts.StepTimed):
            done = done._replace(on_device=True, queued_ns=fact.queued_ns, gap_ns=facts.known_ns(fact.gap_ns))
        if is_new:
            self.executions.append(done)
        if engine is None or fact.rank:
            return
        if isinstance(fact, facts.StepTimed):
            engine.timed(fact)
        else:
            engine.executed(fact.step, length)

    def drain(self) -> list[Execution]:
        """What was done since the last call."""
        executions, self.executions = self.executions, []
        return executions

    def memory(self, ring: int, fact: facts.MemorySeen) -> None:
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

    def memory_by_process(self) -> list[tuple[int, facts.MemorySeen]]:
        """What was said last of each device, by the process id of who said it."""
        return [(self._pids.get(ring, 0), fact) for (ring, _), fact in self._memory.items()]
