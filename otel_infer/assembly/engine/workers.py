"""The state of workers and their devices: time spent on engine steps, and free memory. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter

from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.engine.types import Execution
from otel_infer.ringbuffer import events

_INSTANT = itemgetter(0)
MAX_MEMORY_SAMPLES = 4096
"""Changes of free memory that are kept at least; each process records its memory once a second."""
MAX_STEPS_IN_FLIGHT = 64
MAX_STEPS_REPRESENTED = 1024
"""Steps that one timed step represents at most; where more are missing, they were lost."""


class _SampleWeights:
    """Weights for the timed steps of one worker, so that weighted sums estimate all its steps.

    A device times only some steps (`gpu.sample_rate`). A timed step with a prompt represents the untimed
    steps with prompts before it; a timed step without a prompt represents those without. A gap is known only
    if the step before was timed too; it represents the unknown gaps before it.
    """

    def __init__(self) -> None:
        self._last = self._unknown_gaps = 0
        self._untimed = [0, 0]

    def weigh_step(self, step: int, has_gap: bool, has_prompt: Callable[[int], bool]) -> tuple[int, int]:
        """Returns how many steps, and how many gaps, this step represents."""
        if step <= min(self._last - MAX_STEPS_IN_FLIGHT, MAX_STEPS_IN_FLIGHT):  # a new engine counts from 1
            self._last = 0
        if step <= self._last:
            return 1, 1
        missing = (
            range(self._last + 1, step) if self._last and step - self._last <= MAX_STEPS_REPRESENTED else ()
        )
        between = len(missing)
        for number in missing:
            self._untimed[has_prompt(number)] += 1
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
    """The workers of all processes, by the rings that they write to. `executions`: those not drained yet."""

    def __init__(self) -> None:
        self.executions: list[Execution] = []
        self._logs: dict[tuple[int, str, int], EngineStepLog] = {}
        self._pids: dict[int, int] = {}
        self._ended_work = 0, 0
        self._memory: dict[tuple[int, str], events.MemorySeen] = {}
        self._free_memory: list[tuple[int, int]] = []
        self._block_sizes: dict[tuple[int, str, int], int] = {}
        self._sample_weights: dict[tuple[int, str, int, int], _SampleWeights] = {}

    def add_process(self, ring: int, pid: int) -> None:
        """Adds the process that writes to this ring."""
        self._pids[ring] = pid

    def add_engine(self, event: events.EngineSeen, engine: EngineStepLog) -> None:
        """Adds an engine; the first of a process also gets the executions that name no step ring (0)."""
        self._logs[event.pid, event.engine, event.ring_number] = engine
        self._logs.setdefault((event.pid, event.engine, 0), engine)
        engine.block_tokens = self._block_sizes.get((event.pid, event.engine, event.ring_number), 0)

    def add_thread_run(self, ring: int, handle: int, event: events.ThreadRan) -> None:
        """Adds the counters of a thread that ran one generation of the process with this ring."""
        engine = self._logs.get((self._pids.get(ring, 0), event.engine, event.ring_number))
        if engine is not None:
            engine.baseline.thread_delays.add_totals(event)

    def remove_process(self, ring: int) -> None:
        """Removes a process and its engines."""
        pid = self._pids.pop(ring, 0)
        self._block_sizes = {key: tokens for key, tokens in self._block_sizes.items() if key[0] != pid}
        self._memory = {key: event for key, event in self._memory.items() if key[0] != ring}
        self._ended_work = self.measure_work(ring)
        self._logs = {key: engine for key, engine in self._logs.items() if engine.process != ring}
        self._sample_weights = {
            key: weights for key, weights in self._sample_weights.items() if key[0] != pid
        }

    def measure_work(self, ended: int = -1) -> tuple[int, int]:
        """Returns the time of all steps, and of those for clients that had left, ns; also of engines that have ended.

        `ended`: only of these engines, and of the process with this ring.
        """
        engines = {id(engine): engine for engine in self._logs.values()}.values()
        busy, abandoned = self._ended_work
        for engine in engines:
            if ended in (-1, engine.process):
                busy, abandoned = busy + engine.busy_ns, abandoned + engine.abandoned_ns
        return busy, abandoned

    def set_block_size(self, event: events.BlocksSized) -> None:
        """Records the KV block size of an engine, whose step ring may be found later."""
        key = event.pid, event.engine, event.ring_number
        self._block_sizes[key] = event.tokens
        if key in self._logs:
            self._logs[key].block_tokens = event.tokens

    def add_execution(self, event: events.StepExecuted | events.StepTimed, is_new: bool) -> None:
        """Adds a worker's or its device's time on a step; the step itself gets the time of rank 0.

        `is_new`: it is to be drained for metrics.
        """
        length = max(event.at - event.started_at, 0)
        execution = Execution(engine=event.engine, pid=event.pid, rank=event.rank, length_ns=length)
        engine = self._logs.get((event.pid, event.engine, event.ring_number))
        if engine is not None:
            engine.ranks = max(engine.ranks, event.rank + 1)
        if isinstance(event, events.StepTimed):
            execution = self._with_device_time(execution, event, engine)
        if is_new:
            self.executions.append(execution)
        if engine is None or event.rank:
            return
        if isinstance(event, events.StepTimed):
            engine.add_device_time(event)
        else:
            engine.add_host_time(event.step, length)

    def _with_device_time(
        self, execution: Execution, event: events.StepTimed, engine: EngineStepLog | None
    ) -> Execution:
        worker, gap = (event.pid, event.engine, event.ring_number, event.rank), events.decode_ns(event.gap_ns)
        prefill_tokens = engine.table.prefill_tokens if engine is not None else lambda step: 0
        weights = self._sample_weights.setdefault(worker, _SampleWeights())
        steps, gaps = weights.weigh_step(event.step, gap >= 0, lambda step: prefill_tokens(step) > 0)
        return execution._replace(
            on_device=True, queued_ns=event.queued_ns, gap_ns=gap, steps=steps, gaps=gaps
        )

    def drain_executions(self) -> list[Execution]:
        """Returns the executions since the last call."""
        executions, self.executions = self.executions, []
        return executions

    def set_memory(self, ring: int, event: events.MemorySeen) -> None:
        """Sets the latest memory figures of one of a process's devices."""
        self._memory[ring, event.uuid] = event
        least = min([memory.free for memory in self._memory.values() if memory.total], default=0)
        if not self._free_memory or self._free_memory[-1][1] != least:
            self._free_memory.append((event.at, least))
            if len(self._free_memory) > 2 * MAX_MEMORY_SAMPLES:
                del self._free_memory[:MAX_MEMORY_SAMPLES]

    @property
    def has_memory(self) -> bool:
        """Returns whether free memory of a device was recorded."""
        return bool(self._free_memory)

    def min_free_memory(self, instant: int) -> int:
        """Returns the free bytes of the device with the least at that instant; 0 = unknown, or instant 0."""
        place = bisect_right(self._free_memory, instant, key=_INSTANT)
        return self._free_memory[place - 1][1] if place else 0

    def memory_by_process(self) -> list[tuple[int, events.MemorySeen]]:
        """Returns the latest memory figures of each device, each with the process id that recorded it."""
        return [(self._pids.get(ring, 0), event) for (ring, _), event in self._memory.items()]
