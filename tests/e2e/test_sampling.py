"""Exported requests by the decision of caller and sampler: the caller's decision holds, and every request is counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.toy_server import RUN, Reply, Toy

KINDS: dict[str, dict[str, Any]] = {
    "ordinary": {"tokens": 3},
    "slow": {"tokens": 60},
    "failed": {"fail": "on purpose"},
    "aborted": {"abort": True},
}
REASONS = {"ordinary": "budget", "slow": "slo", "failed": "error", "aborted": "aborted"}
SLO = {"OTEL_INFER_SLO": "e2e=300ms", "OTEL_INFER_SLOW_PERCENT": "0"}
RATIO = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.05"}


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver("http/protobuf") as receiver:
        yield receiver


def serve(
    receiver: OtlpReceiver, log: Path, requests: list[tuple[str, str | None]], **environ: str
) -> list[Reply]:
    """Sends requests of these kinds and flags in sequence, then stops the server, which flushes."""
    with Toy(log, {**receiver.environ, **SLO, **environ}, RUN) as toy:
        replies = [toy.chat(flags=flags, **KINDS[kind]) for kind, flags in requests]
        toy.stop()
        return replies


def keep_reasons(receiver: OtlpReceiver) -> dict[str, str]:
    """Returns the keep reason of each exported request by trace id."""
    return {
        span["trace_id"]: span["attributes"][semconv.KEEP_REASON]
        for span in receiver.spans
        if semconv.KEEP_REASON in span["attributes"]
    }


def count_by(receiver: OtlpReceiver, name: str, by: str = "") -> Counter[str]:
    """Returns the latest values of a metric, summed by the attribute `by`."""
    last: dict[tuple[Any, ...], Any] = {}
    for metric in receiver.metrics:
        for point in metric["points"] if metric["name"] == name else ():
            last[tuple(sorted(point["attributes"].items()))] = point
    sums: Counter[str] = Counter()
    for point in last.values():
        sums[str(point["attributes"].get(by, ""))] += int(point.get("count", point.get("value", 0)))
    return sums


def test_unsampled_caller_exports_nothing_by_default(receiver: OtlpReceiver, tmp_path: Path) -> None:
    plan = [(kind, flags) for kind in KINDS for flags in ("01", "00", None)]
    replies = serve(receiver, tmp_path / "log", plan)
    reasons_by_trace = keep_reasons(receiver)
    for (kind, flags), reply in zip(plan, replies):
        expected = REASONS[kind] if flags == "01" else None
        assert reasons_by_trace.pop(reply.trace_id, None) == expected, (kind, flags)
    assert sorted(reasons_by_trace.values()) == sorted(
        REASONS.values()
    )  # requests without a caller: the default sampler samples
    assert count_by(receiver, "gen_ai.server.request.duration").total() == len(plan)
    assert count_by(receiver, "infer.request.kept", semconv.KEEP_REASON)["unsampled"] == len(KINDS)


def test_ratio_follows_the_caller_then_the_trace_id(receiver: OtlpReceiver, tmp_path: Path) -> None:
    plan = [(kind, flags) for kind in KINDS for flags in ("01", "00")]
    plan += [("ordinary", None)] * 60
    replies = serve(receiver, tmp_path / "log", plan, **RATIO)
    reasons_by_trace = keep_reasons(receiver)
    for (kind, flags), reply in zip(plan, replies):
        expected = {**REASONS, "ordinary": "sampled"}[kind] if flags == "01" else None
        assert reasons_by_trace.pop(reply.trace_id, None) == expected, (kind, flags)
    assert all(int(trace_id[16:], 16) < 0.05 * 2**64 for trace_id in reasons_by_trace)
    assert set(reasons_by_trace.values()) <= {"sampled"}
    assert count_by(receiver, "gen_ai.server.request.duration").total() == len(plan)
    assert count_by(receiver, "infer.request.kept", semconv.KEEP_REASON)["unsampled"] == len(plan) - 4 - len(
        reasons_by_trace
    )


def test_budget_holds_at_ten_times_its_rate(receiver: OtlpReceiver, tmp_path: Path) -> None:
    """A request that missed an objective still has all its steps."""
    budget = 80
    environ = {**receiver.environ, **SLO, "OTEL_INFER_STEP_BUDGET": str(budget), "TOY_STEP_S": "0.005"}
    with Toy(tmp_path / "log", environ, RUN) as toy:
        began = time.monotonic()
        with toy.load(threads=8, tokens=20) as replies:
            time.sleep(5)
        slow = toy.chat(tokens=100)
        lasted = time.monotonic() - began
        toy.stop()
    steps = [span for span in receiver.spans if span["name"] == semconv.SPAN_DECODE_STEP]
    offered = 19 * len(replies) + 99
    assert offered > 10 * budget * lasted
    assert 0 < len(steps) <= budget * (10 + lasted)
    assert keep_reasons(receiver)[slow.trace_id] == "slo"
    assert sum(span["trace_id"] == slow.trace_id for span in steps) == 99
    dropped = count_by(receiver, "infer.self.steps.dropped", semconv.KEEP_REASON)
    assert dropped.total() == offered - len(steps)
    reasons = count_by(receiver, "infer.request.kept", semconv.KEEP_REASON)
    assert reasons.total() == count_by(receiver, "gen_ai.server.request.duration").total() == len(replies) + 1
    assert reasons["none"] > 0 and reasons["budget"] > 0


def test_every_exemplar_points_to_an_exported_span(receiver: OtlpReceiver, tmp_path: Path) -> None:
    plan = [(kind, flags) for kind in KINDS for flags in ("01", "00", None)] * 3
    serve(receiver, tmp_path / "log", plan)
    exported = {(span["trace_id"], span["span_id"]) for span in receiver.spans}
    exemplars = [
        (metric["name"], exemplar["trace_id"], exemplar["span_id"])
        for metric in receiver.metrics
        for point in metric["points"]
        for exemplar in point.get("exemplars", ())
    ]
    assert {"gen_ai.server.request.duration", "infer.inter_token_latency", "infer.stage.duration"} <= {
        name for name, *_ in exemplars
    }
    assert [(name, *where) for name, *where in exemplars if tuple(where) not in exported] == []
