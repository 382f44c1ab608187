"""A tape of `otel-infer demo` on a real GPU, read by the current code."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_infer import semconv
from otel_infer.assembly.engine.device_steps import BY_EVENT
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli import replay

TAPES = sorted((Path(__file__).parents[2] / "tapes").glob("demo-*.tape"))
each = pytest.mark.parametrize("path", TAPES, ids=lambda path: path.stem)


def requests(path: Path) -> list[RequestRecord]:
    return [record for record in replay.read_records(path) if isinstance(record, RequestRecord)]


def test_there_is_a_tape() -> None:
    assert TAPES


@each
def test_device_time_of_decode_is_within_host_time(path: Path) -> None:
    records = requests(path)
    assert len(records) > 50
    for record in records:
        decode = record.find_stage(semconv.SPAN_DECODE)
        assert decode is not None
        attributes = decode.attributes
        length = (decode.ended_at - decode.started_at) / 1e9
        assert attributes[semconv.DEVICE_METHOD] == BY_EVENT
        timed, steps = int(attributes[semconv.DEVICE_STEPS]), int(attributes[semconv.DEVICE_STEPS_ALL])
        assert 1 <= timed <= steps
        assert (
            0
            < float(attributes[semconv.DEVICE_DURATION])
            <= length + float(attributes[semconv.DEVICE_CLOCK_ERROR])
        )
        assert 0 < float(attributes[semconv.DEVICE_CLOCK_ERROR]) < 100e-6
        assert attributes[semconv.DEVICE_BOTTLENECK] == "launch-or-sync"  # a tiny model on a large GPU


@each
def test_causes_sum_to_latency_and_include_host_bubble(path: Path) -> None:
    records = requests(path)
    for record in records:
        assert record.breakdown is not None
        assert sum(record.breakdown.causes.values()) == record.duration_ns
        assert min(record.breakdown.causes.values()) >= 0
    idle = sum(
        record.breakdown.causes.get(semconv.CAUSE_HOST_BUBBLE, 0) for record in records if record.breakdown
    )
    assert idle > 0


@each
def test_memory_and_kv_cache_use_are_recorded(path: Path) -> None:
    """Free memory has three values: at arrival, at the first token and at the end."""
    for record in requests(path):
        decode = record.find_stage(semconv.SPAN_DECODE)
        assert decode is not None
        assert record.memory_free[2] > 80e9
        for key in (semconv.KV_UTILIZATION_START, semconv.KV_UTILIZATION_END):
            assert 0 <= float(decode.attributes[key]) <= 1
    assert min(requests(path)[-1].memory_free) > 80e9
