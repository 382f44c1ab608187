"""What held a device back, over many requests."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.analysis.diagnosis.device_bottleneck import BOTTLENECK_ADVICE, find_device_bottlenecks
from otel_infer.assembly.engine import device_steps
from otel_infer.assembly.engine.device_steps import BACK_PRESSURED, GPU_BOUND, HOST_STALLED, LAUNCH_BOUND
from otel_infer.assembly.records.request import RequestRecord, Stage
from tests.unit.export.sampling.test_slow_requests import request


def test_all_that_can_hold_a_device_back_has_its_words() -> None:
    assert set(BOTTLENECK_ADVICE) == {GPU_BOUND, LAUNCH_BOUND, HOST_STALLED, BACK_PRESSURED}


def test_a_stage_is_held_back_by_what_holds_back_most_requests_of_those_that_are_known() -> None:
    limits = [GPU_BOUND, LAUNCH_BOUND, LAUNCH_BOUND, ""]
    assert find_device_bottlenecks([with_decode(limit) for limit in limits]) == [
        (semconv.SPAN_DECODE, LAUNCH_BOUND, 2, 3)
    ]


def test_whatever_was_timed_has_a_line_and_what_took_most_of_the_device_s_time_is_first() -> None:
    record = with_decode(GPU_BOUND)
    reranked = {semconv.DEVICE_BOTTLENECK: LAUNCH_BOUND, semconv.DEVICE_DURATION: 2.0}
    record.stages.append(Stage("rerank", 0, 1, reranked))
    assert [(one.stage, one.bottleneck) for one in find_device_bottlenecks([record])] == [
        ("rerank", LAUNCH_BOUND),
        (semconv.SPAN_DECODE, GPU_BOUND),
    ]


def test_of_requests_by_the_host_s_clock_nothing_is_said() -> None:
    assert find_device_bottlenecks([with_decode("")]) == []


def with_decode(limit: str) -> RequestRecord:
    record = request(duration=1)
    method = device_steps.BY_EVENT if limit else device_steps.BY_HOST
    said = {semconv.DEVICE_METHOD: method, semconv.DEVICE_DURATION: 1.0}
    if limit:
        said[semconv.DEVICE_BOTTLENECK] = limit
    record.stages.append(Stage(semconv.SPAN_DECODE, 0, 1, attributes=said))
    return record
