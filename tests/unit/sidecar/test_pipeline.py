"""One cycle of the pipeline: finished requests are exported although one of them fails."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from otel_infer.assembly.records.process import Mark, StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config import slo
from otel_infer.config.environment import Config
from otel_infer.export.metrics import sender as metrics_sender_module
from otel_infer.export.sampling import tail_sampler
from otel_infer.gpu.nvml_poller import GpuReading, NvmlPoller
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar import pipeline as pipeline_module
from otel_infer.sidecar.pipeline import Pipeline
from otel_infer.sidecar.recording import file
from tests.support.starts import server
from tests.support.story import (
    AFTER_ALL_EVENTS,
    BASE,
    CLOSED_METRICS_OUTLET,
    MS,
    ClosedMetricsOutlet,
    Story,
    ids,
)


class SpanCollector:
    """An exporter that collects span ids, and fails for `failing_span`."""

    exported_only = True
    taken = 0

    def __init__(self, failing_span: bytes = b"") -> None:
        self.failing_span, self.spans = failing_span, list[bytes]()

    def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        if record.span_id == self.failing_span:
            raise ValueError
        self.spans.append(record.span_id)

    def export_start(self, record: StartRecord) -> None:
        self.spans.append(record.span_id)

    def flush(self, now: int) -> None:
        """Does nothing, because nothing is buffered."""


def make_fed_pipeline(exporter: SpanCollector) -> Pipeline:
    story = Story()
    for name in "abc":
        story.ends(10, story.arrives(0, name))
    pipeline = Pipeline(Config(), MergedReader(), [exporter], None, {}, CLOSED_METRICS_OUTLET, 0)
    pipeline.assembler.feed_events(story.in_order())
    return pipeline


@pytest.mark.parametrize("where", ["exporter", "sampler", "metrics"])
def test_a_failing_request_does_not_affect_the_others(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_span = ids("b")[1]
    exporter = SpanCollector(failing_span if where == "exporter" else b"")
    pipeline = make_fed_pipeline(exporter)

    def failing(original: Any) -> Any:
        def fail_for_span(record: RequestRecord, *args: Any, **more: Any) -> Any:
            if record.span_id == failing_span:
                raise ValueError
            return original(record, *args, **more)

        return fail_for_span

    if where == "sampler":
        monkeypatch.setattr(pipeline.sampler, "make_decision", failing(pipeline.sampler.make_decision))
    if where == "metrics":
        monkeypatch.setattr(pipeline.metrics, "add_request", failing(pipeline.metrics.add_request))
    pipeline.export_requests(AFTER_ALL_EVENTS)
    assert {ids("a")[1], ids("c")[1]} <= set(exporter.spans)
    assert (pipeline.requests, pipeline.count_losses()["requests_not_converted"]) == (3, 1)


def test_exemplars_need_exporters_and_unrecorded_requests_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enabled: list[bool] = []
    for exporters in ([], [SpanCollector()]):
        pipeline = Pipeline(Config(), MergedReader(), exporters, None, {}, None, 0)  # type: ignore[arg-type]
        enabled.append(pipeline.metrics.has_exemplars)
    assert enabled == [False, True]
    monkeypatch.setattr(MergedReader, "read_counts", lambda rings: Counter(unrecorded=7))
    assert pipeline.count_losses()["not_recorded"] == 7


class IdleSender:
    """A sender without batches."""

    accepted = bytes_sent = 0
    lost: ClassVar[dict[str, int]] = {}


@pytest.mark.parametrize(
    ("sender", "spans_by_metric"),
    [
        (IdleSender(), {"infer.startup.duration": 1, "gen_ai.server.request.duration": 2}),
        (None, {"infer.startup.duration": 0, "gen_ai.server.request.duration": 1}),
    ],
    ids=["own exporter", "tracer provider"],
)
def test_exemplars_refer_only_to_exported_spans(sender: Any, spans_by_metric: dict[str, int]) -> None:
    """A tracer provider assigns its own ids to start spans, and drops unsampled spans."""
    story = server()
    for name, flags, until in (("a", events.SAMPLED, 9_501), ("b", 0, 12_000)):
        story.ends(until, story.arrives(9_500, name, flags=flags))
    exporter = SpanCollector()
    settings = Config(keep_unsampled=True, gpu_metrics=False)
    pipeline = Pipeline(settings, MergedReader(), [exporter], sender, {}, CLOSED_METRICS_OUTLET, 0)
    pipeline.assembler.feed_events(story.in_order())
    pipeline.export_requests(AFTER_ALL_EVENTS, final=True)
    exported = pipeline._snapshot_metrics().resource_metrics[0].scope_metrics[0].metrics
    exemplars = {
        metric.name: {exemplar.span_id for point in metric.data.data_points for exemplar in point.exemplars}
        for metric in exported
        if metric.name in spans_by_metric
    }
    assert {name: len(spans) for name, spans in exemplars.items()} == spans_by_metric
    assert (ids("b")[1] in exporter.spans) == (sender is not None)


@pytest.mark.parametrize("metrics_sender", [None, CLOSED_METRICS_OUTLET], ids=["no sender", "sender"])
def test_metrics_are_counted_only_with_a_metrics_sender(metrics_sender: Any) -> None:
    story, exporter = server(), SpanCollector()
    story.ends(12_000, story.arrives(9_500, "a"))
    story.paused(9_900, 10_000)
    pipeline = Pipeline(Config(), MergedReader(), [exporter], None, {}, metrics_sender, 0)
    pipeline.assembler.feed_events(story.in_order())
    pipeline.export_requests(AFTER_ALL_EVENTS, final=True)
    exported = {
        metric.name for metric in pipeline.metrics.collect(0).resource_metrics[0].scope_metrics[0].metrics
    }
    expected = {"gen_ai.server.request.duration", "infer.pause.duration", "infer.startup.duration"}
    assert expected & exported == (expected if metrics_sender else set())
    assert ids("a")[1] in exporter.spans


@pytest.mark.parametrize(("temporality", "lost"), [("delta", 2), ("cumulative", 0)])
def test_failed_delta_exports_count_as_losses(
    monkeypatch: pytest.MonkeyPatch, temporality: str, lost: int
) -> None:
    class FailingExporter:
        def export(self, data: Any) -> None:
            raise OSError("refused")

    monkeypatch.setattr(
        metrics_sender_module, "make_metric_exporter", lambda protocol, compression: FailingExporter()
    )
    sender = metrics_sender_module.MetricsSender("grpc")
    pipeline = Pipeline(Config(temporality=temporality), MergedReader(), [], None, {}, sender, 0)
    for _ in range(2):
        sender.put(None, is_delta=temporality == "delta")
        sender._export_collection(None)
    assert pipeline.count_losses().get("metrics_refused") == lost
    assert not pipeline.delivery.is_accepted(lost)


class RefusingCollector:
    """The SDK's metric exporter with a collector that answers with these results."""

    def __init__(self, *accepts: bool) -> None:
        self._accepts = list(accepts)
        self.accepted: list[Any] = []

    def export(self, data: Any) -> None:
        if not self._accepts.pop(0):
            raise OSError("refused")
        self.accepted.append(data)

    def shutdown(self) -> None:
        """Does nothing."""

    def read_lost(self) -> dict[str, float]:
        """Returns the losses by reason, summed over the accepted collections."""
        lost: Counter[str] = Counter()
        for data in self.accepted:
            for metric in data.resource_metrics[0].scope_metrics[0].metrics:
                if metric.name == "infer.self.lost":
                    for point in metric.data.data_points:
                        lost[point.attributes["infer.loss.reason"]] += point.value
        return lost


def test_refusals_of_deltas_are_in_the_next_accepted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the count of what was refused would be refused too, and so would the other losses."""
    collector = RefusingCollector(True, False, False, False, True, True)
    monkeypatch.setattr(
        metrics_sender_module, "make_metric_exporter", lambda protocol, compression: collector
    )
    sender = metrics_sender_module.MetricsSender("grpc")
    sender.start()
    rings = MergedReader()
    rings.has_seen_rings = True
    settings = Config(gpu_metrics=False, temporality="delta")
    pipeline = Pipeline(settings, rings, [], None, {"service.name": "chat"}, sender, 0)
    for number in range(6):
        pipeline.failed += number == 2
        assert pipeline.flush(10)
    lost = collector.read_lost()
    assert (lost["metrics_refused"], lost["requests_not_converted"]) == (3, 1)
    pipeline.close(0.0)


class ServiceNameCollector(ClosedMetricsOutlet):
    """A metrics sender that is always free and collects the service names."""

    def __init__(self) -> None:
        self.names: list[Any] = []

    def can_accept(self, *, behind: bool) -> bool:
        return True

    def put(self, data: Any, *, is_delta: bool) -> None:
        self.names.append(data.resource_metrics[0].resource.attributes["service.name"])


def make_pipeline(resource: dict[str, events.Value]) -> tuple[Pipeline, ServiceNameCollector]:
    sender: Any = ServiceNameCollector()
    rings = MergedReader()
    rings.has_seen_rings = True
    return Pipeline(Config(gpu_metrics=False), rings, [], None, resource, sender, 0), sender


class SlowCollector:
    """The SDK's metric exporter with a collector that answers when `may_answer` is released."""

    def __init__(self) -> None:
        self.began, self.may_answer = threading.Semaphore(0), threading.Semaphore(0)
        self.sums: list[float] = []

    def export(self, data: Any) -> None:
        self.began.release()
        assert self.may_answer.acquire(timeout=10)
        metrics = {metric.name: metric.data for metric in data.resource_metrics[0].scope_metrics[0].metrics}
        marks = metrics.get("infer.marks")
        self.sums.append(sum(point.value for point in marks.data_points) if marks else 0)

    def shutdown(self) -> None:
        self.may_answer.release()


@pytest.fixture(params=["cumulative", "delta"])
def slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Pipeline, SlowCollector]:
    """Returns a pipeline whose slow collector is processing the first export."""
    collector = SlowCollector()
    monkeypatch.setattr(
        metrics_sender_module, "make_metric_exporter", lambda protocol, compression: collector
    )
    metrics_sender = metrics_sender_module.MetricsSender("grpc")
    metrics_sender.start()
    rings = MergedReader()
    rings.has_seen_rings = True
    settings = Config(gpu_metrics=False, temporality=request.param)
    pipeline = Pipeline(settings, rings, [], None, {"service.name": "chat"}, metrics_sender, 0)
    count_marks(pipeline, 1)
    pipeline.run_cycle(BASE)
    assert collector.began.acquire(timeout=10)
    return pipeline, collector


def count_marks(pipeline: Pipeline, times: int) -> None:
    pipeline.metrics.add_marks([Mark(0, 1, "allocator_oom", times)])


def test_a_flush_during_an_export_sends_later_counts(
    slow: tuple[Pipeline, SlowCollector],
) -> None:
    """With a timeout of 0 it does not wait, because rings fill during a wait."""
    pipeline, collector = slow
    count_marks(pipeline, 2)
    assert not pipeline.flush(0.0)
    collector.may_answer.release()
    assert collector.began.acquire(timeout=10)
    assert not pipeline.is_sent()
    collector.may_answer.release()
    assert pipeline.is_sent(10)
    assert sum(collector.sums[-1:] if not pipeline.metrics.is_delta else collector.sums) == 3
    pipeline.close(1)


def test_repeated_flushes_queue_a_limited_number_of_snapshots(slow: tuple[Pipeline, SlowCollector]) -> None:
    """Cumulative snapshots replace each other; at most `MAX_PENDING` delta snapshots wait."""
    pipeline, collector = slow
    for _ in range(50):
        count_marks(pipeline, 1)
        assert not pipeline.flush(0.0)
    for _ in range(60):
        collector.may_answer.release()
    if pipeline.metrics.is_delta:
        # A delta cannot replace another, so `is_sent` reports that some are unsent.
        assert not pipeline.is_sent(10)
        assert len(collector.sums) == 1 + metrics_sender_module.MAX_PENDING
        assert pipeline.flush(10)
        assert sum(collector.sums) == 51
    else:
        assert pipeline.is_sent(10)
        assert collector.sums == [1, 51]
    pipeline.close(1)


def test_final_metrics_are_sent_after_the_export_underway(
    slow: tuple[Pipeline, SlowCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, collector = slow
    count_marks(pipeline, 2)
    pipeline.run_cycle(BASE + 1, final=True)
    count_marks(pipeline, 4)
    threading.Timer(0.1, lambda: [collector.may_answer.release() for _ in range(3)]).start()
    pipeline.close(10)
    assert collector.sums == ([1, 2, 4] if pipeline.metrics.is_delta else [1, 7])


def test_unsent_final_metrics_are_logged(
    slow: tuple[Pipeline, SlowCollector], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline, collector = slow
    monkeypatch.setattr(pipeline_module, "FINAL_METRICS_S", 0.0)
    pipeline.close(0.0)
    assert "the last metrics were not sent" in caplog.text
    for _ in range(3):
        collector.may_answer.release()


def test_metrics_wait_until_the_service_name_is_known() -> None:
    """Under another name they would look like a second server that disappears, which raises an alert."""
    pipeline, sender = make_pipeline({})
    pipeline.run_cycle(BASE)
    pipeline.flush(0.0)
    assert sender.names == []
    story = Story()
    a = story.arrives(0, "a")
    story.submitted(5, a)
    story.step(10, 20, [a], {a: 4})
    story.ends(30, a)
    pipeline.assembler.feed_events(story.in_order())
    pipeline.export_requests(AFTER_ALL_EVENTS)
    pipeline.run_cycle(AFTER_ALL_EVENTS)
    assert sender.names == ["toy"]


@pytest.mark.parametrize("resource", [{}, {"service.name": "chat"}])
def test_metrics_without_an_engine_are_sent(resource: dict[str, events.Value]) -> None:
    pipeline, sender = make_pipeline(resource)
    pipeline.run_cycle(BASE)
    assert sender.names == list(resource.values())
    pipeline.run_cycle(BASE + 1, final=True)
    assert sender.names[-1] == resource.get("service.name", "unknown_service:python")


@pytest.mark.parametrize(("provider", "model"), [("torch", "bert"), ("custom", "_OTHER")])
def test_only_a_model_served_by_torch_is_named(provider: str, model: str) -> None:
    story = Story()
    a = story.arrives(0, "a")
    for key, value in (("gen_ai.provider.name", provider), ("gen_ai.request.model", "bert")):
        story.add_request_event(a, events.AttributeSet(BASE, key, value))
    story.ends(30, a)
    pipeline = Pipeline(Config(), MergedReader(), [], None, {}, CLOSED_METRICS_OUTLET, 0)
    pipeline.assembler.feed_events(story.in_order())
    pipeline.export_requests(AFTER_ALL_EVENTS)
    exported = pipeline._snapshot_metrics().resource_metrics[0].scope_metrics[0].metrics
    (durations,) = [metric for metric in exported if metric.name == "gen_ai.server.request.duration"]
    assert [point.attributes["gen_ai.request.model"] for point in durations.data.data_points] == [model]


def test_gauges_of_an_ended_process_are_removed() -> None:
    pipeline = make_fed_pipeline(SpanCollector())
    pipeline.assembler.processes.set_waiting(1, 0, events.WaitingSeen(5, "grammar", 3))
    pipeline.assembler.processes.set_hooks(1, 0, events.HooksReported(5, "vllm", 1, 2))
    names = ("infer.engine.waiting", "infer.self.hooks")

    def has_points() -> list[bool]:
        exported = pipeline._snapshot_metrics().resource_metrics[0].scope_metrics[0].metrics
        return [name in {metric.name for metric in exported} for name in names]

    assert has_points() == [True, True]
    pipeline.assembler.processes.remove_process(1)
    assert has_points() == [False, False]


def test_a_request_lists_throttle_reasons_during_its_time() -> None:
    records: list[RequestRecord] = []

    class RecordCollector(SpanCollector):
        def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
            records.append(record)

    story = Story()
    for name, (arrived, ended) in {"a": (0, 1_000), "b": (30_000, 31_000), "c": (60_000, 61_000)}.items():
        story.ends(ended, story.arrives(arrived, name))
    pipeline = Pipeline(Config(), MergedReader(), [RecordCollector()], None, {}, None, 0)
    poller = NvmlPoller()  # not started: the test provides its readings
    for at_ms, reason, value in (
        (28_000, "hw_thermal", 1.0),
        (30_500, "power_cap", 1.0),
        (58_000, "power_cap", 0.0),
    ):
        reading = GpuReading("GPU-1", "a", 0, "", "throttled", reason, value)
        poller.record_readings(round(BASE + at_ms * MS), [reading])
    throttled = [RecordedEvent(0, 0, event) for event in poller.drain_events()]
    pipeline.assembler.feed_events(
        sorted([*story.in_order(), *throttled], key=lambda recorded: recorded.event.at)
    )
    pipeline.export_requests(AFTER_ALL_EVENTS, final=True)
    assert [record.gpu_throttled for record in records] == ["", "hw_thermal,power_cap", ""]


def test_a_full_disk_does_not_prevent_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_close(writer: file.RecordingWriter) -> None:
        raise OSError(28, "No space left on device")

    pipeline = Pipeline(Config(tape=str(tmp_path / "a.tape")), MergedReader(), [], None, {}, None, 0)
    closed: list[str] = []
    monkeypatch.setattr(file.RecordingWriter, "close", fail_close)
    monkeypatch.setattr(pipeline._request_log, "close", lambda: closed.append("log"))
    pipeline.close(0.0)
    assert closed == ["log"]
    assert "No space left on device" in caplog.text


def test_a_tape_is_readable_up_to_last_sync(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    pipeline = Pipeline(Config(tape=str(path)), MergedReader(), [], None, {}, None, 0)
    recorded_events = [RecordedEvent(1, 7, events.TokenReached(5))]
    pipeline._record_events(recorded_events, 10)
    pipeline._record_events([], 10 + file.SYNC_NS)
    assert [
        recorded for batch in file.read_batches(path) for recorded in batch.recorded_events
    ] == recorded_events
    pipeline.close(0.0)


def test_a_tape_states_the_objectives(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    Pipeline(Config(tape=str(path), slo="e2e=1s"), MergedReader(), [], None, {}, None, 0).close(0.0)
    assert file.read_objectives(path) == slo.parse_objectives("e2e=1s")
