"""The tape that `otel-infer demo` left on a real GPU, read by the code that runs now."""

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
def test_prefill_and_decode_have_the_devices_time_within_the_hosts(path: Path) -> None:
    found = requests(path)
    assert len(found) > 50
    for record in found:
        decode = record.find_stage(semconv.SPAN_DECODE)
        assert decode is not None
        said = decode.attributes
        length = (decode.ended_at - decode.started_at) / 1e9
        assert said[semconv.DEVICE_METHOD] == BY_EVENT
        timed, steps = int(said[semconv.DEVICE_STEPS]), int(said[semconv.DEVICE_STEPS_ALL])
        assert 1 <= timed <= steps
        assert 0 < float(said[semconv.DEVICE_DURATION]) <= length + float(said[semconv.DEVICE_CLOCK_ERROR])
        assert 0 < float(said[semconv.DEVICE_CLOCK_ERROR]) < 100e-6
        assert said[semconv.DEVICE_BOTTLENECK] == "launch-bound"  # a tiny model on a large GPU


@each
def test_causes_still_sum_to_each_request_and_an_idle_device_is_one_of_them(path: Path) -> None:
    found = requests(path)
    for record in found:
        assert record.breakdown is not None
        assert sum(record.breakdown.causes.values()) == record.duration_ns
        assert min(record.breakdown.causes.values()) >= 0
    idle = sum(
        record.breakdown.causes.get(semconv.CAUSE_HOST_BUBBLE, 0) for record in found if record.breakdown
    )
    assert idle > 0


@each
def test_pressure_is_said_at_arrival_with_the_first_token_and_at_the_end(path: Path) -> None:
    for record in requests(path):
        decode = record.find_stage(semconv.SPAN_DECODE)
        assert decode is not None
        assert record.memory_free[2] > 80e9
        for key in (semconv.KV_UTILIZATION_START, semconv.KV_UTILIZATION_END):
            assert 0 <= float(decode.attributes[key]) <= 1
    assert min(requests(path)[-1].memory_free) > 80e9
