"""What leaves as metrics, decoded from OTLP bytes: names, units, attributes, values, exemplars."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

from otel_infer import semconv
from otel_infer._version import VERSION
from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.engine.types import Execution, StepRecord
from otel_infer.assembly.records.process import Mark, Pause, Phase, StartRecord
from otel_infer.assembly.records.request import LatencyBreakdown, RequestRecord, Stage
from otel_infer.export.metrics.aggregator import MetricsAggregator
from otel_infer.export.metrics.sender import make_metric_exporter
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.ringbuffer import events
from tests.support.otlp_messages import decoded
from tests.support.otlp_receiver import GRPC, HTTP, OtlpReceiver

MS = 1_000_000
STARTED, NOW, LATER = 1_000 * MS, 2_000 * MS, 3_000 * MS
WALL = 500 * MS
DELTA, CUMULATIVE = 1, 2
WHO = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "llama"}


def sink(**options: Any) -> MetricsAggregator:
    made = MetricsAggregator(
        **{"resource": {"service.name": "vllm"}, "started_at_unix_ns": STARTED, **options}
    )
    made.allow_model("llama")
    return made


def rows(*ended_ms: float, tokens: int = 1, steps: tuple[int, ...] = ()) -> RequestSteps:
    ended = np.array([int(at * MS) for at in ended_ms], np.int64)
    ones = np.ones(len(ended), np.int64)
    return RequestSteps(
        np.array([list(steps or range(len(ended))), ended - MS, ended, ones * tokens, ones, ones * 0])
    )


def record(**changes: Any) -> RequestRecord:
    said: dict[str, Any] = {
        "trace_id": bytes(15) + b"\1",
        "span_id": bytes(7) + b"\2",
        "parent_span_id": b"",
        "server_span_id": b"",
        "sampled": True,
        "remote_parent": False,
        "name": "POST",
        "operation": "chat",
        "provider": "vllm",
        "model": "llama",
        "engine": "0",
        "arrived_at": 100 * MS,
        "ended_at": 400 * MS,
        "wall_offset": WALL,
    }
    return RequestRecord(**{**said, **changes})


def generation(**changes: Any) -> RequestRecord:
    """Five tokens: the first after 50 ms at the reader (48 at the engine), then 10, 10, 20 and 60 ms apart."""
    steps = rows(148, 158, 168, 188, 248)
    said = {"steps": steps, "first_token_at": 150 * MS, "last_token_at": 248 * MS, "output_tokens": 5}
    return record(**{**said, **changes})


def step(number: int = 0, **changes: Any) -> StepRecord:
    said: dict[str, Any] = {
        "engine": "0", "pid": 7, "step": number, "started_at": 0, "ended_at": 8 * MS, "size": 4,
        "prefill_tokens": 0, "decode_tokens": 4, "kv_used": 25, "kv_total": 100, "running": 4, "waiting": 0,
    }  # fmt: skip
    return StepRecord(**{**said, **changes})


def sent(metrics: MetricsAggregator, now: int = NOW) -> dict[str, dict[str, Any]]:
    """One collection, through the SDK's encoder, by name."""
    encoded = encode_metrics(metrics.collect(now)).SerializeToString()
    return {metric["name"]: metric for metric in decoded("metrics", encoded)}


def counted(
    metrics: MetricsAggregator, *records: RequestRecord, exported: bool = True
) -> dict[str, dict[str, Any]]:
    for each in records:
        metrics.add_request(each, exported=exported)
        metrics.add_decision(each, Decision(exported, 0, "budget"))
    return sent(metrics)


def only_point(metric: dict[str, Any]) -> dict[str, Any]:
    (point,) = metric["points"]
    return dict(point)


def in_buckets(bounds: tuple[float, ...], **counts: int) -> list[int]:
    """Bucket counts, each named by the upper bound of its bucket: `le_0_05`."""
    named = {float(name.removeprefix("le_").replace("_", ".")): count for name, count in counts.items()}
    assert named.keys() <= set(bounds)
    return [named.get(bound, 0) for bound in (*bounds, None)]


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_finished_request_is_a_whole_data_point() -> None:
    assert {
        "name": "gen_ai.server.request.duration",
        "unit": "s",
        "description": semconv.REQUEST_DURATION.description,
        "kind": "histogram",
        "temporality": CUMULATIVE,
        "monotonic": False,
        "points": [
            {
                "attributes": WHO,
                "start_time_unix_nano": STARTED,
                "time_unix_nano": NOW,
                "count": 1,
                "sum": 0.3,
                "min": 0.3,
                "max": 0.3,
                "bucket_counts": in_buckets(semconv.DURATION_BOUNDS, le_0_32=1),
                "explicit_bounds": list(semconv.DURATION_BOUNDS),
                "flags": 0,
                "exemplars": [
                    {
                        "trace_id": "0" * 31 + "1",
                        "span_id": "0" * 15 + "2",
                        "at": 400 * MS + WALL,
                        "value": 0.3,
                        "attributes": {},
                    }
                ],
            }
        ],
        "resource": {"service.name": "vllm"},
        "scope": {
            "name": "otel_infer",
            "version": VERSION,
            "attributes": {},
            "schema_url": semconv.SCHEMA_URL,
        },
    } == counted(sink(), record())["gen_ai.server.request.duration"]


def test_a_generation_gives_ttft_tpot_and_every_gap() -> None:
    said = counted(sink(), generation())
    expected = {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "infer.inter_token_latency",
        "infer.request.tokens",
        "infer.request.kept",
    }
    assert expected == set(said)
    ttft = only_point(said["gen_ai.server.time_to_first_token"])
    tpot = only_point(said["gen_ai.server.time_per_output_token"])
    gaps = only_point(said["infer.inter_token_latency"])
    assert (WHO, 1, 0.05) == (ttft["attributes"], ttft["count"], ttft["sum"])
    assert (WHO, 1, 0.025) == (tpot["attributes"], tpot["count"], tpot["sum"])
    assert in_buckets(semconv.TTFT_BOUNDS, le_0_06=1) == ttft["bucket_counts"]
    assert in_buckets(semconv.TPOT_BOUNDS, le_0_01=2, le_0_02=1, le_0_075=1) == gaps["bucket_counts"]
    assert (WHO, 4, 0.01, 0.06) == (gaps["attributes"], gaps["count"], gaps["min"], gaps["max"])
    assert gaps["sum"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("outcome", "gaps"), [(events.ERROR, False), (events.ABORTED, True)], ids=["failed", "aborted"]
)
def test_what_was_no_success_has_no_ttft_and_no_tpot(outcome: int, gaps: bool) -> None:
    said = counted(sink(), generation(outcome=outcome, error_type="timeout", failed_stage="decode"))
    assert "gen_ai.server.time_to_first_token" not in said
    assert "gen_ai.server.time_per_output_token" not in said
    assert gaps == ("infer.inter_token_latency" in said)
    assert {**WHO, "error.type": "timeout"} == only_point(said["gen_ai.server.request.duration"])[
        "attributes"
    ]


def test_an_aborted_request_says_how_long_it_had_waited_and_in_which_stage() -> None:
    said = counted(
        sink(), record(outcome=events.ABORTED, error_type="client_disconnect", failed_stage="queue")
    )
    point = only_point(said["infer.request.abandoned"])
    expected = {**WHO, "infer.stage": "queue", "error.type": "client_disconnect"}
    assert (expected, 1, 0.3) == (point["attributes"], point["count"], point["sum"])


def test_a_clients_own_stop_is_counted_without_an_error() -> None:
    said = counted(sink(), generation(outcome=events.ABORTED, failed_stage="decode"))
    assert {**WHO, "infer.stage": "decode"} == only_point(said["infer.request.abandoned"])["attributes"]
    assert WHO == only_point(said["gen_ai.server.request.duration"])["attributes"]
    assert "gen_ai.server.time_to_first_token" not in said


def test_a_failed_request_was_not_abandoned() -> None:
    said = counted(sink(), record(outcome=events.ERROR, error_type="RuntimeError", failed_stage="prefill"))
    assert "infer.request.abandoned" not in said


def test_an_error_without_a_type_is_another() -> None:
    said = counted(sink(), record(outcome=events.ERROR))
    assert "_OTHER" == only_point(said["gen_ai.server.request.duration"])["attributes"]["error.type"]


@pytest.mark.parametrize(
    "changes",
    [{"output_tokens": 1}, {"steps": rows(148), "output_tokens": 5}, {"steps": None, "last_token_at": 0}],
    ids=["one token", "one step", "no steps"],
)
def test_time_per_output_token_needs_two_instants(changes: dict[str, Any]) -> None:
    assert "gen_ai.server.time_per_output_token" not in counted(sink(), generation(**changes))


def test_without_steps_time_per_output_token_is_between_first_and_last_token() -> None:
    said = counted(sink(), generation(steps=None))
    assert only_point(said["gen_ai.server.time_per_output_token"])["sum"] == pytest.approx(0.098 / 4)
    assert "infer.inter_token_latency" not in said


def test_time_per_output_token_is_of_one_sequence_however_many_a_request_has() -> None:
    alone, three = sink(), sink()
    alone.add_request(generation(), exported=False)
    three.add_request(generation(sequences=3, output_tokens=15), exported=False)
    said = [only_point(sent(metrics)["gen_ai.server.time_per_output_token"]) for metrics in (alone, three)]
    assert said[0]["sum"] == said[1]["sum"] == 0.025


def test_of_a_long_request_only_the_steps_that_are_remembered_make_its_rate() -> None:
    said = counted(sink(), generation(steps_evicted=1000, output_tokens=1005))
    assert 0.025 == only_point(said["gen_ai.server.time_per_output_token"])["sum"]


def test_a_hole_in_what_was_recorded_is_no_gap_between_tokens() -> None:
    holed = rows(148, 158, 1168, 1178, steps=(1, 2, 90, 91))
    said = counted(sink(), generation(steps=holed, telemetry_lost=True, output_tokens=92))
    gaps = only_point(said["infer.inter_token_latency"])
    assert (2, 0.01, 0.01) == (gaps["count"], gaps["min"], gaps["max"])
    assert 0.01 == only_point(said["gen_ai.server.time_per_output_token"])["sum"]


def test_what_generates_nothing_has_duration_and_stages_only() -> None:
    stages = [Stage("forward", 0, 5 * MS, {})]
    said = counted(sink(), generation(generative=False, preemptions=1, stages=stages))
    assert {"gen_ai.server.request.duration", "infer.stage.duration", "infer.request.kept"} == set(said)


def test_a_request_that_was_no_inference_still_counts_in_duration_and_names_its_server_span() -> None:
    other = record(operation="", provider="", model="", server_span_id=bytes(7) + b"\3")
    point = only_point(counted(sink(), other)["gen_ai.server.request.duration"])
    assert ({}, 1) == (point["attributes"], point["count"])
    assert ["0" * 15 + "3"] == [exemplar["span_id"] for exemplar in point["exemplars"]]


def test_each_stage_is_counted_and_detokenize_beside_them() -> None:
    stages = [
        Stage("queue", 0, 5 * MS, {}),
        Stage("rerank", 0, 6 * MS, {}),
        Stage("rerank", 0, 7 * MS, {}),
        Stage("postprocess", 0, 9 * MS, {"infer.detokenize.duration": 0.002}),
    ]
    points = counted(sink(), record(stages=stages))["infer.stage.duration"]["points"]
    said = {point["attributes"].pop("infer.stage"): (point["count"], point["max"]) for point in points}
    expected = {
        "queue": (1, 0.005),
        "rerank": (2, 0.007),
        "postprocess": (1, 0.009),
        "detokenize": (1, 0.002),
    }
    assert expected == said
    assert all({**WHO, "infer.clock": "host"} == point["attributes"] for point in points)


def test_preemptions_and_reasons_are_monotonic_sums() -> None:
    metrics = sink()
    metrics.add_request(record(preemptions=2), exported=True)
    metrics.add_request(record(preemptions=1), exported=False)
    for reason in ("budget", "unsampled"):
        metrics.add_decision(record(), Decision(True, 0, reason))
    said = sent(metrics)
    preemptions, kept = said["infer.request.preemptions"], said["infer.request.kept"]
    assert (True, CUMULATIVE, "{preemption}") == (
        preemptions["monotonic"],
        preemptions["temporality"],
        preemptions["unit"],
    )
    assert [(WHO, 3)] == [(point["attributes"], point["value"]) for point in preemptions["points"]]
    expected = [({"infer.keep.reason": "budget"}, 1), ({"infer.keep.reason": "unsampled"}, 1)]
    assert expected == [(point["attributes"], point["value"]) for point in kept["points"]]


def test_a_request_that_was_never_preempted_makes_no_series_of_preemptions() -> None:
    assert "infer.request.preemptions" not in counted(sink(), record())


# ── exemplars ────────────────────────────────────────────────────────────────────────────────────────────────────


def exemplars_of(said: dict[str, dict[str, Any]], name: str) -> list[tuple[float, str]]:
    return [(each["value"], each["span_id"][-1]) for each in only_point(said[name])["exemplars"]]


def spans(number: int) -> bytes:
    return bytes(7) + bytes([number])


def test_only_an_exported_request_is_an_exemplar() -> None:
    metrics = sink()
    metrics.add_request(generation(span_id=spans(3)), exported=True)
    metrics.add_request(generation(span_id=spans(4)), exported=False)
    said = sent(metrics)
    assert 2 == only_point(said["gen_ai.server.request.duration"])["count"]
    assert [(0.3, "3")] == exemplars_of(said, "gen_ai.server.request.duration")
    assert [(0.05, "3")] == exemplars_of(said, "gen_ai.server.time_to_first_token")


def test_each_bucket_has_the_latest_exported_request() -> None:
    fast, slow = record(span_id=spans(3), ended_at=390 * MS), record(span_id=spans(4), ended_at=900 * MS)
    said = counted(sink(), record(span_id=spans(5), ended_at=380 * MS), fast, slow)
    assert [(0.29, "3"), (0.8, "4")] == exemplars_of(said, "gen_ai.server.request.duration")


def test_the_exemplars_of_gaps_are_the_largest_in_each_bucket() -> None:
    uneven = generation(steps=rows(100, 106, 112.5, 122, 142))
    said = counted(sink(), uneven)
    expected = [(0.0065, "2"), (0.0095, "2"), (0.02, "2")]
    assert expected == sorted(exemplars_of(said, "infer.inter_token_latency"))


def test_there_are_no_exemplars_where_they_are_switched_off() -> None:
    said = counted(sink(exemplars=False), generation())
    assert [] == [
        point["exemplars"] for metric in said.values() for point in metric["points"] if point["exemplars"]
    ]


def test_a_request_without_a_trace_is_no_exemplar() -> None:
    said = counted(sink(), record(trace_id=bytes(16), span_id=bytes(8)))
    assert [] == only_point(said["gen_ai.server.request.duration"])["exemplars"]


# ── cardinality ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_ten_thousand_random_models_names_and_methods_add_at_most_three_series() -> None:
    metrics = sink()
    dice = random.Random(1)
    baseline = {name: len(metric["points"]) for name, metric in counted(metrics, generation()).items()}
    for _ in range(10_000):
        noise = f"{dice.getrandbits(64):x}"
        attributes: dict[str, events.Value] = {"http.request.method": noise, "http.route": noise}
        metrics.add_request(generation(model=noise, name=noise, attributes=attributes), exported=True)
    said = sent(metrics)
    assert baseline.keys() == said.keys()
    for name, metric in said.items():
        assert len(metric["points"]) - baseline[name] <= 3, name
    models = {
        point["attributes"]["gen_ai.request.model"] for point in said["infer.inter_token_latency"]["points"]
    }
    assert {"llama", "_OTHER"} == models


def test_a_model_is_named_once_it_is_served_and_the_first_fifty_are() -> None:
    metrics = MetricsAggregator(resource={}, started_at_unix_ns=STARTED)
    metrics.add_request(record(model="m0"), exported=True)
    for number in range(60):
        metrics.allow_model(f"m{number}")
        metrics.add_request(record(model=f"m{number}"), exported=True)
    points = sent(metrics)["gen_ai.server.request.duration"]["points"]
    counts = {point["attributes"]["gen_ai.request.model"]: point["count"] for point in points}
    assert {"_OTHER": 11, **{f"m{number}": 1 for number in range(50)}} == counts


@pytest.mark.parametrize(
    ("metric", "attribute", "noise", "limit"),
    [
        (semconv.REQUEST_DURATION, "gen_ai.operation.name", lambda name: {"operation": name}, 50),
        (semconv.REQUEST_DURATION, "gen_ai.provider.name", lambda name: {"provider": name}, 50),
        (
            semconv.REQUEST_DURATION,
            "error.type",
            lambda name: {"outcome": events.ERROR, "error_type": name},
            64,
        ),
        (semconv.STAGE_DURATION, "infer.stage", lambda name: {"stages": [Stage(name, 0, 1, {})]}, 64),
        (
            semconv.REQUEST_ABANDONED,
            "infer.stage",
            lambda name: {"outcome": events.ABORTED, "failed_stage": name, "error_type": "timeout"},
            64,
        ),
    ],
    ids=["operations", "providers", "errors", "stages", "where they died"],
)
def test_names_that_user_code_makes_up_are_bounded(
    metric: semconv.Metric, attribute: str, noise: Any, limit: int
) -> None:
    said = counted(sink(), *(record(**noise(f"n{number}")) for number in range(200)))
    names = {point["attributes"][attribute]: point["count"] for point in said[metric.name]["points"]}
    assert {"_OTHER": 200 - limit, **{f"n{number}": 1 for number in range(limit)}} == names


def test_two_thousand_attribute_sets_of_a_number_and_then_one_for_the_rest() -> None:
    metrics = sink()
    for number in range(2100):
        metrics.add_value(semconv.SELF_LOST, {"infer.loss.reason": f"r{number}"}, 1)
    points = sent(metrics)["infer.self.lost"]["points"]
    assert 2001 == len(points)
    assert ({"otel.metric.overflow": True}, 100) == (points[-1]["attributes"], points[-1]["value"])


# ── engine steps ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_steps_are_counted_by_kind_and_engine() -> None:
    metrics = sink()
    prefill = step(2, ended_at=30 * MS, prefill_tokens=512, decode_tokens=0, size=1)
    mixed = step(3, ended_at=20 * MS, prefill_tokens=100, decode_tokens=8, size=9)
    metrics.add_steps([step(1), prefill, mixed, step(4, size=6, decode_tokens=6), step(1, engine="1", pid=8)])
    said = sent(metrics)
    of_first = {"infer.engine": "0", "process.pid": 7}
    of_second = {"infer.engine": "1", "process.pid": 8}
    durations = [(p["attributes"], p["count"], p["sum"]) for p in said["infer.step.duration"]["points"]]
    assert [
        ({"infer.step.kind": "decode", "infer.clock": "host", **of_first}, 2, 0.016),
        ({"infer.step.kind": "prefill", "infer.clock": "host", **of_first}, 1, 0.03),
        ({"infer.step.kind": "mixed", "infer.clock": "host", **of_first}, 1, 0.02),
        ({"infer.step.kind": "decode", "infer.clock": "host", **of_second}, 1, 0.008),
    ] == durations
    sizes = said["infer.step.batch.size"]
    assert "{sequence}" == sizes["unit"]
    assert [(4, 6), (1, 1), (9, 9), (4, 4)] == [(point["min"], point["max"]) for point in sizes["points"]]
    tokens = {
        (p["attributes"]["infer.step.kind"], p["attributes"]["infer.engine"]): p["value"]
        for p in said["infer.step.tokens"]["points"]
    }
    assert {("decode", "0"): 18, ("prefill", "0"): 612, ("decode", "1"): 4} == tokens


def test_kv_usage_is_what_each_engine_said_last() -> None:
    metrics = sink()
    metrics.add_steps(
        [step(1, kv_used=10), step(2, kv_used=50), step(1, engine="", pid=8, kv_used=1, kv_total=4)]
    )
    said = sent(metrics)
    engines = [{"infer.engine": "0", "process.pid": 7}, {"process.pid": 8}]
    for name, kind, unit, values in (
        ("infer.kv_cache.usage", "sum", "{block}", [50, 1]),
        ("infer.kv_cache.limit", "sum", "{block}", [100, 4]),
        ("infer.kv_cache.utilization", "gauge", "1", [0.5, 0.25]),
    ):
        metric = said[name]
        assert (kind, unit, False) == (metric["kind"], metric["unit"], metric["monotonic"])
        points = [(point["attributes"], point["value"]) for point in metric["points"]]
        assert list(zip(engines, values)) == points


def test_how_many_steps_fit_into_what_is_free_is_told_where_the_size_of_blocks_is_known() -> None:
    metrics = sink()
    metrics.add_steps([step(1, kv_used=20, running=4, block_tokens=16), step(1, pid=8, running=4)])
    said = sent(metrics)
    size, headroom = (
        only_point(said[metric.name]) for metric in (semconv.KV_BLOCK_SIZE, semconv.KV_HEADROOM)
    )
    assert size["attributes"] == headroom["attributes"] == {"infer.engine": "0", "process.pid": 7}
    assert (size["value"], headroom["value"]) == (16, (100 - 20) * 16 / 4)


def test_an_engine_that_is_gone_uses_no_kv_cache() -> None:
    metrics = sink()
    metrics.add_steps([step(1, block_tokens=16), step(1, pid=8, block_tokens=16)])
    metrics.retain_engines({("0", 8)})
    for metric in semconv.ENGINE_KV_METRICS:
        name = metric.name
        assert [8] == [point["attributes"]["process.pid"] for point in sent(metrics)[name]["points"]]


def test_where_nobody_is_in_flight_and_no_step_is_taken_nothing_is_in_a_kv_cache() -> None:
    metrics = sink()
    last = step(1, kv_used=90, block_tokens=16)
    metrics.add_steps([last])
    metrics.reset_idle_kv_usage(last.ended_at + 500 * MS)
    names = ("infer.kv_cache.usage", "infer.kv_cache.utilization", "infer.kv_cache.headroom")
    assert [only_point(sent(metrics)[name])["value"] for name in names[:2]] == [90, 0.9]
    metrics.reset_idle_kv_usage(last.ended_at + 2_000 * MS)
    said = sent(metrics)
    assert [only_point(said[name])["value"] for name in names[:2]] == [0, 0] and names[2] not in said
    assert only_point(said["infer.kv_cache.limit"])["value"] == 100


def test_an_engine_without_kv_blocks_has_no_kv_metrics() -> None:
    metrics = sink()
    metrics.add_steps([step(kv_used=0, kv_total=0)])
    assert {"infer.step.duration", "infer.step.batch.size", "infer.step.tokens"} == set(sent(metrics))


def test_a_step_that_does_not_know_the_kv_cache_leaves_what_was_known() -> None:
    metrics = sink()
    metrics.add_steps([step(1)])
    metrics.add_steps([step(2, kv_used=0, kv_total=0)])
    assert 25 == only_point(sent(metrics)["infer.kv_cache.usage"])["value"]


# ── values that others set ───────────────────────────────────────────────────────────────────────────────────────


def test_set_is_absolute_and_add_adds_up() -> None:
    metrics = sink()
    for value in (3, 2):
        metrics.set_value(semconv.REQUEST_ACTIVE, {"infer.request.state": "running"}, value)
        metrics.set_value(semconv.SELF_SPANS, {}, value)
        metrics.add_value(semconv.SELF_ERRORS, {}, value)
    metrics.set_value(semconv.SELF_CPU, {"cpu.mode": "user"}, 1.5)
    said = sent(metrics)
    expected = {
        "infer.request.active": ({"infer.request.state": "running"}, 2, False),
        "infer.self.spans": ({}, 2, True),
        "infer.self.errors": ({}, 5, True),
        "infer.self.cpu.time": ({"cpu.mode": "user"}, 1.5, True),
    }
    points = {name: only_point(metric) for name, metric in said.items()}
    assert expected == {
        name: (point["attributes"], point["value"], said[name]["monotonic"]) for name, point in points.items()
    }


def test_attributes_that_a_metric_does_not_have_do_not_leave() -> None:
    metrics = sink()
    metrics.set_value(semconv.SELF_MEMORY, {"user.id": "canary"}, 5)
    assert {} == only_point(sent(metrics)["infer.self.memory.usage"])["attributes"]


# ── temporality ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_cumulative_says_all_of_it_again_from_the_start() -> None:
    metrics = sink()
    counted(metrics, record())
    metrics.add_request(record(), exported=False)
    point = only_point(sent(metrics, LATER)["gen_ai.server.request.duration"])
    assert (2, STARTED, LATER) == (point["count"], point["start_time_unix_nano"], point["time_unix_nano"])
    assert 1 == len(point["exemplars"])


@pytest.mark.parametrize("temporality", ["delta", "lowmemory"])
def test_delta_reports_histograms_and_counters_and_begins_anew(temporality: str) -> None:
    metrics = sink(temporality=temporality)
    metrics.set_value(semconv.SELF_SPANS, {}, 10)
    first = counted(metrics, record(), record())
    for name, instant in (("gen_ai.server.request.duration", "count"), ("infer.request.kept", "value")):
        point = only_point(first[name])
        assert DELTA == first[name]["temporality"]
        assert (2, STARTED, NOW) == (point[instant], point["start_time_unix_nano"], point["time_unix_nano"])
    assert 10 == only_point(first["infer.self.spans"])["value"]
    metrics.set_value(semconv.SELF_SPANS, {}, 14)
    metrics.add_request(record(ended_at=500 * MS), exported=False)
    metrics.add_decision(record(), Decision(True, 0, "budget"))
    second = sent(metrics, LATER)
    point = only_point(second["gen_ai.server.request.duration"])
    assert (1, 0.4, 0.4, NOW, LATER, []) == (
        point["count"],
        point["min"],
        point["max"],
        point["start_time_unix_nano"],
        point["time_unix_nano"],
        point["exemplars"],
    )
    assert 1 == only_point(second["infer.request.kept"])["value"]
    assert 4 == only_point(second["infer.self.spans"])["value"]
    assert "gen_ai.server.request.duration" not in sent(metrics, LATER + 1)


def test_delta_of_what_was_counted_before_us_begins_with_us() -> None:
    metrics, values = sink(temporality="delta"), []
    for joules in (1e9, 1e9 + 70, 1e9 + 100):
        metrics.set_value(semconv.GPU_ENERGY, {semconv.HW_ID: "GPU-1"}, joules)
        values.append(only_point(sent(metrics)["hw.energy"])["value"])
    assert values == [0, 70, 30]


def test_delta_of_errors_begins_with_us_for_those_that_the_driver_counts_and_tells_all_that_happened_since() -> (
    None
):
    metrics, told = sink(temporality="delta"), []
    for corrected, lost in ((700, 0), (702, 1), (702, 1)):
        counted = {"corrected": corrected, "xid_79": lost}
        for kind, many in counted.items():
            if many:
                metrics.set_value(
                    semconv.GPU_ERRORS, {semconv.HW_ID: "GPU-1", semconv.ERROR_TYPE: kind}, many
                )
        points = sent(metrics)["hw.errors"]["points"]
        told.append({point["attributes"]["error.type"]: point["value"] for point in points})
    assert told == [{"corrected": 0}, {"corrected": 2, "xid_79": 1}, {"corrected": 0, "xid_79": 0}]


def test_a_wall_clock_that_is_set_back_makes_no_interval_that_ends_before_it_begins() -> None:
    metrics = sink(temporality="delta")
    counted(metrics, record())
    metrics.add_request(record(), exported=False)
    point = only_point(sent(metrics, STARTED)["gen_ai.server.request.duration"])
    assert point["start_time_unix_nano"] <= point["time_unix_nano"] == STARTED


@pytest.mark.parametrize("temporality", ["delta", "lowmemory"])
def test_delta_leaves_up_down_counters_cumulative_and_gauges_as_they_were_set(temporality: str) -> None:
    metrics = sink(temporality=temporality)
    metrics.add_steps([step(1)])
    sent(metrics)
    said = sent(metrics, LATER)
    usage, utilization = said["infer.kv_cache.usage"], said["infer.kv_cache.utilization"]
    assert CUMULATIVE == usage["temporality"]
    point = only_point(usage)
    assert (25, STARTED, LATER) == (point["value"], point["start_time_unix_nano"], point["time_unix_nano"])
    assert 0.25 == only_point(utilization)["value"]


@given(
    lengths=st.lists(st.lists(st.integers(0, 10**11), max_size=5), min_size=1, max_size=4),
    exponential=st.booleans(),
)
def test_deltas_add_up_to_what_cumulative_says(lengths: list[list[int]], exponential: bool) -> None:
    delta, cumulative = sink(temporality="delta", exponential=exponential), sink(exponential=exponential)
    name = "gen_ai.server.request.duration"
    count, total = 0, 0.0
    for interval in lengths:
        for length in interval:
            for each in (delta, cumulative):
                each.add_request(record(arrived_at=0, ended_at=length), exported=True)
        said = sent(delta)
        if interval:
            count += only_point(said[name])["count"]
            total += only_point(said[name])["sum"]
    whole = sent(cumulative)
    if count:
        assert count == only_point(whole[name])["count"]
        assert total == pytest.approx(only_point(whole[name])["sum"])


# ── forms and destinations ───────────────────────────────────────────────────────────────────────────────────────


def test_nothing_counted_is_nothing_said() -> None:
    assert {} == sent(sink())


def test_a_length_that_cannot_be_makes_no_empty_point() -> None:
    assert {"infer.request.kept"} == set(counted(sink(), record(ended_at=0)))


def test_exponential_histograms_where_they_are_asked_for() -> None:
    metric = counted(sink(exponential=True), generation())["infer.inter_token_latency"]
    point = only_point(metric)
    assert ("exponential_histogram", CUMULATIVE) == (metric["kind"], metric["temporality"])
    assert (4, 0, 0.01, 0.06) == (point["count"], point["zero_count"], point["min"], point["max"])
    assert 4 == sum(point["positive"]["bucket_counts"])
    base = 2.0 ** (2.0 ** -point["scale"])
    lowest = base ** point["positive"]["offset"]
    assert lowest < 0.01 <= lowest * base
    assert {"2"} == {exemplar["span_id"][-1] for exemplar in point["exemplars"]}
    assert [0.01, 0.02, 0.06] == sorted(exemplar["value"] for exemplar in point["exemplars"])


def test_the_resource_may_still_gain_its_name() -> None:
    resource: dict[str, events.Value] = {"process.pid": 7}
    metrics = sink(resource=resource)
    first = counted(metrics, record())["infer.request.kept"]
    assert {"service.name": "unknown_service:python", "process.pid": 7} == first["resource"]
    resource["service.name"] = "vllm"
    assert {"service.name": "vllm", "process.pid": 7} == sent(metrics)["infer.request.kept"]["resource"]


def test_time_is_counted_by_what_it_went_into() -> None:
    metrics = sink()
    one, two = generation(), generation()
    one.breakdown, two.breakdown = (
        LatencyBreakdown({"decode": 250_000_000, "gc": 50_000_000}, None),
        LatencyBreakdown({"gc": 1_000_000_000}, None),
    )
    points = counted(metrics, one, two)["infer.latency.duration"]["points"]
    assert {p["attributes"]["infer.latency.cause"]: p["value"] for p in points} == {
        "decode": 0.25,
        "gc": 1.05,
    }


def test_pauses_are_counted_by_cause_and_causes_are_few() -> None:
    metrics = sink()
    metrics.add_pauses([Pause(0, 2 * MS, "gc"), Pause(MS, 4 * MS, "gc"), Pause(0, 5000 * MS, "compile")])
    paused = {
        p["attributes"]["infer.pause.cause"]: p for p in sent(metrics)["infer.pause.duration"]["points"]
    }
    assert (paused["gc"]["count"], paused["gc"]["sum"]) == (2, pytest.approx(0.005))
    assert (paused["compile"]["count"], paused["compile"]["sum"]) == (1, 5)
    metrics.add_pauses([Pause(0, MS, f"invented {number}") for number in range(1000)])
    assert len(sent(metrics)["infer.pause.duration"]["points"]) <= 65


def test_marks_are_counted_by_what_they_are_and_only_those_that_are_known() -> None:
    metrics = sink()
    metrics.add_marks([Mark(0, MS, "allocator_retry", 2), Mark(MS, 2 * MS, "allocator_retry", 3)])
    metrics.add_marks([Mark(0, MS, f"invented {number}", 1) for number in range(100)])
    points = sent(metrics)["infer.marks"]["points"]
    assert {point["attributes"]["infer.mark.name"]: point["value"] for point in points} == {
        "allocator_retry": 5,
        "_OTHER": 100,
    }


BY_CALLER = {
    "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token",
    "infer.inter_token_latency", "infer.latency.duration", "infer.request.abandoned", "infer.request.tokens",
}  # fmt: skip


def by_callers(metrics: MetricsAggregator, *said: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For each metric, what its points say of the callers of requests with these attributes."""
    for attributes in said:
        one = generation(attributes=attributes, stages=[Stage("queue", 0, 1, {})], preemptions=1)
        one.breakdown = LatencyBreakdown({"decode": 1}, None)
        aborted = generation(attributes=attributes, outcome=events.ABORTED, failed_stage="decode", steps=None)
        metrics.add_request(one, exported=True)
        metrics.add_request(aborted, exported=True)
    return {
        name: [
            {key: value for key, value in point["attributes"].items() if key in semconv.metrics._CALLER}
            for point in metric["points"]
            if "error.type" not in point["attributes"] or name == "infer.request.abandoned"
        ]
        for name, metric in sent(metrics).items()
    }


def test_where_nobody_asked_who_asks_metrics_say_nothing_of_it() -> None:
    points = by_callers(sink(), {"infer.tenant": "acme", "infer.traffic.class": "batch"})
    assert points.keys() > BY_CALLER
    assert all(point == {} for of_metric in points.values() for point in of_metric)


def test_only_tenants_that_are_listed_are_named_on_metrics_and_only_on_those_of_the_callers() -> None:
    metrics = sink(tenants={"acme"})
    points = by_callers(
        metrics, {"infer.tenant": "acme"}, {"infer.tenant": "other"}, {}, {"infer.tenant": [1]}
    )
    for name, said in points.items():
        named = [point.get("infer.tenant") for point in said]
        assert named == (["acme", "_OTHER"] if name in BY_CALLER else [None]), name


def test_the_traffic_class_is_one_of_two_on_metrics() -> None:
    metrics = sink(traffic_classes=True)
    points = by_callers(metrics, {"infer.traffic.class": "batch"}, {"infer.traffic.class": "invented"}, {})
    for name, said in points.items():
        named = [point.get("infer.traffic.class") for point in said]
        assert named == (["batch", "interactive"] if name in BY_CALLER else [None]), name


def test_interference_is_counted_by_the_class_of_offender_and_victim() -> None:
    metrics = sink()
    victims = [
        generation(input_tokens=8),
        generation(input_tokens=8, attributes={"infer.traffic.class": "batch"}),
    ]
    for victim in victims:
        victim.breakdown = LatencyBreakdown(
            {"interference": 5 * MS}, None, (("long", 4 * MS), ("unknown", MS))
        )
    points = counted(metrics, *victims)["infer.interference.duration"]["points"]
    said = {tuple(point["attributes"].values()): point["value"] for point in points}
    assert said == {
        ("long", "short"): 0.004, ("unknown", "short"): 0.001, ("long", "batch"): 0.004, ("unknown", "batch"): 0.001,
    }  # fmt: skip


def started(*phases: Phase, **more: Any) -> StartRecord:
    return StartRecord(bytes(15) + b"t", bytes(7) + b"s", 1, 0, 900 * MS, WALL, phases, **more)


def test_what_a_worker_takes_is_counted_by_its_rank() -> None:
    metrics = sink()
    metrics.add_executions([Execution("vllm", 77, rank, (rank + 1) * MS) for rank in (0, 1, 1)])
    points = counted(metrics)["infer.step.execution.duration"]["points"]
    assert {point["attributes"]["infer.worker.rank"]: (point["count"], point["sum"]) for point in points} == {
        0: (1, 0.001), 1: (2, 0.004),
    }  # fmt: skip


def test_what_a_device_takes_is_a_series_of_its_own_and_so_is_what_it_waits_for() -> None:
    metrics = sink()
    metrics.add_executions(
        [Execution("vllm", 77, 0, 5 * MS), Execution("vllm", 77, 0, 4 * MS, True, 2 * MS, -1)]
    )
    said = counted(metrics)
    points = said["infer.step.execution.duration"]["points"]
    clocks = {point["attributes"]["infer.clock"]: point["sum"] for point in points}
    assert clocks == {"host": 0.005, "device": 0.004}
    assert [point["sum"] for point in said["infer.step.device.queue"]["points"]] == [0.002]
    assert "infer.step.device.gap" not in said


def test_a_start_is_counted_once_per_phase_and_as_a_whole() -> None:
    metrics = sink()
    loaded = (Phase("weights", 0, 100 * MS), Phase("weights", 200 * MS, 400 * MS))
    metrics.add_start(started(*loaded, ready_by="lifespan"), exported=True)
    metrics.add_start(started(*loaded[:1], error_type="OSError"), exported=True)
    points = counted(metrics)["infer.startup.duration"]["points"]
    said = {tuple(point["attributes"].values()): (point["count"], point["sum"]) for point in points}
    assert said == {
        ("total", "lifespan"): (1, 0.9), ("weights", "lifespan"): (1, pytest.approx(0.3)),
        ("total", "OSError"): (1, 0.9), ("weights", "OSError"): (1, 0.1),
    }  # fmt: skip
    (exemplar,) = next(p for p in points if p["attributes"].get("infer.ready.by"))["exemplars"]
    assert exemplar["trace_id"] == (bytes(15) + b"t").hex()


def test_requests_are_counted_by_what_they_missed_and_those_told_to_stop_by_what_they_had_by_then() -> None:
    metrics = sink(promises=True)
    left = {"outcome": events.ABORTED, "failed_stage": "decode"}
    for each, missed in (
        (generation(), ()),
        (generation(), ("ttft", "e2e")),
        (generation(outcome=events.ERROR, error_type="ValueError"), ("e2e",)),
        (generation(**left, error_type="timeout"), ()),
        (generation(**left), ()),
        (generation(**left, error_type="client_disconnect"), ()),
        (generation(**left, error_type="client_disconnect"), ("itl",)),
        (generation(outcome=events.ABORTED, failed_stage="queue", first_token_at=0), ()),
        (record(operation="", generative=False), ("e2e",)),
    ):
        metrics.add_decision(each, Decision(True, 0, "slo", missed=missed))
    points = sent(metrics)["infer.request.objectives"]["points"]
    said = {point["attributes"]["infer.slo.missed"]: point["value"] for point in points}
    assert said == {"none": 3, "ttft,e2e": 1, "error": 2, "itl": 1}


def test_a_post_that_reaches_no_engine_keeps_no_promise_and_is_blamed_on_nothing() -> None:
    """99 that are not let in, say, would hide the one that was and waited."""
    metrics = sink(promises=True)
    for _ in range(99):
        refused = record(
            operation="", status_code=401, breakdown=LatencyBreakdown({"unexplained": 300 * MS}, None)
        )
        metrics.add_decision(refused, Decision(True, 0, "none", slow=True))
        metrics.add_request(refused, exported=True)
    metrics.add_decision(generation(), Decision(True, 0, "slo", missed=("ttft",)))
    said = sent(metrics)
    points = said["infer.request.objectives"]["points"]
    assert {point["attributes"]["infer.slo.missed"]: point["value"] for point in points} == {"ttft": 1}
    assert "infer.latency.duration" not in said and "infer.latency.slow.duration" not in said
    assert said["gen_ai.server.request.duration"]["points"][0]["count"] == 99


def test_where_nobody_promised_anything_nothing_is_said_of_it() -> None:
    metrics = sink()
    metrics.add_decision(generation(), Decision(True, 0, "budget"))
    assert "infer.request.objectives" not in sent(metrics)


def test_where_the_time_of_slow_requests_went_is_counted_apart() -> None:
    metrics = sink()
    for slow in (True, False):
        each = generation(breakdown=LatencyBreakdown({"decode": 3 * MS, "gc": MS}, None))
        metrics.add_decision(each, Decision(True, 0, "budget", slow=slow))
    points = sent(metrics)["infer.latency.slow.duration"]["points"]
    assert {point["attributes"]["infer.latency.cause"]: point["value"] for point in points} == {
        "decode": 0.003,
        "gc": 0.001,
    }
    assert all(WHO.items() <= point["attributes"].items() for point in points)


def test_every_metric_leaves_as_the_table_has_it() -> None:
    metrics = sink(promises=True)
    aborted = generation(outcome=events.ABORTED, failed_stage="decode", error_type="timeout")
    read = {"prefix_tokens": 8, "cached_tokens": 4, "drafted_tokens": 6, "accepted_tokens": 3}
    preempted = generation(preemptions=1, stages=[Stage("queue", 0, 1, {})], input_tokens=8, **read)
    preempted.breakdown = LatencyBreakdown({"decode": 1, "interference": 1}, None, (("long", 1),))
    preempted.device_share = MS
    metrics.add_decision(preempted, Decision(True, 0, "slow", slow=True))
    metrics.add_steps([step(prefill_tokens=5, block_tokens=16)])
    metrics.add_executions([Execution("vllm", 77, 0, MS, True, MS, MS)])
    metrics.add_pauses([Pause(0, MS, "gc")])
    metrics.add_start(started(Phase("imports", 0, MS)), exported=True)
    metrics.add_marks([Mark(0, MS, "allocator_oom", 1), Mark(0, MS, "kv_eviction", 2)])
    for metric in semconv.METRICS:
        by_value = metric.name.startswith(("infer.self.", "hw.", "infer.gpu.", "infer.device.memory."))
        if by_value or metric in (semconv.REQUEST_ACTIVE, semconv.ENGINE_WAITING, semconv.PINNED_MEMORY):
            metrics.set_value(metric, dict.fromkeys(metric.attributes, "x"), 1)
    said = counted(metrics, aborted, preempted)
    kinds = {"histogram": "histogram", "counter": "sum", "updowncounter": "sum", "gauge": "gauge"}
    expected = [
        (m.name, m.unit, m.description, kinds[m.instrument], m.instrument == "counter")
        for m in semconv.METRICS
    ]
    actual = [(m["name"], m["unit"], m["description"], m["kind"], m["monotonic"]) for m in said.values()]
    assert expected == actual
    for metric in semconv.METRICS:
        for point in said[metric.name]["points"]:
            assert point["attributes"].keys() <= set(metric.attributes)


@pytest.fixture(params=[HTTP, GRPC])
def receiver(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, OtlpReceiver]]:
    with OtlpReceiver(request.param) as listening:
        for name, value in listening.environ.items():
            monkeypatch.setenv(name, value)
        yield request.param, listening


def test_the_exporter_of_the_sdk_sends_it(receiver: tuple[str, OtlpReceiver]) -> None:
    protocol, listening = receiver
    metrics = sink()
    metrics.add_request(generation(), exported=True)
    exporter = make_metric_exporter(protocol)
    try:
        assert "SUCCESS" == exporter.export(metrics.collect(NOW)).name
    finally:
        exporter.shutdown()
    assert "infer.inter_token_latency" in {metric["name"] for metric in listening.metrics}


def test_an_execution_counts_as_often_as_it_stands_for_others() -> None:
    metrics = sink()
    metrics.add_executions([Execution("vllm", 77, 0, 4 * MS, True, 2 * MS, MS, steps=3, gaps=5)])
    said = counted(metrics)
    assert {
        name: [(point["count"], pytest.approx(point["sum"])) for point in said[name]["points"]]
        for name in ("infer.step.execution.duration", "infer.step.device.queue", "infer.step.device.gap")
    } == {
        "infer.step.execution.duration": [(3, 0.012)],
        "infer.step.device.queue": [(3, 0.006)],
        "infer.step.device.gap": [(5, 0.005)],
    }


def test_what_is_not_told_any_more_is_gone_and_counters_stay() -> None:
    metrics = sink()

    def told(*gpus: str) -> dict[str, list[str]]:
        def say(set_value: Any) -> None:
            for gpu in gpus:
                for metric in (semconv.GPU_TEMPERATURE, semconv.GPU_ENERGY):
                    set_value(metric, {semconv.HW_ID: gpu}, 70)

        metrics.replace_values([semconv.GPU_TEMPERATURE, semconv.GPU_POWER], say)
        said = counted(metrics)
        return {
            name: [point["attributes"]["hw.id"] for point in said[name]["points"]] if name in said else []
            for name in ("hw.temperature", "hw.energy")
        }

    assert told("a", "b") == {"hw.temperature": ["a", "b"], "hw.energy": ["a", "b"]}
    assert told("b") == {"hw.temperature": ["b"], "hw.energy": ["a", "b"]}
    assert told() == {"hw.temperature": [], "hw.energy": ["a", "b"]}
