"""How long a device was at the stages of a request that is over: the sum of its steps, and what was said of single stages. Pure."""

from __future__ import annotations

import numpy as np

from otel_infer import facts, semconv
from otel_infer.conclusion.request import Request
from otel_infer.devicesteps import BY_EVENT, DeviceSteps, DeviceTime
from otel_infer.records import RequestRecord


def adopt(record: RequestRecord, request: Request) -> None:
    """Onto its stages, and its decode steps."""
    known = [run.log.device for run in request.runs if run.log.device is not None]
    if known:
        _adopt_steps(record, known[-1])
    for fact in request.timed:
        _adopt(record, fact.stage, _of_stage(fact))


def _adopt_steps(record: RequestRecord, device: DeviceSteps) -> None:
    prefill = np.array([chunk.step for chunk in record.prefill_steps], np.int64)
    _adopt(record, semconv.SPAN_PREFILL, device.time_of(prefill), len(prefill))
    rows = record.steps
    if rows is not None and len(rows) > 1:
        decode = rows.step[1:]
        _adopt(record, semconv.SPAN_DECODE, device.time_of(decode), len(decode))
        rows.device = device.spans(rows.step)


def _of_stage(fact: facts.StageTimed) -> DeviceTime:
    span = fact.at - fact.started_at
    return DeviceTime(BY_EVENT, 1, span, fact.launched_ns, fact.queued_ns, 0, fact.bound_ns)


def _adopt(record: RequestRecord, name: str, time: DeviceTime | None, steps: int = 1) -> None:
    stage = record.stage(name)
    if stage is None or time is None:
        return
    said: dict[str, facts.Value] = {
        semconv.DEVICE_METHOD: time.method,
        semconv.DEVICE_STEPS: time.steps,
        semconv.DEVICE_STEPS_ALL: steps,
        semconv.DEVICE_DURATION: time.span / 1e9,
    }
    if time.method == BY_EVENT:
        said |= {
            semconv.DEVICE_LAUNCH: time.launched / 1e9,
            semconv.DEVICE_QUEUE: time.queued / 1e9,
            semconv.DEVICE_GAP: time.gaps / 1e9,
            semconv.DEVICE_ERROR: time.bound / 1e9,
            semconv.DEVICE_LIMIT: time.limit,
        }
        if time.steps == steps:
            record.device_ns[name] = time.span
    stage.attributes.update(said)
