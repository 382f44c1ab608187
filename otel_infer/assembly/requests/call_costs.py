"""Learns what a call of a model costs by its number of items, from requests that workers have served. Pure."""

from __future__ import annotations

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
        self._lengths, self._items = (np.zeros(MAX_CALLS, np.int64) for _ in range(2))
        self.added = self.fit_due = 0
        self.cost: StepCostModel | None = None

    def add(self, length: int, items: int) -> None:
        place = self.added % MAX_CALLS
        self._lengths[place], self._items[place] = length, items
        self.added += 1
        if self.added > self.fit_due:
            self.cost = fit_cost_model(self._lengths[: self.added], self._items[: self.added])
            self.fit_due = self.added + min(self.added, FIT_EVERY)


class CallCosts:
    """The costs of all models, by process and name."""

    def __init__(self) -> None:
        self._models: dict[tuple[int, Any], _Calls] = {}

    def learn_calls(self, request: OpenRequest) -> StepCostModel | None:
        """Adds the calls for a request that waited in a queue of the application. Returns what a call of its model costs.

        None before that can be estimated, and for any other request.
        """
        stages = request.stages
        if all(stage.stage != events.QUEUE_WAIT for stage in stages):
            return None
        key = request.ring, request.attributes.get(semconv.REQUEST_MODEL, request.arrived.model)
        model = self._models.get(key)
        if model is None:
            if len(self._models) >= MAX_MODELS:
                self._models.clear()
            model = self._models[key] = _Calls()
        for stage in stages:
            if type(stage) is events.StageEnded and stage.stage == semconv.SPAN_FORWARD and stage.items > 0:
                model.add(stage.at - stage.started_at, stage.items)
        return model.cost
