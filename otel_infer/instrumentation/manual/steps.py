"""The steps of a hand-written loop."""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections.abc import Mapping, Sequence
from contextvars import Token
from operator import attrgetter
from types import TracebackType
from typing import Any

from otel_infer.gpu.timed_work import StepWork
from otel_infer.gpu.timing import timing
from otel_infer.instrumentation.hooks.suppression import claimed
from otel_infer.instrumentation.manual._scope import ENGINE, device_of, failed
from otel_infer.instrumentation.manual.requests import request
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import StepLog
from otel_infer.ringbuffer.recorder import recorder

_packed_of = attrgetter("_packed")
_ON_DEVICE = "a step's time on the device"


class _Loop:
    """The step log of a thread, which goes back when the thread ends."""

    def __init__(self, log: StepLog) -> None:
        self.log, self.pid = log, os.getpid()
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

    `gpu`, as of `stage`: what this thread launches in it on its current stream is timed on the device; call `launched()` before
    the loop waits for its results, or the wait is in the span, too.
    """

    def __init__(
        self,
        batch: Sequence[request],
        *,
        prompt_tokens: Mapping[request, int] | None = None,
        waiting: int = 0,
        kv_used: int = 0,
        kv_total: int = 0,
        gpu: object = False,
    ) -> None:
        self._gpu = gpu
        self._begun: Any = None
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
                used, total, waiting = map(events.count, self._load)
                self._number = log.scheduled(members, (), column, used, total, len(members), waiting)
                self._log = log
        except Exception as exc:
            if _loops.loop is not None:
                _loops.loop.log.idle()  # half a change was made: what comes next is told whole
            failed("a step", exc)
        if self._gpu and self._log is not None:
            try:
                self._begun = timing.begin(always=bool(self._prompt_tokens), on=device_of(self._gpu))
            except Exception as exc:
                failed(_ON_DEVICE, exc)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        if self._token is not None:
            with contextlib.suppress(ValueError):  # it may end in another task than it began in
                claimed.reset(self._token)
        self.launched()
        try:
            if self._log is not None:
                delivered, others = (self.delivered, 1) if error is None else ({}, 0)
                column = self._column(delivered, others) if delivered or not others else b""
                self._log.done(self._number, column, len(self._members))
        except Exception as exc:
            failed("a step", exc)

    def launched(self) -> None:
        """All of it is launched: what follows waits for the device."""
        begun, self._begun = self._begun, None
        loop = _loops.loop
        if begun is not None and self._log is not None and loop is not None:
            try:
                timing.end(begun, StepWork(ENGINE, loop.pid, 0, self._number, self._log.number))
            except Exception as exc:
                failed(_ON_DEVICE, exc)

    def _column(self, tokens: Mapping[request, int], others: int) -> bytes:
        return array("I", [events.count(tokens.get(member, others)) for member in self._members]).tobytes()

    @staticmethod
    def _own_log() -> StepLog | None:
        loop = _loops.loop
        if loop is None or not loop.log.alive:
            log = recorder.step_log(ENGINE)
            _loops.loop = loop = _Loop(log) if log is not None else None
        return loop.log if loop is not None else None
