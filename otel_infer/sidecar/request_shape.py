"""The common data of the ordinary requests of one shape, and the division of their time among causes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from otel_infer import semconv
from otel_infer.analysis.attribution.batched_call import estimate_time_for_others
from otel_infer.analysis.attribution.breakdown import attribute_latency, stage_priority
from otel_infer.analysis.attribution.preparation import ENGINE_STAGES
from otel_infer.assembly.records.request import RequestRecord, Stage
from otel_infer.assembly.requests.record_fields import apply_pauses
from otel_infer.assembly.requests.shapes import ShapedRequest
from otel_infer.export import otlp
from otel_infer.export.metrics.request_counters import RequestSeries
from otel_infer.export.spans import tree

_LATENCY_STAGES = (semconv.SPAN_QUEUE,)
"""The ordinary stages that have an attribute of vLLM's request span."""


class RequestShape:
    """Common data of the requests of one shape. `record`: the first of them, without pauses.

    `slots`: for each stage, the position of its cause in `causes`. The first cause is `batching`, the last one `unexplained`.
    `calls`: the positions of calls of a model.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.has_parent = bool(record.parent_span_id)
        self.has_server_span = bool(record.server_span_id) and not tree.is_server_only(record)
        self._scratch = copy.copy(record)
        self.names = names = [stage.name for stage in record.stages]
        self.latency_stages = [names.index(name) for name in _LATENCY_STAGES if name in names]
        self.has_stage_spans = tree.has_stage_spans(record)
        self.causes, self.slots = _assign_causes(names)
        self.calls = [number for number, name in enumerate(names) if name == semconv.SPAN_FORWARD]
        self._first_engine_stage = next((i for i, name in enumerate(names) if name in ENGINE_STAGES), 0)
        self.span_count = 1 + self.has_server_span + len(names) * self.has_stage_spans
        self.series: RequestSeries | None = None
        self.layouts: dict[tuple[Any, ...], otlp.SpanTreeLayout | None] = {}

    def divide_time(self, shaped: ShapedRequest) -> Mapping[str, int]:
        """Returns the time of a request by cause, ns, as in its breakdown."""
        if shaped.request.pauses:
            return self._divide_around_pauses(shaped)
        times = [0] * len(self.causes)
        for slot, length in zip(self.slots, shaped.lengths):
            times[slot] += length
        if shaped.batch:
            self._divide_calls(shaped, times)
        times[-1] = shaped.end - shaped.begin - sum(shaped.lengths)
        first = self._first_engine_stage
        between = shaped.starts[first] - shaped.starts[0] - sum(shaped.lengths[:first]) if first else 0
        if between:
            times[-1] -= between
            times[self.causes.index(semconv.CAUSE_APPLICATION)] += between
        return {cause: length for cause, length in zip(self.causes, times) if length}

    def _divide_calls(self, shaped: ShapedRequest, times: list[int]) -> None:
        """Moves the time of calls that is for the other requests of the batch to `batching`."""
        cost = shaped.request.cost_model
        for number in self.calls:
            for items in shaped.numbers[number]:  # one, or none if it is unknown
                of_others = estimate_time_for_others(cost, shaped.batch, int(items), shaped.lengths[number])
                times[0] += of_others
                times[self.slots[number]] -= of_others

    def find_batch_size(self, shaped: ShapedRequest) -> int:
        """Returns the items of its first call of a model, as `request_counters.find_batch_size` does."""
        items = shaped.numbers[self.calls[0]]
        return int(items[0]) if items else 1

    def _divide_around_pauses(self, shaped: ShapedRequest) -> Mapping[str, int]:
        record = self._scratch
        record.arrived_at, record.ended_at = shaped.begin, shaped.end
        record.call_cost = shaped.request.cost_model
        record.attributes = shaped.request.attributes
        record.stages = [
            Stage(name, since, until, {semconv.ITEMS: numbers[0]} if numbers else {})
            for name, since, until, numbers in zip(self.names, shaped.starts, shaped.ends, shaped.numbers)
        ]
        apply_pauses(record, shaped.request)
        attribute_latency([record])
        return record.breakdown.causes if record.breakdown is not None else {}


def _assign_causes(names: Sequence[str]) -> tuple[list[str], list[int]]:
    """Returns the causes in the order of a breakdown, and for stages with these names the position of their cause."""
    of_stage = [semconv.STAGE_CAUSES.get(name, semconv.CAUSE_APPLICATION) for name in names]
    order = sorted(range(len(names)), key=lambda number: stage_priority(names[number], number))
    of_calls = semconv.CAUSE_BATCHING
    causes = [*dict.fromkeys([of_calls, *(of_stage[number] for number in order), semconv.CAUSE_APPLICATION])]
    return [*causes, semconv.CAUSE_UNEXPLAINED], [causes.index(cause) for cause in of_stage]
