"""For hand-written servers: a request, its stages, and the steps of a loop of one's own.

    with otel_infer.request("chat", model="tiny") as request:      # or under a web framework: already there
        with otel_infer.stage("rerank"):
            ...
    with otel_infer.step(batch):                                   # a list of requests
        logits = model(...)

Everything is a no-op while nothing is recorded, and no mistake in here reaches the caller.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from array import array
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

from otel_infer import clock, facts, ingress
from otel_infer.ring.membership import StepLog
from otel_infer.ring.recorder import recorder

F = TypeVar("F", bound=Callable[..., Any])
ENGINE = "custom"


class stage:  # noqa: N801 - used like a function
    """A named interval of the current request: `with`, `async with`, or a decorator of a function, sync or async.

    The name is part of the code, not data: it becomes a span name and a metric label. Without a current request it does
    nothing. A stage that raises is recorded all the same.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._request: ingress.LiveRequest | None = None
        self._started_at = 0

    def __enter__(self) -> stage:
        self._request = ingress.current()
        self._started_at = clock.now()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        if self._request is not None:
            self._request.stage(self.name, self._started_at)

    async def __aenter__(self) -> stage:
        return self.__enter__()

    async def __aexit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        self.__exit__(kind, error, where)

    def __call__(self, function: F) -> F:
        name = self.name
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with stage(name):
                    return await function(*args, **kwargs)

            return cast(F, awaited)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with stage(name):
                return function(*args, **kwargs)

        return cast(F, called)


class request:  # noqa: N801 - used like a function
    """A request: `with`, `async with`, or a decorator. Under a server that is instrumented, the one that is there.

    `operation` and `model` are the served ones, never what a caller wrote. `headers`: of the caller, for its context.
    """

    def __init__(
        self, operation: str = "inference", *, model: str = "", headers: dict[str, str] | None = None
    ) -> None:
        self._operation, self._model, self._headers = operation, model, headers
        self._live: ingress.LiveRequest | None = None
        self._own = False
        self._token: Any = None

    # ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> request:
        self._live = ingress.current()
        self._own = self._live is None
        if self._live is not None:
            self._live.name(self._operation, ENGINE, self._model)
        else:
            self._live = ingress.open_request(
                f"{self._operation} {self._model}".strip(),
                owner=ENGINE,
                headers=self._headers,
                server=self._headers is not None,
                operation=self._operation,
                provider=ENGINE,
                model=self._model,
            )
            self._token = self._live.attach() if self._live is not None else None
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        if self._token is not None:
            ingress.detach(self._token)
        if self._live is None or not self._own:
            return
        if error is None:
            self._live.close()
        elif isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self._live.close(facts.ABORTED, "cancelled")
        elif isinstance(error, TimeoutError):
            self._live.close(facts.ERROR, "timeout")
        else:
            self._live.close(facts.ERROR, type(error).__qualname__)

    async def __aenter__(self) -> request:
        return self.__enter__()

    async def __aexit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        self.__exit__(kind, error, where)

    def __call__(self, function: F) -> F:
        operation, model = self._operation, self._model
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with request(operation, model=model):
                    return await function(*args, **kwargs)

            return cast(F, awaited)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with request(operation, model=model):
                return function(*args, **kwargs)

        return cast(F, called)

    # ── what a loop of one's own says of it ──────────────────────────────────────────────────────────────────────

    def submitted(self, *, input_tokens: int = 0, max_tokens: int = 0) -> None:
        """Handed over to the loop: from here to its first step it is in the queue."""
        if self._live is not None:
            self._live.submitted(ENGINE, 1, input_tokens, max_tokens)

    def received(self) -> None:
        """The loop saw it: until here the queue was a hidden one."""
        if self._live is not None:
            self._live.state(facts.RequestReceived(clock.now()))

    def preempted(self) -> None:
        """Taken out of the batch; its KV is gone."""
        if self._live is not None:
            self._live.state(facts.RequestPreempted(clock.now(), "recompute"))

    def finished(self, reason: str = "stop", output_tokens: int = 0) -> None:
        """The loop is done with it. `output_tokens` 0 = count those that its steps delivered."""
        if self._live is not None:
            self._live.state(facts.EngineFinished(clock.now(), reason, output_tokens))

    def set_attribute(self, key: str, value: facts.Value) -> None:
        """An attribute on the request span."""
        if self._live is not None:
            self._live.set_attribute(key, value)

    @property
    def handle(self) -> int:
        """Which request this is in shared memory; 0 = unrecorded."""
        return self._live.handle if self._live is not None else 0


class _Loops(threading.local):
    """The step log of this thread's loop."""

    log: StepLog | None = None


_loops = _Loops()


class step:  # noqa: N801 - used like a function
    """One forward pass over a batch of requests, as `with`. From the `with` to its end is the step.

    `prompt_tokens`: for requests that are in their prefill, how many tokens of the prompt; all others decode one token.
    `waiting`: how many requests the loop has not taken up. Set `delivered` inside, {request: tokens}, where a request got
    other than one token (0 = a chunk of a prompt).
    """

    def __init__(
        self,
        batch: Sequence[request],
        *,
        prompt_tokens: dict[request, int] | None = None,
        waiting: int = 0,
        kv_used: int = 0,
        kv_total: int = 0,
    ) -> None:
        self._batch = list(batch)
        self._prompt_tokens = prompt_tokens or {}
        self._load = (kv_used, kv_total, len(self._batch), waiting)
        self._log: StepLog | None = None
        self._number = 0
        self.delivered: dict[request, int] = {}

    def __enter__(self) -> step:
        self._log = log = self._own_log()
        if log is not None:
            for member in self._batch:
                if member not in log.handles:
                    log.handles.bind(member, member.handle)
            column = b""
            if self._prompt_tokens:
                column = array("I", (self._prompt_tokens.get(member, 1) for member in self._batch)).tobytes()
            self._number = log.scheduled(self._batch, (), column, *self._load)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        log = self._log
        if log is None:
            return
        column = b""
        if error is not None:
            column = array("I", (0 for _ in self._batch)).tobytes()
        elif self.delivered:
            column = array("I", (self.delivered.get(member, 1) for member in self._batch)).tobytes()
        log.done(self._number, column, len(self._batch))

    @staticmethod
    def _own_log() -> StepLog | None:
        log = _loops.log
        if log is None or not log.alive:
            log = _loops.log = recorder.step_log(ENGINE)
        return log
