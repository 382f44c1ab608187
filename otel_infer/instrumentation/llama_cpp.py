"""Records llama-cpp-python: completions with each pass over the model as a step, embeddings, and the queue of its server.

    get_llama_proxy ─ another request holds the lock ─▶ `queue wait`           Llama.__init__ ─▶ phase `weights`
    _create_completion ─▶ tokenize ─ generate ─▶ (LlamaContext.decode ─ sample ─ a token)*             embed ─▶ `forward`

With a draft model a step delivers several tokens. Read and run: 0.3.36.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation import model_calls
from otel_infer.instrumentation.followed_streams import StreamWork, follow_stream
from otel_infer.instrumentation.generation_calls import Generation, begin_generation
from otel_infer.instrumentation.hooks.engines import read_file_name
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import wrap_loading
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.model_calls import ModelLibrary, count_inputs, wrap_call, wrap_tokenizer
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span, start
from otel_infer.tracing.context import detach
from otel_infer.tracing.outcome import classify_exception

PROVIDER = events.LLAMA_CPP
_LLAMA, _SERVER = "llama_cpp.llama:Llama", "llama_cpp.server.app"

instrumentor = Instrumentor("llama_cpp", "llama-cpp-python", ("llama_cpp",), is_engine=True)


def read_model(llama: Any) -> str:
    """Returns the name of a model by the path of its file."""
    return read_file_name(str(llama.model_path))


TEXT = ModelLibrary(PROVIDER, read_model, events.OPERATION_TEXT_COMPLETION)
CHAT = ModelLibrary(PROVIDER, read_model, events.OPERATION_CHAT)
EMBEDDINGS = ModelLibrary(PROVIDER, read_model, events.OPERATION_EMBEDDINGS)

_library: ContextVar[ModelLibrary] = ContextVar("otel_infer-llama-operation", default=TEXT)
_completion: ContextVar[Completion | None] = ContextVar("otel_infer-llama-completion", default=None)
_run: ContextVar[Run | None] = ContextVar("otel_infer-llama-run", default=None)
"""What computes its next token."""

instrumentor.patch_hot_path(f"{_LLAMA}.__init__", reads=("model_path",))(wrap_loading(PROVIDER, read_model))
instrumentor.patch_hot_path(f"{_LLAMA}.embed", reads=("input",))(wrap_call(EMBEDDINGS, count_inputs))
instrumentor.patch_hot_path(f"{_LLAMA}.tokenize", reads=("text",))(wrap_tokenizer)


class Completion(StreamWork):
    """A completion while it runs. `own_request`: opened for it. `run`: the generation inside it, once that begins."""

    def __init__(self, llama: Any, library: ModelLibrary, max_tokens: int) -> None:
        self.llama, self.library, self.max_tokens = llama, library, max_tokens
        self.own_request: request_span.RequestSpan | None = None
        self.run: Run | None = None
        self.has_begun = False

    def enter(self) -> Any:
        if not self.has_begun:
            self.has_begun = True
            if start.find_request() is None:
                self.own_request = model_calls.open_request(self.library, self.llama, generative=True)
        outer = _completion.set(self)
        return outer, self.own_request.attach() if self.own_request is not None else None

    def leave(self, entered: Any) -> None:
        outer, token = entered
        _completion.reset(outer)
        if token is not None:
            detach(token)

    def note_item(self, item: Any) -> None:
        """Ends the completion with the item that states its finish reason."""
        reason = item["choices"][0]["finish_reason"]
        if reason:
            self.end(None, reason)

    def end(self, exc: BaseException | None, reason: str = "") -> None:
        run, request = self.run, self.own_request
        self.run = self.own_request = None
        if run is not None and exc is None:
            run.finish(reason)
        elif run is not None and exc is not None:
            run.generation.fail(exc)
        if request is not None:
            request.close(*classify_exception(exc))


class Run(StreamWork):
    """A generation and its passes over the model. `prompt_left`: tokens of the prompt that are still to be computed.

    `generation`: begun with the first token. `pending`: tokens of the step since its pass, the last one at `pending_at`.
    `drafted`, `accepted`: of the draft model.
    """

    generation: Generation

    def __init__(self, llama: Any, prompt_tokens: int, hook: Hook) -> None:
        self.llama, self.prompt_left = llama, prompt_tokens
        self._hook: Hook | None = hook
        self.is_drafting = getattr(llama, "draft_model", None) is not None
        self.pending = self.pending_at = self.drafted = self.accepted = 0
        self.last_token, self.is_recorded = -1, False
        self.completion: Completion | None = None

    def enter(self) -> Any:
        if self._hook is not None:
            self._begin(self._hook)
        return _run.set(self if self.is_recorded else None)

    def _begin(self, hook: Hook) -> None:
        self._hook, self.completion = None, (work := _completion.get())
        library, most = (work.library, work.max_tokens) if work is not None else (TEXT, 0)
        begun = begin_generation(library, self.llama, hook, self.prompt_left, most)
        if begun is not None:
            self.generation, self.is_recorded = begun, True
            if work is not None:
                work.run = self

    def leave(self, entered: Any) -> None:
        _run.reset(entered)

    def begin_pass(self, tokens: int) -> None:
        """Begins a step, and ends the one before. `tokens`: that the pass computes."""
        generation, used = self.generation, self.llama.n_tokens
        self.end_step()
        if not generation.steps and used:
            cached = min(used, self.prompt_left)
            generation.request.record_event(events.PrefixRead(_clock.now(), self.prompt_left, cached))
            self.prompt_left -= cached
        elif self.prompt_left <= 0:
            self.drafted += tokens - 1
        self.prompt_left -= tokens
        generation.begin_step(tokens, used + tokens, self.llama.n_ctx())

    def note_item(self, item: Any) -> None:
        """Notes a token. Without a draft model it ends the step."""
        if not self.is_recorded:
            return
        self.last_token = item
        self.pending, self.pending_at = self.pending + 1, _clock.now()
        if not self.is_drafting:
            self.end_step()

    def end_step(self) -> None:
        """Ends the step that runs: it delivered all its tokens, or was a part of the prompt."""
        if self.generation.step:
            self.accepted += max(self.pending - 1, 0)
            self.generation.end_step(self.pending, self.pending_at)
        self.pending = self.pending_at = 0

    def end(self, exc: BaseException | None) -> None:
        """Ends a generation that is no part of a completion. Its reader may leave it at any token."""
        if self.is_recorded and exc is not None and not isinstance(exc, GeneratorExit):
            self.generation.fail(exc)
        elif self.is_recorded and self.completion is None:
            self.finish("")

    def finish(self, reason: str) -> None:
        """Ends the generation. A token that ends a text is none of the completion's."""
        self.end_step()
        if self.is_drafting:
            drafts = events.TokensDrafted(_clock.now(), self.drafted, self.accepted)
            self.generation.request.record_event(drafts)
        self.generation.tokens -= self.last_token == self.llama.token_eos()
        self.generation.finish(reason)


@instrumentor.patch_hot_path(f"{_LLAMA}.create_chat_completion", reads=("messages",))
def _patch_chat(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def create_chat_completion(*args: Any, **kwargs: Any) -> Any:
        token = _library.set(CHAT)
        try:
            return original(*args, **kwargs)
        finally:
            _library.reset(token)

    return create_chat_completion


@instrumentor.patch_hot_path(f"{_LLAMA}._create_completion", reads=("prompt", "max_tokens"))
def _patch_completion(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def create_completion(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        stream = original(self, prompt, *args, **kwargs)
        most = args[1] if len(args) > 1 else kwargs.get("max_tokens", 16)
        work = Completion(self, _library.get(), events.clamp_count(most or 0))
        return follow_stream(stream, work, hook) if hook.alive else stream

    return create_completion


@instrumentor.patch_hot_path(f"{_LLAMA}.generate", reads=("tokens",))
def _patch_generate(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def generate(self: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        stream = original(self, tokens, *args, **kwargs)
        return follow_stream(stream, Run(self, len(tokens), hook), hook) if hook.alive else stream

    return generate


@instrumentor.patch_hot_path("llama_cpp._internals:LlamaContext.decode", reads=("batch",))
def _patch_decode(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def decode(self: Any, batch: Any) -> Any:
        run = _run.get()
        if run is not None and hook.alive:
            call_safely(hook, lambda: run.begin_pass(batch.n_tokens()))
        return original(self, batch)

    return decode


@instrumentor.patch_hot_path(f"{_SERVER}:get_llama_proxy", part="server")
def _patch_proxy(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    wait = contextlib.asynccontextmanager(original)

    async def get_llama_proxy() -> AsyncIterator[Any]:  # a lock lets one request through at a time
        request = call_safely(hook, start.current_request) if hook.alive else None
        queued_at = _clock.now()
        if request is not None:
            request.queued_at = queued_at  # recorded if it ends before
        async with wait() as proxy:
            if request is not None:
                request.queued_at = 0
                call_safely(hook, request.record_stage, events.QUEUE_WAIT, queued_at)
            yield proxy

    return get_llama_proxy


@instrumentor.patch_hot_path(f"{_SERVER}:create_app", part="server")
def _patch_create_app(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Has routes that hold the function as a dependency call the one in the module."""

    def create_app(*args: Any, **kwargs: Any) -> Any:
        app = original(*args, **kwargs)
        current = sys.modules[_SERVER].get_llama_proxy
        app.dependency_overrides.setdefault(inspect.unwrap(current), current)
        return app

    return create_app
