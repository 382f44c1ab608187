"""The bottleneck of a device, over many requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_infer import semconv
from otel_infer.analysis.diagnosis.device_bottleneck import (
    BOTTLENECK_ADVICE,
    SYNC_CHECK,
    find_device_bottlenecks,
)
from otel_infer.assembly.engine import device_steps
from otel_infer.assembly.engine.device_steps import BACK_PRESSURED, GPU_BOUND, HOST_STALLED, LAUNCH_OR_SYNC
from otel_infer.assembly.records.request import RequestRecord, Stage
from tests.unit.export.sampling.test_slow_detector import request

ROOT = Path(__file__).parents[4]


def test_each_bottleneck_has_advice() -> None:
    assert set(BOTTLENECK_ADVICE) == {GPU_BOUND, LAUNCH_OR_SYNC, HOST_STALLED, BACK_PRESSURED}


def test_advice_names_both_reasons_and_how_to_see_which() -> None:
    meaning, change = BOTTLENECK_ADVICE[LAUNCH_OR_SYNC]
    assert "kernel by kernel" in meaning
    assert all(wait in meaning for wait in ("`.item()`", "`nonzero()`", "pageable memory"))
    assert change.index(SYNC_CHECK) < change.index("CUDA graphs")


@pytest.mark.parametrize("folder", ["otel_infer", "docs", "dashboards"])
def test_nothing_else_is_called_launch_bound(folder: str) -> None:
    """Docs, panels and alerts give no other reason for the same durations; the table of renamed names has the old one."""
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".json", ".yml")]
    assert files
    named = [path.name for path in files if "launch-bound" in path.read_text(encoding="utf-8").lower()]
    assert set(named) <= {"renamed-names.md"}


def test_stage_bottleneck_is_the_majority_of_known_ones() -> None:
    limits = [GPU_BOUND, LAUNCH_OR_SYNC, LAUNCH_OR_SYNC, ""]
    assert find_device_bottlenecks([with_decode(limit) for limit in limits]) == [
        (semconv.SPAN_DECODE, LAUNCH_OR_SYNC, 2, 3)
    ]


def test_stages_are_ordered_by_device_time() -> None:
    record = with_decode(GPU_BOUND)
    reranked = {semconv.DEVICE_BOTTLENECK: LAUNCH_OR_SYNC, semconv.DEVICE_DURATION: 2.0}
    record.stages.append(Stage("rerank", 0, 1, reranked))
    assert [(found.stage, found.bottleneck) for found in find_device_bottlenecks([record])] == [
        ("rerank", LAUNCH_OR_SYNC),
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
