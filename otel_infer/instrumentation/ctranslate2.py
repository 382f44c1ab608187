"""Records CTranslate2's calls: encoders and scores as the stage `forward`, translations and generations as `decode`.

    Generator(path) ─▶ phase `weights`            encode, forward_batch, score_batch ─▶ `forward`
    generate_batch, translate_batch, Whisper.generate ─▶ `decode`; with a callback for each token its steps
    …(asynchronous=True) ─▶ when all results are there, as result() of one finds them

The callback is the user's, or that of `generate_tokens`. None is added, because the library then would call Python for each
token. Read and run: 4.8.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

from otel_infer.instrumentation.generation_calls import Generation, begin_generation
from otel_infer.instrumentation.hooks.guarded_calls import call_or_fail, call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import LoadedNames
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.instrumentation.model_calls import ModelLibrary, begin_call, guard_rows, wrap_call
from otel_infer.instrumentation.pending_results import PendingResults, wrap_result
from otel_infer.ringbuffer import events

PROVIDER = events.CTRANSLATE2
_MODELS = ("Translator", "Generator", "Encoder", "Whisper", "Wav2Vec2", "Wav2Vec2Bert")

instrumentor = Instrumentor("ctranslate2", "ctranslate2", ("ctranslate2",), is_engine=True)

_names = LoadedNames(PROVIDER)


def read_place(model: Any) -> str:
    """Returns the device of a model."""
    return str(model.device)


LIBRARY = ModelLibrary(PROVIDER, _names.read_name, read_place=read_place, keeps_names=True)
GENERATION = ModelLibrary(PROVIDER, _names.read_name, events.OPERATION_TEXT_COMPLETION, read_place=read_place)


_INPUTS = ("source", "start_tokens", "inputs", "tokens", "prompts", "features")
"""Names of the first parameter of the methods."""


def _find_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next((kwargs[name] for name in _INPUTS if name in kwargs), ())


@guard_rows
def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the number of sequences, or the first dimension of a `StorageView`; 0 = unknown."""
    batch = _find_inputs(args, kwargs)
    return len(batch) if isinstance(batch, (list, tuple)) else int(next(iter(batch.shape), 0))


def _list_prompts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[str]]:
    """Returns the tokens of each prompt; empty = unknown."""
    batch = _find_inputs(args, kwargs)
    rows = batch if isinstance(batch, (list, tuple)) else ()
    return [list(row) for row in rows if isinstance(row, (list, tuple))]


class Tokens:
    """The tokens of a generation that calls back for each. `rows`: that have not ended, which a step computes."""

    __slots__ = ("generation", "rows", "step")

    def __init__(self, generation: Generation, rows: int) -> None:
        self.generation, self.rows, self.step = generation, rows, -1
        generation.begin_step(max(rows, 1))

    def note(self, result: Any) -> None:
        """Notes a token. The first one of a step ends it for all rows, and begins the next."""
        if result.step != self.step:
            self.step = result.step
            self.generation.end_step(max(self.rows, 1))
            self.generation.begin_step(max(self.rows, 1))
        if result.is_last:
            self.rows -= 1


class Batch:
    """A call that generates for a batch. `tokens`: None without a callback. `prompts`: that the results may begin with."""

    def __init__(self, generation: Generation, rows: int, hook: Hook, prompts: list[list[str]]) -> None:
        self.generation, self.rows, self.hook, self.prompts = generation, rows, hook, prompts
        self.tokens: Tokens | None = None

    def follow_callback(self, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns the callback, which also notes each token."""
        tokens = self.tokens = Tokens(self.generation, self.rows)

        def note_and_call(result: Any) -> Any:
            call_safely(self.hook, tokens.note, result)
            return callback(result)

        return note_and_call

    def end(self, results: Any, exc: BaseException | None = None) -> None:
        """Ends the generation. `results`: of the library, in the order of the prompts, which tell the number of tokens."""
        if exc is not None:
            self.generation.fail(exc)
            return
        self.generation.drop_step()
        counted = sum(map(_count_tokens, results or (), self.prompts or repeat([])))
        self.generation.tokens = counted or self.generation.tokens
        self.generation.finish()


def _count_tokens(result: Any, prompt: list[str]) -> int:
    """Returns the tokens of all sequences of a result but those of the prompt that they begin with."""
    sequences = getattr(result, "sequences", None) or getattr(result, "hypotheses", None)
    if not sequences:
        return sum(map(len, getattr(result, "sequences_ids", None) or ()))
    # The token that starts a sequence is a part of the prompt, but not of the result.
    begins = [begin for begin in (prompt, prompt[1:]) if sequences[0][: len(begin)] == begin]
    return sum(len(sequence) - len(begins[0] if begins else ()) for sequence in sequences)


def _wrap_generation(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = _begin_batch(self, args, kwargs, hook)
        if batch is None:
            return original(self, *args, **kwargs)
        token = torch_suppressed.set(True)
        try:
            results = call_or_fail(hook, batch.generation, original, (self, *args), kwargs)
        finally:
            torch_suppressed.reset(token)
        if kwargs.get("asynchronous"):
            call_safely(hook, PendingResults, results, batch.end, hook)
        else:
            call_safely(hook, batch.end, results)
        return results

    return generate


def _begin_batch(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hook: Hook) -> Batch | None:
    """Returns the batch of a call, whose callback in `kwargs` is followed; None if it is not recorded."""
    if not hook.alive or torch_suppressed.get():
        return None
    prompts: list[list[str]] = call_safely(hook, _list_prompts, args, kwargs) or []
    generation = begin_generation(GENERATION, model, hook, sum(map(len, prompts)))
    if generation is None:
        return None
    # A generator's results begin with the prompt, a translator's do not.
    begins_with_prompt = hasattr(model, "generate_batch") and kwargs.get("include_prompt_in_result", True)
    batch = Batch(generation, count_rows(args, kwargs), hook, prompts if begins_with_prompt else [])
    call_safely(hook, _record_load, generation, model)
    if kwargs.get("callback") is not None:
        kwargs["callback"] = (
            call_safely(hook, batch.follow_callback, kwargs["callback"]) or kwargs["callback"]
        )
    return batch


def _record_load(generation: Generation, model: Any) -> None:
    """Records how many batches the model's threads compute, and how many wait for one, as the call finds them."""
    generation.request.record_attribute(events.BATCHES_ACTIVE, int(model.num_active_batches))
    generation.request.record_attribute(events.BATCHES_QUEUED, int(model.num_queued_batches))


def _wrap_scores(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    score_at_once = wrap_call(LIBRARY, count_rows)(original, hook)

    def score_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = begin_call(LIBRARY, self, hook) if kwargs.get("asynchronous") else None
        if call is None:
            return score_at_once(self, *args, **kwargs)
        call.leave()
        rows = count_rows(args, kwargs)
        try:
            results = original(self, *args, **kwargs)
        except BaseException as exc:
            call_safely(hook, call.end, rows, exc)
            raise
        call_safely(hook, PendingResults, results, lambda _, exc: call.end(rows, exc), hook)
        return results

    return score_batch


def _patch(path: str, make: WrapperFactory) -> None:
    instrumentor.patch_hot_path(f"ctranslate2._ext:{path}", optional=True)(make)


for _model in _MODELS:
    _patch(f"{_model}.__init__", _names.wrap_loading)
    for _method in ("encode", "forward_batch", "align", "detect_language"):
        _patch(f"{_model}.{_method}", wrap_call(LIBRARY, count_rows))
    _patch(f"{_model}.score_batch", _wrap_scores)
    for _method in ("generate_batch", "translate_batch", "generate"):
        _patch(f"{_model}.{_method}", _wrap_generation)
for _result in ("Generation", "Scoring", "Translation", "WhisperGeneration"):
    for _class in (f"Async{_result}Result", f"{_result}ResultAsync"):
        _patch(f"{_class}.result", wrap_result)
