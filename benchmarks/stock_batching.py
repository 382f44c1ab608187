"""The stock SDK on transformers' continuous batching, put there by hand: a span per token, or one per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.own_time import OwnTime
from benchmarks.stock import Stock


class StockHooks:
    """A span per token made with the stock SDK, or one per step, where ours states two facts per step."""

    def __init__(self, stock: Stock, per_token: bool = True) -> None:
        from transformers.generation.continuous_batching import continuous_api, scheduler

        self.stock, self.per_token = stock, per_token
        self._contexts: dict[str, Any] = {}
        self._spans: dict[str, Any] = {}
        self._batch: list[Any] = []
        self._began = self._step = 0
        manager, processor = continuous_api.ContinuousBatchingManager, continuous_api.ContinuousBatchProcessor
        self._places = (
            (manager, "add_request", self._adding),
            (scheduler.FIFOScheduler, "schedule_batch", self._scheduling),
            (processor, "update_batch", self._updating),
            (scheduler.Scheduler, "finish_request", self._finishing),
        )
        self.own: OwnTime | None = None
        self._originals = [getattr(owner, name) for owner, name, _ in self._places]

    def put_on(self) -> None:
        """Wraps the four functions."""
        for (owner, name, wrapping), original in zip(self._places, self._originals):
            timed = self.own.around(wrapping, original) if self.own is not None else wrapping(original)
            setattr(owner, name, timed)

    def take_off(self) -> None:
        """The library as it came."""
        for (owner, name, _), original in zip(self._places, self._originals):
            setattr(owner, name, original)

    def _adding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(manager: Any, *args: Any, **kwargs: Any) -> Any:
            span, context = self.stock.request()
            request_id = f"stock_{id(span)}"
            self._spans[request_id], self._contexts[request_id] = span, context
            return original(manager, *args, **{**kwargs, "request_id": request_id})

        return add_request

    def _scheduling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule_batch(scheduler: Any, *args: Any) -> Any:
            result = original(scheduler, *args)
            self._began, self._batch = time.time_ns(), result[0] or []
            return result

        return schedule_batch

    def _updating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_batch(processor: Any) -> None:
            contexts = [
                self._contexts[future.state.request_id] for future in self._batch if future.has_new_token
            ]
            original(processor)
            self._step += 1
            contexts = contexts if self.per_token else contexts[:1]
            self.stock.step(contexts, self._step, self._began, time.time_ns())

        return update_batch

    def _finishing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finish_request(scheduler: Any, request_id: str) -> None:
            original(scheduler, request_id)
            self._contexts.pop(request_id, None)
            self._spans.pop(request_id).end()

        return finish_request
