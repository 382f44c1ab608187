"""Compiled hooks of tokenizers and thread pools do what their Python code does."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from otel_infer import _clock
from otel_infer.instrumentation import threading as thread_hooks
from otel_infer.instrumentation.hooks import context_hooks
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.instrumentation.transformers import tokenization
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from tests.support.frames import list_own_frames
from tests.support.rings import Recording

pytestmark = pytest.mark.skipif(context_hooks._known is None, reason="the compiled module is not built")


class Ids:
    """Token ids of a tensor library."""

    def __init__(self, count: Any) -> None:
        self._count, self.shape = count, (count,)

    def numel(self) -> Any:
        return self._count


class Encoding:
    """As a `BatchEncoding`."""

    def __init__(self, ids: Any) -> None:
        self.data = {"input_ids": ids}

    def keys(self) -> Any:
        return self.data.keys()

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def __getitem__(self, key: str) -> Any:
        return self.data[key]


class BrokenArray:
    size = "many"
    shape = (2, 2)


ROWS = [[1, 2, 3], [4]]
RESULTS = [
    *(
        [1, 2, 3],
        [],
        ROWS,
        "text",
        None,
        Ids(7),
        {"input_ids": [1, 2]},
        {"input_ids": Ids(3)},
        {},
        BrokenArray(),
    ),
    *(Encoding(ids) for ids in ([1, 2], ROWS, [], Ids(5), Ids("x"), None, BrokenArray(), [[1], None])),
]
FAILURES: list[Any] = [None, None, ValueError("x"), KeyboardInterrupt()]


class Tokenizer:
    """A tokenizer whose calls return `result`, or raise `fail`."""

    def __init__(self) -> None:
        self.result: Any = None
        self.fail: Any = None
        self.seen: list[Any] = []

    def encode(self, text: str, *, padding: bool = False) -> Any:
        self.seen.append((text, padding, tokenization.tokenizer_call.busy))
        if self.fail is not None:
            raise self.fail
        return self.result


class Wrapped:
    """A tokenizer with a hook, and what it records."""

    def __init__(self, recording: Recording, wrap: Callable[..., Any]) -> None:
        self.hook = Hook("encode")
        self.tokenizer = type("Hooked", (Tokenizer,), {"encode": wrap(Tokenizer.encode, self.hook)})()
        self._recording = recording
        self._reader: RequestReader | None = None

    def call(self, where: str, result: Any, fail: Any) -> tuple[Any, ...]:
        """Returns what a call returned or raised, what the original saw, and the recorded stages."""
        request, token = None, None
        self.tokenizer.result, self.tokenizer.fail = result, fail
        if where != "nothing":
            request = start.open_request("POST", owner="asgi")
            assert request is not None
            token = request.attach()
            request.tokenizing = where == "tokenizing"
            if where == "ended":
                request.close()
        tokenization.tokenizer_call.busy = where == "busy"
        self.hook.alive = where != "failed"
        try:
            returned = self.tokenizer.encode("text", padding=True)
        except BaseException as exc:
            returned = exc
        busy, tokenization.tokenizer_call.busy = tokenization.tokenizer_call.busy, False
        if request is not None:
            detach(token)
            request.close()
        return returned, busy, self.hook.alive, self.tokenizer.seen, self._read_stages()

    def _read_stages(self) -> list[Any]:
        if not self._recording.arena.buffers:
            return []
        self._reader = self._reader or RequestReader(self._recording.arena.buffers[0][1], 1)
        entries = self._reader.poll(_clock.now(), final=True)
        return [entry.event[2:] for entry in entries if isinstance(entry.event, events.StageEnded)]


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    where=st.sampled_from(("nothing", "request", "request", "ended", "tokenizing", "busy", "failed")),
    result=st.sampled_from(RESULTS),
    fail=st.sampled_from(FAILURES),
)
def test_compiled_tokenizer_call_records_what_python_records(
    recording: Recording, where: str, result: Any, fail: Any
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        compiled = Wrapped(recording, tokenization._wrap_tokenize)
        monkeypatch.setattr(tokenization, "compile_tokenizer", lambda original, hook, call, *more: call)
        python = Wrapped(recording, tokenization._wrap_tokenize)
    python._read_stages()
    expected = python.call(where, result, fail)
    compiled._read_stages()
    assert compiled.call(where, result, fail) == expected


def test_tokenizer_call_enters_python_code_only_for_its_request(recording: Recording) -> None:
    tokenizer = Wrapped(recording, tokenization._wrap_tokenize).tokenizer
    tokenizer.result = Encoding([1, 2])
    assert list_own_frames(lambda: tokenizer.encode("text")) == []
    request = start.open_request("POST", owner="asgi")
    assert request is not None
    token = request.attach()
    tokenizer.encode("text")  # its name becomes known to the ring
    assert list_own_frames(lambda: tokenizer.encode("text")) == []
    detach(token)
    request.close()


class Pool:
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)


def read_context() -> tuple[Any, Any]:
    return start.current_request(), torch_suppressed.get()


def test_thread_work_is_propagated_only_if_there_is_something(recording: Recording) -> None:
    submit = thread_hooks.submit_with_context(Pool.submit, Hook("submit"))
    assert list_own_frames(lambda: submit(Pool(), max, 1, 2)) == []
    request = start.open_request("POST", owner="asgi")
    assert request is not None
    token = request.attach()
    assert "ThreadContext.run" in list_own_frames(lambda: submit(Pool(), read_context))
    detach(token)
    request.close()
    flag = torch_suppressed.set(True)
    assert "ThreadContext.run" in list_own_frames(lambda: submit(Pool(), read_context))
    torch_suppressed.reset(flag)


def test_compiled_hook_looks_like_its_function() -> None:
    thread_hooks.instrumentor.install()
    try:
        submit = ThreadPoolExecutor.submit
        assert list(inspect.signature(submit).parameters) == ["self", "fn", "args", "kwargs"]
        assert submit.__name__ == "submit" and submit.__doc__ is submit.__wrapped__.__doc__  # type: ignore[attr-defined]
        assert copy.deepcopy(submit) is submit and pickle.loads(pickle.dumps(submit)) is submit
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(max, 1, 2).result() == 2
    finally:
        thread_hooks.instrumentor.remove()
