"""Exported metrics, decoded from OTLP bytes: names, units, attributes, values, exemplars."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import AggregationTemporality

from otel_infer import semconv
from otel_infer._version import VERSION
from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.engine.types import Execution, StepRecord
from otel_infer.assembly.records.process import Mark, Pause, Phase, StartRecord
from otel_infer.assembly.records.request import LatencyBreakdown, RequestRecord, Stage
from otel_infer.export.metrics import aggregator, openmetrics
from otel_infer.export.metrics.aggregator import MetricsAggregator
from otel_infer.export.metrics.counters import NumberSeries
from otel_infer.export.metrics.histograms import MAX_SERIES
from otel_infer.export.metrics.sender import make_metric_exporter
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.ringbuffer import events
from tests.support.otlp_messages import decoded
from tests.support.otlp_receiver import GRPC, HTTP, OtlpReceiver

MS = 1_000_000
STARTED, NOW, LATER = 1_000 * MS, 2_000 * MS, 3_000 * MS
WALL = 500 * MS
DELTA, CUMULATIVE = 1, 2
GEN_AI = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "llama"}


def make_aggregator(**options: Any) -> MetricsAggregator:
    metrics = MetricsAggregator(
        **{"resource": {"service.name": "vllm"}, "started_at_unix_ns": STARTED, **options}
    )
    metrics.allow_model("llama")
    return metrics


def rows(*ended_ms: float, tokens: int = 1, steps: tuple[int, ...] = ()) -> RequestSteps:
    ended = np.array([int(at * MS) for at in ended_ms], np.int64)
    ones = np.ones(len(ended), np.int64)
    return RequestSteps(
        np.array([list(steps or range(len(ended))), ended - MS, ended, ones * tokens, ones, ones * 0])
    )


HTTP_ATTRIBUTES: Any = {"http.request.method": "POST", "url.scheme": "http", "http.route": "/tokenize"}


def record(**changes: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
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
    return RequestRecord(**{**defaults, **changes})


def generation(**changes: Any) -> RequestRecord:
    """Five tokens: the first after 50 ms at the client (48 at the engine), then 10, 10, 20 and 60 ms apart."""
    steps = rows(148, 158, 168, 188, 248)
    defaults = {"steps": steps, "first_token_at": 150 * MS, "last_token_at": 248 * MS, "output_tokens": 5}
    return record(**{**defaults, **changes})


def step(number: int = 0, **changes: Any) -> StepRecord:
    defaults: dict[str, Any] = {
        "engine": "0", "pid": 7, "step": number, "started_at": 0, "ended_at": 8 * MS, "size": 4,
        "prefill_tokens": 0, "decode_tokens": 4, "kv_used": 25, "kv_total": 100, "running": 4, "waiting": 0,
    }  # fmt: skip
    return StepRecord(**{**defaults, **changes})


def collect(metrics: MetricsAggregator, now: int = NOW) -> dict[str, dict[str, Any]]:
    """Returns the metrics of one collection by name, encoded by the SDK and decoded."""
    encoded = encode_metrics(metrics.collect(now)).SerializeToString()
    return {metric["name"]: metric for metric in decoded("metrics", encoded)}


def add_and_collect(
    metrics: MetricsAggregator, *records: RequestRecord, exported: bool = True
) -> dict[str, dict[str, Any]]:
    for each in records:
        metrics.add_request(each, exported=exported)
        metrics.add_decision(each, Decision(exported, 0, "budget"))
    return collect(metrics)


def only_point(metric: dict[str, Any]) -> dict[str, Any]:
    (point,) = metric["points"]
    return dict(point)


def in_buckets(bounds: tuple[float, ...], **counts: int) -> list[int]:
    """Returns bucket counts; each keyword names the upper bound of its bucket, e.g. `le_0_05`."""
    named = {float(name.removeprefix("le_").replace("_", ".")): count for name, count in counts.items()}
    assert named.keys() <= set(bounds)
    return [named.get(bound, 0) for bound in (*bounds, None)]


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_finished_request_is_a_complete_data_point() -> None:
    assert {
        "name": "gen_ai.server.request.duration",
        "unit": "s",
        "description": semconv.REQUEST_DURATION.description,
        "kind": "histogram",
        "temporality": CUMULATIVE,
        "monotonic": False,
        "points": [
            {
                "attributes": GEN_AI,
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
    } == add_and_collect(make_aggregator(), record())["gen_ai.server.request.duration"]


def test_generation_has_ttft_tpot_and_inter_token_latency() -> None:
    collected = add_and_collect(make_aggregator(), generation())
    expected = {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "infer.inter_token_latency",
        "infer.request.tokens",
        "infer.request.kept",
        "infer.request.preemptions",
    }
    assert expected == set(collected)
    ttft = only_point(collected["gen_ai.server.time_to_first_token"])
    tpot = only_point(collected["gen_ai.server.time_per_output_token"])
    gaps = only_point(collected["infer.inter_token_latency"])
    assert (GEN_AI, 1, 0.05) == (ttft["attributes"], ttft["count"], ttft["sum"])
    assert (GEN_AI, 1, 0.025) == (tpot["attributes"], tpot["count"], tpot["sum"])
    assert in_buckets(semconv.TTFT_BOUNDS, le_0_06=1) == ttft["bucket_counts"]
    assert in_buckets(semconv.TPOT_BOUNDS, le_0_01=2, le_0_02=1, le_0_075=1) == gaps["bucket_counts"]
    assert (GEN_AI, 4, 0.01, 0.06) == (gaps["attributes"], gaps["count"], gaps["min"], gaps["max"])
    assert gaps["sum"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("outcome", "gaps"), [(events.ERROR, False), (events.ABORTED, True)], ids=["failed", "aborted"]
)
def test_unsuccessful_request_has_no_ttft_or_tpot(outcome: int, gaps: bool) -> None:
    collected = add_and_collect(
        make_aggregator(), generation(outcome=outcome, error_type="timeout", failed_stage="decode")
    )
    assert "gen_ai.server.time_to_first_token" not in collected
    assert "gen_ai.server.time_per_output_token" not in collected
    assert gaps == ("infer.inter_token_latency" in collected)
    assert {**GEN_AI, "error.type": "timeout"} == only_point(collected["gen_ai.server.request.duration"])[
        "attributes"
    ]


def test_aborted_request_records_wait_and_stage() -> None:
    collected = add_and_collect(
        make_aggregator(),
        record(outcome=events.ABORTED, error_type="client_disconnect", failed_stage="queue"),
    )
    point = only_point(collected["infer.request.abandoned"])
    expected = {**GEN_AI, "infer.stage": "queue", "error.type": "client_disconnect"}
    assert (expected, 1, 0.3) == (point["attributes"], point["count"], point["sum"])


def test_client_stop_is_abandoned_without_an_error() -> None:
    collected = add_and_collect(make_aggregator(), generation(outcome=events.ABORTED, failed_stage="decode"))
    assert {**GEN_AI, "infer.stage": "decode"} == only_point(collected["infer.request.abandoned"])[
        "attributes"
    ]
    assert GEN_AI == only_point(collected["gen_ai.server.request.duration"])["attributes"]
    assert "gen_ai.server.time_to_first_token" not in collected


def test_failed_request_is_not_abandoned() -> None:
    collected = add_and_collect(
        make_aggregator(), record(outcome=events.ERROR, error_type="RuntimeError", failed_stage="prefill")
    )
    assert "infer.request.abandoned" not in collected


def test_error_without_a_type_is_other() -> None:
    collected = add_and_collect(make_aggregator(), record(outcome=events.ERROR))
    assert "_OTHER" == only_point(collected["gen_ai.server.request.duration"])["attributes"]["error.type"]


@pytest.mark.parametrize(
    "changes",
    [{"output_tokens": 1}, {"steps": rows(148), "output_tokens": 5}, {"steps": None, "last_token_at": 0}],
    ids=["one token", "one step", "no steps"],
)
def test_time_per_output_token_needs_two_timestamps(changes: dict[str, Any]) -> None:
    assert "gen_ai.server.time_per_output_token" not in add_and_collect(
        make_aggregator(), generation(**changes)
    )


def test_without_steps_tpot_spans_first_to_last_token() -> None:
    collected = add_and_collect(make_aggregator(), generation(steps=None))
    assert only_point(collected["gen_ai.server.time_per_output_token"])["sum"] == pytest.approx(0.098 / 4)
    assert "infer.inter_token_latency" not in collected


def test_tpot_is_per_sequence() -> None:
    alone, three = make_aggregator(), make_aggregator()
    alone.add_request(generation(), exported=False)
    three.add_request(generation(sequences=3, output_tokens=15), exported=False)
    values = [
        only_point(collect(metrics)["gen_ai.server.time_per_output_token"]) for metrics in (alone, three)
    ]
    assert values[0]["sum"] == values[1]["sum"] == 0.025


def test_tpot_uses_the_steps_that_are_kept() -> None:
    collected = add_and_collect(make_aggregator(), generation(steps_evicted=1000, output_tokens=1005))
    assert 0.025 == only_point(collected["gen_ai.server.time_per_output_token"])["sum"]


def test_lost_steps_are_not_an_inter_token_gap() -> None:
    with_loss = rows(148, 158, 1168, 1178, steps=(1, 2, 90, 91))
    collected = add_and_collect(
        make_aggregator(), generation(steps=with_loss, telemetry_lost=True, output_tokens=92)
    )
    gaps = only_point(collected["infer.inter_token_latency"])
    assert (2, 0.01, 0.01) == (gaps["count"], gaps["min"], gaps["max"])
    assert 0.01 == only_point(collected["gen_ai.server.time_per_output_token"])["sum"]


def test_non_generative_request_has_duration_and_stages() -> None:
    stages = [Stage("forward", 0, 5 * MS, {})]
    collected = add_and_collect(make_aggregator(), generation(generative=False, preemptions=1, stages=stages))
    assert {"gen_ai.server.request.duration", "infer.stage.duration", "infer.request.kept"} == set(collected)


def test_a_request_without_inference_counts_as_http_only() -> None:
    """It has no operation. Its exemplar is the server span, the only one that is exported."""
    other = record(operation="", provider="", model="", server_span_id=bytes(7) + b"\3", status_code=400)
    other.attributes = HTTP_ATTRIBUTES
    collected = add_and_collect(make_aggregator(), other)
    assert {semconv.HTTP_REQUEST_DURATION.name, semconv.REQUEST_KEPT.name} == set(collected)
    point = only_point(collected[semconv.HTTP_REQUEST_DURATION.name])
    assert ({**HTTP_ATTRIBUTES, "http.response.status_code": 400}, 1) == (point["attributes"], point["count"])
    assert ["0" * 15 + "3"] == [exemplar["span_id"] for exemplar in point["exemplars"]]


def test_an_inference_over_http_counts_as_both() -> None:
    served = record(
        server_span_id=bytes(7) + b"\3", status_code=504, error_type="timeout", outcome=events.ABORTED
    )
    collected = add_and_collect(make_aggregator(), served)
    labels = {"http.request.method": "POST", "http.response.status_code": 504, "error.type": "timeout"}
    assert only_point(collected[semconv.HTTP_REQUEST_DURATION.name])["attributes"] == labels
    assert (
        only_point(collected[semconv.REQUEST_DURATION.name])["attributes"]["gen_ai.operation.name"] == "chat"
    )


@pytest.mark.parametrize(
    "changes", [{"server_span_id": b""}, {"name": "chat llama", "server_span_id": b"7" * 8}]
)
def test_http_of_another_library_or_none_is_not_counted(changes: dict[str, Any]) -> None:
    """Another library has the server span, and counts it; a request by hand need not be HTTP."""
    assert semconv.HTTP_REQUEST_DURATION.name not in add_and_collect(make_aggregator(), record(**changes))


def test_untraced_http_requests_are_counted_by_route_and_status() -> None:
    metrics = make_aggregator()
    health = events.HttpServed(100 * MS, 40 * MS, 200, "", "GET", "http", "/health")
    metrics.http_requests.add_untraced([health, health, health._replace(status_code=500, error_type="500")])
    points = collect(metrics)[semconv.HTTP_REQUEST_DURATION.name]["points"]
    labels = {"http.request.method": "GET", "url.scheme": "http", "http.route": "/health"}
    assert [({**labels, "http.response.status_code": 200}, 2), (
        {**labels, "http.response.status_code": 500, "error.type": "500"}, 1
    )] == [(point["attributes"], point["count"]) for point in points]  # fmt: skip
    assert only_point({"points": points[1:]})["sum"] == 0.06


def test_odd_http_requests_add_few_series() -> None:
    """A route is a template of the code. If user code sets a path instead, or a status by the client's number."""
    metrics = make_aggregator()
    for number in range(5000):
        odd = events.HttpServed(
            MS, 0, 600 + number, f"E{number}", f"M{number}", f"s{number}", f"/items/{number}"
        )
        metrics.http_requests.add_untraced([odd])
    points = collect(metrics)[semconv.HTTP_REQUEST_DURATION.name]["points"]
    assert len(points) <= 65
    assert {point["attributes"]["http.request.method"] for point in points} == {"_OTHER"}


def test_stages_and_detokenize_are_recorded() -> None:
    stages = [
        Stage("queue", 0, 5 * MS, {}),
        Stage("rerank", 0, 6 * MS, {}),
        Stage("rerank", 0, 7 * MS, {}),
        Stage("postprocess", 0, 9 * MS, {"infer.detokenize.duration": 0.002}),
    ]
    points = add_and_collect(make_aggregator(), record(stages=stages))["infer.stage.duration"]["points"]
    recorded = {point["attributes"].pop("infer.stage"): (point["count"], point["max"]) for point in points}
    expected = {
        "queue": (1, 0.005),
        "rerank": (2, 0.007),
        "postprocess": (1, 0.009),
        "detokenize": (1, 0.002),
    }
    assert expected == recorded
    assert all({**GEN_AI, "infer.clock": "host"} == point["attributes"] for point in points)


def test_preemptions_and_sampling_reasons_are_counters() -> None:
    metrics = make_aggregator()
    metrics.add_request(record(preemptions=2), exported=True)
    metrics.add_request(record(preemptions=1), exported=False)
    for reason in ("budget", "unsampled"):
        metrics.add_decision(record(), Decision(True, 0, reason))
    collected = collect(metrics)
    preemptions, sampled = collected["infer.request.preemptions"], collected["infer.request.kept"]
    assert (True, CUMULATIVE, "{preemption}") == (
        preemptions["monotonic"],
        preemptions["temporality"],
        preemptions["unit"],
    )
    assert [(GEN_AI, 3)] == [(point["attributes"], point["value"]) for point in preemptions["points"]]
    expected = [({"infer.keep.reason": "budget"}, 1), ({"infer.keep.reason": "unsampled"}, 1)]
    assert expected == [(point["attributes"], point["value"]) for point in sampled["points"]]


def test_preemptions_of_a_model_begin_at_zero() -> None:
    collected = add_and_collect(make_aggregator(), generation())
    assert only_point(collected["infer.request.preemptions"])["value"] == 0


def test_marks_begin_at_zero() -> None:
    metrics = make_aggregator()
    metrics.begin_known_series()
    values = {
        point["attributes"]["infer.mark.name"]: point["value"]
        for point in collect(metrics)["infer.marks"]["points"]
    }
    assert values == dict.fromkeys(semconv.MARK_NAMES, 0)


def read_error_counts(metrics: MetricsAggregator, reader: str) -> list[tuple[str | None, int]]:
    encoded = encode_metrics(metrics.collect(NOW, reader)).SerializeToString()
    (metric,) = [m for m in decoded("metrics", encoded) if m["name"] == "gen_ai.server.request.duration"]
    return [(point["attributes"].get("error.type"), point["count"]) for point in metric["points"]]


def test_each_reader_gets_a_new_error_series_first_empty() -> None:
    """Prometheus counts only what follows the first sample of a series."""
    metrics = make_aggregator()
    for _ in range(500):
        metrics.add_request(record(outcome=events.ERROR, error_type="OutOfMemoryError"), exported=False)
    metrics.add_request(record(), exported=False)
    first, later = ("OutOfMemoryError", 0), ("OutOfMemoryError", 500)
    assert read_error_counts(metrics, aggregator.PUSH) == [first, (None, 1)]
    assert read_error_counts(metrics, aggregator.PUSH) == [later, (None, 1)]
    assert read_error_counts(metrics, aggregator.SCRAPE) == [first, (None, 1)]
    assert read_error_counts(metrics, aggregator.SCRAPE) == [later, (None, 1)]


def test_an_empty_error_series_is_rendered_and_encoded() -> None:
    failed = record(outcome=events.ERROR, error_type="OSError")
    for exponential in (True, False):
        metrics = make_aggregator(exponential=exponential)
        metrics.add_request(failed, exported=True)
        assert read_error_counts(metrics, aggregator.PUSH) == [("OSError", 0)]
    text = openmetrics.render_metrics(metrics.collect(NOW, aggregator.SCRAPE), is_open=True).decode()
    assert re.search(r'request_duration_seconds_count\{.*error_type="OSError".*\} 0\n', text)


def test_deltas_of_errors_have_no_empty_point() -> None:
    metrics = make_aggregator(temporality="delta")
    metrics.add_request(record(outcome=events.ERROR, error_type="OSError"), exported=False)
    assert read_error_counts(metrics, aggregator.PUSH) == [("OSError", 1)]


# ── exemplars ────────────────────────────────────────────────────────────────────────────────────────────────────


def exemplars_in(collected: dict[str, dict[str, Any]], name: str) -> list[tuple[float, str]]:
    return [(each["value"], each["span_id"][-1]) for each in only_point(collected[name])["exemplars"]]


def spans(number: int) -> bytes:
    return bytes(7) + bytes([number])


def test_only_exported_requests_are_exemplars() -> None:
    metrics = make_aggregator()
    metrics.add_request(generation(span_id=spans(3)), exported=True)
    metrics.add_request(generation(span_id=spans(4)), exported=False)
    collected = collect(metrics)
    assert 2 == only_point(collected["gen_ai.server.request.duration"])["count"]
    assert [(0.3, "3")] == exemplars_in(collected, "gen_ai.server.request.duration")
    assert [(0.05, "3")] == exemplars_in(collected, "gen_ai.server.time_to_first_token")


def test_bucket_exemplar_is_the_latest_exported_request() -> None:
    fast, slow = record(span_id=spans(3), ended_at=390 * MS), record(span_id=spans(4), ended_at=900 * MS)
    collected = add_and_collect(make_aggregator(), record(span_id=spans(5), ended_at=380 * MS), fast, slow)
    assert [(0.29, "3"), (0.8, "4")] == exemplars_in(collected, "gen_ai.server.request.duration")


def test_gap_exemplars_are_the_largest_per_bucket() -> None:
    uneven = generation(steps=rows(100, 106, 112.5, 122, 142))
    collected = add_and_collect(make_aggregator(), uneven)
    expected = [(0.0065, "2"), (0.0095, "2"), (0.02, "2")]
    assert expected == sorted(exemplars_in(collected, "infer.inter_token_latency"))


def test_exemplars_can_be_disabled() -> None:
    collected = add_and_collect(make_aggregator(exemplars=False), generation())
    assert [] == [
        point["exemplars"]
        for metric in collected.values()
        for point in metric["points"]
        if point["exemplars"]
    ]


def test_request_without_a_trace_is_no_exemplar() -> None:
    collected = add_and_collect(make_aggregator(), record(trace_id=bytes(16), span_id=bytes(8)))
    assert [] == only_point(collected["gen_ai.server.request.duration"])["exemplars"]


# ── cardinality ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_random_request_names_add_at_most_three_series() -> None:
    metrics = make_aggregator()
    dice = random.Random(1)
    baseline = {
        name: len(metric["points"]) for name, metric in add_and_collect(metrics, generation()).items()
    }
    for _ in range(10_000):
        noise = f"{dice.getrandbits(64):x}"
        attributes: dict[str, events.Value] = {"http.request.method": noise, "http.route": noise}
        metrics.add_request(generation(model=noise, name=noise, attributes=attributes), exported=True)
    collected = collect(metrics)
    assert baseline.keys() == collected.keys()
    for name, metric in collected.items():
        assert len(metric["points"]) - baseline[name] <= 3, name
    models = {
        point["attributes"]["gen_ai.request.model"]
        for point in collected["infer.inter_token_latency"]["points"]
    }
    assert {"llama", "_OTHER"} == models


def test_first_fifty_served_models_are_named() -> None:
    metrics = MetricsAggregator(resource={}, started_at_unix_ns=STARTED)
    metrics.add_request(record(model="m0"), exported=True)
    for number in range(60):
        metrics.allow_model(f"m{number}")
        metrics.add_request(record(model=f"m{number}"), exported=True)
    points = collect(metrics)["gen_ai.server.request.duration"]["points"]
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
    ids=["operations", "providers", "errors", "stages", "abandoned stages"],
)
def test_names_from_user_code_are_bounded(
    metric: semconv.Metric, attribute: str, noise: Any, limit: int
) -> None:
    collected = add_and_collect(make_aggregator(), *(record(**noise(f"n{number}")) for number in range(200)))
    names = {point["attributes"][attribute]: point["count"] for point in collected[metric.name]["points"]}
    assert {"_OTHER": 200 - limit, **{f"n{number}": 1 for number in range(limit)}} == names


def test_attribute_sets_are_limited_with_overflow_point() -> None:
    """2,000 attribute sets per metric, and one point for the rest."""
    series = NumberSeries(semconv.SELF_LOST)
    for number in range(2100):
        series.add((f"r{number}",), 1)
    points = series.collect_data(AggregationTemporality.CUMULATIVE, STARTED, NOW).data_points
    assert 2001 == len(points)
    assert ({"otel.metric.overflow": True}, 100) == (points[-1].attributes, points[-1].value)


# ── engine steps ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_steps_are_counted_by_kind_and_engine() -> None:
    metrics = make_aggregator()
    prefill = step(2, ended_at=30 * MS, prefill_tokens=512, decode_tokens=0, size=1)
    mixed = step(3, ended_at=20 * MS, prefill_tokens=100, decode_tokens=8, size=9)
    metrics.add_steps([step(1), prefill, mixed, step(4, size=6, decode_tokens=6), step(1, engine="1", pid=8)])
    collected = collect(metrics)
    first_engine = {"infer.engine": "0", "process.pid": 7}
    second_engine = {"infer.engine": "1", "process.pid": 8}
    durations = [(p["attributes"], p["count"], p["sum"]) for p in collected["infer.step.duration"]["points"]]
    assert [
        ({"infer.step.kind": "decode", "infer.clock": "host", **first_engine}, 2, 0.016),
        ({"infer.step.kind": "prefill", "infer.clock": "host", **first_engine}, 1, 0.03),
        ({"infer.step.kind": "mixed", "infer.clock": "host", **first_engine}, 1, 0.02),
        ({"infer.step.kind": "decode", "infer.clock": "host", **second_engine}, 1, 0.008),
    ] == durations
    sizes = collected["infer.step.batch.size"]
    assert "{sequence}" == sizes["unit"]
    assert [(4, 6), (1, 1), (9, 9), (4, 4)] == [(point["min"], point["max"]) for point in sizes["points"]]
    tokens = {
        (p["attributes"]["infer.step.kind"], p["attributes"]["infer.engine"]): p["value"]
        for p in collected["infer.step.tokens"]["points"]
    }
    assert {("decode", "0"): 18, ("prefill", "0"): 612, ("decode", "1"): 4} == tokens


def test_kv_usage_is_the_latest_per_engine() -> None:
    metrics = make_aggregator()
    metrics.add_steps(
        [step(1, kv_used=10), step(2, kv_used=50), step(1, engine="", pid=8, kv_used=1, kv_total=4)]
    )
    collected = collect(metrics)
    engines = [{"infer.engine": "0", "process.pid": 7}, {"process.pid": 8}]
    for name, kind, unit, values in (
        ("infer.kv_cache.usage", "sum", "{block}", [50, 1]),
        ("infer.kv_cache.limit", "sum", "{block}", [100, 4]),
        ("infer.kv_cache.utilization", "gauge", "1", [0.5, 0.25]),
    ):
        metric = collected[name]
        assert (kind, unit, False) == (metric["kind"], metric["unit"], metric["monotonic"])
        points = [(point["attributes"], point["value"]) for point in metric["points"]]
        assert list(zip(engines, values)) == points


def test_kv_headroom_needs_a_known_block_size() -> None:
    metrics = make_aggregator()
    metrics.add_steps([step(1, kv_used=20, running=4, block_tokens=16), step(1, pid=8, running=4)])
    collected = collect(metrics)
    size, headroom = (
        only_point(collected[metric.name]) for metric in (semconv.KV_BLOCK_SIZE, semconv.KV_HEADROOM)
    )
    assert size["attributes"] == headroom["attributes"] == {"infer.engine": "0", "process.pid": 7}
    assert (size["value"], headroom["value"]) == (16, (100 - 20) * 16 / 4)


def test_removed_engine_has_no_kv_metrics() -> None:
    metrics = make_aggregator()
    metrics.add_steps([step(1, block_tokens=16), step(1, pid=8, block_tokens=16)])
    metrics.retain_engines({("0", 8)})
    for metric in semconv.ENGINE_KV_METRICS:
        name = metric.name
        assert [8] == [point["attributes"]["process.pid"] for point in collect(metrics)[name]["points"]]


def test_idle_engine_has_zero_kv_usage() -> None:
    metrics = make_aggregator()
    last = step(1, kv_used=90, block_tokens=16)
    metrics.add_steps([last])
    metrics.reset_idle_kv_usage(last.ended_at + 500 * MS)
    names = ("infer.kv_cache.usage", "infer.kv_cache.utilization", "infer.kv_cache.headroom")
    assert [only_point(collect(metrics)[name])["value"] for name in names[:2]] == [90, 0.9]
    metrics.reset_idle_kv_usage(last.ended_at + 2_000 * MS)
    collected = collect(metrics)
    assert [only_point(collected[name])["value"] for name in names[:2]] == [0, 0] and names[
        2
    ] not in collected
    assert only_point(collected["infer.kv_cache.limit"])["value"] == 100


def test_engine_without_kv_blocks_has_no_kv_metrics() -> None:
    metrics = make_aggregator()
    metrics.add_steps([step(kv_used=0, kv_total=0)])
    assert {"infer.step.duration", "infer.step.batch.size", "infer.step.tokens"} == set(collect(metrics))


def test_step_without_kv_data_keeps_the_last_value() -> None:
    metrics = make_aggregator()
    metrics.add_steps([step(1)])
    metrics.add_steps([step(2, kv_used=0, kv_total=0)])
    assert 25 == only_point(collect(metrics)["infer.kv_cache.usage"])["value"]


# ── values set by other modules ──────────────────────────────────────────────────────────────────────────────────


def test_set_value_is_absolute() -> None:
    metrics = make_aggregator()
    for value in (3, 2):
        metrics.set_value(semconv.REQUEST_ACTIVE, {"infer.request.state": "running"}, value)
        metrics.set_value(semconv.SELF_SPANS, {}, value)
        metrics.set_value(semconv.SELF_ERRORS, {}, value)
    metrics.set_value(semconv.SELF_CPU, {"cpu.mode": "user"}, 1.5)
    collected = collect(metrics)
    expected = {
        "infer.request.active": ({"infer.request.state": "running"}, 2, False),
        "infer.self.spans": ({}, 2, True),
        "infer.self.errors": ({}, 2, True),
        "infer.self.cpu.time": ({"cpu.mode": "user"}, 1.5, True),
    }
    points = {name: only_point(metric) for name, metric in collected.items()}
    assert expected == {
        name: (point["attributes"], point["value"], collected[name]["monotonic"])
        for name, point in points.items()
    }


def test_undeclared_attributes_are_not_exported() -> None:
    metrics = make_aggregator()
    metrics.set_value(semconv.SELF_MEMORY, {"user.id": "canary"}, 5)
    assert {} == only_point(collect(metrics)["infer.self.memory.usage"])["attributes"]


# ── temporality ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_cumulative_points_start_at_process_start() -> None:
    metrics = make_aggregator()
    add_and_collect(metrics, record())
    metrics.add_request(record(), exported=False)
    point = only_point(collect(metrics, LATER)["gen_ai.server.request.duration"])
    assert (2, STARTED, LATER) == (point["count"], point["start_time_unix_nano"], point["time_unix_nano"])
    assert 1 == len(point["exemplars"])


@pytest.mark.parametrize("temporality", ["delta", "lowmemory"])
def test_delta_points_restart_after_each_collection(temporality: str) -> None:
    metrics = make_aggregator(temporality=temporality)
    metrics.set_value(semconv.SELF_SPANS, {}, 10)
    first = add_and_collect(metrics, record(), record())
    for name, instant in (("gen_ai.server.request.duration", "count"), ("infer.request.kept", "value")):
        point = only_point(first[name])
        assert DELTA == first[name]["temporality"]
        assert (2, STARTED, NOW) == (point[instant], point["start_time_unix_nano"], point["time_unix_nano"])
    assert 10 == only_point(first["infer.self.spans"])["value"]
    metrics.set_value(semconv.SELF_SPANS, {}, 14)
    metrics.add_request(record(ended_at=500 * MS), exported=False)
    metrics.add_decision(record(), Decision(True, 0, "budget"))
    second = collect(metrics, LATER)
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
    assert "gen_ai.server.request.duration" not in collect(metrics, LATER + 1)


def test_delta_starts_at_the_first_observed_value() -> None:
    metrics, values = make_aggregator(temporality="delta"), []
    for joules in (1e9, 1e9 + 70, 1e9 + 100):
        metrics.set_value(semconv.GPU_ENERGY, {semconv.HW_ID: "GPU-1"}, joules)
        values.append(only_point(collect(metrics)["hw.energy"])["value"])
    assert values == [0, 70, 30]


def test_delta_of_errors_starts_at_the_first_value() -> None:
    """Errors that the driver counts start at the first value; errors that we count start at zero."""
    metrics, values = make_aggregator(temporality="delta"), []
    for corrected, lost in ((700, 0), (702, 1), (702, 1)):
        counts = {"corrected": corrected, "xid_79": lost}
        for kind, many in counts.items():
            if many:
                metrics.set_value(
                    semconv.GPU_ERRORS, {semconv.HW_ID: "GPU-1", semconv.ERROR_TYPE: kind}, many
                )
        points = collect(metrics)["hw.errors"]["points"]
        values.append({point["attributes"]["error.type"]: point["value"] for point in points})
    assert values == [{"corrected": 0}, {"corrected": 2, "xid_79": 1}, {"corrected": 0, "xid_79": 0}]


def test_wall_clock_set_back_gives_no_negative_interval() -> None:
    metrics = make_aggregator(temporality="delta")
    add_and_collect(metrics, record())
    metrics.add_request(record(), exported=False)
    point = only_point(collect(metrics, STARTED)["gen_ai.server.request.duration"])
    assert point["start_time_unix_nano"] <= point["time_unix_nano"] == STARTED


@pytest.mark.parametrize("temporality", ["delta", "lowmemory"])
def test_delta_keeps_updowncounters_cumulative_and_gauges_current(temporality: str) -> None:
    metrics = make_aggregator(temporality=temporality)
    metrics.add_steps([step(1)])
    collect(metrics)
    collected = collect(metrics, LATER)
    usage, utilization = collected["infer.kv_cache.usage"], collected["infer.kv_cache.utilization"]
    assert CUMULATIVE == usage["temporality"]
    point = only_point(usage)
    assert (25, STARTED, LATER) == (point["value"], point["start_time_unix_nano"], point["time_unix_nano"])
    assert 0.25 == only_point(utilization)["value"]


@given(
    lengths=st.lists(st.lists(st.integers(0, 10**11), max_size=5), min_size=1, max_size=4),
    exponential=st.booleans(),
)
def test_deltas_sum_to_the_cumulative_value(lengths: list[list[int]], exponential: bool) -> None:
    delta, cumulative = (
        make_aggregator(temporality="delta", exponential=exponential),
        make_aggregator(exponential=exponential),
    )
    name = "gen_ai.server.request.duration"
    count, total = 0, 0.0
    for interval in lengths:
        for length in interval:
            for each in (delta, cumulative):
                each.add_request(record(arrived_at=0, ended_at=length), exported=True)
        collected = collect(delta)
        if interval:
            count += only_point(collected[name])["count"]
            total += only_point(collected[name])["sum"]
    whole = collect(cumulative)
    if count:
        assert count == only_point(whole[name])["count"]
        assert total == pytest.approx(only_point(whole[name])["sum"])


# ── formats and destinations ─────────────────────────────────────────────────────────────────────────────────────


def test_aggregator_without_data_exports_nothing() -> None:
    assert {} == collect(make_aggregator())


def test_negative_duration_adds_no_point() -> None:
    assert {"infer.request.kept", "infer.request.preemptions"} == set(
        add_and_collect(make_aggregator(), record(ended_at=0))
    )


def test_exponential_histograms_can_be_enabled() -> None:
    metric = add_and_collect(make_aggregator(exponential=True), generation())["infer.inter_token_latency"]
    point = only_point(metric)
    assert ("exponential_histogram", CUMULATIVE) == (metric["kind"], metric["temporality"])
    assert (4, 0, 0.01, 0.06) == (point["count"], point["zero_count"], point["min"], point["max"])
    assert 4 == sum(point["positive"]["bucket_counts"])
    base = 2.0 ** (2.0 ** -point["scale"])
    lowest = base ** point["positive"]["offset"]
    assert lowest < 0.01 <= lowest * base
    assert {"2"} == {exemplar["span_id"][-1] for exemplar in point["exemplars"]}
    assert [0.01, 0.02, 0.06] == sorted(exemplar["value"] for exemplar in point["exemplars"])


def test_resource_can_gain_its_service_name_later() -> None:
    resource: dict[str, events.Value] = {"process.pid": 7}
    metrics = make_aggregator(resource=resource)
    first = add_and_collect(metrics, record())["infer.request.kept"]
    assert {"service.name": "unknown_service:python", "process.pid": 7} == first["resource"]
    resource["service.name"] = "vllm"
    assert {"service.name": "vllm", "process.pid": 7} == collect(metrics)["infer.request.kept"]["resource"]


def test_latency_is_counted_by_cause() -> None:
    metrics = make_aggregator()
    first, second = generation(), generation()
    first.breakdown, second.breakdown = (
        LatencyBreakdown({"decode": 250_000_000, "gc": 50_000_000}, None),
        LatencyBreakdown({"gc": 1_000_000_000}, None),
    )
    points = add_and_collect(metrics, first, second)["infer.latency.duration"]["points"]
    assert {p["attributes"]["infer.latency.cause"]: p["value"] for p in points} == {
        "decode": 0.25,
        "gc": 1.05,
    }


def test_pauses_are_counted_by_cause_with_a_limit() -> None:
    metrics = make_aggregator()
    metrics.add_pauses([Pause(0, 2 * MS, "gc"), Pause(MS, 4 * MS, "gc"), Pause(0, 5000 * MS, "compile")])
    paused = {
        p["attributes"]["infer.pause.cause"]: p for p in collect(metrics)["infer.pause.duration"]["points"]
    }
    assert (paused["gc"]["count"], paused["gc"]["sum"]) == (2, pytest.approx(0.005))
    assert (paused["compile"]["count"], paused["compile"]["sum"]) == (1, 5)
    metrics.add_pauses([Pause(0, MS, f"invented {number}") for number in range(1000)])
    assert len(collect(metrics)["infer.pause.duration"]["points"]) <= 65


def test_marks_are_counted_and_unknown_names_are_other() -> None:
    metrics = make_aggregator()
    metrics.add_marks([Mark(0, MS, "allocator_retry", 2), Mark(MS, 2 * MS, "allocator_retry", 3)])
    metrics.add_marks([Mark(0, MS, f"invented {number}", 1) for number in range(100)])
    points = collect(metrics)["infer.marks"]["points"]
    assert {point["attributes"]["infer.mark.name"]: point["value"] for point in points} == {
        "allocator_retry": 5,
        "_OTHER": 100,
    }


BY_CALLER = {
    "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token",
    "infer.inter_token_latency", "infer.latency.duration", "infer.request.abandoned", "infer.request.tokens",
}  # fmt: skip


def caller_attributes(
    metrics: MetricsAggregator, *requests: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Returns the caller attributes of each metric's points, for requests with these attributes."""
    for attributes in requests:
        finished = generation(attributes=attributes, stages=[Stage("queue", 0, 1, {})], preemptions=1)
        finished.breakdown = LatencyBreakdown({"decode": 1}, None)
        aborted = generation(attributes=attributes, outcome=events.ABORTED, failed_stage="decode", steps=None)
        metrics.add_request(finished, exported=True)
        metrics.add_request(aborted, exported=True)
    return {
        name: [
            {key: value for key, value in point["attributes"].items() if key in semconv.metrics._CALLER}
            for point in metric["points"]
            if "error.type" not in point["attributes"] or name == "infer.request.abandoned"
        ]
        for name, metric in collect(metrics).items()
    }


def test_caller_attributes_are_off_by_default() -> None:
    points = caller_attributes(make_aggregator(), {"infer.tenant": "acme", "infer.traffic.class": "batch"})
    assert points.keys() > BY_CALLER
    assert all(point == {} for metric_points in points.values() for point in metric_points)


def test_only_listed_tenants_are_named_on_caller_metrics() -> None:
    metrics = make_aggregator(tenants={"acme"})
    points = caller_attributes(
        metrics, {"infer.tenant": "acme"}, {"infer.tenant": "other"}, {}, {"infer.tenant": [1]}
    )
    for name, callers in points.items():
        named = [point.get("infer.tenant") for point in callers]
        assert named == (["acme", "_OTHER"] if name in BY_CALLER else [None]), name


def test_traffic_class_has_two_values_on_metrics() -> None:
    metrics = make_aggregator(traffic_classes=True)
    points = caller_attributes(
        metrics, {"infer.traffic.class": "batch"}, {"infer.traffic.class": "invented"}, {}
    )
    for name, callers in points.items():
        named = [point.get("infer.traffic.class") for point in callers]
        assert named == (["batch", "interactive"] if name in BY_CALLER else [None]), name


def test_interference_is_counted_by_both_classes() -> None:
    """The class of the interferer and the class of the delayed request."""
    metrics = make_aggregator()
    delayed = [
        generation(input_tokens=8),
        generation(input_tokens=8, attributes={"infer.traffic.class": "batch"}),
    ]
    for delayed_request in delayed:
        delayed_request.breakdown = LatencyBreakdown(
            {"interference": 5 * MS}, None, (("long", 4 * MS), ("unknown", MS))
        )
    points = add_and_collect(metrics, *delayed)["infer.interference.duration"]["points"]
    values = {tuple(point["attributes"].values()): point["value"] for point in points}
    assert values == {
        ("long", "short"): 0.004, ("unknown", "short"): 0.001, ("long", "batch"): 0.004, ("unknown", "batch"): 0.001,
    }  # fmt: skip


def start_record(*phases: Phase, **more: Any) -> StartRecord:
    return StartRecord(bytes(15) + b"t", bytes(7) + b"s", 1, 0, 900 * MS, WALL, phases, **more)


def test_executions_are_counted_by_worker_rank() -> None:
    metrics = make_aggregator()
    metrics.add_executions([Execution("vllm", 77, rank, (rank + 1) * MS) for rank in (0, 1, 1)])
    points = add_and_collect(metrics)["infer.step.execution.duration"]["points"]
    assert {point["attributes"]["infer.worker.rank"]: (point["count"], point["sum"]) for point in points} == {
        0: (1, 0.001), 1: (2, 0.004),
    }  # fmt: skip


def test_device_times_have_their_own_series() -> None:
    metrics = make_aggregator()
    metrics.add_executions(
        [Execution("vllm", 77, 0, 5 * MS), Execution("vllm", 77, 0, 4 * MS, True, 2 * MS, -1)]
    )
    collected = add_and_collect(metrics)
    points = collected["infer.step.execution.duration"]["points"]
    clocks = {point["attributes"]["infer.clock"]: point["sum"] for point in points}
    assert clocks == {"host": 0.005, "device": 0.004}
    assert [point["sum"] for point in collected["infer.step.device.queue"]["points"]] == [0.002]
    assert "infer.step.device.gap" not in collected


def test_start_is_recorded_per_phase_and_in_total() -> None:
    metrics = make_aggregator()
    loaded = (Phase("weights", 0, 100 * MS), Phase("weights", 200 * MS, 400 * MS))
    metrics.add_start(start_record(*loaded, ready_by="lifespan"), exported=True)
    metrics.add_start(start_record(*loaded[:1], error_type="OSError"), exported=True)
    points = add_and_collect(metrics)["infer.startup.duration"]["points"]
    recorded = {tuple(point["attributes"].values()): (point["count"], point["sum"]) for point in points}
    assert recorded == {
        ("total", "lifespan"): (1, 0.9), ("weights", "lifespan"): (1, pytest.approx(0.3)),
        ("total", "OSError"): (1, 0.9), ("weights", "OSError"): (1, 0.1),
    }  # fmt: skip
    (exemplar,) = next(p for p in points if p["attributes"].get("infer.ready.by"))["exemplars"]
    assert exemplar["trace_id"] == (bytes(15) + b"t").hex()


def test_requests_are_counted_by_missed_objectives() -> None:
    """An aborted request counts with the objectives that it had missed by then."""
    metrics = make_aggregator(has_objectives=True)
    aborted = {"outcome": events.ABORTED, "failed_stage": "decode"}
    for each, missed in (
        (generation(), ()),
        (generation(), ("ttft", "e2e")),
        (generation(outcome=events.ERROR, error_type="ValueError"), ("e2e",)),
        (generation(**aborted, error_type="timeout"), ()),
        (generation(**aborted), ()),
        (generation(**aborted, error_type="client_disconnect"), ()),
        (generation(**aborted, error_type="client_disconnect"), ("itl",)),
        (generation(outcome=events.ABORTED, failed_stage="queue", first_token_at=0), ()),
        (record(operation="", generative=False), ("e2e",)),
    ):
        metrics.add_decision(each, Decision(True, 0, "slo", missed=missed))
    points = collect(metrics)["infer.request.objectives"]["points"]
    values = {point["attributes"]["infer.slo.missed"]: point["value"] for point in points}
    assert values == {"none": 3, "ttft,e2e": 1, "error": 2, "itl": 1}


def test_refused_request_counts_for_no_objective_or_latency() -> None:
    """99 refused requests would hide one accepted request that missed its objective."""
    metrics = make_aggregator(has_objectives=True)
    for _ in range(99):
        refused = record(
            operation="", status_code=401, breakdown=LatencyBreakdown({"unexplained": 300 * MS}, None)
        )
        metrics.add_decision(refused, Decision(True, 0, "none", slow=True))
        metrics.add_request(refused, exported=True)
    metrics.add_decision(generation(), Decision(True, 0, "slo", missed=("ttft",)))
    collected = collect(metrics)
    points = collected["infer.request.objectives"]["points"]
    assert {point["attributes"]["infer.slo.missed"]: point["value"] for point in points} == {"ttft": 1}
    assert "infer.latency.duration" not in collected and "infer.latency.slow.duration" not in collected
    assert "gen_ai.server.request.duration" not in collected


def test_without_objectives_none_are_counted() -> None:
    metrics = make_aggregator()
    metrics.add_decision(generation(), Decision(True, 0, "budget"))
    assert "infer.request.objectives" not in collect(metrics)


def test_latency_of_slow_requests_is_counted_separately() -> None:
    metrics = make_aggregator()
    for slow in (True, False):
        each = generation(breakdown=LatencyBreakdown({"decode": 3 * MS, "gc": MS}, None))
        metrics.add_decision(each, Decision(True, 0, "budget", slow=slow))
    points = collect(metrics)["infer.latency.slow.duration"]["points"]
    assert {point["attributes"]["infer.latency.cause"]: point["value"] for point in points} == {
        "decode": 0.003,
        "gc": 0.001,
    }
    assert all(GEN_AI.items() <= point["attributes"].items() for point in points)


def batched(size: int, wait: str = "queue wait") -> RequestRecord:
    """A classification whose worker called the model twice, first for a batch of this size."""
    calls = [Stage("forward", MS, 2 * MS, {"infer.items": size}), Stage("forward", 2 * MS, 3 * MS, {})]
    return record(operation="inference", stages=[Stage(wait, 0, MS, {}), *calls])


def test_a_batch_has_its_size_once_per_request() -> None:
    collected = add_and_collect(make_aggregator(), batched(4), batched(4), batched(9, wait="ingress"))
    point = only_point(collected["infer.request.batch.size"])
    assert (point["count"], point["sum"]) == (2, 8)
    assert point["attributes"]["gen_ai.operation.name"] == "inference"


def test_each_metric_is_exported_as_declared() -> None:
    metrics = make_aggregator(has_objectives=True)
    aborted = generation(outcome=events.ABORTED, failed_stage="decode", error_type="timeout")
    read = {"prefix_tokens": 8, "cached_tokens": 4, "drafted_tokens": 6, "accepted_tokens": 3}
    preempted = generation(preemptions=1, stages=[Stage("queue", 0, 1, {})], input_tokens=8, **read)
    preempted.breakdown = LatencyBreakdown({"decode": 1, "interference": 1}, None, (("long", 1),))
    preempted.device_share = MS
    metrics.add_decision(preempted, Decision(True, 0, "slow", slow=True))
    metrics.http_requests.add_untraced([events.HttpServed(MS, 0, 200, "", "GET", "http", "/health")])
    metrics.add_steps([step(prefill_tokens=5, block_tokens=16)])
    metrics.add_executions([Execution("vllm", 77, 0, MS, True, MS, MS)])
    metrics.add_pauses([Pause(0, MS, "gc")])
    metrics.add_start(start_record(Phase("imports", 0, MS)), exported=True)
    metrics.add_marks([Mark(0, MS, "allocator_oom", 1), Mark(0, MS, "kv_eviction", 2)])
    for metric in semconv.METRICS:
        by_value = metric.name.startswith(
            ("infer.self.", "infer.server.", "hw.", "infer.gpu.", "infer.device.memory.")
        )
        if by_value or metric in (
            semconv.REQUEST_ACTIVE, semconv.REQUEST_HUNG, semconv.ENGINE_WAITING, semconv.PINNED_MEMORY,
        ):  # fmt: skip
            metrics.set_value(metric, dict.fromkeys(metric.attributes, "x"), 1)
    collected = add_and_collect(metrics, aborted, preempted, batched(4))
    kinds = {"histogram": "histogram", "counter": "sum", "updowncounter": "sum", "gauge": "gauge"}
    expected = [
        (m.name, m.unit, m.description, kinds[m.instrument], m.instrument == "counter")
        for m in semconv.METRICS
    ]
    actual = [(m["name"], m["unit"], m["description"], m["kind"], m["monotonic"]) for m in collected.values()]
    assert expected == actual
    for metric in semconv.METRICS:
        for point in collected[metric.name]["points"]:
            assert point["attributes"].keys() <= set(metric.attributes)


@pytest.fixture(params=[HTTP, GRPC])
def receiver(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, OtlpReceiver]]:
    with OtlpReceiver(request.param) as listening:
        for name, value in listening.environ.items():
            monkeypatch.setenv(name, value)
        yield request.param, listening


def test_sdk_exporter_sends_the_metrics(receiver: tuple[str, OtlpReceiver]) -> None:
    protocol, listening = receiver
    metrics = make_aggregator()
    metrics.add_request(generation(), exported=True)
    exporter = make_metric_exporter(protocol)
    try:
        assert "SUCCESS" == exporter.export(metrics.collect(NOW)).name
    finally:
        exporter.shutdown()
    assert "infer.inter_token_latency" in {metric["name"] for metric in listening.metrics}


def test_execution_counts_for_the_steps_it_represents() -> None:
    metrics = make_aggregator()
    metrics.add_executions([Execution("vllm", 77, 0, 4 * MS, True, 2 * MS, MS, steps=3, gaps=5)])
    collected = add_and_collect(metrics)
    assert {
        name: [(point["count"], pytest.approx(point["sum"])) for point in collected[name]["points"]]
        for name in ("infer.step.execution.duration", "infer.step.device.queue", "infer.step.device.gap")
    } == {
        "infer.step.execution.duration": [(3, 0.012)],
        "infer.step.device.queue": [(3, 0.006)],
        "infer.step.device.gap": [(5, 0.005)],
    }


def test_replaced_gauges_disappear_and_counters_remain() -> None:
    metrics = make_aggregator()

    def observed(*gpus: str) -> dict[str, list[str]]:
        def set_gpu_values(set_value: Any) -> None:
            for gpu in gpus:
                for metric in (semconv.GPU_TEMPERATURE, semconv.GPU_ENERGY):
                    set_value(metric, {semconv.HW_ID: gpu}, 70)

        metrics.replace_values([semconv.GPU_TEMPERATURE, semconv.GPU_POWER], set_gpu_values)
        collected = add_and_collect(metrics)
        return {
            name: [point["attributes"]["hw.id"] for point in collected[name]["points"]]
            if name in collected
            else []
            for name in ("hw.temperature", "hw.energy")
        }

    assert observed("a", "b") == {"hw.temperature": ["a", "b"], "hw.energy": ["a", "b"]}
    assert observed("b") == {"hw.temperature": ["b"], "hw.energy": ["a", "b"]}
    assert observed() == {"hw.temperature": [], "hw.energy": ["a", "b"]}


def test_replaced_values_keep_their_overflow_series() -> None:
    metrics = make_aggregator()

    def set_gpu_values(set_value: Any) -> None:
        for gpu in range(MAX_SERIES + 2):
            set_value(semconv.GPU_TEMPERATURE, {semconv.HW_ID: str(gpu)}, 70)

    metrics.replace_values([semconv.GPU_TEMPERATURE], set_gpu_values)
    points = add_and_collect(metrics)["hw.temperature"]["points"]
    assert {"otel.metric.overflow": True} in [point["attributes"] for point in points]
