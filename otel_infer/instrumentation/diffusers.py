"""Records diffusers' pipelines: a call is the stage `forward`, with its text encoder, each denoising step and its decoder inside.

    pipeline(…) ─▶ encode_prompt ─▶ `encode prompt` ─ progress_bar ─ update* ─▶ `denoise step`* ─ vae.decode ─▶ `decode image`

Each class of pipelines has methods of its own, which are wrapped when the first object of the class is made. A step ends where
the pipeline advances its progress bar. 250 steps of a request are recorded at most. Read and run: 0.42.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import strip_model_path
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import wrap_loading
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.instrumentation.hooks.subclass_methods import SubclassMethods
from otel_infer.instrumentation.model_calls import LibraryCall, ModelLibrary, begin_call
from otel_infer.ringbuffer import events

PROVIDER = events.DIFFUSERS
_PIPELINE = "diffusers.pipelines.pipeline_utils:DiffusionPipeline"
_MODULE = "diffusers."
MAX_STEPS = 250


class _DiffusersInstrumentor(Instrumentor):
    """The instrumentor of diffusers, which also restores the methods of the pipelines."""

    def remove(self) -> None:
        super().remove()
        _pipelines.unwrap_classes()
        _decoders.unwrap_classes()


instrumentor = _DiffusersInstrumentor("diffusers", "diffusers", ("diffusers",), is_engine=True)


def read_model(pipeline: Any) -> str:
    """Returns the hub id of a pipeline, or its folder without its path, or its class."""
    name = getattr(getattr(pipeline, "config", None), "_name_or_path", "") or pipeline.__dict__.get(
        "name_or_path", ""
    )
    return strip_model_path(str(name)) if name else type(pipeline).__name__


def read_place(pipeline: Any) -> str:
    """Returns the device of a pipeline's models."""
    return str(pipeline.device)


LIBRARY = ModelLibrary(PROVIDER, read_model, events.OPERATION_GENERATE_CONTENT, read_place=read_place)


class Diffusion:
    """A call of a pipeline while it runs. `part`: that is recorded now; "" = none. `began_at`: of the step, monotonic ns.

    `has_latents`: the result is not decoded, so its size is not that of an image.
    """

    def __init__(self, call: LibraryCall, has_latents: bool) -> None:
        self.call, self.part, self.has_latents = call, "", has_latents
        self.steps = self.began_at = 0

    def begin_steps(self) -> None:
        """Notes that the denoising begins."""
        self.began_at = _clock.now()

    def end_step(self, *_: Any) -> None:
        """Records a denoising step, and begins the next."""
        now = _clock.now()
        self.steps += 1
        if self.steps <= MAX_STEPS:
            self.call.request.record_stage_at(now, events.DENOISE_STEP, self.began_at, 0)
        self.began_at = now

    def end(self, result: Any, failure: BaseException | None) -> None:
        """Records the end of the call, the number of its steps, and the size of its images (px)."""
        images = _list_images(result)
        request = self.call.request
        if self.steps:
            request.record_attribute(events.DIFFUSION_STEPS, self.steps)
        size = _read_size(images)
        if size is not None and not self.has_latents:
            request.record_attribute(events.IMAGE_WIDTH, size[0])
            request.record_attribute(events.IMAGE_HEIGHT, size[1])
        self.call.end(len(images), failure)


def _list_images(result: Any) -> Any:
    """Returns the images of a pipeline's result: a list, an array or a tensor; empty = unknown."""
    images: Any = result[0] if isinstance(result, tuple) and result else getattr(result, "images", None)
    return images if hasattr(images, "__len__") else ()


def _read_size(images: Any) -> tuple[int, int] | None:
    """Returns width and height of images: of PIL, of an array of rows, or of a tensor, whose channels are first."""
    try:
        first = images[0]
        if hasattr(first, "getbands"):
            width, height = first.size
        elif hasattr(first, "requires_grad"):
            height, width = first.shape[-2:]
        else:
            height, width = first.shape[:2]
        return int(width), int(height)
    except Exception:  # other kinds of results
        return None


class _ThreadState(threading.local):
    """The call that this thread computes."""

    diffusion: Diffusion | None = None


_thread = _ThreadState()


def _wrap_pipeline(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = begin_call(LIBRARY, self, hook)
        if begun is None:
            return original(self, *args, **kwargs)
        diffusion = Diffusion(begun, kwargs.get("output_type") == "latent")
        result, failure = None, None
        outer, _thread.diffusion = _thread.diffusion, diffusion
        try:
            result = original(self, *args, **kwargs)
            return result
        except BaseException as exc:
            failure = exc
            raise
        finally:
            _thread.diffusion = outer
            begun.leave()
            call_safely(hook, diffusion.end, result, failure)
            del failure  # breaks the reference cycle with its traceback

    return call


def _wrap_part(name: str) -> WrapperFactory:
    """Returns a factory for a method that computes a part of a call. Only the outermost part is recorded."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def compute_part(*args: Any, **kwargs: Any) -> Any:
            diffusion = _thread.diffusion if hook.alive else None
            if diffusion is None or diffusion.part:
                return original(*args, **kwargs)
            diffusion.part, started_at = name, _clock.now()
            try:
                return original(*args, **kwargs)
            finally:
                diffusion.part = ""
                call_safely(hook, diffusion.call.request.record_stage, name, started_at)

        return compute_part

    return make_wrapper


_pipelines = SubclassMethods({"__call__": _wrap_pipeline, "encode_prompt": _wrap_part(events.ENCODE_PROMPT)})
_decoders = SubclassMethods({"decode": _wrap_part(events.DECODE_IMAGE)})


@instrumentor.patch_hot_path(f"{_PIPELINE}.register_modules")
def _patch_register(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Every pipeline calls it when it is made."""

    def register_modules(self: Any, **modules: Any) -> Any:
        if hook.alive:
            for cls in type(self).__mro__:
                if cls.__module__ != "builtins":
                    _pipelines.wrap_class(cls, hook)
            for module in modules.values():
                for cls in type(module).__mro__:
                    if cls.__module__.startswith(f"{_MODULE}models."):
                        _decoders.wrap_class(cls, hook)
        return original(self, **modules)

    return register_modules


class _Steps:
    """The timesteps that a pipeline iterates over: each ends where the next one is asked for."""

    def __init__(self, steps: Any, diffusion: Diffusion, hook: Hook) -> None:
        self._steps, self._diffusion, self._hook = steps, diffusion, hook

    def __len__(self) -> int:
        return len(self._steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)

    def __iter__(self) -> Iterator[Any]:
        return self._follow(self._steps)

    def __reversed__(self) -> Iterator[Any]:
        return self._follow(reversed(self._steps))

    def _follow(self, steps: Any) -> Iterator[Any]:
        for step in steps:
            yield step
            call_safely(self._hook, self._diffusion.end_step)


@instrumentor.patch_hot_path(f"{_PIPELINE}.progress_bar", reads=("iterable", "total"))
def _patch_progress(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def progress_bar(self: Any, iterable: Any = None, *args: Any, **kwargs: Any) -> Any:
        diffusion = _thread.diffusion if hook.alive else None
        if diffusion is None:
            return original(self, iterable, *args, **kwargs)
        diffusion.begin_steps()
        if iterable is not None:
            return original(self, _Steps(iterable, diffusion, hook), *args, **kwargs)
        bar = original(self, iterable, *args, **kwargs)
        update = bar.update

        def update_and_record(*args: Any, **kwargs: Any) -> Any:
            call_safely(hook, diffusion.end_step)
            return update(*args, **kwargs)

        bar.update = update_and_record
        return bar

    return progress_bar


instrumentor.patch_hot_path(f"{_PIPELINE}.from_pretrained")(wrap_loading(PROVIDER, read_model))
