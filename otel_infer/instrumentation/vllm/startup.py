"""Hooks that record how engine core and workers start: load of the weights, warmup, readiness.

Each of them is a separate process, and its start is a part of the server's start. vLLM loads plugins, ours
included, while it creates the engine core. Only the end of that creation is therefore always observable. A
worker executes calls of its engine core from early on; the last call of its start is the warmup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import mark_engine_models
from otel_infer.instrumentation.vllm._instrumentor import (
    ENGINE,
    LOADING,
    PROCESSES,
    READY,
    instrumentor,
    model_name,
)
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

WORKER = "vllm.v1.worker.gpu_worker:Worker"
CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
WORKER_ROLE = PROCESSES["VllmWorker"]


def _make_phase_wrapper(phase: str) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    """Returns a wrapper factory that records `phase` of a worker's start around a call."""

    def wrap_phase(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def run_phase(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not hook.alive:
                return original(self, *args, **kwargs)
            started_at, error_type = _clock.now(), ""
            recorder.record_startup(events.PhaseBegan(started_at, phase))
            try:
                return original(self, *args, **kwargs)
            except BaseException as exc:
                error_type = type(exc).__qualname__
                raise
            finally:
                name = _worker_model_name(self, hook)
                recorder.record_startup(
                    events.PhaseEnded(_clock.now(), started_at, phase, ENGINE, name, error_type)
                )
                if phase == events.WARMUP and recorder.role == WORKER_ROLE:
                    _record_ready(error_type)

        return run_phase

    return wrap_phase


def _worker_model_name(worker: Any, hook: Hook) -> str:
    try:
        return model_name(worker.model_config)
    except Exception as exc:
        hook.mark_failed(exc)
        return ""


def _record_ready(error_type: str = "") -> None:
    at = _clock.now()
    recorder.record_startup(events.PhaseEnded(at, at, events.READY, events.BY_ENGINE, "", error_type))


instrumentor.patch_hot_path(f"{WORKER}.load_model", part=LOADING)(_make_phase_wrapper(events.WEIGHTS))
instrumentor.patch_hot_path(f"{WORKER}.load_model", part=LOADING)(mark_engine_models)
instrumentor.patch_hot_path(f"{WORKER}.compile_or_warm_up_model", part=LOADING)(
    _make_phase_wrapper(events.WARMUP)
)
instrumentor.patch_hot_path(f"{CPU_WORKER}.compile_or_warm_up_model", part=f"{LOADING} on a CPU")(
    _make_phase_wrapper(events.WARMUP)
)


@instrumentor.patch_hot_path("vllm.v1.engine.core:EngineCoreProc.run_busy_loop", part=READY)
@instrumentor.patch_hot_path("vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop", part=READY)
def wrap_run_busy_loop(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def run_busy_loop(*args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            _record_ready()
        return original(*args, **kwargs)

    return run_busy_loop
