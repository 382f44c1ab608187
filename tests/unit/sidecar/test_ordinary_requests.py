"""Ordinary requests, whose shape is known, export the same bytes and numbers as requests that become records."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer import semconv
from otel_infer.config.environment import Config
from otel_infer.export.spans.exporter import OtlpSpanExporter
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar import ordinary_requests
from otel_infer.sidecar.ordinary_requests import OrdinaryRequest
from otel_infer.sidecar.pipeline import Pipeline
from tests.support.story import AFTER_ALL_EVENTS, CLOSED_METRICS_OUTLET, MS

NAMES = (
    "tokenize", "queue", "forward", "forward", "queue wait", "batch wait", "accept", "my own", "prepare media",
    "fetch media", "ingress", "decode",
)  # fmt: skip
OWN = events.SAMPLED | events.OWN_SERVER_SPAN


class Served(NamedTuple):
    """One request: lengths and distances in ms. `stages`: (name, distance, length, items). `pauses`: before its end.

    `batch`: the requests of its batch, 0 = it is in none; `links`: to others of them.
    """

    flags: int = OWN
    operation: str = ""
    name: str = "POST"
    parent: bytes = bytes(8)
    stages: tuple[tuple[str, float, float, int], ...] = ()
    response: float = 0.0
    rest: float = 1.0
    route: str = "/embed"
    names_operation: bool = False
    ended: tuple[Any, ...] = (events.OK, "", 200, 1, 1000, 0)
    extra: Any = None
    pauses: tuple[tuple[str, float], ...] = ()
    batch: Any = 0
    links: int = 0
    rpc_method: str = ""


class BatchCollector:
    """A sender that keeps the batches."""

    accepted = bytes_sent = 0
    lost: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.content: list[tuple[bytes, int, int]] = []

    def put(self, batch: Any) -> None:
        self.content.append((b"".join(batch.parts), batch.spans, batch.requests))


def record_events(requests: list[Served]) -> list[RecordedEvent]:
    """Returns the events of requests that follow each other, with ids and times of their own."""
    rng, recorded, at = random.Random(1), list[RecordedEvent](), 10**12
    for handle, served in enumerate(requests, 1):
        at += 5 * MS

        def add(event: Any, handle: int = handle) -> None:
            recorded.append(RecordedEvent(1, handle, event))

        ids = rng.randbytes(16), rng.randbytes(8), served.parent, rng.randbytes(8)
        add(
            events.RequestArrived(
                at, 10**18 + at, *ids, served.flags, served.operation, "sim", "m", served.name
            )
        )
        for name, distance, length, items in served.stages:
            began = at + int(distance * MS) + rng.randrange(1000)
            at = began + int(length * MS)
            add(events.StageEnded(at, began, name, items))
        if served.batch:
            add(events.BatchFormed(at, served.batch))
        for _ in range(served.links):
            add(events.SpanLinked(at, rng.randbytes(16), rng.randbytes(8)))
        if served.rpc_method:
            add(events.CallServed(at, "grpc", served.rpc_method, "OK"))
        if served.names_operation:
            for key in events.OPERATION_KEYS:
                add(events.AttributeSet(at, key, "classify"))
        if served.extra is not None:
            add(served.extra._replace(at=at))
        for cause, length in served.pauses:
            at += MS // 4
            recorded.append(RecordedEvent(1, 0, events.PauseSeen(at, at - int(length * MS), cause)))
        if served.response:
            at += int(served.response * MS)
            add(events.ResponseStarted(at))
        at += int(served.rest * MS)
        if served.route:
            add(events.HttpDescribed(at, "POST", "http", served.route))
        add(events.RequestEnded(at, *served.ended))
    return recorded


def export(
    requests: list[Served], finds_shapes: bool, latency_attributes: bool, **changes: Any
) -> tuple[Any, int]:
    """Returns what was exported, and how many requests were ordinary ones."""
    sender: Any = BatchCollector()
    exporter = OtlpSpanExporter(sender, latency_attributes)
    pipeline = Pipeline(
        Config(gpu_metrics=False, **changes), MergedReader(), [exporter], sender, {}, CLOSED_METRICS_OUTLET, 0
    )
    pipeline.assembler.finds_shapes = pipeline.assembler.finds_shapes and finds_shapes
    found: list[Any] = []
    finish = pipeline._ordinary.finish_requests
    pipeline._ordinary.finish_requests = lambda *args: found.extend(each := finish(*args)) or each  # type: ignore
    collected = []
    recorded = record_events(requests)
    middle = len(recorded) // 2
    for part in (recorded[:middle], recorded[middle:]):
        pipeline.assembler.feed_events(part)
        pipeline.export_requests(
            AFTER_ALL_EVENTS if part is not recorded[:middle] else part[-1].event.at if part else 0
        )
        exporter.flush(0)
        data = pipeline.metrics.collect(2 * 10**18)
        collected.append(
            [(each.name, each.data) for each in data.resource_metrics[0].scope_metrics[0].metrics]
        )
    result = sender.content, collected, pipeline.requests, exporter.taken, pipeline.failed
    return result, sum(isinstance(each, OrdinaryRequest) for each in found)


stages = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
        st.sampled_from([0.0, 0.25, 3.0]),
        st.sampled_from([-1, 0, 1, 5, 127, 128, 5000, 1 << 14]),
    ),
    max_size=4,
).map(tuple)
extras = st.sampled_from(
    [
        None, None, None, events.AttributeSet(0, "user", "x"), events.AttributeSet(0, "user", [1, 2]),
        events.AttributeSet(0, "http.extra", 1), events.SpanUnseen(0), events.NameUpdated(0, "own"),
        events.TokenReached(0), events.RequestScheduled(0), events.StateCarried(0, "ot=th:8"),
        events.SpanEventAdded(0, "event", {}), events.BytesMoved(0, 0, "h2d", 7, 1), events.StepsUnrecorded(0),
        events.LinkDescribed(0, "", {"why": "x"}), events.AttributeSet(0, semconv.BATCH_REQUESTS, "x"),
        events.EngineFinished(0, "stop", 1), events.CacheHeld(0, 3), events.RequestSubmitted(0, 1, 2, 3, "sim"),
    ]
)  # fmt: skip
ends = st.tuples(
    st.sampled_from([events.OK, events.OK, events.OK, events.ERROR, events.ABORTED]),
    st.sampled_from(["", "", "", "ValueError"]),
    st.sampled_from([0, 200, 404, 503]),
    st.sampled_from([0, 1, 127, 128]),
    st.sampled_from([0, 1000]),
    st.sampled_from([0, 0, 0, 500]),
)
served = st.builds(
    Served,
    flags=st.sampled_from(
        [OWN, OWN, OWN | events.REMOTE_PARENT, events.SAMPLED, 0, OWN | events.NON_GENERATIVE]
    ),
    operation=st.sampled_from(["", "chat"]),
    name=st.sampled_from(["POST", ""]),
    parent=st.sampled_from([bytes(8), b"12345678"]),
    stages=stages,
    response=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
    rest=st.sampled_from([-0.5, 0.0, 1.0, 40.0]),
    route=st.sampled_from(["", "/embed"]),
    names_operation=st.booleans(),
    ended=ends,
    extra=extras,
    pauses=st.lists(
        st.tuples(
            st.sampled_from(["gc", "event_loop", "compile", "throttled", "other"]),
            st.sampled_from([0.1, 0.5, 3.0, 90.0]),
        ),
        max_size=3,
    ).map(tuple),
    batch=st.sampled_from([0, 0, 1, 2, 8, 200, 1 << 14]),
    links=st.sampled_from([0, 0, 1, 2, 16, 17]),
    rpc_method=st.sampled_from(["", "", "a.B/C"]),
)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(served, min_size=1, max_size=3),
    order=st.lists(st.integers(0, 2), min_size=4, max_size=16),
    latency=st.booleans(),
    changes=st.sampled_from(
        [
            {}, {"steps": "all"}, {"steps": "off", "exemplars": False}, {"temporality": "delta", "keep_unsampled": True},
            {"exponential_histograms": True, "sampler": "traceidratio", "slow_percent": 50},
            {"tenant": "x-tenant", "traffic_class": "x-class"},
        ]
    ),
)  # fmt: skip
def test_shapes_change_nothing_that_is_exported(
    kinds: list[Served], order: list[int], latency: bool, changes: dict[str, Any]
) -> None:
    requests = [kinds[number % len(kinds)] for number in order]
    with_shapes, _ = export(requests, True, latency, **changes)
    without, ordinary = export(requests, False, latency, **changes)
    assert (with_shapes, ordinary) == (without, 0)


FORWARD = ("forward", 0.5, 3.0, 8)
WAITS = ("queue wait", 0.5, 1.0, 0), ("batch wait", 0.0, 2.0, 4)


@pytest.mark.parametrize(
    "request_kind",
    [
        Served(response=0.5),
        Served(operation="chat", stages=(FORWARD,), pauses=(("event_loop", 2.0), ("gc", 0.1))),
        Served(operation="chat", stages=(("queue", 0.5, 1.0, 0), FORWARD)),
        Served(names_operation=True, stages=(("tokenize", 0.5, 1.0, 1), FORWARD), response=0.5),
        Served(flags=events.SAMPLED, operation="forward", name="", route="", stages=(FORWARD,), ended=(0, "", 0, 0, 0, 0)),
        Served(names_operation=True, stages=(FORWARD,), response=0.5, extra=events.AttributeSet(0, semconv.EXECUTION_PROVIDER, "CPU")),
        Served(names_operation=True, stages=(FORWARD,), response=0.5, extra=events.ModelPlaced(0, "CPUExecutionProvider")),
    ],
    ids=["HTTP only", "pauses", "stages", "tokenize and forward", "forward of a batch", "provider as attribute", "provider"],
)  # fmt: skip
def test_all_but_the_first_request_of_a_shape_are_ordinary(request_kind: Served) -> None:
    exported, ordinary = export([request_kind] * 8, True, True, slow_percent=0)
    assert (exported, ordinary) == (export([request_kind] * 8, False, True, slow_percent=0)[0], 7)


@pytest.mark.parametrize(
    "request_kind",
    [
        Served(stages=(*WAITS, FORWARD), batch=4, links=3, response=0.5),
        Served(stages=(*WAITS, ("forward", 0.5, 3.0, 300)), batch=200, links=16, response=0.5),
        Served(stages=(*WAITS, FORWARD), batch=8, links=1, pauses=(("gc", 0.5), ("event_loop", 2.0))),
        Served(stages=(("accept", -2.0, 1.5, 0), FORWARD), response=0.5),
        Served(stages=(("queue wait", -2.0, 1.5, 0), FORWARD), response=0.5),
        Served(name="a.B/C", route="", stages=(FORWARD,), response=0.5, rpc_method="a.B/C", ended=(0, "", 0, 1, 0, 0)),
    ],
    ids=["first of a batch", "large batch", "pauses in a batch", "wait in the socket", "wait before arrival", "gRPC"],
)  # fmt: skip
def test_a_request_that_waited_is_ordinary(request_kind: Served) -> None:
    exported, ordinary = export([request_kind] * 8, True, True, slow_percent=0)
    assert (exported, ordinary) == (export([request_kind] * 8, False, True, slow_percent=0)[0], 7)


def test_calls_of_batches_are_divided_as_in_records() -> None:
    """The cost model of the calls changes while requests of one shape are counted."""
    kinds = [
        Served(stages=(*WAITS, ("forward", 0.5, 1.0 + 0.5 * size, size)), batch=size, links=1, response=0.5)
        for size in (2, 4, 8, 16)
    ]
    exported, ordinary = export(kinds * 32, True, True)
    assert exported == export(kinds * 32, False, True)[0]
    assert ordinary > 100
    causes = dict(exported[1][-1])[semconv.LATENCY_DURATION.name].data_points
    times = {point.attributes[semconv.LATENCY_CAUSE]: point.value for point in causes}
    assert times[semconv.CAUSE_BATCHING] > times[semconv.CAUSE_DECODE] > 0


def test_slow_requests_and_long_items_leave_their_shape() -> None:
    usual = Served(operation="chat", stages=(FORWARD,))
    slow = usual._replace(rest=900.0)
    many = usual._replace(stages=(("forward", 0.5, 3.0, 20_000),))
    requests = [*[usual] * 60, slow, many, *[usual] * 3]
    exported, ordinary = export(requests, True, False)
    assert exported == export(requests, False, False)[0]
    assert (
        ordinary == 63
    )  # the first is none, and the one with many items; the slow one is until it is sampled
    kept = dict(exported[1][-1])[semconv.REQUEST_KEPT.name]
    assert any(point.attributes[semconv.KEEP_REASON] == "slow" for point in kept.data_points)


def test_a_shape_whose_layout_gives_other_bytes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Served(operation="chat", stages=(FORWARD,))
    expected, _ = export([kind] * 5, False, False)
    monkeypatch.setattr(ordinary_requests, "_list_values", lambda ordinary, pauses, latency_attributes: [])
    assert export([kind] * 5, True, False)[0] == expected


def test_names_that_change_with_each_request_are_no_shapes() -> None:
    requests = [Served(operation="chat", stages=((f"own {number}", 0.5, 1.0, 0),)) for number in range(300)]
    exported, ordinary = export(requests, True, False)
    assert (exported, ordinary) == (export(requests, False, False)[0], 0)
