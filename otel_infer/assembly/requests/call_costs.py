"""Learns what a call of a model costs by its number of items, from requests that workers have served. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.engine.step_cost import StepCostModel, fit_cost_model
from otel_infer.assembly.requests.open_request import OpenRequest
from otel_infer.ringbuffer import events

MAX_CALLS, MAX_MODELS = 512, 64
FIT_EVERY = 64
"""Calls between two fits; the first ones follow each other more closely."""


class _Calls:
    """The latest calls of one model: length in ns, and number of items."""

    def __init__(self) -> None:
        self.calls: deque[tuple[int, int]] = deque(maxlen=MAX_CALLS)
        self.added = self.fit_due = 0
        self.cost: StepCostModel | None = None

    def add(self, length: int, items: int) -> None:
        self.calls.append((length, items))
        self.added += 1
        if self.added > self.fit_due:
            lengths, sizes = np.array(self.calls, dtype=np.int64).T
            self.cost = fit_cost_model(lengths, sizes)
            self.fit_due = self.added + min(self.added, FIT_EVERY)


class CallCosts:
    """The costs of all models, by process and name."""

    def __init__(self) -> None:
        self._models: dict[tuple[int, Any], _Calls] = {}

    def learn_calls(self, request: OpenRequest) -> StepCostModel | None:
        """Adds the calls for a request that waited in a queue of the application. Returns what a call of its model costs.

        None before that can be estimated, and for any other request.
        """
        stages = [stage for stage in request.stages if type(stage) is events.StageEnded]
        if all(stage.stage != events.QUEUE_WAIT for stage in stages):
            return None
        key = request.ring, request.attributes.get(semconv.REQUEST_MODEL, request.arrived.model)
        if key not in self._models and len(self._models) >= MAX_MODELS:
            self._models.clear()
        model = self._models.setdefault(key, _Calls())
        for stage in stages:
            if stage.stage == semconv.SPAN_FORWARD and stage.items > 0:
                model.add(stage.at - stage.started_at, stage.items)
        return model.cost
