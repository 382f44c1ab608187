"""Hooks that record `model.generate` as one request, in the caller's thread.

    GenerationMixin.generate ─▶ (encoder) ─▶ _prefill ─▶ loop: _has_unfinished_sequences ─▶ forward ─▶ …
    submitted                   scheduled                      done, scheduled

Greedy decoding, sampling, beam search and assisted decoding call `_has_unfinished_sequences` once per
iteration, between two steps. In the n-th iteration the tokens of the (n−1)-th are known on the host.

All rows of a batch are one request. Rows that are computed (every beam) count as scheduled, rows that are
returned as delivered. Rows that finished early or were padded on the left count in full, because only the
device can identify them.

A custom decoding loop is one `decode`; it has steps only from the library's loops that it calls. A `generate`
inside a `generate`, such as a draft model's, is part of the outer call. That does not hold for a stream that
a custom loop returns: its body runs wherever it is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from operator import attrgetter
from typing import Any

from otel_infer import _clock
from otel_infer.gpu.timing import UNTIMED
from otel_infer.instrumentation.hooks.compiled_hook import compile_hook
from otel_infer.instrumentation.hooks.engines import read_model_name
from otel_infer.instrumentation.hooks.probe import Call, Hook
from otel_infer.instrumentation.hooks.suppression import suppress_torch
from otel_infer.instrumentation.hooks.thread_counters import begin_thread_run, record_thread_run
from otel_infer.instrumentation.http_server.event_loop_lag import record_blocked_loop
from otel_infer.instrumentation.transformers import generation_run
from otel_infer.instrumentation.transformers._instrumentor import (
    ENGINE,
    already_submitted,
    instrumentor,
    name_request,
    open_own_request,
)
from otel_infer.instrumentation.transformers.generation_arguments import get_setting, read_prompt_shape
from otel_infer.instrumentation.transformers.generation_run import GenerationRun, compiled_state, thread_state
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from otel_infer.tracing.context import detach

_GENERATION = "transformers.generation.utils:GenerationMixin"
OPERATION = "text_completion"
DECODING_LOOPS = ("_sample", "_beam_search", "_assisted_decoding")
ENCODERS = ("_prepare_encoder_decoder_kwargs_for_generation", "_maybe_prepare_encoder_kwargs_for_generation")

PIXEL_INPUTS = frozenset(("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches"))
"""Names of the inputs of image and video encoders."""

_get_packed = attrgetter("packed")


@instrumentor.patch_hot_path(f"{_GENERATION}.generate", part="generate")
def wrap_generate(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Makes a run current on its thread, and its request current in the context, while the call lasts.

    It does not extend to a stream that the call returns, because any thread may read that.
    """

    def generate(*args: Any, **kwargs: Any) -> Any:
        outer, thread_state.run, thread_state.next_run = thread_state.run, thread_state.next_run, None
        run = thread_state.run
        token = None
        try:
            if run is not None and run.owns_request and hook.alive:
                token = _attach_request(run, hook)
            return original(*args, **kwargs)
        finally:
            thread_state.run = outer
            if token is not None:
                detach(token)

    return generate


def _attach_request(run: GenerationRun, hook: Hook) -> Any:
    """Returns the context token of the run's request; None if it could not be made current."""
    try:
        return run.request.attach()
    except Exception as exc:
        hook.mark_failed(exc)
        return None


@instrumentor.patch_function(
    f"{_GENERATION}.generate", reads=("inputs", "generation_config"), part="generate"
)
def trace_generate(call: Call) -> Generator[None, Any, None]:
    # A draft model's calls are inside the outer decode.
    run = None if thread_state.run is not None or _is_paged(call) else _begin_generation(call)
    if run is None:
        yield
        return
    thread_state.next_run = run
    try:
        result = yield
        run.record_result(result)
    except BaseException as exc:
        run.record_failure(exc)
        raise
    finally:
        # A run refers to itself, so only the garbage collector frees it. Device memory must not wait for it.
        run.cache = None
        record_blocked_loop(run.began_at)
        if run.writer is not None:
            record_thread_run(run.writer, ENGINE)
            recorder.release_batch_writer(ENGINE, run.writer)


instrumentor.patch_hot_path(f"{_GENERATION}.generate", part="generate")(suppress_torch)


def _is_paged(call: Call) -> bool:
    """Whether the library runs this call through continuous batching."""
    return bool(call.kwargs.get("cache_implementation") == "paged")


def _begin_generation(call: Call) -> GenerationRun | None:
    request = start.begin_model_call()
    own = request is None
    if own and already_submitted.get():  # by a request that has ended and recorded it
        return None
    rows, prompt = read_prompt_shape(call)
    sequences = rows * (events.clamp_count(get_setting(call, "num_return_sequences")) or 1)
    request = request or open_own_request(OPERATION, call.instance)
    if request is None:
        return None
    if not own:
        name_request(request, OPERATION, read_model_name(call.instance))
    if own or not already_submitted.get():
        request.record_submitted(ENGINE, sequences, prompt * rows, get_setting(call, "max_new_tokens"))
    already_submitted.set(False)
    writer = recorder.acquire_batch_writer(ENGINE)
    if writer is None:
        recorder.record_missing_steps(request.handle)
    else:
        writer.pack_handles = _pack_handles
        begin_thread_run()
    return GenerationRun(request, own, writer, rows, prompt)


def _pack_handles(runs: Any) -> bytes:
    return b"".join(map(_get_packed, runs))


def _wrap_decoding_loop(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)
    names = names[names.index("input_ids") + 1 :]

    def run_decoding_loop(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        run = thread_state.run
        if run is not None and hook.alive:
            try:
                arguments = dict(zip(names, args)) | kwargs
                if arguments.get("generation_config") is not None:
                    run.begin_loop(self, input_ids, arguments)
                run.drafting = hook.target.endswith("._assisted_decoding")
                if run.drafting:
                    update_model_kwargs_patch.demand()
                run.has_plain_steps = run.has_one_row and not run.drafting
                # These loops wait for tokens or scores from the device before they check whether to continue.
                run.has_waited = not hook.target.endswith("._sample") or arguments.get("streamer") is not None
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, input_ids, *args, **kwargs)

    return run_decoding_loop


for _name in DECODING_LOOPS:
    instrumentor.patch_hot_path(
        f"{_GENERATION}.{_name}", reads=("input_ids", "generation_config"), part="generate"
    )(_wrap_decoding_loop)


def _wrap_update_model_kwargs(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Reads the number of accepted tokens in assisted decoding.

    It includes the token that follows the accepted draft tokens.
    """

    def update_model_kwargs(*args: Any, **kwargs: Any) -> Any:
        run = thread_state.run
        if run is not None and run.drafting and hook.alive:
            try:
                run.accepted_tokens = int(kwargs.get("num_new_tokens", 1))
            except Exception as exc:
                hook.mark_failed(exc)
        return original(*args, **kwargs)

    return update_model_kwargs


update_model_kwargs_patch = instrumentor.patch_on_demand(
    f"{_GENERATION}._update_model_kwargs_for_generation",
    _wrap_update_model_kwargs,
    reads=("num_new_tokens",),
    part="generate",
)


def _wrap_encoder(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records that a run is scheduled when an encoder starts.

    The encoder computes the prompt, or the images in it, so its time is prefill and not queueing.
    """

    def prepare_encoder_kwargs(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = thread_state.run
        if run is not None and hook.alive:
            try:
                if self.config.is_encoder_decoder or _uses_vision_encoder(self, (*args, *kwargs.values())):
                    run.request.record_event(events.RequestScheduled(_clock.now()))
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, *args, **kwargs)

    return prepare_encoder_kwargs


def _uses_vision_encoder(model: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether an argument holds images or video, and the model encodes those before its forward pass."""
    supports = getattr(model, "_supports_mm_encoder_outputs", None)
    has_pixels = any(
        isinstance(argument, dict) and not PIXEL_INPUTS.isdisjoint(argument) for argument in arguments
    )
    return has_pixels and supports is not None and bool(supports())


for _name in ENCODERS:
    instrumentor.patch_hot_path(f"{_GENERATION}.{_name}", optional=True, part="generate")(_wrap_encoder)


@instrumentor.patch_hot_path(f"{_GENERATION}._prefill", optional=True, part="generate")
def wrap_prefill(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def prefill(*args: Any, **kwargs: Any) -> Any:
        run = thread_state.run
        if run is not None and run.stepping and hook.alive:
            try:
                run.prefilled = True
                run.begin_step(run.prefill_tokens)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(*args, **kwargs)

    return prefill


def _wrap_stop_check(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Ends the launch of a step: from 5.17 on, this call waits for streamer tokens and stop condition."""

    def stop_check(*args: Any, **kwargs: Any) -> Any:
        run = thread_state.run
        if run is not None and run.timing_handle != UNTIMED and hook.alive:
            try:
                run.mark_launched()
            except Exception as exc:
                hook.mark_failed(exc)
        return original(*args, **kwargs)

    return stop_check


stop_check_patch = instrumentor.patch_on_demand(
    "transformers.generation.utils:StopCheck.__call__", _wrap_stop_check, optional=True, part="generate"
)
generation_run.on_device_timed = stop_check_patch.demand


@instrumentor.patch_hot_path(f"{_GENERATION}._has_unfinished_sequences", part="generate")
def wrap_has_unfinished_sequences(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Ends a step, and begins the next if the loop continues. Plain steps enter no other function of ours."""

    def has_unfinished_sequences(*args: Any, **kwargs: Any) -> Any:
        run = thread_state.run
        if run is None or not hook.alive:
            return original(*args, **kwargs)
        if run.timing_handle != UNTIMED:
            try:
                run.mark_launched(run.has_waited)  # this function waits for the device
            except Exception as exc:
                hook.mark_failed(exc)
        result = original(*args, **kwargs)
        try:
            if result and run.has_plain_steps and run.iterations > 1:
                at, writer = _clock.now(), run.writer
                assert writer is not None  # `has_plain_steps` implies it
                run.iterations += 1
                run.tokens += 1
                writer.write_single_tokens(run.step, at)
                run.step = writer.write_unchanged(1, 0, 0, 1, 0, at)
                if not run.step:
                    run.begin_unchanged_step()
                if at >= run.timing_due_at:
                    run.begin_timing(at, False)
            elif run.stepping:
                run.advance_iteration(bool(result))
        except Exception as exc:
            hook.mark_failed(exc)
        return result

    return compile_hook("unfinished sequences", compiled_state, original, hook, has_unfinished_sequences)
