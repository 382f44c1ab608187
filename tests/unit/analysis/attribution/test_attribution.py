"""Latency attribution: each ns of a request is assigned to exactly one cause."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer import semconv
from otel_infer.analysis.attribution.breakdown import attribute_latency
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.assembly.engine.thread_delays import ThreadDelays
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events
from tests.support.simulator import Simulator, Tick, ticks
from tests.support.story import AFTER_ALL_EVENTS, MS, RequestHandle, Story, exported, ids, ns
from tests.unit.assembly.test_assembler import ENGINES, any_event, plausible


def attributed_records(recorded: Any) -> list[RequestRecord]:
    assembler = Assembler()
    assembler.feed_events(recorded)
    records = assembler.drain_records(AFTER_ALL_EVENTS)
    attribute_latency(records)
    return records


def attributed(story: Story, name: str = "a", **fields: Any) -> RequestRecord:
    """Returns the record of a request with its latency breakdown; `fields` are set before the attribution."""
    (record,) = [record for record in story.records() if record.span_id == ids(name)[1]]
    for field, value in fields.items():
        setattr(record, field, value)
    attribute_latency([record])
    assert record.breakdown is not None
    assert sum(record.breakdown.causes.values()) == record.duration_ns
    return record


def causes_ms(story: Story, name: str = "a", **fields: Any) -> dict[str, float]:
    """Returns the latency breakdown of a request: ms by cause."""
    breakdown = attributed(story, name, **fields).breakdown
    assert breakdown is not None
    return {cause: length / 1e6 for cause, length in breakdown.causes.items()}


def warmed_up(story: Story, steps: int = 40, length: float = 10) -> float:
    """Runs steps of 10 ms each, whatever the batch, until the cost model is fitted. Returns the time of the end in ms."""
    early = story.arrives(0, "early", http=False)
    for i in range(steps):
        story.step(i * length, (i + 1) * length, [early])
    story.ends(steps * length, early)
    return steps * length


EVENT = re.compile(r"(?:(\w+)\.)?([a-z_ ]+?) ([\d.]+)(?:–([\d.]+))?( .*)?")


def build(script: str, warm: bool = True) -> Story:
    """Builds a story from events that are separated by commas. Times are ms, in a warm engine since its warm-up.

    `step 0–30 a:4 b every=10` is three steps of a and b, in which a has 4 prompt tokens. `a:4/0` receives no token.
    `device=3–9` is the time in the step during which the device is busy. `pause gc 2–5` pauses the process. An event
    with any other name and an interval is a stage. `b.submitted 3` is an event of b, `submitted 3` of a. Requests
    arrive at 0, and end with the last event, unless the script has other times.
    """
    story = Story()
    start = warmed_up(story) if warm else 0.0
    matches = [EVENT.fullmatch(" ".join(part.split())) for part in script.split(",")]
    parsed, arrivals = [], {"a": start}
    for match in matches:
        assert match, script
        owner, verb, rest = match[1] or "a", match[2], match[5] or ""
        at, until = start + float(match[3]), start + float(match[4] or 0)
        options: dict[str, Any] = dict(re.findall(r"(\w+)=(\S+)", rest))
        members = re.findall(r" (\w+)(?::(\d+))?(?:/(\d+))?(?= |$)", rest)
        for name in (owner, *(member[0] for member in members)):
            arrivals.setdefault(name, start)
        if verb == "arrives":
            arrivals[owner] = at
        parsed.append((owner, verb, at, until, members, options))
    requests = {name: story.arrives(at, name) for name, at in arrivals.items()}
    for owner, verb, at, until, members, options in parsed:
        numbers = {key: int(value) for key, value in options.items() if value.isdigit()}
        if verb == "step":
            _add_steps(story, at, until, [requests[member[0]] for member in members], members, options)
        elif verb.startswith("pause "):
            story.paused(at, until, verb.removeprefix("pause "))
        elif verb == "prefix":
            story.add_request_event(requests[owner], events.PrefixRead(ns(at), **numbers))
        elif verb == "preempted":
            story.preempted(at, requests[owner], "recompute")
        elif verb in ("submitted", "received", "finished", "ends", "aborts"):
            getattr(story, verb)(at, requests[owner], **numbers)
        elif verb != "arrives":
            story.stage(verb, at, until, requests[owner], **numbers)
    ended = {owner for owner, verb, *_ in parsed if verb in ("ends", "aborts")}
    for name in requests.keys() - ended:
        story.ends(max(max(at, until) for _, _, at, until, *_ in parsed), requests[name])
    return story


def _add_steps(
    story: Story, at: float, until: float, batch: list[RequestHandle], members: Any, options: dict[str, Any]
) -> None:
    prompts = {i: int(prompt) for i, (_, prompt, _) in enumerate(members) if prompt}
    delivered = {i: int(tokens) for i, (_, _, tokens) in enumerate(members) if tokens}
    length = float(options.get("every", until - at))
    while at < until:
        step = story.scheduled(at, batch, tokens=prompts)
        story.done(at + length, step, tokens=delivered)
        if device := options.get("device"):
            since, to = map(float, device.split("–"))
            story.timed(step, at + since, at + to, queued=float(options.get("queued", 0)))
        at += length


def table(text: str) -> pytest.MarkDecorator:
    """Each row has what is true, the script of `build`, and the ms of request a by cause."""
    rows = re.findall(r"^(\w.*)\n((?: .*\n)+?) +→ (.*)$", text, re.MULTILINE)
    params = []
    for name, script, causes in rows:
        expected = {cause: float(ms) for cause, ms in re.findall(r"(\w+) ([\d.]+)", causes)}
        params.append(pytest.param(script.strip(), expected, id=name))
    assert len(params) == text.count("→")
    return pytest.mark.parametrize(("script", "expected"), params)


# ── arbitrary events ────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.lists(any_event, max_size=60), plausible()))
def test_causes_sum_to_duration_for_any_events(recorded: list[events.RecordedEvent]) -> None:
    for record in attributed_records([*ENGINES, *recorded]):
        assert record.breakdown is not None
        assert sum(record.breakdown.causes.values()) == record.duration_ns
        by_class = [length for _, length in record.breakdown.interference_by_class]
        assert sum(by_class) == record.breakdown.causes.get("interference", 0)
        assert all(length > 0 for length in by_class)
        assert all(length > 0 for length in record.breakdown.causes.values())
        streaming = record.breakdown.streaming
        assert all(0 <= streaming[cause] <= record.breakdown.causes.get(cause, 0) for cause in streaming)


@settings(max_examples=60, deadline=None)
@given(ticks(max_ticks=60), st.integers(1, 2))
def test_causes_sum_to_duration_for_any_schedule(program: list[Tick], depth: int) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    for record in attributed_records(simulator.recorded_events):
        assert record.breakdown is not None
        assert sum(record.breakdown.causes.values()) == record.duration_ns


@settings(max_examples=60, deadline=None)
@given(
    ticks(max_ticks=60),
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(-5, 30), st.integers(-5, 30), st.integers(0, 1)), min_size=1, max_size=20),
)
def test_causes_sum_to_duration_for_any_device_times(
    program: list[Tick], depth: int, device: list[tuple[int, int, int]]
) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    recorded = list(simulator.recorded_events)
    seen = {item.ring: item.event for item in recorded if isinstance(item.event, events.EngineSeen)}
    for item in simulator.recorded_events:
        if isinstance(item.event, events.StepDone) and item.ring in seen:
            since, length, behind = device[item.event.step % len(device)]
            engine, began = seen[item.ring], item.event.at + since * 100_000
            times = (
                began + max(length, 0) * 100_000,
                began,
                engine.engine,
                engine.pid,
                0,
                item.event.step,
                engine.ring_number,
            )
            recorded.append(
                events.RecordedEvent(
                    engine.process, 0, events.StepTimed(*times, 0, behind * 50_000, events.UNKNOWN_NS, 0)
                )
            )
    records = attributed_records(sorted(recorded, key=lambda item: item.event.at))
    for record in records:
        record.gpu_throttled_at = ((record.arrived_at, record.ended_at),)
        attribute_latency([record])
        assert record.breakdown is not None
        assert sum(record.breakdown.causes.values()) == record.duration_ns
        assert all(length > 0 for length in record.breakdown.causes.values())


@settings(max_examples=60, deadline=None)
@given(ticks(max_ticks=60), st.integers(1, 2))
def test_attribution_is_the_same_in_batches_and_alone(program: list[Tick], depth: int) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    together = attributed_records(simulator.recorded_events)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("otel_infer.assembly.assembler.STEPS_PER_BATCH", 1)
        patched.setattr("otel_infer.analysis.attribution.breakdown.STEPS_PER_BATCH", 1)
        alone = attributed_records(simulator.recorded_events)
    assert [(record.breakdown, record.summary) for record in alone] == [
        (record.breakdown, record.summary) for record in together
    ]
    for record, other in zip(alone, together):
        assert (record.steps is None) == (other.steps is None)
        assert record.steps is None or other.steps is None or (record.steps.table == other.steps.table).all()


# ── outside the engine ───────────────────────────────────────────────────────────────────────────────────────────


@table("""
hidden queue is separate from scheduler queue
    tokenize 2–5, submitted 6, received 36, step 56–66 a:4, step 66–76 a, ends 78 chunks=2
    → ingress 2, tokenize 3, application 1, hidden_queue 30, scheduler_queue 20, prefill 10, decode 10, egress 2
waiting until a model is loaded is warmup
    submitted 6, received 806, step 816–826 a:4, ends 826
    → ingress 6, warmup 800, scheduler_queue 10, prefill 10
grammar and kv transfer are not scheduler queue
    submitted 2, received 6, grammar 4–34, kv transfer 40–50, step 56–66 a:4, ends 66
    → ingress 2, hidden_queue 2, grammar 30, kv_transfer 10, scheduler_queue 12, prefill 10
media time is taken out of tokenize
    tokenize 2–60, fetch media 4–34, fetch media 4–24, prepare media 40–55, submitted 60, step 60–66 a:4, ends 66
    → ingress 2, tokenize 13, media 45, prefill 6
stage of the application is application
    database lookup 1–251, submitted 260, step 260–270 a:4, ends 270
    → ingress 1, application 259, prefill 10
nested stage takes its time from the outer
    outer 0–100, tokenize 40–60, ends 100
    → application 80, tokenize 20
of a stream that was not counted the last token is detokenize
    step 0–10 a:4, step 10–20 a, ends 120 status=200 detokenize=8
    → prefill 10, decode 10, detokenize 4, egress 96
slow client is egress, final text is detokenize
    step 0–10 a:4, step 10–20 a, ends 120 chunks=1 send_wait=90 detokenize=8
    → prefill 10, decode 10, detokenize 8, egress 92
request aborted in the queue is scheduler queue
    submitted 5, aborts 500
    → ingress 5, scheduler_queue 495
generation in one stage is decode
    submitted 0 input_tokens=5, decode 10–200 items=12, ends 200
    → unexplained 10, decode 190
aborted generation in one stage is decode
    submitted 0 input_tokens=5, decode 10–200 items=12, aborts 200
    → scheduler_queue 10, decode 190
time between steps is host bubble
    step 0–10 a:4, step 25–35 a, step 50–60 a, step 75–85 a, ends 85
    → prefill 10, decode 30, host_bubble 45
first prompt of an engine is warmup
    submitted 0, step 0–2000 a:4, step 2000–2300 a every=10, ends 2300
    → prefill 50, warmup 1950, decode 300
""")
def test_causes_in_a_cold_engine(script: str, expected: dict[str, float]) -> None:
    assert causes_ms(build(script, warm=False)) == expected


@table("""
ingress during a blocked loop is event loop
    pause event_loop 20–170, submitted 180, step 180–190 a:4, ends 190
    → ingress 30, event_loop 150, prefill 10
submission during a blocked loop is ingress
    pause event_loop 20–170, submitted 160, step 180–190 a:4, ends 190
    → ingress 160, scheduler_queue 20, prefill 10
gc inside a blocked loop is gc
    pause gc 30–130, pause event_loop 50–170, submitted 180, step 180–190 a:4, ends 190
    → ingress 40, gc 100, event_loop 40, prefill 10
send delayed by a blocked loop is event loop
    step 0–10 a:4, step 10–20 a, pause event_loop 15–215, ends 220 chunks=1 detokenize=2
    → prefill 10, decode 10, event_loop 195, detokenize 2, egress 3
engine steps continue while the loop is blocked
    submitted 0, step 5–15 a:3, step 15–65 a every=10, pause event_loop 1–55, ends 65
    → scheduler_queue 5, prefill 10, decode 50
stage that ends before the loop continues does not wait for it
    retrieval 10–210, pause event_loop 40–211, ends 215
    → ingress 10, application 200, event_loop 1, unexplained 4
stage that ends after the loop continues waits for it
    retrieval 5–220, pause event_loop 40–211, ends 225
    → ingress 5, application 44, event_loop 171, unexplained 5
synchronous stage does not wait for the loop
    tokenize 5–205, pause event_loop 40–160, ends 210
    → ingress 5, tokenize 200, unexplained 5
request without an engine waits for the loop
    pause event_loop 20–170, ends 180
    → event_loop 150, unexplained 30
""")
def test_causes_while_the_event_loop_is_blocked(script: str, expected: dict[str, float]) -> None:
    assert causes_ms(build(script, warm=False)) == expected


# ── in the batch ─────────────────────────────────────────────────────────────────────────────────────────────────

DELAYED_BY_PROMPT = "submitted 0, b.arrives 1, b.submitted 1, step 0–20 a:4 every=10, step 20–110 a b:4000, step 110–120 a, ends 120"
"""The prompt of b extends a step of a from 10 ms to 90 ms."""
DELAYED_BY_CHUNK = DELAYED_BY_PROMPT.replace("4000", "300")
CHUNK_OF_LONG_PROMPT = DELAYED_BY_CHUNK.replace("b.submitted 1", "b.submitted 1 input_tokens=5000")
PROMPT_BEHIND_PROMPT = "submitted 0, b.submitted 0, step 0–400 b:4000, step 2–420 b a:50, ends 420"
"""The prompt of a is scheduled while the step with the prompt of b runs."""
CANCELLED_STREAM = "step 0–10 a:4, step 10–40 a every=10, step 40–6040 a b:99990, aborts 5040, b.ends 6040"
CANCELLED_PROMPT = "step 0–6000 a:10 b:99990, aborts 5000, b.ends 6000"
TWO_PROMPTS = "step 0–400 a:3900 b:100, step 400–410 a b, step 410–540 a b c:1200, ends 540"


@table(f"""
steps of the usual length are decode
    submitted 0, step 0–10 a:4, step 10–40 a every=10, ends 40
    → prefill 10, decode 30
slow step without a known cause is unexplained
    step 0–10 a:4, step 10–300 a, ends 300
    → prefill 10, decode 10, unexplained 280
excess of a step with another prompt is interference
    {DELAYED_BY_PROMPT}
    → prefill 10, decode 30, interference 80
two prompts share a step by tokens
    submitted 0, step 0–100 a:100 b:300, ends 100
    → prefill 25, interference 75
excess of two steps with other prompts is interference
    {TWO_PROMPTS}
    → prefill 390, interference 130, decode 20
prompt behind another prompt is interference
    {PROMPT_BEHIND_PROMPT}
    → scheduler_queue 2, batching 10, interference 388, prefill 20
few prompt tokens ahead are not interference
    submitted 0, step 0–11 b:2, step 2–31 b a:50, ends 31
    → scheduler_queue 2, batching 9, prefill 20
prompt behind a decode step is batching
    step 0–10 b:4, step 10–20 b, step 12–40 b a:50, ends 40
    → ingress 12, batching 8, prefill 20
steps of other requests between two chunks are interference
    submitted 0 input_tokens=80, step 0–10 a:40/0, step 10–50 b:4000, step 50–60 a:40, ends 60
    → prefill 20, interference 40
prompts of own sequences are prefill
    submitted 0 sequences=2, step 0–10 a:4, step 10–20 a, step 20–320 a a:3000, step 320–330 a a,
        step 330–640 a a:200 b:100, ends 640
    → prefill 300, interference 300, decode 40
first use of another prompt size is warmup
    step 0–10 a:1, step 10–1020 a b:16, step 1020–1030 a b, ends 1030
    → prefill 10, decode 20, interference 160, warmup 840
only the first slow step per batch size is warmup
    step 0–10 b:1, step 10–20 c:1, step 20–30 d:1, step 30–40 e:1, step 40–50 a:1, step 50–360 b c d e a,
        step 360–670 b c d e a, ends 670
    → ingress 40, prefill 10, warmup 300, decode 20, unexplained 300
stream cancelled during an engine hang is unexplained
    step 0–10 a:4, step 10–20 a, aborts 6020
    → prefill 10, decode 20, unexplained 5990
stream cancelled behind another prompt is interference
    {CANCELLED_STREAM}
    → prefill 10, decode 40, interference 4990
prompt cancelled behind another prompt is interference
    {CANCELLED_PROMPT}
    → prefill 0.5, interference 4999.5
time between two generations is application, whatever steps run
    step 0–10 b:4, arrives 10, submitted 10, step 10–20 b a:4, finished 20, step 20–310 b every=10, submitted 305,
        step 310–320 b a:4, step 320–330 b a, finished 330, ends 330
    → prefill 10, application 285, scheduler_queue 5, decode 20
wait after a generation without a token is scheduler queue
    submitted 0, step 0–10 a:4/0, finished 10, submitted 295, step 300–310 a:4, step 310–320 a, finished 320, ends 320
    → prefill 20, application 285, scheduler_queue 5, decode 10
""")
def test_causes_in_the_batch(script: str, expected: dict[str, float]) -> None:
    assert causes_ms(build(script)) == pytest.approx(expected, abs=0.1)


@table("""
preemption covers the wait and the recomputation
    step 0–10 a:4 b:4, preempted 12, step 10–60 b every=10, step 60–90 b a:5, ends 90
    → prefill 5, interference 5, preemption 70, decode 10
preemption during a step in flight counts equally
    step 0–10 a:4 b:4, step 10–20 a b, preempted 11, step 11–30 b, step 30–70 b every=10, step 70–100 b a:5, ends 100
    → prefill 5, interference 5, decode 20, preemption 70
preemption before the first token arrives is counted
    step 0–50 b a:40, preempted 5, step 50–130 b every=10, step 130–180 b a:41, ends 180
    → prefill 48.8, interference 1.2, preemption 120, decode 10
recomputation excludes the cached prefix
    submitted 0 input_tokens=10000, prefix 0 tokens=10000 cached=8000, step 0–100 a:1000/0, preempted 110,
        step 800–900 a:1000/0, step 900–1000 a:1000, ends 1000
    → prefill 200, preemption 800
preempted prompt waits and recomputes its chunks
    submitted 0 input_tokens=80, step 0–10 b a:40/0, preempted 12, step 10–90 b every=10, step 90–170 b a:80,
        step 170–180 b a, ends 180
    → prefill 49.8, interference 0.2, preemption 120, decode 10
recomputing one of two sequences is preemption
    submitted 0 sequences=2 input_tokens=100, step 0–10 a:50 a:50, step 10–20 a a, preempted 20,
        step 20–220 a every=10, step 220–620 a a:52, step 620–630 a a, ends 630
    → prefill 10, decode 230, preemption 390
cancelled while a preempted stream waits is preemption
    step 0–10 a:100 b:4, step 10–40 a b every=10, preempted 40, step 40–20040 b every=100, aborts 20040
    → prefill 9.6, interference 0.4, decode 30, preemption 20000
cancelled while a preempted prompt waits is preemption
    step 0–10 a:100/0 b:4, preempted 10, step 10–20010 b every=100, aborts 20010
    → prefill 9.6, interference 0.4, preemption 20000
""")
def test_causes_of_a_preempted_request(script: str, expected: dict[str, float]) -> None:
    assert causes_ms(build(script)) == pytest.approx(expected, abs=0.1)


@table("""
gc is taken out of its step
    step 0–10 a:4, step 10–70 a, ends 70, pause gc 12–62
    → prefill 10, decode 10, gc 50
throttling inside a collection is gc
    step 0–10 a:4, step 10–70 a, ends 70, pause gc 12–62, pause throttled 22–52
    → prefill 10, decode 10, gc 50
capture inside a compilation is capture
    step 0–10 a:4, step 10–70 a, ends 70, pause compile 12–62, pause capture 32–52
    → prefill 10, decode 10, compile 30, capture 20
""")
def test_causes_of_process_pauses(script: str, expected: dict[str, float]) -> None:
    assert causes_ms(build(script)) == expected


@table("""
device idle time is host bubble
    step 0–20 a every=10, step 20–50 a every=10 device=3–9, ends 50
    → prefill 10, host_bubble 16, decode 24
untimed steps get the timed host share
    step 0–30 a every=10, step 30–40 a device=3–9, step 40–50 a, ends 50
    → prefill 10, host_bubble 16, decode 24
backlogged device has no host bubble
    step 0–20 a every=10, step 20–40 a every=10 device=3–10 queued=5, ends 40
    → prefill 10, decode 30
device is not idle before a pipelined step
    step 0–10 a, step 10–20 a device=0–5, step 12–30 a device=3–18, ends 30
    → prefill 10, decode 20
stall of an idle device is host bubble
    step 0–10 a, step 10–20 a device=0–10, step 20–90 a device=60–70, ends 90
    → prefill 10, decode 20, host_bubble 60
gc takes its part of a stall
    step 0–10 a, step 10–20 a device=0–10, step 20–90 a device=60–70, pause gc 25–75, ends 90
    → prefill 10, decode 20, gc 50, host_bubble 10
""")
def test_causes_with_device_times(script: str, expected: dict[str, float]) -> None:
    assert causes_ms(build(script)) == expected


@pytest.mark.parametrize(("device", "expected"), [("device=0–70", "gpu_throttled"), ("", "unexplained")])
def test_excess_while_clocks_are_throttled_is_gpu_throttled(device: str, expected: str) -> None:
    """Without device times, the excess stays unexplained."""
    story = build(f"step 0–20 a every=10, step 20–90 a {device}, step 90–100 a, ends 100")
    causes = causes_ms(story, gpu_throttled_at=((ns(480), ns(5480)),))
    assert causes == {"prefill": 10, "decode": 30, expected: 60}


@pytest.mark.parametrize(
    ("device", "expected"),
    [("", {"blocked": 70}), ("device=1–80", {"blocked": 1, "gpu_throttled": 69, "host_bubble": 2})],
)
def test_waiting_for_a_busy_device_is_not_blocked(device: str, expected: dict[str, float]) -> None:
    """The engine's thread sleeps in a step of 80 ms, where 10 are usual."""
    story = build(f"step 0–20 a every=10, step 20–100 a {device}, step 100–110 a, ends 110")
    record, delays = attributed(story), ThreadDelays()
    assert record.cost_model is not None
    delays.add_sample(events.ThreadSeen(ns(500), ns(420), 10 * MS, 0, 0, 0))
    table = np.array([[1, 2], [ns(400), ns(420)], [ns(420), ns(500)], [1, 1], [1, 1], [0, 0]])
    delays.resolve_samples(table, record.cost_model, final=True)
    causes = causes_ms(story, thread_delays=delays, gpu_throttled_at=((ns(420), ns(500)),))
    assert {cause: causes[cause] for cause in causes.keys() - {"prefill", "decode"}} == expected


def test_throttling_outside_steps_is_throttled() -> None:
    """The kernel reports delays of the engine's thread only."""
    story = build(
        "tokenize 0–400, submitted 400, step 500–510 a:4, step 510–520 a, pause throttled 50–370,"
        "pause throttled 410–490, ends 520"
    )
    assert causes_ms(story, thread_delays=ThreadDelays()) == {
        "tokenize": 80, "throttled": 400, "scheduler_queue": 20, "prefill": 10, "decode": 10,
    }  # fmt: skip


def test_streaming_causes_are_separate_from_earlier_ones() -> None:
    breakdown = attributed(build(DELAYED_BY_PROMPT + ", pause gc 2–6, pause gc 12–17")).breakdown
    assert breakdown is not None
    assert breakdown.causes["gc"] == (4 + 5) * MS
    assert breakdown.streaming == {"gc": 5 * MS, "decode": 25 * MS, "interference": 80 * MS}


# ── interferers ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("script", "name", "length", "stalls"),
    [
        pytest.param(DELAYED_BY_PROMPT, "b", 80, True, id="prompt in a step"),
        pytest.param(TWO_PROMPTS, "c", 120, True, id="longer of two prompts"),
        pytest.param(PROMPT_BEHIND_PROMPT, "b", 388, False, id="prompt ahead"),
        pytest.param(CANCELLED_STREAM, "b", 4990, True, id="unfinished step of a stream"),
        pytest.param(CANCELLED_PROMPT, "b", 4999.5, False, id="unfinished step of a prompt"),
    ],
)
def test_breakdown_names_the_longest_interferer(script: str, name: str, length: float, stalls: bool) -> None:
    """Only an interferer during streaming stalls the request."""
    breakdown = attributed(build(script)).breakdown
    assert breakdown is not None and breakdown.interferer is not None
    assert (breakdown.interferer.trace_id, breakdown.interferer.span_id) == ids(name)
    assert breakdown.interferer.length / 1e6 == pytest.approx(length, abs=0.1)
    assert (breakdown.stalled_by and breakdown.stalled_by.trace_id) == (ids(name)[0] if stalls else None)


def test_unfinished_step_is_no_prefill_step() -> None:
    assert attributed(build(CANCELLED_PROMPT)).prefill_steps == []


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param(DELAYED_BY_PROMPT, {"long": 80}, id="long prompt"),
        pytest.param(DELAYED_BY_CHUNK, {"medium": 80}, id="medium prompt"),
        pytest.param(CHUNK_OF_LONG_PROMPT, {"long": 80}, id="chunk of a long prompt"),
        pytest.param(
            "step 0–10 a:4, step 10–110 a b:100 c:300, ends 110",
            {"short": 22.5, "medium": 67.5},
            id="two prompts",
        ),
        pytest.param("step 0–10 a:4, step 10–40 a every=10, ends 40", {}, id="none"),
    ],
)
def test_interference_class_is_the_prompt_size(script: str, expected: dict[str, float]) -> None:
    breakdown = attributed(build(script)).breakdown
    assert breakdown is not None
    assert {name: length / 1e6 for name, length in breakdown.interference_by_class} == expected


def test_delayed_span_links_to_the_interferer() -> None:
    """The link has the interferer's traffic class instead of its prompt size, where it is set."""
    story = build(DELAYED_BY_PROMPT)
    interferer = next(
        r.handle for r in story.recorded_events if getattr(r.event, "span_id", b"") == ids("b")[1]
    )
    traffic_class = events.AttributeSet(ns(401), semconv.TRAFFIC_CLASS, "batch")
    story.add_request_event(RequestHandle("b", 1, interferer), traffic_class)
    (span,) = [s for s in exported(attributed_records(story.in_order())) if s["span_id"] == ids("a")[1].hex()]
    assert span["attributes"]["infer.latency.interference"] == pytest.approx(0.08)
    assert span["attributes"]["infer.latency.top_cause"] == "interference"
    (link,) = span["links"]
    assert link["span_id"] == ids("b")[1].hex()
    assert link["attributes"] == {"infer.interference.delay": 0.08, "infer.interference.class": "batch"}


# ── several generations, sequences and engines ───────────────────────────────────────────────────────────────────


def test_second_generation_adds_no_gap_between_tokens() -> None:
    """A request generates, searches for 2 s, and generates again behind a prompt of two steps."""
    story = build(
        "submitted 0 input_tokens=40, step 0–10 a:40, step 10–60 a every=10, finished 60, search 62–2060,"
        "b.arrives 999, step 1000–1010 b:4, submitted 2060 input_tokens=4000, step 2080–2100 a:2000/0,"
        "step 2100–2120 a:2000, step 2120–2160 a every=10, finished 2160, ends 2160"
    )
    expected = {"application": 2000, "scheduler_queue": 20, "prefill": 10 + 20 + 10, "decode": 100}
    assert causes_ms(story) == pytest.approx(expected, abs=1)
    record = attributed(story)
    assert record.summary.gap_max == 10 * MS
    assert record.decode_ns == (5 + 4) * 10 * MS
    assert (record.output_tokens, record.tokens_after_first) == (6 + 5, 5 + 4)


def test_overlapping_generations_leave_no_application_time() -> None:
    """Two generations; while the second continues, the first ends and a third starts."""
    story = build(
        "submitted 0 sequences=2, step 0–10 a:4 a:4, step 10–20 a a, finished 20, step 20–30 a, submitted 35,"
        "step 30–40 a, step 40–50 a a:4, finished 50, finished 50, ends 50"
    )
    assert "application" not in causes_ms(story)
    assert attributed(story).generation_gaps == ()


def test_step_time_added_by_batch_size_is_batching() -> None:
    story = Story()
    crowd = [story.arrives(0, f"member {i}") for i in range(20)]
    at = 0.0
    for step in range(80):  # 5 ms and 1 ms for each sequence
        members = crowd[: 2 + step % 10]
        length = 5 + len(members)
        story.step(at, at + length, members)
        at += length
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a, *crowd[:9]], {a: 4})
    story.step(at + 10, at + 25, [a, *crowd[:9]])
    story.ends(at + 25, a)
    causes = causes_ms(story)
    assert causes["batching"] == pytest.approx(9 + 9, abs=0.1)
    assert causes["decode"] == pytest.approx(6, abs=0.1)


def test_accepted_drafts_are_not_sequences() -> None:
    story = Story()
    crowd, fast = [story.arrives(0, f"c{i}") for i in range(7)], story.arrives(0, "fast")
    story.step(0, 50, [*crowd, fast], {fast: 4})
    for n in range(1, 5):
        story.step(50 * n, 50 * n + 50, [*crowd, fast], delivered={fast: 4})
    story.ends(250, fast)
    causes = causes_ms(story, "fast", cost_model=StepCostModel(10e6, 5e6, 0.0, 100))
    # The batching is of other requests, before its first token and after.
    assert (causes["decode"], causes["batching"]) == (4 * 15, 35 + 4 * 35)


def test_steps_of_two_engines_are_not_mixed() -> None:
    story = Story()
    at = warmed_up(story)
    other = story.engine(11)
    a, bystander = story.arrives(at, "a"), story.arrives(at, "bystander")
    for n in range(60):
        story.step(at + n, at + n + 1, [bystander], {bystander: 500} if n == 41 else None, engine=other)
    story.submitted(at, a, sequences=2)
    story.step(at + 60, at + 70, [a], {a: 4})
    story.step(at + 60, at + 70, [bystander, a], {a: 4}, engine=other)
    for n in range(7, 10):
        story.step(at + 10 * n, at + 10 * n + 10, [a])
        story.step(at + 10 * n, at + 10 * n + 10, [bystander, a], engine=other)
    story.ends(at + 100, a)
    record = attributed(story)
    assert record.is_multi_engine
    assert record.breakdown is not None and record.breakdown.interferer is None


def test_two_engines_use_their_own_cost_models() -> None:
    story = Story()
    slow = story.engine(ring=11)
    early, later = story.arrives(0, "early", http=False), story.arrives(0, "later", http=False)
    for n in range(60):
        story.step(30 * n, 30 * n + 30, [early], engine=slow)
        story.step(30 * n, 30 * n + 3, [later])
    story.ends(1800, early)
    story.ends(1800, later)
    at = 1800
    a = story.arrives(at, "a")
    story.submitted(at, a)
    story.step(at, at + 30, [a], {a: 4}, engine=slow)
    for n in range(1, 30):
        story.step(at + 30 * n, at + 30 * n + 30, [a], engine=slow)
    at += 900
    story.step(at, at + 3, [])
    for n in range(30):
        story.step(at + 3 * n, at + 3 * n + 3, [a])
    story.ends(at + 90, a)
    assert causes_ms(story) == {"prefill": 30, "decode": 960}


def test_pipeline_parallel_steps_overlap_without_interference() -> None:
    """Pipeline parallel: a step completes every 10 ms and takes 20 ms."""
    story = Story()
    first, second = story.arrives(0, "first"), story.arrives(0, "second")
    batches = [[first], [second]]
    begun = story.scheduled(0, batches[0], {first: 4})
    for n in range(1, 60):
        member = batches[n % 2]
        following = story.scheduled(10 * n + 1, member, {member[0]: 4} if n == 1 else None)
        story.done(10 * n + 10, begun)
        begun = following
    story.ends(600, first)
    story.ends(600, second)
    causes = causes_ms(story, "first")
    assert causes["decode"] > 550
    assert causes.get("unexplained", 0) + causes.get("interference", 0) + causes.get("host_bubble", 0) < 30


def test_prompts_beyond_the_memory_limit_count_as_concurrent() -> None:
    story = Story()
    a = story.arrives(0, "a")
    for _ in range(600):
        story.submitted(0, a)
    story.step(0, 10, [a] * 600, tokens=dict.fromkeys(range(600), 4))
    for n in range(1, 11):
        story.step(10 * n, 10 * n + 10, [a] * 600)
    story.ends(110, a)
    assert story.record(a).tokens_after_first == 10


def test_without_the_first_step_there_is_no_warmup() -> None:
    story = build("step 0–2000 a:4, step 2000–2300 a every=10, ends 2300", warm=False)
    story.recorded_events = [
        recorded for recorded in story.recorded_events if getattr(recorded.event, "step", 0) != 1
    ]
    assert "warmup" not in causes_ms(story)


def test_each_instant_of_overlapping_pauses_is_counted_once() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    for n in range(1, 400):
        story.step(at + 10 * n, at + 10 * n + 10, [a])
    for n in range(400):
        story.paused(at + 10 * n + 2, at + 10 * n + 4, "gc")
        story.paused(at + 10 * n + 3, at + 10 * n + 5, semconv.CAUSE_CAPTURE)
        story.paused(at + 10 * n + 1, at + 10 * n + 6, "throttled")
    story.ends(at + 4000, a)
    causes = causes_ms(story)
    assert causes["gc"] == pytest.approx(800)
    assert causes["throttled"] == pytest.approx(800)
    assert sum(causes.values()) == 4000


@table("""
an item waits for a worker while its handler waits for a condition
  queue wait 10–60, lock wait 12–30, lock wait 30–70, forward 70–90, ends 90
                                                       → ingress 10, work_queue 50, lock_queue 10, decode 20
an item waits for its batch while a thread of a pool waits for the result
  queue wait 10–20, pool wait 15–55, batch wait 20–60, forward 60–90, ends 90
                                                       → ingress 10, work_queue 10, batch_wait 40, decode 30
an item waits while the model is called for another item of its request
  queue wait 10–20, forward 20–60, queue wait 10–65, forward 65–90, ends 90
                                                       → ingress 10, work_queue 15, decode 65
""")
def test_the_wait_of_an_item_is_not_that_of_its_handler(script: str, expected: dict[str, float]) -> None:
    assert causes_ms(build(script)) == pytest.approx(expected)
