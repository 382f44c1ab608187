"""Records calls of models by libraries that offer a function for it: a stage of the request, or a request of its own.

    session.run(…) ─▶ begin_call ─ the library computes ─ LibraryCall.end ─▶ stage `forward`

Without a current request a call is a separate request. The outermost call counts: what it calls further in, of the same
library, of another one or of torch, is a part of it.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.instrumentation.hooks.context_hooks import compile_model_call
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span, start
from otel_infer.tracing.context import detach
from otel_infer.tracing.outcome import classify_exception

Rows = Callable[[tuple[Any, ...], dict[str, Any]], int]
"""Counts the rows of a call's input, from its arguments; 0 = unknown."""


class ModelLibrary(NamedTuple):
    """A library that runs models. `provider`: its name on the wire. `read_model`: returns the name of a model.

    `operation`: of the requests that a model serves. `has_stages`: a call is no stage, because what it calls further in
    is recorded: tokenizers, and forward passes of another library. `read_place`: returns where a model runs, such as an
    execution provider or a device. `keeps_names`: name and place of a model do not change.
    """

    provider: str
    read_model: Callable[[Any], str]
    operation: str = events.OPERATION_INFERENCE
    has_stages: bool = False
    read_place: Callable[[Any], str] | None = None
    keeps_names: bool = False


class KnownModel(NamedTuple):
    """A model that was called. `operation`: operation, provider and model. `reference`: forgets it with the model."""

    library: ModelLibrary
    operation: tuple[str, str, str]
    place: str
    reference: weakref.ref[Any] | None = None


_known_models: dict[int, KnownModel] = {}
"""Models of libraries that keep names, by the models' ids."""


class LibraryCall:
    """A call of a model while it runs. `token`: of the context, if the call is a request of its own."""

    __slots__ = ("_flag", "_token", "request", "started_at")

    def __init__(
        self, request: request_span.RequestSpan, token: Any, started_at: int, is_outermost: bool
    ) -> None:
        self.request, self.started_at, self._token = request, started_at, token
        self._flag = torch_suppressed.set(True) if is_outermost else None

    def leave(self) -> None:
        """Ends that the call is current in this context; it may go on in another thread."""
        flag, self._flag = self._flag, None
        if flag is not None:
            torch_suppressed.reset(flag)
        if self._token is not None:
            detach(self._token)

    def end(self, items: int, failure: BaseException | None, has_stage: bool = True) -> None:
        """Records the end of the call. `items`: rows of its input, 0 = unknown."""
        if has_stage and not self.request.ended:
            items = items if failure is None else events.RAISED
            self.request.record_stage(events.FORWARD, self.started_at, items)
        if self._token is not None:
            self.request.close(*classify_exception(failure))


def begin_call(library: ModelLibrary, model: Any, hook: Hook) -> LibraryCall | None:
    """Returns the call of a model that begins now; None if it is not recorded, or is a part of another call."""
    if torch_suppressed.get() or not hook.alive:
        return None
    try:
        request, token = start.begin_model_call(), None
        if request is None:
            request = open_request(library, model)
            if request is None:
                return None
            token = request.attach()
            started_at = request.arrived_at
        else:
            started_at = _clock.now()
            name_request(request, library, model)
        return LibraryCall(request, token, started_at, not library.has_stages)
    except BaseException as exc:
        hook.mark_failed(exc)
        return None


def open_request(
    library: ModelLibrary, model: Any, generative: bool = False
) -> request_span.RequestSpan | None:
    """Opens a request for a call outside of any server's request; None while nothing is recorded."""
    known = describe_model(library, model)
    operation, provider, name = known.operation
    request = start.open_request(
        f"{operation} {name}",
        owner=provider,
        operation=operation,
        provider=provider,
        model=name,
        generative=generative,
    )
    if request is not None:
        request.has_forward_name = True
        request.set_execution_provider(known.place)
    return request


def name_request(request: request_span.RequestSpan, library: ModelLibrary, model: Any) -> None:
    """Sets operation, provider and model of a server's request, if no model has served it before."""
    if not request.is_named and not request.has_forward_name:
        request.has_forward_name = True
        known = describe_model(library, model)
        request.set_operation(*known.operation)
        request.set_execution_provider(known.place)


def describe_model(library: ModelLibrary, model: Any) -> KnownModel:
    """Returns name and place of a model; they are read once, where its library keeps them."""
    key = id(model)
    known = _known_models.get(key)
    if known is not None and known.library is library:
        return known
    name = _read_text(library.read_model, model) or type(model).__name__
    place = _read_text(library.read_place, model) if library.read_place is not None else ""
    known = KnownModel(library, (library.operation, library.provider, name), place)
    if library.keeps_names:
        with contextlib.suppress(TypeError):  # it takes no weak references
            reference = weakref.ref(model, lambda _: _known_models.pop(key, None))
            known = _known_models[key] = known._replace(reference=reference)
    return known


def _read_text(read: Callable[[Any], str], model: Any) -> str:
    try:
        return read(model)
    except Exception:  # a model of the application may raise anything
        return ""


def forget_model(model: Any) -> None:
    """Reads name and place of a model again at its next call, because the application has changed them."""
    _known_models.pop(id(model), None)


def guard_rows(rows_of: Rows) -> Rows:
    """Returns a function that returns 0, for unknown, where `rows_of` raises."""

    def count_guarded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        try:
            return rows_of(args, kwargs)
        except Exception:  # data of the application may raise anything
            return 0

    return count_guarded


def wrap_call(library: ModelLibrary | Callable[[Any], ModelLibrary | None], rows_of: Rows) -> WrapperFactory:
    """Returns a factory for a method of a model that returns when its result is computed.

    `library`: of the method's models, or a function that returns the library of a model; None if this call is no inference.
    `rows_of`: counts the rows, and never raises (`guard_rows`).
    """

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def call_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = library if isinstance(library, ModelLibrary) else library(self)
            call = begin_call(found, self, hook) if found is not None else None
            if call is None or found is None:
                return original(self, *args, **kwargs)
            failure: BaseException | None = None
            try:
                return original(self, *args, **kwargs)
            except BaseException as exc:
                failure = exc
                raise
            finally:
                end_call(call, hook, rows_of, args, kwargs, failure, not found.has_stages)
                del failure  # breaks the reference cycle with its traceback

        if not isinstance(library, ModelLibrary) or library.has_stages or not library.keeps_names:
            return call_model
        details = library, _known_models, events.FORWARD, rows_of, rows_of is count_rows
        return compile_model_call(original, hook, call_model, details)

    return make_wrapper


class StartedCall(NamedTuple):
    """A call that runs in a thread of a library. `key`: id of what its callback is given. `items`: rows of its input.

    `context`: in which it was started.
    """

    key: int
    call: LibraryCall
    items: int
    context: contextvars.Context


class StartedCalls:
    """The started calls of an object of a library, which has them as an attribute. Several threads may end them.

    Those that are left when the object is deleted were left by their caller.
    """

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: list[StartedCall] = []

    def add(self, key: Any, call: LibraryCall, items: int) -> None:
        """Adds a call that is about to start, with the rows of its input."""
        self._running.append(StartedCall(id(key), call, items, contextvars.copy_context()))

    def list_running(self) -> list[StartedCall]:
        """Returns the calls that have not ended, in the order of their starts."""
        return list(self._running)

    def end_one(self, key: Any) -> StartedCall | None:
        """Ends and returns the call that was started first of those with this key; None if there is none."""
        found = [started for started in self.list_running() if started.key == id(key)][:1]
        self.end_these(found)
        return found[0] if found else None

    def end_last(self, failure: BaseException | None = None) -> StartedCall | None:
        """Ends and returns the call that was started last; those before it had ended: the object runs one at a time."""
        last = self.list_running()[-1:]
        self.end_these(last, failure)
        self.end_these(self.list_running())
        return last[0] if last else None

    def fail(self, failed: LibraryCall, failure: BaseException) -> None:
        """Ends a call that did not start."""
        self.end_these([started for started in self.list_running() if started.call is failed], failure)

    def end_these(self, ended: list[StartedCall], failure: BaseException | None = None) -> None:
        """Ends those calls of `list_running` that are still running."""
        for started in ended:
            try:
                self._running.remove(started)
            except ValueError:  # another thread has ended it
                continue
            started.call.end(started.items, failure)

    def __del__(self) -> None:
        self.end_these(self.list_running(), GeneratorExit())


def end_call(
    call: LibraryCall,
    hook: Hook,
    count_rows: Rows,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    failure: BaseException | None,
    has_stage: bool = True,
) -> None:
    """Ends a call in the context in which it began."""
    call.leave()
    try:
        call.end(count_rows(args, kwargs) if has_stage else 0, failure, has_stage)
    except BaseException as exc:
        hook.mark_failed(exc)


def wrap_tokenizer(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A factory for a function that turns text into a list of tokens: the stage `tokenize` of the current request."""

    def tokenize(*args: Any, **kwargs: Any) -> Any:
        request = start.current_request() if hook.alive and not torch_suppressed.get() else None
        if request is None:
            return original(*args, **kwargs)
        started_at = _clock.now()
        tokens = original(*args, **kwargs)
        try:
            request.record_stage(events.TOKENIZE, started_at, count_tokens(tokens))
        except Exception as exc:
            hook.mark_failed(exc)
        return tokens

    return tokenize


def count_tokens(tokens: Any) -> int:
    """Returns the number of tokens of a list, or of an array or tensor with any number of dimensions."""
    shape: Any = getattr(tokens, "shape", None)
    shape = shape() if callable(shape) else shape
    return int(math.prod(shape)) if shape else len(tokens)


@guard_rows
def count_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the number of inputs that a call gets: those of the first list or text, which is one."""
    kinds = (str, list, tuple)
    found = next((value for value in (*args, *kwargs.values()) if isinstance(value, kinds)), "")
    return 1 if isinstance(found, str) else len(found)


@guard_rows
def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the first dimension of the first array with two dimensions or more; 0 = there is none."""
    return next(filter(None, map(_read_rows, _iter_values((*args, *kwargs.values())))), 0)


def _iter_values(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value[:8]
        else:
            yield value


def _read_rows(value: Any) -> int:
    try:
        shape: Any = getattr(value, "shape", ())
        shape = shape() if callable(shape) else shape
        return int(shape[0]) if len(shape) > 1 else 0
    except Exception:  # an object of the application may raise anything
        return 0
