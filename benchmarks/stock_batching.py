"""Manual instrumentation of transformers' continuous batching with the stock SDK: a span per token, or one per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.own_time import OwnTime
from benchmarks.stock import Stock


class StockHooks:
    """Hooks that make a span per token, or one per step. otel_infer records two events per step."""

    def __init__(self, stock: Stock, per_token: bool = True) -> None:
        from transformers.generation.continuous_batching import continuous_api, scheduler

        self.stock, self.per_token = stock, per_token
        self._contexts: dict[str, Any] = {}
        self._spans: dict[str, Any] = {}
        self._batch: list[Any] = []
        self._began = self._step = 0
        manager, processor = continuous_api.ContinuousBatchingManager, continuous_api.ContinuousBatchProcessor
        self._places = (
            (manager, "add_request", self._hook_add),
            (scheduler.FIFOScheduler, "schedule_batch", self._hook_schedule),
            (processor, "update_batch", self._hook_update),
            (scheduler.Scheduler, "finish_request", self._hook_finish),
        )
        self.own: OwnTime | None = None
        self._originals = [getattr(owner, name) for owner, name, _ in self._places]

    def switch_on(self) -> None:
        """Hooks the four functions."""
        for (owner, name, hook), original in zip(self._places, self._originals):
            timed = self.own.wrap_timed(hook, original) if self.own is not None else hook(original)
            setattr(owner, name, timed)

    def switch_off(self) -> None:
        """Restores the functions of the library."""
        for (owner, name, _), original in zip(self._places, self._originals):
            setattr(owner, name, original)

    def _hook_add(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(manager: Any, *args: Any, **kwargs: Any) -> Any:
            span, context = self.stock.start_request()
            request_id = f"stock_{id(span)}"
            self._spans[request_id], self._contexts[request_id] = span, context
            return original(manager, *args, **{**kwargs, "request_id": request_id})

        return add_request

    def _hook_schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule_batch(scheduler: Any, *args: Any) -> Any:
            result = original(scheduler, *args)
            self._began, self._batch = time.time_ns(), result[0] or []
            return result

        return schedule_batch

    def _hook_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_batch(processor: Any) -> None:
            contexts = [
                self._contexts[future.state.request_id] for future in self._batch if future.has_new_token
            ]
            original(processor)
            self._step += 1
            contexts = contexts if self.per_token else contexts[:1]
            self.stock.make_step_spans(contexts, self._step, self._began, time.time_ns())

        return update_batch

    def _hook_finish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finish_request(scheduler: Any, request_id: str) -> None:
            original(scheduler, request_id)
            self._contexts.pop(request_id, None)
            self._spans.pop(request_id).end()

        return finish_request
