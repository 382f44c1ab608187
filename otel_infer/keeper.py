"""Which requests are exported, and which with every decode step. Pure.

Two decisions. *Trace*: a request whose context says sampled is exported with its stages; one that is not sampled is not,
unless the configuration keeps those too (then it is marked). *Step detail*: inside a budget of step spans per second,
and per trace id, because trace stores refuse traces over a few MB and with them other people's spans.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from otel_infer import facts, semconv
from otel_infer.records import RequestRecord

STEPS_PER_TRACE = 1000
TRACES_REMEMBERED = 4096
BURST_SECONDS = 10
"""At low load everything is kept: unused budget of so many seconds may be spent at once."""
RESERVED_SHARE = 4
"""One part in so many of the budget is kept for requests that failed or were aborted."""

REASON_ERROR = "error"
REASON_ABORTED = "aborted"
REASON_SAMPLED = "sampled"
REASON_ALL = "all"
REASON_BUDGET = "budget"
REASON_NONE = "none"
REASON_UNSAMPLED = "unsampled"
REASONS = (
    REASON_ERROR, REASON_ABORTED, REASON_SAMPLED, REASON_ALL, REASON_BUDGET, REASON_NONE, REASON_UNSAMPLED,
)  # fmt: skip
"""`budget`: an ordinary request, kept because there was room. `none`: exported without its steps."""


class Decision(NamedTuple):
    """`export`: request and stage spans. `steps`: how many decode-step spans at most. `reason`: why those.

    `prefill_steps`: whether the chunks of its prompt are spans too.
    """

    export: bool
    steps: int
    reason: str
    prefill_steps: bool = False


class Keeper:
    """`mode`: `all`, `auto` or `off`; `budget`: step spans a second, in `auto`; `ratio`: the sampler is a ratio."""

    def __init__(self, mode: str, budget: int, keep_unsampled: bool, ratio: bool) -> None:
        self._mode, self._budget, self._keep_unsampled, self._ratio = mode, budget, keep_unsampled, ratio
        self._room = float(budget * BURST_SECONDS)
        self._filled_at = 0
        self._per_trace: OrderedDict[bytes, int] = OrderedDict()
        self.left_out = 0

    def decide(self, record: RequestRecord) -> Decision:
        """The decision for a finished request; spends its part of the budget."""
        if not record.sampled and not self._keep_unsampled:
            return Decision(False, 0, REASON_UNSAMPLED)
        chunks, steps = _chunks(record), _steps(record)
        urgent = self._urgent(record)
        if self._mode == "off":
            return Decision(True, 0, REASON_NONE)
        if self._mode == "all":
            return Decision(True, steps, urgent or REASON_ALL, chunks > 0)
        used = self._per_trace.get(record.trace_id, 0)
        room = max(min(STEPS_PER_TRACE - used, self._room_at(record.ended_at, bool(urgent))), 0)
        with_chunks = 0 < chunks <= room
        granted = min(steps, room - chunks * with_chunks)
        spent = granted + chunks * with_chunks
        self._spend(record.trace_id, used, spent)
        self.left_out += chunks + steps - spent
        if spent == 0 and chunks + steps > 0:
            return Decision(True, 0, urgent or REASON_NONE)
        reason = urgent or (REASON_SAMPLED if self._ratio else REASON_BUDGET)
        return Decision(True, granted, reason, with_chunks)

    @staticmethod
    def _urgent(record: RequestRecord) -> str:
        if record.outcome == facts.ERROR:
            return REASON_ERROR
        return REASON_ABORTED if record.outcome == facts.ABORTED else ""

    def _room_at(self, at: int, urgent: bool) -> int:
        """How many step spans there is room for at this instant."""
        capacity = self._budget * BURST_SECONDS
        if self._filled_at:
            self._room = min(capacity, self._room + max(at - self._filled_at, 0) * self._budget / 1e9)
        self._filled_at = max(at, self._filled_at)
        return int(self._room - (0 if urgent else capacity / RESERVED_SHARE))

    def _spend(self, trace_id: bytes, used: int, spent: int) -> None:
        self._room -= spent
        self._per_trace[trace_id] = used + spent
        self._per_trace.move_to_end(trace_id)
        while len(self._per_trace) > TRACES_REMEMBERED:
            self._per_trace.popitem(last=False)


def _steps(record: RequestRecord) -> int:
    """How many decode steps could be spans: those that delivered tokens after the first one."""
    if record.steps is None or record.stage(semconv.SPAN_DECODE) is None:
        return 0
    return len(record.steps) - 1


def _chunks(record: RequestRecord) -> int:
    """How many chunks of the prompt could be spans; one alone is the prefill itself."""
    return len(record.prefill_steps) if len(record.prefill_steps) > 1 else 0
