"""For hand-written servers: a request, its stages, and the steps of a loop of one's own.

    with otel_infer.request("chat", model="tiny") as request:      # or under a web framework: already there
        with otel_infer.stage("rerank"):
            ...
    with otel_infer.step(batch):                                   # a list of requests
        logits = model(...)

Everything is a no-op while nothing is recorded, and no mistake in here, or in what it is given, reaches the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from operator import attrgetter
from types import TracebackType
from typing import Any, TypeVar, cast

from otel_infer import clock, facts, ingress
from otel_infer.integrations._claims import claimed
from otel_infer.ring.membership import StepLog
from otel_infer.ring.recorder import recorder

F = TypeVar("F", bound=Callable[..., Any])
ENGINE = "custom"
OPERATION = "inference"

_said: set[str] = set()


def _failed(what: str, exc: Exception) -> None:
    """Something is left unrecorded, which is said once. Never the message: it may quote what it was given."""
    if what not in _said:
        _said.add(what)
        logging.getLogger("otel_infer").warning("%s is not recorded: %s", what, type(exc).__name__)


def _count(number: Any) -> int:
    """What fits a ring; 0 for what is no number."""
    try:
        return max(0, min(int(number), 0xFFFFFFFF))
    except (TypeError, ValueError, OverflowError):
        return 0


class _Scope(contextlib.AbstractContextManager[Any]):
    """What is used as `with` and `async with`, and as a decorator of whatever kind of function."""

    _again: Callable[[], _Scope]
    """Makes a new one like this, for one call of what is decorated."""

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(self, *how: Any) -> None:
        self.__exit__(*how)

    def __call__(self, function: F) -> F:
        again, around = self._again, functools.wraps(function)
        if inspect.iscoroutinefunction(function):

            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with again():
                    return await function(*args, **kwargs)

            return cast(F, around(awaited))
        if inspect.isasyncgenfunction(function):

            async def streamed(*args: Any, **kwargs: Any) -> Any:
                with again():
                    async with contextlib.aclosing(function(*args, **kwargs)) as items:
                        async for item in items:
                            yield item

            return cast(F, around(streamed))
        if inspect.isgeneratorfunction(function):

            def generated(*args: Any, **kwargs: Any) -> Any:
                with again():
                    return (yield from function(*args, **kwargs))

            return cast(F, around(generated))

        def called(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        return cast(F, around(called))


class stage(_Scope):  # noqa: N801 - used like a function
    """A named interval of the current request: `with`, `async with`, or a decorator of any kind of function.

    The name is part of the code, not data: it becomes a span name and a metric label. Without a current request it does
    nothing. A stage that raises is recorded all the same. Make a new one for each `with`.
    """

    def __init__(self, name: str) -> None:
        self.name = str(name)
        self._again = functools.partial(stage, name)
        self._request: ingress.LiveRequest | None = None
        self._started_at = 0

    def __enter__(self) -> stage:
        self._request = ingress.current()
        self._started_at = clock.now()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        if self._request is not None:
            self._request.stage(self.name, self._started_at)


def _outcome(error: BaseException | None) -> tuple[int, str]:
    if error is None:
        return facts.OK, ""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return facts.ABORTED, "cancelled"
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return facts.ABORTED, "timeout"
    return facts.ERROR, type(error).__qualname__


class request(_Scope):  # noqa: N801 - used like a function
    """A request: `with`, `async with`, or a decorator. Under a server that is instrumented, the one that is there.

    `operation` and `model` are the served ones, never what a caller wrote. `headers`: of the caller, for its context.
    Make a new one for each `with`.
    """

    def __init__(
        self, operation: str = OPERATION, *, model: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self._operation, self._model, self._headers = str(operation), str(model), headers
        self._again = functools.partial(request, operation, model=model, headers=headers)
        self._live: ingress.LiveRequest | None = None
        self._packed = bytes(4)
        self._own = False
        self._token: Any = None

    def __enter__(self) -> request:
        try:
            self._live = ingress.current()
            self._own = self._live is None
            live = self._live or self._open()
            if live is not None:
                self._live, self._packed = live, live.packed
                self._name(live)
        except Exception as exc:
            _failed("a request", exc)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        if self._token is not None:
            ingress.detach(self._token)
        if self._live is not None and self._own:
            self._live.close(*_outcome(error))

    def _open(self) -> ingress.LiveRequest | None:
        live = ingress.open_request(
            f"{self._operation} {self._model}".strip(),
            owner=ENGINE,
            headers=self._headers,
            server=self._headers is not None,
            operation=self._operation,
            provider=ENGINE,
            model=self._model,
        )
        self._token = live.attach() if live is not None else None
        return live

    def _name(self, live: ingress.LiveRequest) -> None:
        """What was said here goes before what engines say; where nothing was, they may."""
        if not self._model and self._operation == OPERATION:
            return
        if not self._own:
            live.name(self._operation, ENGINE, self._model)
        live.named, live.operation = True, self._operation

    def submitted(self, *, input_tokens: int = 0, max_tokens: int = 0) -> None:
        """Handed over to the loop: from here to its first step it is in the queue."""
        if self._live is not None:
            self._live.submitted(ENGINE, 1, _count(input_tokens), _count(max_tokens))

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
            self._live.state(facts.EngineFinished(clock.now(), str(reason), _count(output_tokens)))

    def set_attribute(self, key: str, value: facts.Value) -> None:
        """An attribute on the request span."""
        if self._live is not None:
            self._live.set_attribute(key, value)


_packed_of = attrgetter("_packed")


class _Loop:
    """The step log of a thread, which goes back when the thread ends."""

    def __init__(self, log: StepLog) -> None:
        self.log = log
        log.pack = lambda members: b"".join(map(_packed_of, members))

    def __del__(self) -> None:
        try:
            recorder.give_back(ENGINE, self.log)
        except Exception:  # the interpreter may be half gone
            pass


class _Loops(threading.local):
    loop: _Loop | None = None


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
        prompt_tokens: Mapping[request, int] | None = None,
        waiting: int = 0,
        kv_used: int = 0,
        kv_total: int = 0,
    ) -> None:
        self._batch, self._prompt_tokens = batch, prompt_tokens
        self._load = (kv_used, kv_total, waiting)
        self._members: list[request] = []
        self._log: StepLog | None = None
        self._number = 0
        self._token: Token[bool] | None = None
        self.delivered: dict[request, int] = {}

    def __enter__(self) -> step:
        self._token = claimed.set(True)
        try:
            log = self._own_log()
            if log is not None:
                self._members = members = list(self._batch)
                column = self._column(self._prompt_tokens, 1) if self._prompt_tokens else b""
                used, total, waiting = map(_count, self._load)
                self._number = log.scheduled(members, (), column, used, total, len(members), waiting)
                self._log = log
        except Exception as exc:
            if _loops.loop is not None:
                _loops.loop.log.idle()  # half a change was made: what comes next is told whole
            _failed("a step", exc)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        if self._token is not None:
            with contextlib.suppress(ValueError):  # it may end in another task than it began in
                claimed.reset(self._token)
        try:
            if self._log is not None:
                delivered, others = (self.delivered, 1) if error is None else ({}, 0)
                column = self._column(delivered, others) if delivered or not others else b""
                self._log.done(self._number, column, len(self._members))
        except Exception as exc:
            _failed("a step", exc)

    def _column(self, tokens: Mapping[request, int], others: int) -> bytes:
        return array("I", [_count(tokens.get(member, others)) for member in self._members]).tobytes()

    @staticmethod
    def _own_log() -> StepLog | None:
        loop = _loops.loop
        if loop is None or not loop.log.alive:
            log = recorder.step_log(ENGINE)
            _loops.loop = loop = _Loop(log) if log is not None else None
        return loop.log if loop is not None else None
