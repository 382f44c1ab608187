"""`step` of the manual API: the steps of a custom decode loop."""

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
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.instrumentation.manual._scope import ENGINE, resolve_device
from otel_infer.instrumentation.manual.requests import request
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing.user_mistakes import report_mistake

_get_packed_handle = attrgetter("_packed")
_DEVICE_TIME = "a step's time on the device"


class _LoopWriter:
    """The writer of a thread's steps. It is released for reuse when the thread ends."""

    def __init__(self, writer: BatchWriter) -> None:
        self.writer, self.pid = writer, os.getpid()
        writer.pack_handles = lambda members: b"".join(map(_get_packed_handle, members))

    def __del__(self) -> None:
        try:
            recorder.release_batch_writer(ENGINE, self.writer)
        except Exception:  # the interpreter may be shutting down
            pass


class _ThreadLoop(threading.local):
    loop: _LoopWriter | None = None


_thread_loop = _ThreadLoop()


def _record_missing_steps(batch: Sequence[request]) -> None:
    """Records once per request that its steps are not recorded, if they are not for want of room."""
    for member in batch:
        if recorder.active and not member.misses_steps:
            member.misses_steps = True
            recorder.record_missing_steps(int.from_bytes(member._packed, "little"))


class step:  # noqa: N801 - used like a function
    """One forward pass over a batch of requests, as a `with` block. The step lasts from its start to its end.

    `prompt_tokens`: request → tokens of its prompt in this step, for requests in prefill. All others decode
    one token.
    `waiting`: requests that the loop has not scheduled yet. `kv_used`, `kv_total`: KV blocks; total 0 =
    unknown. Inside the block set `delivered`, {request: tokens}, for requests that got a number of tokens
    other than one. 0 means a chunk of a prompt.

    `gpu`: measures device time as in `stage`. Call `launched()` before the loop waits for the results,
    because otherwise the measured span includes the wait.
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
        self._timing_handle: Any = None
        self._batch, self._prompt_tokens = batch, prompt_tokens
        self._load = (kv_used, kv_total, waiting)
        self._members: list[request] = []
        self._writer: BatchWriter | None = None
        self._step_number = 0
        self._token: Token[bool] | None = None
        self.delivered: dict[request, int] = {}

    def __enter__(self) -> step:
        self._token = torch_suppressed.set(True)
        try:
            writer = self._get_writer()
            if writer is not None:
                self._members = members = list(self._batch)
                column = self._pack_column(self._prompt_tokens, 1) if self._prompt_tokens else b""
                used, total, waiting = map(events.clamp_count, self._load)
                self._step_number = writer.write_scheduled(
                    members, (), column, used, total, len(members), waiting
                )
                self._writer = writer
            else:
                _record_missing_steps(self._batch)
        except Exception as exc:
            if _thread_loop.loop is not None:
                # The change may be written partly, so the next step is recorded as a whole batch.
                _thread_loop.loop.writer.clear_batch()
            report_mistake("a step", exc)
        if self._writer is not None:
            try:
                if self._gpu:
                    on = resolve_device(self._gpu)
                    self._timing_handle = timing.begin(always=bool(self._prompt_tokens), on=on)
            except Exception as exc:
                report_mistake(_DEVICE_TIME, exc)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._token is not None:
            with contextlib.suppress(ValueError):  # the step may end in another task than it began in
                torch_suppressed.reset(self._token)
        self.launched()
        try:
            if self._writer is not None:
                delivered, default_tokens = (self.delivered, 1) if error is None else ({}, 0)
                column = (
                    self._pack_column(delivered, default_tokens) if delivered or not default_tokens else b""
                )
                self._writer.write_done(self._step_number, column, len(self._members))
        except Exception as exc:
            report_mistake("a step", exc)

    def launched(self) -> None:
        """Ends the device span: all work is launched, and the rest of the block waits for the device."""
        timing_handle, self._timing_handle = self._timing_handle, None
        loop = _thread_loop.loop
        if timing_handle is not None and self._writer is not None and loop is not None:
            try:
                timing.end(
                    timing_handle, StepWork(ENGINE, loop.pid, 0, self._step_number, self._writer.number)
                )
            except Exception as exc:
                report_mistake(_DEVICE_TIME, exc)

    def _pack_column(self, tokens: Mapping[request, int], default_tokens: int) -> bytes:
        return array(
            "I", [events.clamp_count(tokens.get(member, default_tokens)) for member in self._members]
        ).tobytes()

    @staticmethod
    def _get_writer() -> BatchWriter | None:
        loop = _thread_loop.loop
        if loop is None or not loop.writer.alive:
            writer = recorder.acquire_batch_writer(ENGINE)
            _thread_loop.loop = loop = _LoopWriter(writer) if writer is not None else None
        return loop.writer if loop is not None else None
