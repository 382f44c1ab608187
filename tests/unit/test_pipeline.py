"""One wake of the reading side: what is concluded is handed on, whatever becomes of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from otel_infer import facts, keeper, tape
from otel_infer.config import Config
from otel_infer.facts import RingFact
from otel_infer.gpu.readings import Poller
from otel_infer.pipeline import Pipeline
from otel_infer.records import GpuReading, RequestRecord, StartRecord
from otel_infer.ring.folder import Rings
from tests.story import BASE, LATER, MS, Story, ids


class Taken:
    """A sink that remembers, and cannot describe one of them."""

    exported_only = True

    def __init__(self, bad: bytes = b"") -> None:
        self.bad, self.spans = bad, list[bytes]()

    def request(self, record: RequestRecord, decision: keeper.Decision) -> None:
        if record.span_id == self.bad:
            raise ValueError
        self.spans.append(record.span_id)

    def start(self, record: StartRecord) -> None:
        self.spans.append(record.span_id)

    def flush(self, now: int) -> None:
        """Nothing waits here."""


def fed(sink: Taken) -> Pipeline:
    story = Story()
    for name in "abc":
        story.ends(10, story.arrives(0, name))
    pipeline = Pipeline(Config(), Rings(), [sink], None, {}, None, 0)
    pipeline.assembler.feed(story.in_order())
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
        monkeypatch.setattr(pipeline.keeper, "decide", refusing(pipeline.keeper.decide))
    if where == "metrics":
        monkeypatch.setattr(pipeline.metrics, "request", refusing(pipeline.metrics.request))
    pipeline.conclude(LATER)
    assert {ids("a")[1], ids("c")[1]} <= set(sink.spans)
    assert (pipeline.requests, pipeline.losses()["requests_not_described"]) == (3, 1)


def test_without_spans_there_is_no_exemplar_and_what_has_no_room_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[bool] = []
    for sinks in ([], [Taken()]):
        pipeline = Pipeline(Config(), Rings(), sinks, None, {}, None, 0)  # type: ignore[arg-type]
        said.append(pipeline.metrics._exemplars)
    assert said == [False, True]
    monkeypatch.setattr(Rings, "unrecorded", lambda rings: 7)
    assert pipeline.losses()["not_recorded"] == 7


@pytest.mark.parametrize(("temporality", "refused"), [("delta", 2), ("cumulative", None)])
def test_deltas_that_nobody_took_are_a_loss(temporality: str, refused: int | None) -> None:
    class Outlet:
        failed = 2

    outlet: Any = Outlet()
    pipeline = Pipeline(Config(temporality=temporality), Rings(), [], None, {}, outlet, 0)
    assert pipeline.losses().get("collections_refused") == refused


class Collected:
    """An outlet that remembers what services the metrics were of. Always free."""

    free, failed = True, 0

    def __init__(self) -> None:
        self.names: list[Any] = []

    def put(self, data: Any) -> None:
        self.names.append(data.resource_metrics[0].resource.attributes["service.name"])

    def wait(self, timeout: float) -> bool:
        return True

    close = wait


def collecting(resource: dict[str, facts.Value]) -> tuple[Pipeline, Collected]:
    outlet: Any = Collected()
    rings = Rings()
    rings.seen_any = True
    return Pipeline(Config(gpu_metrics=False), rings, [], None, resource, outlet, 0), outlet


def test_metrics_wait_until_it_is_known_whose_they_are() -> None:
    """Under another name they would be another server's, that a moment later is gone: an alert says so."""
    pipeline, outlet = collecting({})
    pipeline.wake(BASE)
    pipeline.flush(0.0)
    assert outlet.names == []
    story = Story()
    a = story.arrives(0, "a")
    story.submitted(5, a)
    story.step(10, 20, [a], {a: 4})
    story.ends(30, a)
    pipeline.assembler.feed(story.in_order())
    pipeline.conclude(LATER)
    pipeline.wake(LATER)
    assert outlet.names == ["toy"]


@pytest.mark.parametrize("resource", [{}, {"service.name": "chat"}])
def test_metrics_of_whoever_has_no_engine_go_all_the_same(resource: dict[str, facts.Value]) -> None:
    pipeline, outlet = collecting(resource)
    pipeline.wake(BASE)
    assert outlet.names == list(resource.values())
    pipeline.wake(BASE + 1, final=True)
    assert outlet.names[-1] == resource.get("service.name", "unknown_service:python")


@pytest.mark.parametrize(("provider", "named"), [("torch", "bert"), ("custom", "_OTHER")])
def test_a_model_that_torch_serves_is_named_and_one_that_a_caller_may_have_named_is_not(
    provider: str, named: str
) -> None:
    story = Story()
    a = story.arrives(0, "a")
    for key, value in (("gen_ai.provider.name", provider), ("gen_ai.request.model", "bert")):
        story.state(a, facts.AttributeSet(BASE, key, value))
    story.ends(30, a)
    pipeline = Pipeline(Config(), Rings(), [], None, {}, None, 0)
    pipeline.assembler.feed(story.in_order())
    pipeline.conclude(LATER)
    told = pipeline._counted().resource_metrics[0].scope_metrics[0].metrics
    (durations,) = [metric for metric in told if metric.name == "gen_ai.server.request.duration"]
    assert [point.attributes["gen_ai.request.model"] for point in durations.data.data_points] == [named]


def test_who_waited_in_a_process_that_is_gone_waits_no_more() -> None:
    pipeline = fed(Taken())
    pipeline.assembler.processes.waited(1, 0, facts.WaitingSeen(5, "grammar", 3))
    pipeline.assembler.processes.hooked(1, 0, facts.HooksReported(5, "vllm", 1, 2))
    names = ("infer.engine.waiting", "infer.self.hooks")

    def points() -> list[bool]:
        told = pipeline._counted().resource_metrics[0].scope_metrics[0].metrics
        return [name in {metric.name for metric in told} for name in names]

    assert points() == [True, True]
    pipeline.assembler.processes.died(1)
    assert points() == [False, False]


def test_a_request_says_why_clocks_were_held_down_when_it_came_or_while_it_was_there() -> None:
    taken: list[RequestRecord] = []

    class Records(Taken):
        def request(self, record: RequestRecord, decision: keeper.Decision) -> None:
            taken.append(record)

    story = Story()
    for name, (arrived, ended) in {"a": (0, 1_000), "b": (30_000, 31_000), "c": (60_000, 61_000)}.items():
        story.ends(ended, story.arrives(arrived, name))
    pipeline = Pipeline(Config(), Rings(), [Records()], None, {}, None, 0)
    pipeline._gpus = Poller()  # not started: what it reads is said here
    for at_ms, reason, value in (
        (28_000, "hw_thermal", 1.0),
        (30_500, "power_cap", 1.0),
        (58_000, "power_cap", 0.0),
    ):
        pipeline._gpus.note(
            round(BASE + at_ms * MS), [GpuReading("GPU-1", "a", 0, "", "throttled", reason, value)]
        )
    pipeline.assembler.feed(story.in_order())
    pipeline.conclude(LATER, final=True)
    assert [record.throttled for record in taken] == ["", "hw_thermal,power_cap", ""]


def test_a_disk_that_is_full_at_the_end_keeps_nothing_from_being_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(writer: tape.TapeWriter) -> None:
        raise OSError(28, "No space left on device")

    pipeline = Pipeline(Config(tape=str(tmp_path / "a.tape")), Rings(), [], None, {}, None, 0)
    closed: list[str] = []
    monkeypatch.setattr(tape.TapeWriter, "close", full)
    monkeypatch.setattr(pipeline._log, "close", lambda: closed.append("log"))
    pipeline.close(0.0)
    assert closed == ["log"]
    assert "No space left on device" in caplog.text


def test_a_tape_of_a_server_that_is_killed_has_all_but_the_last_seconds(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    pipeline = Pipeline(Config(tape=str(path)), Rings(), [], None, {}, None, 0)
    said = [RingFact(1, 7, facts.TokenReached(5))]
    pipeline._save(said, 10)
    pipeline._save([], 10 + tape.SYNC_NS)
    assert [fact for passage in tape.read(path) for fact in passage.said] == said
    pipeline.close(0.0)
