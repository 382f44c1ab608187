"""One wake of the reading side: what is concluded is handed on, whatever becomes of one of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from otel_infer.assembly.records.process import Mark, StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config.environment import Config
from otel_infer.export.metrics import sender as outlets
from otel_infer.export.sampling import tail_sampler
from otel_infer.gpu.nvml_poller import GpuReading, NvmlPoller
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar import pipeline as pipeline_module
from otel_infer.sidecar.pipeline import Pipeline
from otel_infer.sidecar.recording import file
from tests.support.starts import server
from tests.support.story import BASE, COUNTED, LATER, MS, Story, Uncollected, ids


class Taken:
    """A sink that remembers, and cannot describe one of them."""

    exported_only = True

    def __init__(self, bad: bytes = b"") -> None:
        self.bad, self.spans = bad, list[bytes]()

    def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        if record.span_id == self.bad:
            raise ValueError
        self.spans.append(record.span_id)

    def export_start(self, record: StartRecord) -> None:
        self.spans.append(record.span_id)

    def flush(self, now: int) -> None:
        """Nothing waits here."""


def fed(sink: Taken) -> Pipeline:
    story = Story()
    for name in "abc":
        story.ends(10, story.arrives(0, name))
    pipeline = Pipeline(Config(), MergedReader(), [sink], None, {}, COUNTED, 0)
    pipeline.assembler.feed_events(story.in_order())
    return pipeline


@pytest.mark.parametrize("where", ["sink", "keeper", "metrics"])
def test_one_request_that_cannot_be_described_costs_no_other(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = ids("b")[1]
    sink = Taken(bad if where == "sink" else b"")
    pipeline = fed(sink)

    def refusing(original: Any) -> Any:
        def refuse(record: RequestRecord, *args: Any, **more: Any) -> Any:
            if record.span_id == bad:
                raise ValueError
            return original(record, *args, **more)

        return refuse

    if where == "keeper":
        monkeypatch.setattr(pipeline.sampler, "make_decision", refusing(pipeline.sampler.make_decision))
    if where == "metrics":
        monkeypatch.setattr(pipeline.metrics, "add_request", refusing(pipeline.metrics.add_request))
    pipeline.export_requests(LATER)
    assert {ids("a")[1], ids("c")[1]} <= set(sink.spans)
    assert (pipeline.requests, pipeline.count_losses()["requests_not_converted"]) == (3, 1)


def test_without_spans_there_is_no_exemplar_and_what_has_no_room_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[bool] = []
    for sinks in ([], [Taken()]):
        pipeline = Pipeline(Config(), MergedReader(), sinks, None, {}, None, 0)  # type: ignore[arg-type]
        said.append(pipeline.metrics._exemplars_enabled)
    assert said == [False, True]
    monkeypatch.setattr(MergedReader, "count_unrecorded", lambda rings: 7)
    assert pipeline.count_losses()["not_recorded"] == 7


class Sent:
    """A sender that has nothing to do."""

    accepted = bytes_sent = 0
    lost: ClassVar[dict[str, int]] = {}


@pytest.mark.parametrize(
    ("sender", "named"),
    [
        (Sent(), {"infer.startup.duration": 1, "gen_ai.server.request.duration": 2}),
        (None, {"infer.startup.duration": 0, "gen_ai.server.request.duration": 1}),
    ],
    ids=["our own spans", "a provider's"],
)
def test_exemplars_name_no_span_that_a_provider_does_not_have(sender: Any, named: dict[str, int]) -> None:
    """It gives starts ids of its own, and records nothing of what it does not sample."""
    story = server()
    for name, flags, until in (("a", events.SAMPLED, 9_501), ("b", 0, 12_000)):
        story.ends(until, story.arrives(9_500, name, flags=flags))
    sink = Taken()
    settings = Config(keep_unsampled=True, gpu_metrics=False)
    pipeline = Pipeline(settings, MergedReader(), [sink], sender, {}, COUNTED, 0)
    pipeline.assembler.feed_events(story.in_order())
    pipeline.export_requests(LATER, final=True)
    told = pipeline._snapshot_metrics().resource_metrics[0].scope_metrics[0].metrics
    exemplars = {
        metric.name: {one.span_id for point in metric.data.data_points for one in point.exemplars}
        for metric in told
        if metric.name in named
    }
    assert {name: len(spans) for name, spans in exemplars.items()} == named
    assert (ids("b")[1] in sink.spans) == (sender is not None)


@pytest.mark.parametrize("outlet", [None, COUNTED], ids=["nobody takes them", "somebody does"])
def test_metrics_are_counted_for_whoever_takes_them(outlet: Any) -> None:
    story, sink = server(), Taken()
    story.ends(12_000, story.arrives(9_500, "a"))
    story.paused(9_900, 10_000)
    pipeline = Pipeline(Config(), MergedReader(), [sink], None, {}, outlet, 0)
    pipeline.assembler.feed_events(story.in_order())
    pipeline.export_requests(LATER, final=True)
    told = {
        metric.name for metric in pipeline.metrics.collect(0).resource_metrics[0].scope_metrics[0].metrics
    }
    counted = {"gen_ai.server.request.duration", "infer.pause.duration", "infer.startup.duration"}
    assert counted & told == (counted if outlet else set())
    assert ids("a")[1] in sink.spans


@pytest.mark.parametrize(("temporality", "refused"), [("delta", 2), ("cumulative", None)])
def test_deltas_that_nobody_took_are_a_loss(temporality: str, refused: int | None) -> None:
    class Outlet:
        failed_exports = 2

    outlet: Any = Outlet()
    pipeline = Pipeline(Config(temporality=temporality), MergedReader(), [], None, {}, outlet, 0)
    assert pipeline.count_losses().get("metrics_refused") == refused


class Collected(Uncollected):
    """An outlet that remembers what services the metrics were of. Always free."""

    def __init__(self) -> None:
        self.names: list[Any] = []

    def can_accept(self, *, behind: bool) -> bool:
        return True

    def put(self, data: Any, *, is_delta: bool) -> None:
        self.names.append(data.resource_metrics[0].resource.attributes["service.name"])


def collecting(resource: dict[str, events.Value]) -> tuple[Pipeline, Collected]:
    outlet: Any = Collected()
    rings = MergedReader()
    rings.has_seen_rings = True
    return Pipeline(Config(gpu_metrics=False), rings, [], None, resource, outlet, 0), outlet


class Slow:
    """The SDK's exporter before a collector that answers when it is told to."""

    def __init__(self) -> None:
        self.began, self.may_answer = threading.Semaphore(0), threading.Semaphore(0)
        self.sums: list[float] = []

    def export(self, data: Any) -> None:
        self.began.release()
        assert self.may_answer.acquire(timeout=10)
        metrics = {metric.name: metric.data for metric in data.resource_metrics[0].scope_metrics[0].metrics}
        kept = metrics.get("infer.marks")
        self.sums.append(kept.data_points[0].value if kept else 0)


@pytest.fixture(params=["cumulative", "delta"])
def slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Pipeline, Slow]:
    """A pipeline whose collector is slow, and is at the first metrics that it got."""
    collector = Slow()
    monkeypatch.setattr(outlets, "make_metric_exporter", lambda protocol: collector)
    sends = outlets.MetricsSender("grpc")
    sends.start()
    rings = MergedReader()
    rings.has_seen_rings = True
    settings = Config(gpu_metrics=False, temporality=request.param)
    pipeline = Pipeline(settings, rings, [], None, {"service.name": "chat"}, sends, 0)
    counted(pipeline, 1)
    pipeline.run_cycle(BASE)
    assert collector.began.acquire(timeout=10)
    return pipeline, collector


def counted(pipeline: Pipeline, times: int) -> None:
    pipeline.metrics.add_marks([Mark(0, 1, "allocator_oom", times)])


def test_a_flush_sends_what_was_counted_while_a_collector_was_at_other_metrics(
    slow: tuple[Pipeline, Slow],
) -> None:
    """It keeps nobody waiting who may not wait: a reader's rings fill meanwhile."""
    pipeline, collector = slow
    counted(pipeline, 2)
    assert not pipeline.flush(0.0)
    collector.may_answer.release()
    assert collector.began.acquire(timeout=10)
    assert not pipeline.is_sent()
    collector.may_answer.release()
    assert pipeline.is_sent(10)
    assert sum(collector.sums[-1:] if not pipeline.metrics.is_delta else collector.sums) == 3
    pipeline.close(1)


def test_whoever_flushes_again_has_no_pile_of_the_same_metrics_sent(slow: tuple[Pipeline, Slow]) -> None:
    pipeline, collector = slow
    for _ in range(50):
        counted(pipeline, 1)
        assert not pipeline.flush(0.0)
    for _ in range(60):
        collector.may_answer.release()
    if pipeline.metrics.is_delta:
        # They cannot take each other's place: it is said that some are left behind.
        assert not pipeline.is_sent(10)
        assert len(collector.sums) == 1 + outlets.MAX_PENDING
        assert pipeline.flush(10)
        assert sum(collector.sums) == 51
    else:
        assert pipeline.is_sent(10)
        assert collector.sums == [1, 51]
    pipeline.close(1)


def test_the_last_metrics_are_sent_behind_those_that_are_still_being_sent(
    slow: tuple[Pipeline, Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, collector = slow
    counted(pipeline, 2)
    pipeline.run_cycle(BASE + 1, final=True)
    counted(pipeline, 4)
    threading.Timer(0.1, lambda: [collector.may_answer.release() for _ in range(3)]).start()
    pipeline.close(10)
    assert collector.sums == ([1, 2, 4] if pipeline.metrics.is_delta else [1, 7])


def test_metrics_that_a_collector_does_not_take_in_time_are_left_behind_with_a_word(
    slow: tuple[Pipeline, Slow], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline, collector = slow
    monkeypatch.setattr(pipeline_module, "FINAL_METRICS_S", 0.0)
    pipeline.close(0.0)
    assert "the last metrics were not sent" in caplog.text
    for _ in range(3):
        collector.may_answer.release()


def test_metrics_wait_until_it_is_known_whose_they_are() -> None:
    """Under another name they would be another server's, that a moment later is gone: an alert says so."""
    pipeline, outlet = collecting({})
    pipeline.run_cycle(BASE)
    pipeline.flush(0.0)
    assert outlet.names == []
    story = Story()
    a = story.arrives(0, "a")
    story.submitted(5, a)
    story.step(10, 20, [a], {a: 4})
    story.ends(30, a)
    pipeline.assembler.feed_events(story.in_order())
    pipeline.export_requests(LATER)
    pipeline.run_cycle(LATER)
    assert outlet.names == ["toy"]


@pytest.mark.parametrize("resource", [{}, {"service.name": "chat"}])
def test_metrics_of_whoever_has_no_engine_go_all_the_same(resource: dict[str, events.Value]) -> None:
    pipeline, outlet = collecting(resource)
    pipeline.run_cycle(BASE)
    assert outlet.names == list(resource.values())
    pipeline.run_cycle(BASE + 1, final=True)
    assert outlet.names[-1] == resource.get("service.name", "unknown_service:python")


@pytest.mark.parametrize(("provider", "named"), [("torch", "bert"), ("custom", "_OTHER")])
def test_a_model_that_torch_serves_is_named_and_one_that_a_caller_may_have_named_is_not(
    provider: str, named: str
) -> None:
    story = Story()
    a = story.arrives(0, "a")
    for key, value in (("gen_ai.provider.name", provider), ("gen_ai.request.model", "bert")):
        story.state(a, events.AttributeSet(BASE, key, value))
    story.ends(30, a)
    pipeline = Pipeline(Config(), MergedReader(), [], None, {}, COUNTED, 0)
    pipeline.assembler.feed_events(story.in_order())
    pipeline.export_requests(LATER)
    told = pipeline._snapshot_metrics().resource_metrics[0].scope_metrics[0].metrics
    (durations,) = [metric for metric in told if metric.name == "gen_ai.server.request.duration"]
    assert [point.attributes["gen_ai.request.model"] for point in durations.data.data_points] == [named]


def test_who_waited_in_a_process_that_is_gone_waits_no_more() -> None:
    pipeline = fed(Taken())
    pipeline.assembler.processes.set_waiting(1, 0, events.WaitingSeen(5, "grammar", 3))
    pipeline.assembler.processes.set_hooks(1, 0, events.HooksReported(5, "vllm", 1, 2))
    names = ("infer.engine.waiting", "infer.self.hooks")

    def points() -> list[bool]:
        told = pipeline._snapshot_metrics().resource_metrics[0].scope_metrics[0].metrics
        return [name in {metric.name for metric in told} for name in names]

    assert points() == [True, True]
    pipeline.assembler.processes.remove_process(1)
    assert points() == [False, False]


def test_a_request_says_why_clocks_were_held_down_when_it_came_or_while_it_was_there() -> None:
    taken: list[RequestRecord] = []

    class Records(Taken):
        def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
            taken.append(record)

    story = Story()
    for name, (arrived, ended) in {"a": (0, 1_000), "b": (30_000, 31_000), "c": (60_000, 61_000)}.items():
        story.ends(ended, story.arrives(arrived, name))
    pipeline = Pipeline(Config(), MergedReader(), [Records()], None, {}, None, 0)
    poller = NvmlPoller()  # not started: what it reads is given here
    for at_ms, reason, value in (
        (28_000, "hw_thermal", 1.0),
        (30_500, "power_cap", 1.0),
        (58_000, "power_cap", 0.0),
    ):
        reading = GpuReading("GPU-1", "a", 0, "", "throttled", reason, value)
        poller.record_readings(round(BASE + at_ms * MS), [reading])
    throttled = [RecordedEvent(0, 0, event) for event in poller.drain_events()]
    pipeline.assembler.feed_events(sorted([*story.in_order(), *throttled], key=lambda one: one.event.at))
    pipeline.export_requests(LATER, final=True)
    assert [record.gpu_throttled for record in taken] == ["", "hw_thermal,power_cap", ""]


def test_a_disk_that_is_full_at_the_end_keeps_nothing_from_being_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(writer: file.RecordingWriter) -> None:
        raise OSError(28, "No space left on device")

    pipeline = Pipeline(Config(tape=str(tmp_path / "a.tape")), MergedReader(), [], None, {}, None, 0)
    closed: list[str] = []
    monkeypatch.setattr(file.RecordingWriter, "close", full)
    monkeypatch.setattr(pipeline._request_log, "close", lambda: closed.append("log"))
    pipeline.close(0.0)
    assert closed == ["log"]
    assert "No space left on device" in caplog.text


def test_a_tape_of_a_server_that_is_killed_has_all_but_the_last_seconds(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    pipeline = Pipeline(Config(tape=str(path)), MergedReader(), [], None, {}, None, 0)
    said = [RecordedEvent(1, 7, events.TokenReached(5))]
    pipeline._record_events(said, 10)
    pipeline._record_events([], 10 + file.SYNC_NS)
    assert [fact for passage in file.read_batches(path) for fact in passage.recorded_events] == said
    pipeline.close(0.0)
