"""The bottleneck of a device, over many requests."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.analysis.diagnosis.device_bottleneck import BOTTLENECK_ADVICE, find_device_bottlenecks
from otel_infer.assembly.engine import device_steps
from otel_infer.assembly.engine.device_steps import BACK_PRESSURED, GPU_BOUND, HOST_STALLED, LAUNCH_BOUND
from otel_infer.assembly.records.request import RequestRecord, Stage
from tests.unit.export.sampling.test_slow_detector import request


def test_each_bottleneck_has_advice() -> None:
    assert set(BOTTLENECK_ADVICE) == {GPU_BOUND, LAUNCH_BOUND, HOST_STALLED, BACK_PRESSURED}


def test_stage_bottleneck_is_the_majority_of_known_ones() -> None:
    limits = [GPU_BOUND, LAUNCH_BOUND, LAUNCH_BOUND, ""]
    assert find_device_bottlenecks([with_decode(limit) for limit in limits]) == [
        (semconv.SPAN_DECODE, LAUNCH_BOUND, 2, 3)
    ]


def test_stages_are_ordered_by_device_time() -> None:
    record = with_decode(GPU_BOUND)
    reranked = {semconv.DEVICE_BOTTLENECK: LAUNCH_BOUND, semconv.DEVICE_DURATION: 2.0}
    record.stages.append(Stage("rerank", 0, 1, reranked))
    assert [(found.stage, found.bottleneck) for found in find_device_bottlenecks([record])] == [
        ("rerank", LAUNCH_BOUND),
        (semconv.SPAN_DECODE, GPU_BOUND),
    ]


def test_host_timed_requests_report_no_bottleneck() -> None:
    assert find_device_bottlenecks([with_decode("")]) == []


def with_decode(limit: str) -> RequestRecord:
    record = request(duration=1)
    method = device_steps.BY_EVENT if limit else device_steps.BY_HOST
    attributes = {semconv.DEVICE_METHOD: method, semconv.DEVICE_DURATION: 1.0}
    if limit:
        attributes[semconv.DEVICE_BOTTLENECK] = limit
    record.stages.append(Stage(semconv.SPAN_DECODE, 0, 1, attributes=attributes))
    return record
