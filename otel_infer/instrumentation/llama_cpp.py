"""Records llama-cpp-python: completions with each pass over the model as a step, embeddings, and the queue of its server.

    get_llama_proxy ─ another request holds the lock ─▶ `queue wait`           Llama.__init__ ─▶ phase `weights`
    _create_completion ─▶ tokenize ─ generate ─▶ (LlamaContext.decode ─ sample ─ a token)*             embed ─▶ `forward`

With a draft model a step delivers several tokens. Read and run: 0.3.36.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.followed_streams import (
    RequestWork,
    StreamWork,
    follow_call,
    follow_stream,
    read_finish_reason,
)
from otel_infer.instrumentation.generation_calls import Generation, begin_generation, record_refusal
from otel_infer.instrumentation.hooks.engines import read_file_name
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import wrap_loading
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.model_calls import ModelLibrary, count_inputs, wrap_call, wrap_tokenizer
from otel_infer.instrumentation.route_dependencies import override_dependency, wrap_queue_wait
from otel_infer.ringbuffer import events

PROVIDER = events.LLAMA_CPP
_LLAMA, _SERVER, _LOCK = "llama_cpp.llama:Llama", "llama_cpp.server.app", "get_llama_proxy"

instrumentor = Instrumentor("llama_cpp", "llama-cpp-python", ("llama_cpp",), is_engine=True)


def read_model(llama: Any) -> str:
    """Returns the name of a model by the path of its file."""
    return read_file_name(str(llama.model_path))


TEXT = ModelLibrary(PROVIDER, read_model, events.OPERATION_TEXT_COMPLETION)
CHAT = ModelLibrary(PROVIDER, read_model, events.OPERATION_CHAT)
_EMBEDDINGS = ModelLibrary(PROVIDER, read_model, events.OPERATION_EMBEDDINGS)

_library = ContextVar("otel_infer-llama-operation", default=TEXT)
_completion: ContextVar[Completion | None] = ContextVar("otel_infer-llama-completion", default=None)
_run: ContextVar[Run | None] = ContextVar("otel_infer-llama-run", default=None)
"""What computes its next token."""

instrumentor.patch_hot_path(f"{_LLAMA}.__init__", reads=("model_path",))(wrap_loading(PROVIDER, read_model))
instrumentor.patch_hot_path(f"{_LLAMA}.embed", reads=("input",))(wrap_call(_EMBEDDINGS, count_inputs))
instrumentor.patch_hot_path(f"{_LLAMA}.tokenize", reads=("text",))(wrap_tokenizer)


class Chat(RequestWork):
    """A chat, which is a completion, or several. Those may begin with the first item that is read."""

    def enter(self) -> Any:
        return _library.set(CHAT), super().enter()

    def leave(self, entered: Any) -> None:
        _library.reset(entered[0])
        super().leave(entered[1])


class Completion(RequestWork):
    """A completion while it runs. `run`: the generation inside it, once that begins. `is_inner`: it is a part of another one."""

    run: Run | None

    def __init__(self, llama: Any, library: ModelLibrary, max_tokens: int) -> None:
        super().__init__(library, llama)
        self.max_tokens, self.run = max_tokens, None
        self.is_inner = _completion.get() is not None or _run.get() is not None

    def enter(self) -> Any:
        entered = super().enter()
        return _completion.set(self), entered

    def leave(self, entered: Any) -> None:
        _completion.reset(entered[0])
        super().leave(entered[1])

    def note_item(self, item: Any) -> None:
        """Ends the generation with the item that states its finish reason."""
        super().note_item(item)
        if self.has_finished:
            self._end_run(None, read_finish_reason(item))

    def _end_run(self, exc: BaseException | None, reason: str = "") -> None:
        run, self.run = self.run, None
        if run is not None:
            run.finish(reason, exc)
        elif not (
            exc is None or self.request is None or self.owns_request or self.is_inner or self.has_finished
        ):
            record_refusal(self.request, self.library, self.model, exc)

    def end(self, exc: BaseException | None) -> None:
        self._end_run(exc)
        super().end(exc)


class Run(StreamWork):
    """A generation, begun with the first token, and its passes over the model. `prompt_left`: tokens of the prompt to compute.

    `resets`: what the model has computed before is of this prompt. `pending`: tokens of the step since its pass, the last one at
    `pending_at`. `drafted`, `accepted`: of the draft model.
    """

    generation: Generation

    def __init__(self, llama: Any, prompt_tokens: int, resets: bool, hook: Hook) -> None:
        self.llama, self.prompt_left, self.resets = llama, prompt_tokens, resets
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
        if _run.get() is not None or (work is not None and work.is_inner):  # such as a judge of its tokens
            return
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
        if not generation.steps and used and self.resets:
            self._note_cached(min(used, self.prompt_left))
        elif self.prompt_left <= 0:
            self.drafted += tokens - 1
        self.prompt_left -= tokens
        generation.begin_step(tokens, used + tokens, self.llama.n_ctx())

    def _note_cached(self, tokens: int) -> None:
        self.generation.request.record_event(events.PrefixRead(_clock.now(), self.prompt_left, tokens))
        self.prompt_left -= tokens

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
        generation = self.generation
        if self.pending and not generation.steps:
            self._note_cached(self.prompt_left)  # the whole prompt
            generation.begin_step(at=generation.began_at)
        if generation.step:
            self.accepted += max(self.pending - 1, 0)
            generation.end_step(self.pending, self.pending_at)
        self.pending = self.pending_at = 0

    def end(self, exc: BaseException | None) -> None:
        """Ends a generation that is no part of a completion. Its reader may leave it at any token."""
        is_left = exc is None or isinstance(exc, GeneratorExit)
        if self.is_recorded and not (is_left and self.completion is not None):
            self.finish("", None if is_left else exc)

    def finish(self, reason: str, exc: BaseException | None = None) -> None:
        """Ends the generation, once. A token that ends a text is none of the completion's."""
        self.end_step()
        if self.is_drafting and not self.generation.is_ended:
            drafted = self.drafted, self.accepted
            self.generation.request.record_event(events.TokensDrafted(_clock.now(), *drafted))
        if exc is not None:
            self.generation.fail(exc)
        else:
            self.generation.tokens -= self.last_token >= 0 and _ends_text(self.llama._model, self.last_token)
            self.generation.finish(reason)


def _ends_text(model: Any, token: int) -> bool:
    """Whether a token ends a text; False if the model is closed, because its vocabulary is freed."""
    return model.model is not None and sys.modules["llama_cpp"].llama_vocab_is_eog(model.vocab, token)


@instrumentor.patch_hot_path(f"{_LLAMA}.create_chat_completion", reads=("messages",))
def _patch_chat(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A chat may be several completions. Without a server it is one request."""

    def create_chat_completion(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = hook, original, (self, *args), kwargs
        return follow_call(Chat(CHAT, self), *arguments) if hook.alive else original(self, *args, **kwargs)

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
        tokens = list(tokens) if hasattr(tokens, "__next__") else tokens  # as the library does, but later
        stream = original(self, tokens, *args, **kwargs)
        count = len(tokens) if hasattr(tokens, "__len__") else 0
        run = Run(self, count, args[6] if len(args) > 6 else kwargs.get("reset", True), hook)
        return follow_stream(stream, run, hook) if hook.alive else stream

    return generate


@instrumentor.patch_hot_path("llama_cpp._internals:LlamaContext.decode", reads=("batch",))
def _patch_decode(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def decode(self: Any, batch: Any) -> Any:
        run = _run.get()
        if run is not None and hook.alive and run.llama._ctx is self:
            call_safely(hook, lambda: run.begin_pass(batch.n_tokens()))
        return original(self, batch)

    return decode


# A lock lets one request through at a time.
instrumentor.patch_hot_path(f"{_SERVER}:{_LOCK}", part="server")(wrap_queue_wait)
instrumentor.patch_hot_path(f"{_SERVER}:create_app", part="server")(override_dependency(_SERVER, _LOCK))
