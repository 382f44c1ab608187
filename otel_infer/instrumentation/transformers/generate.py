"""`model.generate`: one request, in the caller's thread.

    generate ─▶ (encoder) ─▶ _prefill ─▶ loop: _has_unfinished_sequences ─▶ forward, select ─▶ …
    submitted   scheduled                       done, scheduled

`_has_unfinished_sequences` is asked once per iteration of greedy, sampling, beam search and assisted decoding, between
two steps. In the n-th iteration the tokens of the (n−1)-th are known on the host. All rows of a batch are one request.
Scheduled are the rows that are computed (every beam), delivered those that are returned; rows that finished early, or
that were padded on the left, count in full, since only the device knows which. A loop of the user's own is one `decode`
without steps, but for those of the library's loops that it calls. A `generate` inside a `generate`, as a draft model's, is
part of it; one in the body of a stream that a loop of the user's returned is not, since that body runs wherever it is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from operator import attrgetter
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Call, Hook
from otel_infer.instrumentation.hooks.suppression import claiming
from otel_infer.instrumentation.transformers import kv_cache
from otel_infer.instrumentation.transformers._integration import (
    ENGINE,
    handed_over,
    integration,
    name_request,
    own_request,
)
from otel_infer.instrumentation.transformers.generation_arguments import setting, shape_of_prompt
from otel_infer.instrumentation.transformers.generation_run import Run, thread
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start

_GENERATION = "transformers.generation.utils:GenerationMixin"
OPERATION = "text_completion"
LOOPS = ("_sample", "_beam_search", "_assisted_decoding")
ENCODERS = ("_prepare_encoder_decoder_kwargs_for_generation", "_maybe_prepare_encoder_kwargs_for_generation")

PIXELS = frozenset(("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches"))
"""As encoders of images and videos call what they look at."""

_packed_of = attrgetter("packed")


@integration.step_hook(f"{_GENERATION}.generate", part="generate")
def running(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A run is its thread's, and its request current, while the call lasts: the stream that it may return is read anywhere."""

    def generate(*args: Any, **kwargs: Any) -> Any:
        outer, thread.run, thread.begun = thread.run, thread.begun, None
        run = thread.run
        token = None
        try:
            token = run.request.attach() if run is not None and run.own else None
            return original(*args, **kwargs)
        finally:
            thread.run = outer
            if token is not None:
                start.detach(token)

    return generate


@integration.around(f"{_GENERATION}.generate", reads=("inputs", "generation_config"), part="generate")
def generate(call: Call) -> Generator[None, Any, None]:
    # A draft model's calls are inside the outer decode.
    run = None if thread.run is not None or _is_paged(call) else _begin(call)
    if run is None:
        yield
        return
    thread.begun = run
    try:
        result = yield
        run.concludes(result)
    except BaseException as exc:
        run.fails(exc)
        raise
    finally:
        # A run is in a cycle with itself, and a device's memory cannot wait for the garbage collector.
        run.cache = None
        if run.log is not None:
            recorder.give_back(ENGINE, run.log)


integration.step_hook(f"{_GENERATION}.generate", part="generate")(claiming)


def _is_paged(call: Call) -> bool:
    """Whether the library turns this into continuous batching."""
    return bool(call.kwargs.get("cache_implementation") == "paged")


def _begin(call: Call) -> Run | None:
    request = start.current()
    own = request is None
    if own and handed_over.get():  # by one that has ended, and has told of it
        return None
    rows, prompt = shape_of_prompt(call)
    sequences = rows * (events.count(setting(call, "num_return_sequences")) or 1)
    request = request or own_request(OPERATION, call.instance)
    if request is None:
        return None
    if not own:
        name_request(request, OPERATION, call.instance)
    if own or not handed_over.get():
        request.submitted(ENGINE, sequences, prompt * rows, setting(call, "max_new_tokens"))
    handed_over.set(False)
    log = recorder.step_log(ENGINE)
    if log is not None:
        log.pack = _pack
    return Run(request, own, log, rows, prompt)


def _pack(runs: Any) -> bytes:
    return b"".join(map(_packed_of, runs))


def _loop(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)
    names = names[names.index("input_ids") + 1 :]

    def loop(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and hook.alive:
            try:
                given = dict(zip(names, args)) | kwargs
                if given.get("generation_config") is not None:
                    run.enter(self, input_ids, given)
                run.drafting = hook.target.endswith("._assisted_decoding")
                # These ask the device for tokens or scores before they ask whether to go on.
                run.has_waited = not hook.target.endswith("._sample") or given.get("streamer") is not None
            except Exception as exc:
                hook.fail(exc)
        return original(self, input_ids, *args, **kwargs)

    return loop


for _name in LOOPS:
    integration.step_hook(
        f"{_GENERATION}.{_name}", reads=("input_ids", "generation_config"), part="generate"
    )(_loop)


@integration.step_hook(
    f"{_GENERATION}._update_model_kwargs_for_generation", reads=("num_new_tokens",), part="generate"
)
def accept(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Assisted decoding says here how many tokens of its draft were right, and the one beyond; every loop, where its cache is."""

    def accept(*args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and run.drafting and hook.alive:
            try:
                run.accepted = int(kwargs.get("num_new_tokens", 1))
            except Exception as exc:
                hook.fail(exc)
        result = original(*args, **kwargs)
        if run is not None and hook.alive and type(result) is dict:
            run.cache = kv_cache.among(result)
        return result

    return accept


def _encoding(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """An encoder takes the prompt, or what the prompt shows: that is prefill, and no waiting."""

    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and hook.alive:
            try:
                if self.config.is_encoder_decoder or _shows(self, (*args, *kwargs.values())):
                    run.request.state(events.RequestScheduled(_clock.now()))
            except Exception as exc:
                hook.fail(exc)
        return original(self, *args, **kwargs)

    return encode


def _shows(model: Any, given: tuple[Any, ...]) -> bool:
    """Whether there is something to see, and a model that looks at it before it reads."""
    supports = getattr(model, "_supports_mm_encoder_outputs", None)
    has_pixels = any(isinstance(one, dict) and not PIXELS.isdisjoint(one) for one in given)
    return has_pixels and supports is not None and bool(supports())


for _name in ENCODERS:
    integration.step_hook(f"{_GENERATION}.{_name}", optional=True, part="generate")(_encoding)


@integration.step_hook(f"{_GENERATION}._prefill", optional=True, part="generate")
def prefill(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def prefill(*args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and run.stepping and hook.alive:
            try:
                run.prefilled = True
                run.scheduled(run.first)
            except Exception as exc:
                hook.fail(exc)
        return original(*args, **kwargs)

    return prefill


@integration.step_hook("transformers.generation.utils:StopCheck.__call__", optional=True, part="generate")
def stop_check(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """From 5.17 on, what a streamer is given and whether to go on is waited for here."""

    def check(*args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and run.begun is not None and hook.alive:
            try:
                run.launched()
            except Exception as exc:
                hook.fail(exc)
        return original(*args, **kwargs)

    return check


@integration.step_hook(f"{_GENERATION}._has_unfinished_sequences", part="generate")
def has_unfinished_sequences(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def has_unfinished_sequences(*args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and run.begun is not None and hook.alive:
            try:
                run.launched(run.has_waited)  # this function waits for the device
            except Exception as exc:
                hook.fail(exc)
        result = original(*args, **kwargs)
        if run is not None and run.stepping and hook.alive:
            try:
                run.iterate(bool(result))
            except Exception as exc:
                hook.fail(exc)
        return result

    return has_unfinished_sequences
