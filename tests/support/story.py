"""A server's events with a clock in ms, and the resulting spans as text.

    story = Story()
    a = story.arrives(0)                              # POST /v1/chat/completions, operation chat, model toy
    story.submitted(4, a, input_tokens=5)
    story.step(10, 30, [a], prompt={a: 5})            # scheduled at 10, tokens known at 30
    story.step(30, 40, [a])
    story.finished(40, a)
    story.ends(45, a, chunks=2)
    assert story.tree() == text('''...''')            # as a receiver of the OTLP bytes sees it

Events are fed in the order of their instants, whatever the order of the calls.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export import otlp
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans.exporter import OtlpSpanExporter, SpanBatch, encode_resource_and_scope
from otel_infer.ringbuffer import events
from tests.support.otlp_messages import decoded

MS = 1_000_000
BASE = 1_000_000 * MS
"""Monotonic ns of the story's 0 ms."""
WALL = 1_700_000_000_000 * MS
"""Unix ns of the story's 0 ms."""
AFTER_ALL_EVENTS = BASE + (1 << 50)
PROCESS, ENGINE = 1, 10


def ns(at: float) -> int:
    """Returns the monotonic ns of an instant of the story."""
    return BASE + round(at * MS)


def ms(at: float) -> float:
    """Returns an instant of the story from monotonic ns; 0 stays 0."""
    return round((at - BASE) / MS, 6) if at else 0


def text(block: str) -> str:
    """Returns a block of text without its indentation in the source."""
    return inspect.cleandoc(block)


def ids(name: str) -> tuple[bytes, bytes]:
    """Returns the trace id and span id of the request with this name."""
    digest = hashlib.sha256(name.encode()).digest()
    return digest[:16], digest[16:24]


class RequestHandle(NamedTuple):
    """A request of the story."""

    name: str
    ring: int
    handle: int


class _Engine:
    """The last values an engine recorded, so that only changes are recorded."""

    def __init__(self, ring: int, process: int) -> None:
        self.ring, self.process = ring, process
        self.members: list[RequestHandle] | None = None
        self.batches: dict[int, list[RequestHandle]] = {}
        self.step = 0


class Story:
    """All events of a server."""

    def __init__(self, process: int = PROCESS) -> None:
        self.recorded_events: list[events.RecordedEvent] = []
        self._handles = iter(range(1, 1 << 20))
        self._engines: dict[int, _Engine] = {}
        self.engine(process=process)

    def add_event(self, ring: int, handle: int, event: Any) -> None:
        self.recorded_events.append(events.RecordedEvent(ring, handle, event))

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def arrives(
        self,
        at: float,
        name: str = "a",
        *,
        http: bool = True,
        operation: str = "chat",
        flags: int = events.SAMPLED,
        handle: int = 0,
        process: int = PROCESS,
        trace: str = "",
    ) -> RequestHandle:
        """Opens a request. With `http` it is below our server span, which is below a span of the client."""
        request = RequestHandle(name, process, handle or next(self._handles))
        trace_id, span_id = ids(trace or name)[0], ids(name)[1]
        server = ids(f"server of {name}")[1] if http else bytes(8)
        parent = ids("caller")[1] if http else bytes(8)
        flags |= events.OWN_SERVER_SPAN | events.REMOTE_PARENT if http else 0
        known = ("", "", "", "POST") if http else (operation, "toy", "toy", f"{operation} toy")
        arrived = events.RequestArrived(
            ns(at), WALL + ns(at) - BASE, trace_id, span_id, parent, server, flags, *known
        )
        self.add_event(process, request.handle, arrived)
        if http:
            route = "/v1/chat/completions" if operation else "/health"
            self.add_request_event(request, events.HttpDescribed(ns(at), "POST", "http", route))
        if http and operation:
            for key, value in ((semconv.OPERATION_NAME, operation), (semconv.REQUEST_MODEL, "toy")):
                self.add_request_event(request, events.AttributeSet(ns(at), key, value))
        return request

    def joins(self, at: float, request: RequestHandle, process: int) -> RequestHandle:
        """Continues the request in another process; returns it as that process knows it."""
        part = RequestHandle(request.name, process, next(self._handles))
        trace_id, span_id = ids(request.name)
        known = trace_id, span_id, bytes(8), bytes(8), events.JOINED, "", "", "", ""
        self.add_request_event(part, events.RequestArrived(ns(at), WALL + ns(at) - BASE, *known))
        return part

    def add_request_event(self, request: RequestHandle, event: Any) -> None:
        self.add_event(request.ring, request.handle, event)

    def stage(self, name: str, started: float, ended: float, request: RequestHandle, items: int = 0) -> None:
        self.add_request_event(request, events.StageEnded(ns(ended), ns(started), name, items))

    def submitted(
        self,
        at: float,
        request: RequestHandle,
        *,
        input_tokens: int = 0,
        max_tokens: int = 0,
        sequences: int = 1,
    ) -> None:
        self.add_request_event(
            request, events.RequestSubmitted(ns(at), sequences, input_tokens, max_tokens, "toy")
        )

    def received(self, at: float, request: RequestHandle) -> None:
        self.add_request_event(request, events.RequestReceived(ns(at)))

    def preempted(self, at: float, request: RequestHandle, kind: str) -> None:
        self.add_request_event(request, events.RequestPreempted(ns(at), kind))

    def finished(self, at: float, request: RequestHandle, reason: str = "stop", tokens: int = 0) -> None:
        self.add_request_event(request, events.EngineFinished(ns(at), reason, tokens))

    def ends(
        self,
        at: float,
        request: RequestHandle,
        outcome: int = events.OK,
        error: str = "",
        *,
        status: int | None = None,
        chunks: int = 0,
        send_wait: float = 0,
        detokenize: float = 0,
    ) -> None:
        """Ends a request; `status` defaults to 200 for a successful HTTP request."""
        http = any(
            s.handle == request.handle and isinstance(s.event, events.HttpDescribed)
            for s in self.recorded_events
        )
        code = status if status is not None else 200 if http and outcome == events.OK else 0
        waits = (round(send_wait * MS), round(detokenize * MS))
        self.add_request_event(request, events.RequestEnded(ns(at), outcome, error, code, chunks, *waits))

    def aborts(self, at: float, request: RequestHandle, error: str = "client_disconnect") -> None:
        self.ends(at, request, events.ABORTED, error)

    # ── engines ──────────────────────────────────────────────────────────────────────────────────────────────────

    def engine(self, ring: int = ENGINE, process: int = PROCESS) -> int:
        """Adds an engine's ring; returns its number, for `scheduled` and `done`."""
        self._engines[ring] = _Engine(ring, process)
        self.add_event(ring, 0, events.EngineSeen(0, process, 4242, "toy"))
        return ring

    def scheduled(
        self,
        at: float,
        members: Sequence[RequestHandle],
        prompt: Mapping[RequestHandle, int] | None = None,
        *,
        tokens: Mapping[int, int] | None = None,
        engine: int = ENGINE,
        keyframe: bool = False,
        lost: bool = False,
        kv: tuple[int, int] = (0, 0),
        waiting: int = 0,
    ) -> int:
        """`prompt`: scheduled tokens of a request's sequences. `tokens`: of a position. `lost`: the event is dropped."""
        written = self._engines[engine]
        written.step += 1
        before, members = written.members, list(members)
        written.members = written.batches[written.step] = members
        stays = [request for request in before or () if request in members]
        keyframe = keyframe or before is None or members[: len(stays)] != stays
        left, joined = (
            _change(before or [], members) if not keyframe else ([], [request.handle for request in members])
        )
        numbers = {
            i: (prompt or {})[request] for i, request in enumerate(members) if request in (prompt or {})
        }
        numbers.update(tokens or {})
        exceptions = tuple((i, n) for i, n in sorted(numbers.items()) if n != 1)
        event = events.StepScheduled(
            ns(at), written.step, keyframe, len(members), left, joined, exceptions, *kv, len(members), waiting
        )
        if not lost:
            self.add_event(engine, 0, event)
        return written.step

    def done(
        self,
        at: float,
        step: int,
        delivered: Mapping[RequestHandle, int] | None = None,
        *,
        tokens: Mapping[int, int] | None = None,
        discarded: int = 0,
        engine: int = ENGINE,
    ) -> None:
        """`delivered`: tokens to each sequence of a request. `tokens`: to a position. All others get one."""
        batch = self._engines[engine].batches[step]
        numbers = {
            i: (delivered or {})[request] for i, request in enumerate(batch) if request in (delivered or {})
        }
        numbers.update(tokens or {})
        exceptions = tuple((i, n) for i, n in sorted(numbers.items()) if n != 1)
        self.add_event(engine, 0, events.StepDone(ns(at), step, exceptions, discarded))

    def step(
        self,
        at: float,
        until: float,
        members: Sequence[RequestHandle],
        prompt: Mapping[RequestHandle, int] | None = None,
        delivered: Mapping[RequestHandle, int] | None = None,
        **more: Any,
    ) -> int:
        """Schedules a step at one instant and completes it at another."""
        step = self.scheduled(at, members, prompt, **more)
        self.done(until, step, delivered, engine=more.get("engine", ENGINE))
        return step

    def timed(
        self,
        step: int,
        since: float,
        until: float,
        *,
        queued: float = 0,
        launched: float = 0,
        engine: int = ENGINE,
    ) -> None:
        """Records the device time of a step when it is known, in the engine's process."""
        process, lengths = self._engines[engine].process, (round(launched * MS), round(queued * MS))
        fields = (ns(until), ns(since), "toy", 4242, 0, step, 0, *lengths, events.UNKNOWN_NS, 0)
        self.add_event(process, 0, events.StepTimed(*fields))

    def paused(self, since: float, until: float, cause: str = "gc", process: int = PROCESS) -> None:
        self.add_event(process, 0, events.PauseSeen(ns(until), ns(since), cause))

    def marked(self, since: float, at: float, mark: str, count: int = 1, process: int = PROCESS) -> None:
        self.add_event(process, 0, events.MarkSeen(ns(at), ns(since), mark, count))

    def steps_lost(self, at: float, engine: int = ENGINE) -> None:
        self.add_event(engine, 0, events.StepsLost(ns(at), 1))

    def keyframe_next(self, engine: int = ENGINE) -> None:
        """Makes the next step a keyframe, as a reader requests."""
        self._engines[engine].members = None

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────

    def in_order(self) -> list[events.RecordedEvent]:
        """Returns the events as the rings return them."""
        return sorted(self.recorded_events, key=lambda recorded: recorded.event.at)

    def records(self) -> list[RequestRecord]:
        assembler = Assembler()
        assembler.feed_events(self.in_order())
        return assembler.drain_records(AFTER_ALL_EVENTS)

    def record(self, request: RequestHandle | None = None) -> RequestRecord:
        """Returns the record of this request, or the only record."""
        span_id = ids(request.name)[1] if request is not None else None
        (found,) = [record for record in self.records() if span_id in (None, record.span_id)]
        return found

    def spans(
        self, sampler: tail_sampler.TailSampler | None = None, latency: bool = False
    ) -> list[dict[str, Any]]:
        """Returns every span as a receiver decodes it."""
        return exported(self.records(), sampler, latency)

    def span(self, name: str, request: RequestHandle | None = None) -> dict[str, Any]:
        """Returns the only span of this name (of a request)."""
        trace_id = ids(request.name)[0].hex() if request is not None else None
        found = [s for s in self.spans() if s["name"] == name and trace_id in (None, s["trace_id"])]
        (span,) = found
        return span

    def tree(
        self, request: RequestHandle | None = None, sampler: tail_sampler.TailSampler | None = None
    ) -> str:
        """Returns the spans of a request, or all spans, as text."""
        trace_id = ids(request.name)[0].hex() if request is not None else None
        return render_spans(span for span in self.spans(sampler) if trace_id in (None, span["trace_id"]))


def _change(before: list[RequestHandle], members: list[RequestHandle]) -> tuple[list[int], list[int]]:
    """Returns (positions that left, one after the other; handles that joined)."""
    here, left = list(before), []
    for request in before:
        if here.count(request) > members.count(request):
            left.append(len(here) - 1 - here[::-1].index(request))
            del here[left[-1]]
    return left, [request.handle for request in members[len(here) :]]


class BatchCollector:
    """Collects the batches of an exporter, in place of a `Sender`."""

    def __init__(self) -> None:
        self.collected: list[SpanBatch] = []
        self.lost: Counter[str] = Counter()

    def put(self, batch: SpanBatch) -> None:
        self.collected.append(batch)

    def count_not_encoded(self, spans: int, requests: int) -> None:
        self.lost["not_encoded"] += spans

    def bodies(self) -> list[bytes]:
        """Returns the bodies that would be sent."""
        return [
            b"".join(otlp.build_export_request(*encode_resource_and_scope({}), batch.parts))
            for batch in self.collected
        ]


class ClosedMetricsOutlet:
    """A metrics outlet that accepts nothing, so that the test reads the metrics from the pipeline."""

    lost_collections, is_refused = 0, False

    def can_accept(self, *, behind: bool) -> bool:
        return False

    def drain_refused_deltas(self) -> tuple[()]:
        return ()

    def wait(self, timeout: float) -> bool:
        return True

    close = wait


CLOSED_METRICS_OUTLET: Any = ClosedMetricsOutlet()
"""Used in place of a `MetricsOutlet`."""


def exported(
    records: Iterable[RequestRecord], sampler: tail_sampler.TailSampler | None = None, latency: bool = False
) -> list[dict[str, Any]]:
    """Returns the spans of records as a receiver decodes their OTLP bytes; every step, unless `sampler` samples them."""
    batches = BatchCollector()
    sampler = sampler or tail_sampler.TailSampler("all", 0, keep_unsampled=False, ratio=False)
    exporter = OtlpSpanExporter(batches, latency)  # type: ignore[arg-type]
    for record in records:
        decision = sampler.make_decision(record)
        if decision.export:
            exporter.export_request(record, decision)
    exporter.flush(0)
    return [span for body in batches.bodies() for span in decoded("traces", body)]


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_FORMATS = {
    semconv.STEP_ID: "step {}",
    semconv.STEP_TOKENS: "{} tokens",
    semconv.BATCH_SIZE: "batch {}",
    semconv.INTERFERENCE_PREFILL_TOKENS: "others' prompt {}",
    semconv.ITEMS: "{} items",
    semconv.SEQUENCES: "{} sequences",
    semconv.PREEMPTIONS: "{} preemptions",
    semconv.STEPS_DISCARDED: "{} discarded",
    semconv.STEPS_DROPPED: "{} left out",
    semconv.ERROR_TYPE: "{}",
    semconv.FAILED_STAGE: "died in {}",
    semconv.TELEMETRY_LOST: "telemetry lost",
    semconv.UNSAMPLED: "unsampled",
}


def render_spans(spans: Iterable[dict[str, Any]]) -> str:
    """Draws spans as an indented tree in order of time, with ms of the story and the main attributes."""
    everything = list(spans)
    known = {span["span_id"] for span in everything}
    lines: list[str] = []

    def draw(parent: str | None, depth: int) -> None:
        here = [
            s for s in everything if (s["parent_span_id"] if s["parent_span_id"] in known else None) == parent
        ]
        for span in sorted(here, key=lambda s: (s["start"], s["end"])):
            lines.append("  " * depth + _line(span))
            draw(span["span_id"], depth + 1)

    draw(None, 0)
    return "\n".join(lines)


def _line(span: dict[str, Any]) -> str:
    attributes = span["attributes"]
    words = [word.format(attributes[key]) for key, word in _FORMATS.items() if key in attributes]
    if semconv.USAGE_OUTPUT_TOKENS in attributes or semconv.USAGE_INPUT_TOKENS in attributes:
        counts = (attributes.get(key, 0) for key in (semconv.USAGE_INPUT_TOKENS, semconv.USAGE_OUTPUT_TOKENS))
        words.insert(0, " → ".join(map(str, counts)))
    if semconv.QUEUE_HIDDEN in attributes:
        words.append(
            f"hidden {attributes[semconv.QUEUE_HIDDEN] * 1e3:g}, scheduler {attributes[semconv.QUEUE_SCHEDULER] * 1e3:g}"
        )
    if span["status"] == 2:
        words.append("ERROR")
    words += [f"event {event['name']} {(event['at'] - WALL) / MS:g}" for event in span["events"]]
    line = f"{span['name']} {(span['start'] - WALL) / MS:g}–{(span['end'] - WALL) / MS:g}"
    return f"{line} · {', '.join(words)}" if words else line
