"""Behaviour of probes and hot-path patches, tested on functions of a module made for the tests."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import inspect
import logging
import multiprocessing
import os
import pickle
import sys
import threading
import timeit
import traceback
import types
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import wrapt
from hypothesis import given
from hypothesis import strategies as st

from otel_infer.instrumentation.hooks import probe as patching
from otel_infer.instrumentation.hooks.patch import FunctionPatch, HotPathPatch
from otel_infer.instrumentation.hooks.probe import Call, Hook
from otel_infer.instrumentation.hooks.target import TargetMismatch, read_parameters

NAME = "engine_for_patching"

SOURCE = """
import asyncio, types
calls = []
class Stop(BaseException): pass
class Token:
    pass
def add(a, b=2, /, c=3, *rest, d=4, **more):
    "Adds."
    calls.append("add")
    return a + b + c + d + sum(rest)
def fail(exc):
    calls.append("fail")
    raise exc
def down(n):
    return n if n == 0 else down(n - 1) + 1
def stream(n, then=None):
    for i in range(n):
        yield i
    if then is not None: raise then
    return "end"
def echo():
    got = []
    try:
        while True:
            try:
                got.append((yield len(got)))
            except ValueError as exc:
                got.append(exc)
    finally:
        calls.append(got)
def primed():
    g = echo()
    next(g)
    return g
@types.coroutine
def old_coroutine():
    yield from asyncio.sleep(0).__await__()
    return "old"
class Items:
    def __iter__(self): return self
    def __next__(self): raise StopIteration("over")
def items():
    return Items()
async def answer(x, wait=0):
    "Answers."
    calls.append("answer")
    await asyncio.sleep(wait)
    if isinstance(x, BaseException): raise x
    return x
async def tokens(n, then=None, wait=0):
    try:
        for i in range(n):
            await asyncio.sleep(wait)
            yield i
        if then is not None: raise then
    finally:
        calls.append("tokens closed")
async def atalk():
    got = []
    try:
        while True:
            try:
                got.append((yield len(got)))
            except ValueError as exc:
                got.append(exc)
    finally:
        calls.append(got)
class Engine:
    limit = 1
    def step(self, batch, dry=False):
        return self, batch
    @classmethod
    def build(cls, path, size=1):
        return cls
    @staticmethod
    def plan(tokens, chunk=8):
        return tokens
    async def generate(self, prompt, *, seed=0):
        yield prompt
    @property
    def busy(self): return True
    class Inner:
        def run(self, x): return x
class Child(Engine):
    pass
"""


@pytest.fixture
def engine() -> Iterator[Any]:
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    exec(SOURCE, module.__dict__)
    yield module
    del sys.modules[NAME]


class Witness:
    """A probe that records each call, result and exception."""

    def __init__(self, *reads: str) -> None:
        self.reads = reads
        self.seen: list[Any] = []
        self.open = 0

    def __call__(self, call: Call) -> Generator[None, Any, None]:
        self.open += 1
        self.seen.append(("before", *(call[name] for name in self.reads)))
        try:
            result = yield
            self.seen.append(("after", result))
        except BaseException as exc:
            self.seen.append(("raised", exc))
            raise
        finally:
            self.open -= 1

    @property
    def last(self) -> Any:
        return self.seen[-1]


@pytest.fixture
def patch_target() -> Iterator[Callable[..., Any]]:
    held: list[FunctionPatch] = []

    def install(path: str, probe: Any, **options: Any) -> FunctionPatch:
        patch = FunctionPatch(f"{NAME}:{path}", probe, **options)
        patch.install()
        held.append(patch)
        return patch

    yield install
    for patch in reversed(held):
        patch.remove()


def test_patched_function_runs_once_and_returns_its_result(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    token = engine.Token()
    engine.give = lambda: token
    patch_target("give", witness)
    assert engine.give() is token
    assert witness.seen == [("before",), ("after", token)]
    patch_target("add", witness)
    assert engine.add(1) == 10
    assert engine.calls == ["add"]


@pytest.mark.parametrize(
    "kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]
)
def test_exception_passes_unchanged_and_reaches_the_probe(engine: Any, patch_target: Any, kind: Any) -> None:
    witness = Witness()
    patch_target("fail", witness)
    error = kind("x")
    with pytest.raises(kind) as caught:
        engine.fail(error)
    assert caught.value is error
    assert witness.seen == [("before",), ("raised", error)]
    assert engine.calls == ["fail"]
    assert error.__context__ is None and error.__cause__ is None


def test_stop_iteration_passes_unchanged_and_keeps_patch_active(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch = patch_target("Items.__next__", witness)
    error = None
    try:
        next(engine.Items())
    except StopIteration as exc:
        error = exc
    assert error is not None and error.value == "over"
    assert error.__cause__ is None
    assert witness.last == ("raised", error)
    assert patch.active


def test_user_traceback_omits_the_probe(engine: Any, patch_target: Any) -> None:
    def a_probe(call: Call) -> Any:
        yield

    patch_target("fail", a_probe)
    error = ValueError("x")
    with pytest.raises(ValueError):
        engine.fail(error)
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-1] == "fail" and "a_probe" not in names


def test_probe_cannot_swallow_or_replace_a_user_exception(engine: Any, patch_target: Any) -> None:
    def swallows(call: Call) -> Any:
        try:
            yield
        except ValueError:
            pass

    def replaces(call: Call) -> Any:
        try:
            yield
        except ValueError as exc:
            raise exc from KeyError("probe")

    @dataclass(frozen=True)
    class Frozen(ValueError):
        text: str

    for probe in (swallows, replaces):
        patch_target("fail", probe)
    for error in (ValueError("x"), Frozen("x")):
        with pytest.raises(ValueError) as caught:
            engine.fail(error)
        assert caught.value is error
        assert error.__cause__ is None and not error.__suppress_context__


def test_argument_is_read_positionally_by_keyword_or_default(engine: Any, patch_target: Any) -> None:
    witness = Witness("a", "b", "c", "d", "absent")
    patch_target("add", witness, reads=("a", "b", "c", "d"))
    engine.add(1)
    engine.add(1, 5, d=6, c=7)
    engine.add(1, 5, 7, 100, 200)
    engine.add(1, a=9)
    assert [values for kind, *values in witness.seen if kind == "before"] == [
        [1, 2, 3, 4, None],
        [1, 5, 7, 6, None],
        [1, 5, 7, 4, None],
        [1, 2, 3, 4, None],
    ]


def test_every_method_kind_exposes_instance_and_arguments(engine: Any, patch_target: Any) -> None:
    seen: list[Any] = []

    def probe(call: Call) -> Any:
        seen.append((call.instance, call["batch"] or call["path"] or call["tokens"]))
        yield

    for path in ("Engine.step", "Engine.build", "Engine.plan"):
        patch_target(path, probe)
    instance, child = engine.Engine(), engine.Child()
    assert instance.step("b") == (instance, "b")
    assert engine.Engine.step(instance, batch="b") == (instance, "b")
    assert engine.Engine.step("not an engine", "b") == ("not an engine", "b")
    assert engine.Child.build("p") is engine.Child
    assert child.build("p") is engine.Child
    assert engine.Engine.plan("t") == instance.plan("t") == "t"
    assert seen == [
        (instance, "b"),
        (instance, "b"),
        ("not an engine", "b"),
        (engine.Child, "p"),
        (engine.Child, "p"),
        (None, "t"),
        (None, "t"),
    ]


@given(st.lists(st.integers(), min_size=1, max_size=5), st.dictionaries(st.sampled_from("cd"), st.integers()))
def test_argument_reads_agree_with_signature_bind(args: list[int], kwargs: dict[str, int]) -> None:
    def function(a: int, /, b: int = 2, *rest: int, c: int = 3, **more: int) -> None: ...

    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    call = Call(None, tuple(args), kwargs, read_parameters(None, function))
    assert {name: call[name] for name in "abc"} == {name: bound.arguments[name] for name in "abc"}


def test_recursive_calls_are_probed_at_each_level(engine: Any, patch_target: Any) -> None:
    witness = Witness("n")
    patch_target("down", witness, reads=("n",))
    assert engine.down(3) == 3
    assert [entry[1] for entry in witness.seen] == [3, 2, 1, 0, 0, 1, 2, 3]
    assert witness.open == 0


def test_concurrent_calls_share_no_probe_state(engine: Any, patch_target: Any) -> None:
    pairs: list[tuple[Any, Any]] = []

    def probe(call: Call) -> Any:
        argument = call["x"]
        pairs.append((argument, (yield)))

    patch_target("answer", probe, reads=("x",))

    async def main() -> None:
        await asyncio.gather(*(engine.answer(i, wait=0.001 * (5 - i)) for i in range(5)))

    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pairs) == sorted([(i, i) for i in range(5)] * 2)


def test_coroutine_probe_ends_when_the_await_returns(engine: Any, patch_target: Any) -> None:
    witness = Witness("x")
    patch_target("answer", witness, reads=("x",))
    assert inspect.iscoroutinefunction(engine.answer)

    async def main() -> None:
        coroutine = engine.answer(7)
        assert inspect.iscoroutine(coroutine)
        assert coroutine.__qualname__ == "answer"
        assert witness.seen == [("before", 7)]
        assert await coroutine == 7

    asyncio.run(main())
    assert witness.seen == [("before", 7), ("after", 7)]
    assert engine.calls == ["answer"]


def test_coroutine_cancellation_reaches_the_probe(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("answer", witness)

    async def main() -> None:
        task = asyncio.ensure_future(engine.answer(1, wait=60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(KeyError):
            await engine.answer(KeyError("x"))

    asyncio.run(main())
    assert [type(entry[1]) for entry in witness.seen if entry[0] == "raised"] == [
        asyncio.CancelledError,
        KeyError,
    ]


def test_unawaited_coroutine_closes_its_probe(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("answer", witness)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coroutine = engine.answer(1)
        coroutine.close()
        del coroutine
        gc.collect()
    assert [entry[0] for entry in witness.seen] == ["before", "raised"]
    assert engine.calls == []


def test_generator_keeps_its_type_and_reports_last_item(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("stream", witness)
    assert inspect.isgeneratorfunction(engine.stream)
    stream = engine.stream(3)
    assert inspect.isgenerator(stream) and stream.__name__ == "stream"
    assert next(stream) == 0
    assert witness.seen == [("before",)]

    def outer() -> Any:
        return (yield from stream)

    rest = outer()
    assert [next(rest), next(rest)] == [1, 2]
    with pytest.raises(StopIteration) as end:
        next(rest)
    assert end.value.value == "end"
    assert witness.seen == [("before",), ("after", 2)]


def test_empty_generator_ends_with_none(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("stream", witness)
    assert list(engine.stream(0)) == []
    assert witness.last == ("after", None)


def test_send_throw_and_close_reach_the_generator(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("echo", witness)
    stream = engine.echo()
    assert next(stream) == 0
    assert stream.send("a") == 1
    error = ValueError("x")
    assert stream.throw(error) == 2
    assert stream.send("b") == 3
    stream.close()
    assert engine.calls == [["a", error, "b"]]
    assert error.__context__ is None
    assert [entry[0] for entry in witness.seen] == ["before", "raised"]
    assert type(witness.last[1]) is GeneratorExit


def test_generator_ignoring_close_raises_the_usual_error(engine: Any, patch_target: Any) -> None:
    def stubborn() -> Any:
        try:
            yield 1
        except GeneratorExit:
            yield 2

    engine.stubborn = stubborn
    patch_target("stubborn", Witness())
    stream = engine.stubborn()
    next(stream)
    with pytest.raises(RuntimeError, match="generator ignored GeneratorExit"):
        stream.close()


def test_error_after_generator_throw_has_no_added_context(engine: Any, patch_target: Any) -> None:
    def turns() -> Any:
        try:
            yield 1
        except ValueError:
            pass
        raise KeyError("its own")

    engine.turns = turns
    patch_target("turns", Witness())
    stream = engine.turns()
    next(stream)
    with pytest.raises(KeyError) as caught:
        stream.throw(ValueError("x"))
    assert caught.value.__context__ is None


def test_generator_closed_twice_ends_its_probe_once(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("stream", witness)
    stream = engine.stream(9)
    next(stream)
    stream.close()
    stream.close()
    del stream
    gc.collect()
    assert [entry[0] for entry in witness.seen] == ["before", "raised"]


def test_garbage_collected_generator_closes_its_probe(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("echo", witness)
    stream = engine.echo()
    next(stream)
    del stream
    gc.collect()
    assert engine.calls == [[]]
    assert type(witness.last[1]) is GeneratorExit
    assert witness.open == 0


@pytest.mark.parametrize("ending", ["drop", "close", "throw"])
def test_uniterated_generator_starts_and_closes_its_probe(
    engine: Any, patch_target: Any, ending: str
) -> None:
    witness = Witness()
    patch = patch_target("stream", witness)
    stream = engine.stream(3)
    assert witness.seen == [("before",)]
    if ending == "close":
        stream.close()
    elif ending == "throw":
        with pytest.raises(ValueError):
            stream.throw(ValueError("x"))
    del stream
    gc.collect()
    assert [entry[0] for entry in witness.seen] == ["before", "raised"]
    assert witness.open == 0 and patch.active


def test_error_inside_a_generator_passes_unchanged(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("stream", witness)
    error = engine.Stop("x")
    with pytest.raises(engine.Stop) as caught:
        list(engine.stream(2, then=error))
    assert caught.value is error
    assert witness.last == ("raised", error)


def test_started_generator_accepts_a_value_immediately(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("primed", witness)
    stream = engine.primed()
    assert stream.send("a") == 1
    assert next(stream) == 2
    stream.close()
    assert engine.calls == [["a", None]]
    assert [entry[0] for entry in witness.seen] == ["before", "raised"]


def test_non_generator_iterator_is_returned_unchanged(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("items", witness)
    items = engine.items()
    assert type(items) is engine.Items
    assert witness.last == ("after", items)


def test_generator_based_coroutine_can_be_awaited(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("old_coroutine", witness)

    async def main() -> Any:
        return await engine.old_coroutine()

    assert asyncio.run(main()) == "old"
    assert witness.last[0] == "after"


def test_async_generator_stays_an_async_generator(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("tokens", witness)
    assert inspect.isasyncgenfunction(engine.tokens)

    async def main() -> None:
        stream = engine.tokens(3)
        assert inspect.isasyncgen(stream) and stream.__qualname__ == "tokens"
        assert witness.seen == [("before",)]
        assert [item async for item in stream] == [0, 1, 2]

    asyncio.run(main())
    assert witness.seen == [("before",), ("after", 2)]
    assert engine.calls == ["tokens closed"]


def test_asend_athrow_and_aclose_reach_the_async_generator(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("atalk", witness)
    error = ValueError("x")

    async def main() -> None:
        stream = engine.atalk()
        assert await stream.__anext__() == 0
        assert await stream.asend("a") == 1
        assert await stream.athrow(error) == 2
        await stream.aclose()

    asyncio.run(main())
    assert engine.calls == [["a", error]]
    assert error.__context__ is None
    assert [entry[0] for entry in witness.seen] == ["before", "raised"]
    assert type(witness.last[1]) is GeneratorExit


async def _cancel(engine: Any) -> None:
    async def read() -> None:
        async for _ in engine.tokens(9, wait=60):
            pass

    task = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _close(engine: Any) -> None:
    stream = engine.tokens(9)
    await stream.__anext__()
    await stream.aclose()
    await stream.aclose()


async def _drop(engine: Any) -> None:
    stream = engine.tokens(9)
    await stream.__anext__()
    del stream
    gc.collect()
    await asyncio.sleep(0.01)


async def _fault(engine: Any) -> None:
    with pytest.raises(engine.Stop):
        async for _ in engine.tokens(1, then=engine.Stop("x")):
            pass


@pytest.mark.parametrize(
    ("end", "kind"),
    [(_cancel, "CancelledError"), (_close, "GeneratorExit"), (_drop, "GeneratorExit"), (_fault, "Stop")],
)
def test_failed_async_generator_is_reported_once(
    engine: Any, patch_target: Any, end: Callable[[Any], Awaitable[None]], kind: str
) -> None:
    witness = Witness()
    patch_target("tokens", witness)
    asyncio.run(end(engine))  # type: ignore[arg-type]
    assert [entry[0] for entry in witness.seen] == ["before", "raised"]
    assert type(witness.last[1]).__name__ == kind
    assert engine.calls == ["tokens closed"]


def test_uniterated_async_generator_closes_its_probe(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch_target("tokens", witness)

    async def main() -> None:
        stream: AsyncGenerator[Any, Any] = engine.tokens(3)
        await stream.aclose()
        engine.tokens(3)
        gc.collect()

    asyncio.run(main())
    assert sorted(entry[0] for entry in witness.seen) == ["before", "before", "raised", "raised"]
    assert witness.open == 0


def _raises_before(call: Call) -> Any:
    raise LookupError("secret prompt")
    yield


def _raises_after(call: Call) -> Any:
    yield
    raise LookupError("secret prompt")


def _raises_on_error(call: Call) -> Any:
    try:
        yield
    finally:
        raise LookupError("secret prompt")


def _never_yields(call: Call) -> Any:
    return
    yield


def _yields_twice(call: Call) -> Any:
    try:
        yield
    except BaseException:
        pass
    yield


def _keeps_yielding(call: Call) -> Any:
    for _ in range(3):
        try:
            yield
        except BaseException:
            pass


def _is_cancelled_on_close(call: Call) -> Any:
    try:
        yield
    except BaseException:
        pass
    try:
        yield
    finally:
        raise asyncio.CancelledError("probe")


def _is_cancelled(call: Call) -> Any:
    raise asyncio.CancelledError("probe")
    yield


def _is_no_generator(call: Call) -> Any:
    return None


BROKEN = [
    _raises_before,
    _raises_after,
    _raises_on_error,
    _never_yields,
    _yields_twice,
    _keeps_yielding,
    _is_cancelled_on_close,
    _is_cancelled,
    _is_no_generator,
]


@pytest.mark.parametrize("probe", BROKEN)
def test_failing_probe_is_logged_once_disabled_and_counted(
    engine: Any, patch_target: Any, caplog: pytest.LogCaptureFixture, probe: Any
) -> None:
    patch = patch_target("add", probe)
    before = patching.count_errors()
    with caplog.at_level(logging.DEBUG):
        assert [engine.add(1), engine.add(1), engine.add(1)] == [10, 10, 10]
    assert patching.count_errors() == before + 1
    assert len(caplog.records) == 1
    assert f"{NAME}:add" in caplog.text and "disabled" in caplog.text
    assert "secret" not in caplog.text
    assert not patch.active and patch.installed


@pytest.mark.parametrize("probe", BROKEN)
def test_failing_probe_leaves_user_exceptions_unchanged(engine: Any, patch_target: Any, probe: Any) -> None:
    patch_target("fail", probe)
    error = ValueError("x")
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            engine.fail(error)
        assert caught.value is error
        assert error.__context__ is None and error.__cause__ is None


@pytest.mark.parametrize("probe", BROKEN)
def test_failing_probe_leaves_generators_and_coroutines_unchanged(
    engine: Any, patch_target: Any, probe: Any
) -> None:
    for path in ("stream", "tokens", "answer", "echo"):
        patch_target(path, probe)

    async def main() -> None:
        assert [item async for item in engine.tokens(3)] == [0, 1, 2]
        assert await engine.answer(7) == 7
        await engine.tokens(2).aclose()

    for _ in range(2):
        assert list(engine.stream(3)) == [0, 1, 2]
        asyncio.run(main())
        stream = engine.echo()
        next(stream)
        stream.close()
        engine.stream(3)
    gc.collect()


def test_failing_probe_releases_its_open_state(engine: Any, patch_target: Any) -> None:
    open_requests: set[int] = set()

    def probe(call: Call) -> Any:
        key = id(call)
        open_requests.add(key)
        try:
            yield
            yield
        finally:
            open_requests.discard(key)

    patch_target("stream", probe)
    streams = [engine.stream(1), engine.stream(1)]
    assert len(open_requests) == 2
    for stream in streams:
        list(stream)
    assert open_requests == set()


def test_calls_in_flight_survive_disabling_the_probe(engine: Any, patch_target: Any) -> None:
    ended: list[Any] = []

    def probe(call: Call) -> Any:
        if call["n"] == 0:
            raise RuntimeError
        ended.append((yield))

    patch_target("stream", probe)
    stream = engine.stream(2)
    engine.stream(0)
    assert list(stream) == [0, 1]
    assert ended == [1]


def test_signal_during_a_probe_reaches_the_user(engine: Any, patch_target: Any) -> None:
    def interrupted(call: Call) -> Any:
        raise KeyboardInterrupt
        yield

    patch = patch_target("add", interrupted)
    before = patching.count_errors()
    with pytest.raises(KeyboardInterrupt):
        engine.add(1)
    assert patch.active and patching.count_errors() == before


def test_signal_while_closing_a_probe_reaches_the_user(engine: Any, patch_target: Any) -> None:
    def interrupted(call: Call) -> Any:
        yield
        try:
            yield
        finally:
            raise KeyboardInterrupt

    patch_target("add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.add(1)


def test_failing_logger_does_not_reach_the_engine(
    engine: Any, patch_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RecursionError

    monkeypatch.setattr(patching.log, "error", refuse)
    patch_target("add", _raises_before)
    assert engine.add(1) == 10


def test_missing_target_is_a_mismatch_and_changes_nothing(engine: Any) -> None:
    names = dict(vars(engine))
    for target, reason in {
        f"{NAME}:absent": "there is no absent",
        f"{NAME}:Engine.absent": "there is no absent",
        f"{NAME}:Absent.step": "there is no Absent",
        "missing_module:step": "there is no module missing_module imported",
        f"{NAME}:Engine": "is a class, not a function",
        f"{NAME}:Engine.limit": "is not a function",
        f"{NAME}:Engine.busy": "is not a function",
    }.items():
        with pytest.raises(TargetMismatch) as caught:
            FunctionPatch(target, Witness()).install()
        assert (caught.value.target, caught.value.reason) == (target, reason)
        assert str(caught.value) == f"{target}: {reason}"
    assert dict(vars(engine)) == names


def test_target_lookup_imports_nothing() -> None:
    assert "this" not in sys.modules
    with pytest.raises(TargetMismatch):
        FunctionPatch("this:d", Witness()).install()
    assert "this" not in sys.modules


def test_undeclared_parameter_is_a_mismatch_despite_kwargs(engine: Any) -> None:
    for hook in (
        FunctionPatch(f"{NAME}:add", Witness(), reads=("c", "more", "rest", "x")),
        HotPathPatch(f"{NAME}:add", lambda original, hook: original, reads=("c", "more", "rest", "x")),
    ):
        with pytest.raises(TargetMismatch, match="declares no parameter more, rest, x"):
            hook.check_target()
        with pytest.raises(TargetMismatch, match="declares no parameter more, rest, x"):
            hook.install()
        assert not hook.installed
    with pytest.raises(TargetMismatch, match="declares no parameter self"):
        FunctionPatch(f"{NAME}:Engine.step", Witness(), reads=("self",)).install()


def test_function_without_signature_is_patchable_but_not_readable(engine: Any, patch_target: Any) -> None:
    engine.largest = max
    witness = Witness()
    patch_target("largest", witness)
    assert engine.largest(1, 2) == 2
    with pytest.raises(TargetMismatch):
        FunctionPatch(f"{NAME}:largest", witness, reads=("key",)).check_target()


def test_immutable_class_is_a_mismatch(engine: Any) -> None:
    engine.Dict = dict
    patch = FunctionPatch(f"{NAME}:Dict.get", Witness())
    with pytest.raises(TargetMismatch, match="cannot be replaced"):
        patch.install()
    assert not patch.installed


def test_optional_target_may_be_missing_but_not_changed(engine: Any) -> None:
    patch = FunctionPatch(f"{NAME}:absent", Witness(), optional=True)
    assert not patch.check_target() and not patch.install() and not patch.active
    with pytest.raises(TargetMismatch):
        FunctionPatch(f"{NAME}:add", Witness(), reads=("x",), optional=True).install()


def test_target_requires_a_module_and_a_path() -> None:
    for target in ("engine.step", ":step", "engine:"):
        with pytest.raises(ValueError, match="is not like"):
            FunctionPatch(target, Witness())


def test_second_install_of_a_patch_is_ignored(engine: Any, patch_target: Any) -> None:
    witness = Witness()
    patch = patch_target("add", witness)
    assert patch.install()
    engine.add(1)
    assert len(witness.seen) == 2


def test_two_patches_on_one_target_both_run(engine: Any, patch_target: Any) -> None:
    first, second = Witness("batch"), Witness("batch")
    patch_target("Engine.step", first, reads=("batch",))
    patch_target("Engine.step", second, reads=("batch",))
    engine.Engine().step("b")
    assert first.seen[0] == second.seen[0] == ("before", "b")


@pytest.mark.parametrize("path", ["add", "Engine.step", "Engine.build", "Engine.plan", "Engine.Inner.run"])
def test_removal_restores_the_original_object(engine: Any, path: str) -> None:
    *outer, name = path.split(".")
    owner = engine
    for step in outer:
        owner = getattr(owner, step)
    before = vars(owner)[name]
    for hook in (
        FunctionPatch(f"{NAME}:{path}", Witness()),
        HotPathPatch(
            f"{NAME}:{path}", lambda original, hook: lambda *args, **kwargs: original(*args, **kwargs)
        ),
    ):
        hook.install()
        assert vars(owner)[name] is not before
        hook.remove()
        hook.remove()
        assert vars(owner)[name] is before
        assert not hook.active


def test_inherited_method_is_patched_only_on_its_target(engine: Any) -> None:
    witness = Witness()
    patch = FunctionPatch(f"{NAME}:Child.step", witness)
    patch.install()
    engine.Engine().step("b")
    assert witness.seen == []
    engine.Child().step("b")
    assert len(witness.seen) == 2
    patch.remove()
    assert "step" not in vars(engine.Child)


def test_later_wrapper_stays_after_removal_of_the_patch(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    witness = Witness()
    patch = FunctionPatch(f"{NAME}:Engine.step", witness)
    patch.install()
    outer = wrapt.FunctionWrapper(
        vars(engine.Engine)["step"],
        lambda wrapped, instance, args, kwargs: ("outer", wrapped(*args, **kwargs)),
    )
    engine.Engine.step = outer
    patch.remove()
    assert vars(engine.Engine)["step"] is outer
    assert "wrapped or replaced by others" in caplog.text
    instance = engine.Engine()
    assert instance.step("b") == ("outer", (instance, "b"))
    assert witness.seen == []

    patch.install()
    assert vars(engine.Engine)["step"] is outer
    instance.step("b")
    assert len(witness.seen) == 2


def test_bound_method_stops_probing_after_removal(engine: Any) -> None:
    witness = Witness()
    patch = FunctionPatch(f"{NAME}:Engine.step", witness)
    patch.install()
    instance = engine.Engine()
    step = instance.step
    patch.remove()
    assert step("b") == (instance, "b")
    assert witness.seen == []


def test_patch_hidden_under_a_wrapper_is_not_reactivated(engine: Any) -> None:
    witness = Witness()
    patch = FunctionPatch(f"{NAME}:add", witness)
    patch.install()
    patched = engine.add
    engine.add = lambda *args: patched(*args)
    patch.remove()
    patch.install()
    engine.add(1)
    assert len(witness.seen) == 2
    patch.remove()


def test_patch_inside_a_functools_wrapper_is_recognised(engine: Any) -> None:
    witness = Witness()
    patch = FunctionPatch(f"{NAME}:Engine.step", witness)
    patch.install()
    bound = engine.Engine.step

    @functools.wraps(bound)
    def outer(self: Any, *args: Any) -> Any:
        return bound(self, *args)

    engine.Engine.step = outer
    patch.remove()
    patch.install()
    assert engine.Engine.__dict__["step"] is outer
    engine.Engine().step("b")
    assert len(witness.seen) == 2


def _run_in_child(function: Any, queue: Any) -> None:
    queue.put(function("a"))


def module_level(x: str, y: int = 2) -> str:
    """Returns its argument."""
    return x


class Holder:
    def method(self, x: int) -> Any:
        return self, x

    @classmethod
    def build(cls) -> type:
        return cls

    @staticmethod
    def plan(x: int) -> int:
        return x


@pytest.fixture
def patched_module() -> Iterator[None]:
    sys.modules.setdefault(__name__, sys.modules[_run_in_child.__module__])
    patches = [
        FunctionPatch(f"{__name__}:{path}", Witness())
        for path in ("module_level", "Holder.method", "Holder.build", "Holder.plan")
    ]
    for patch in patches:
        patch.install()
    yield
    for patch in patches:
        patch.remove()


def test_patched_function_keeps_signature_name_and_docstring(engine: Any, patch_target: Any) -> None:
    before = inspect.signature(engine.add), inspect.signature(engine.Engine.step)
    for path in ("add", "Engine.step", "answer"):
        patch_target(path, Witness())
    assert (inspect.signature(engine.add), inspect.signature(engine.Engine.step)) == before
    assert str(inspect.signature(engine.Engine().step)) == "(batch, dry=False)"
    assert (engine.add.__name__, engine.add.__doc__) == ("add", "Adds.")
    assert engine.Engine.step.__qualname__ == "Engine.step"


def test_patched_objects_pass_isinstance_and_issubclass(engine: Any, patch_target: Any) -> None:
    patch_target("Engine.step", Witness())
    patch_target("add", Witness())
    assert isinstance(engine.add, types.FunctionType)
    assert isinstance(engine.Engine().step, types.MethodType)
    assert isinstance(engine.Child(), engine.Engine) and issubclass(engine.Child, engine.Engine)
    assert callable(engine.add) and inspect.isfunction(engine.add) and inspect.ismethod(engine.Engine().step)


@pytest.mark.usefixtures("patched_module")
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_patched_functions_pickle_by_name(protocol: int) -> None:
    def roundtrip(value: Any) -> Any:
        return pickle.loads(pickle.dumps(value, protocol))

    assert roundtrip(module_level) is module_level
    assert roundtrip(Holder.method)(Holder(), 1)[1] == 1
    assert roundtrip(Holder.plan)(1) == 1
    assert roundtrip(Holder.build)() is Holder
    instance, value = roundtrip(Holder().method)(1)
    assert type(instance) is Holder and value == 1


@pytest.mark.usefixtures("patched_module")
def test_patched_functions_and_methods_copy_as_usual() -> None:
    holder = Holder()
    holder.step = holder.method  # type: ignore[attr-defined]
    twin = copy.deepcopy(holder)
    assert twin.step(1)[0] is twin  # type: ignore[attr-defined]
    assert copy.copy(holder.method)(1)[0] is holder
    assert copy.copy(module_level) is copy.deepcopy(module_level) is module_level


@pytest.mark.usefixtures("patched_module")
def test_patched_function_runs_in_a_forked_process() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_run_in_child, args=(module_level, queue))
    process.start()
    assert queue.get() == "a"
    process.join()
    assert process.exitcode == 0


def test_target_mismatch_survives_pickling() -> None:
    mismatch = pickle.loads(pickle.dumps(TargetMismatch("a:b", "is gone")))
    assert (mismatch.target, mismatch.reason, str(mismatch)) == ("a:b", "is gone", "a:b: is gone")


def _make_recording_hook(seen: list[Any]) -> Any:
    def make(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if hook.alive:
                try:
                    seen.append(args)
                    if args[-1] == "boom":
                        raise LookupError("secret prompt")
                except Exception as exc:
                    hook.mark_failed(exc)
            return result

        return step

    return make


@pytest.mark.parametrize("path", ["add", "Engine.step", "Engine.build", "Engine.plan"])
def test_hot_path_patch_replaces_every_kind_of_function(engine: Any, path: str) -> None:
    seen: list[Any] = []
    hook = HotPathPatch(f"{NAME}:{path}", _make_recording_hook(seen))
    hook.install()
    hook.install()
    call = getattr(engine.Engine(), path.partition(".")[2], engine.add)
    call(1)
    assert len(seen) == 1 and seen[0][-1] == 1
    assert call.__name__ == path.rpartition(".")[2]
    assert str(inspect.signature(call)) != "(*args, **kwargs)"
    if path == "Engine.build":
        assert engine.Child.build(1) is engine.Child
    hook.remove()
    before = len(seen)
    call(1)
    assert len(seen) == before


def test_hot_path_patch_installs_a_plain_function(engine: Any) -> None:
    hook = HotPathPatch(f"{NAME}:Engine.step", _make_recording_hook([]), reads=("batch",))
    assert hook.check_target() and hook.install()
    assert type(vars(engine.Engine)["step"]) is types.FunctionType
    hook.remove()


def test_failing_hot_path_hook_is_disabled_and_logged(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    hook = HotPathPatch(f"{NAME}:Engine.step", _make_recording_hook(seen))
    hook.install()
    before = patching.count_errors()
    instance = engine.Engine()
    for _ in range(3):
        assert instance.step("boom") == (instance, "boom")
    assert len(seen) == 1
    assert patching.count_errors() == before + 1
    assert len(caplog.records) == 1 and "secret" not in caplog.text
    assert hook.installed and not hook.active


def test_forked_child_starts_with_no_hook_errors() -> None:
    hook = Hook("a:b")
    hook.mark_failed(ValueError())
    pid = os.fork()
    if pid == 0:
        os._exit(patching.count_errors() if not hook.alive else 77)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert patching.count_errors() > 0


def test_second_hook_failure_is_counted_but_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    hook, before = Hook("a:b"), patching.count_errors()
    hook.mark_failed(ValueError())
    hook.mark_failed(ValueError())
    assert patching.count_errors() == before + 2
    assert len(caplog.records) == 1


def test_bound_hot_path_hook_stops_after_removal(engine: Any) -> None:
    seen: list[Any] = []
    hook = HotPathPatch(f"{NAME}:Engine.step", _make_recording_hook(seen))
    hook.install()
    instance = engine.Engine()
    step = instance.step
    hook.remove()
    assert step("b") == (instance, "b")
    assert seen == []


def test_hot_path_patch_over_a_patch_keeps_arguments(engine: Any, patch_target: Any) -> None:
    witness, seen = Witness("batch"), []  # type: ignore[var-annotated]
    patch_target("Engine.step", witness, reads=("batch",))
    hook = HotPathPatch(f"{NAME}:Engine.step", _make_recording_hook(seen), reads=("batch",))
    hook.install()
    instance = engine.Engine()
    assert instance.step("b") == (instance, "b")
    assert witness.seen == [("before", "b"), ("after", (instance, "b"))]
    assert seen == [(instance, "b")]
    hook.remove()


def test_wrapper_over_a_removed_hot_path_patch_stays(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    hook = HotPathPatch(f"{NAME}:add", _make_recording_hook(seen))
    hook.install()
    patched = engine.add
    engine.add = lambda *args: patched(*args)
    hook.remove()
    assert engine.add(1) == 10
    assert seen == []
    assert "wrapped or replaced by others" in caplog.text


def test_patched_call_costs_under_ten_microseconds(engine: Any, patch_target: Any) -> None:
    def probe(call: Call) -> Any:
        yield

    engine.identity = lambda x: x
    patch_target("identity", probe)
    best = min(timeit.repeat(lambda: engine.identity(1), number=2000, repeat=7)) / 2000
    assert best < 10e-6
