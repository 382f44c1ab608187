"""From a recording to the diagnosis: each symptom is distinguished from the others, and from a healthy server."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from otel_infer.analysis.diagnosis.rules import diagnose_requests
from otel_infer.analysis.diagnosis.symptoms import SYMPTOMS, Finding
from otel_infer.assembly.engine.step_rows import NO_STEPS
from otel_infer.assembly.records.request import Interferer, LatencyBreakdown, RequestRecord, Stage
from otel_infer.ringbuffer import events
from otel_infer.semconv import SEND_WAIT
from tests.support.served_load import MS, ClientRequest, SimulatedServer
from tests.support.story import Story, ids
from tests.unit.analysis.attribution.test_attribution import attributed_records, warmed_up

Draw = random.Random
Load = Callable[[Draw], tuple[SimulatedServer, list[ClientRequest]]]


def steady(draw: Draw, count: int = 60, every: float = 60.0, **more: float) -> list[ClientRequest]:
    """Requests that arrive one by one, of mixed lengths."""
    at, requests = 0.0, []
    for _ in range(count):
        at += draw.expovariate(1 / every)
        requests.append(ClientRequest(at, draw.randint(16, 64), draw.randint(12, 48), **more))
    return requests


def healthy(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    return SimulatedServer(seed=draw.randint(0, 9999)), steady(draw)


def uniformly_slow(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    slow = draw.uniform(20, 60)
    return SimulatedServer(base=slow, seed=draw.randint(0, 9999)), steady(draw, every=8 * slow)


def before_the_engine(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    return healthy(draw)[0], steady(draw, before_ms=draw.uniform(80, 400))


def queueing(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    """More users than batch slots, all the time: each user sends again after its answer."""
    batch = draw.randint(2, 4)
    return SimulatedServer(max_batch=batch, seed=draw.randint(0, 9999)), steady(
        draw, 80, every=draw.uniform(0.8, 1.0) * 290 / batch
    )


def prefill(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    server = SimulatedServer(prompt_token=draw.uniform(0.1, 0.3), seed=draw.randint(0, 9999))
    requests = steady(draw, every=5000)
    for request in requests:
        request.prompt = draw.randint(1500, 4000)
    return server, requests


def stutter(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    server, requests = healthy(draw)
    if draw.random() < 0.5:
        last = requests[-1].at
        server.pauses = [(draw.uniform(0, last), draw.uniform(80, 300)) for _ in range(round(last / 250))]
        return server, requests
    server.prompt_token = 0.1
    for request in draw.sample(requests, len(requests) // 6):
        request.prompt = draw.randint(1000, 3000)
    return server, requests


def peak(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    server, requests = SimulatedServer(max_batch=8, seed=draw.randint(0, 9999)), steady(draw, every=80)
    middle = requests[len(requests) // 2].at
    requests += [
        ClientRequest(middle + draw.uniform(0, 300), 32, draw.randint(24, 48))
        for _ in range(draw.randint(40, 90))
    ]
    return server, requests


def big_and_small(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    server, requests = SimulatedServer(max_batch=4, seed=draw.randint(0, 9999)), steady(draw, 70, every=120)
    for request in requests:
        request.tokens = draw.randint(6, 14)
    for at in range(6):
        requests += [
            ClientRequest(at * 1400 + draw.uniform(0, 40), 400, draw.randint(90, 130))
            for _ in range(4 if at % 2 == 0 else 0)
        ]
    return server, requests


def batching(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    if draw.random() < 0.5:
        server = SimulatedServer(batch_delay=draw.uniform(150, 400), seed=draw.randint(0, 9999))
        requests = steady(draw, every=400)
        for request in requests:
            request.tokens = draw.randint(4, 8)
        return server, requests
    return SimulatedServer(
        base=4, each=draw.uniform(1.0, 2.0), max_batch=64, seed=draw.randint(0, 9999)
    ), steady(draw, 120, every=25)


ROWS: dict[str, Load] = {
    "pre_engine": before_the_engine,
    "queueing": queueing,
    "prefill": prefill,
    "stutter": stutter,
    "peak": peak,
    "head_of_line_blocking": big_and_small,
    "batching": batching,
}


def healthy_records() -> list[RequestRecord]:
    server, requests = healthy(random.Random(3))
    return server.records(requests)


def add_time(record: RequestRecord, streaming: bool = False, **causes: int) -> None:
    """Adds ns to causes of the latency breakdown, also to those while streaming. The record's duration stays."""
    assert record.breakdown is not None
    total, streamed = Counter(record.breakdown.causes), Counter(record.breakdown.streaming)
    total.update(causes)
    streamed.update(causes if streaming else {})
    record.breakdown = record.breakdown._replace(causes=dict(total), streaming=dict(streamed))


def first_finding(records: list[RequestRecord]) -> Finding:
    return diagnose_requests(records).findings[0]


def symptoms(records: list[RequestRecord], **more: Any) -> list[str]:
    return [finding.symptom for finding in diagnose_requests(records, **more).findings]


def test_each_symptom_has_a_load() -> None:
    """The loads of the others are in `test_time_by_complaint`."""
    others = {"late_end", "slow_reader", "not_enough_cpu", "too_many_at_once", "abandoned_work", "slow_model"}
    assert ROWS.keys() | others == SYMPTOMS.keys()


@pytest.mark.parametrize("row", ROWS)
def test_symptom_is_recognized_from_the_records(row: str) -> None:
    right = 0
    for seed in range(10):
        server, requests = ROWS[row](random.Random(f"{row} {seed}"))
        right += diagnose_requests(server.records(requests)).verdict == row
    assert right >= 9


def test_a_pause_that_few_requests_met_is_stated_of_a_healthy_server() -> None:
    server, requests = SimulatedServer(seed=1), steady(random.Random(1), 400)
    records = server.records(requests)
    for record in records[200:204]:
        add_time(record, gc=285 * MS)
    diagnosis = diagnose_requests(records)
    assert diagnosis.verdict == "healthy"
    assert re.search(
        r"the slowest 4 of 400 took \d+ ms longer .*, 285 ms of it gc: garbage collection \(gc",
        diagnosis.note,
    )


@pytest.mark.parametrize("load", [healthy, uniformly_slow])
def test_healthy_or_uniformly_slow_server_has_no_symptom(
    load: Load,
) -> None:
    for seed in range(10):
        server, requests = load(random.Random(f"fine {seed}"))
        diagnosis = diagnose_requests(server.records(requests))
        assert (diagnosis.verdict, diagnosis.findings) == ("healthy", []), seed


def test_few_requests_are_insufficient_evidence() -> None:
    server, requests = healthy(random.Random(1))
    diagnosis = diagnose_requests(server.records(requests[:5]))
    assert diagnosis.verdict == "insufficient" and "at least 12" in diagnosis.note


def test_evidence_names_the_longest_interferer_first() -> None:
    server, requests = healthy(random.Random(3))
    server.prompt_token = 0.1
    requests[20].prompt = requests[40].prompt = 4000
    records = server.records(requests)
    finding = first_finding(records)
    assert (finding.symptom, finding.cause) == ("stutter", "interference")
    assert re.search("trace 0{6}[0-9a-f]{26} and", finding.evidence[-1]), "both"
    heavy, light = Interferer(b"\xff" * 16, b"h" * 8, 10**10), Interferer(b"\x01" * 16, b"l" * 8, 10**6)
    named = [record for record in records if record.breakdown and record.breakdown.stalled_by]
    for number, record in enumerate(named):
        assert record.breakdown is not None
        record.breakdown = record.breakdown._replace(stalled_by=light if number % 2 else heavy)
    assert f"trace {'ff' * 16} " in first_finding(records).evidence[-1]


def collected(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    server, requests = healthy(draw)
    server.pauses = [(at * 300.0, 200.0) for at in range(10)]
    return server, requests


def blocked_loop(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    server, requests = healthy(draw)
    server.blocked_loop = [(at * 300.0, 250.0) for at in range(10)]
    return server, requests


def blocked_before_the_engine(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    server, requests = SimulatedServer(), steady(draw, every=5000)
    for request in requests[10:16]:
        request.before_ms = 305.0
        server.blocked_loop.append((request.at + 2, 300.0))
    return server, requests


def cold_start(draw: Draw) -> tuple[SimulatedServer, list[ClientRequest]]:
    return SimulatedServer(cold_ms=3000.0), steady(draw, every=5000)


@pytest.mark.parametrize(
    ("load", "symptom", "cause", "change"),
    [
        (collected, "stutter", "gc", "gc.freeze()"),
        (blocked_loop, "stutter", "event_loop", "asyncio.to_thread"),
        (blocked_before_the_engine, "pre_engine", "event_loop", "asyncio.to_thread"),
        (cold_start, "prefill", "warmup", "batch"),
    ],
)
def test_cause_of_a_symptom_determines_the_change(load: Load, symptom: str, cause: str, change: str) -> None:
    server, requests = load(random.Random(3))
    finding = first_finding(server.records(requests))
    assert (finding.symptom, finding.cause) == (symptom, cause)
    assert change in finding.change


def test_blocked_loop_makes_no_step_slow() -> None:
    server, requests = blocked_loop(random.Random(3))
    records = server.records(requests)
    assert not any("event_loop" in record.breakdown.causes for record in records if record.breakdown)


def test_loop_delay_caused_by_gc_is_dropped() -> None:
    server, requests = healthy(random.Random(3))
    server.pauses = [(at * 300.0, 200.0) for at in range(10)]
    paused = {pause for record in server.records(requests) for pause in record.pauses}
    server.blocked_loop = [(p.started_at / 1e6 + 1, (p.ended_at - p.started_at) / 1e6 - 1) for p in paused]
    assert [finding.cause for finding in diagnose_requests(server.records(requests)).findings] == ["gc"]


# ── similar symptoms ─────────────────────────────────────────────────────────────────────────────────────────────


def test_short_prefill_is_not_a_symptom() -> None:
    server = SimulatedServer(base=7, prompt_token=0.033)
    requests = [ClientRequest(at * 2500.0, 1500, 200) for at in range(40)]
    assert diagnose_requests(server.records(requests)).verdict == "healthy"


def test_burst_of_ordinary_prompts_is_peak_not_prefill() -> None:
    draw = random.Random(5)
    server = SimulatedServer(max_batch=4, prompt_token=0.05, noise=0.01)
    requests = [ClientRequest(at * 700.0 + draw.uniform(0, 200), 3000, 12) for at in range(100)]
    requests += [ClientRequest(requests[50].at + draw.uniform(0, 300), 3000, 12) for _ in range(20)]
    assert diagnose_requests(server.records(requests)).verdict == "peak"


def test_requests_before_the_recording_make_no_peak() -> None:
    """Of the requests that began before the recording, only the unfinished ones are known, so later load looks higher."""
    server, requests = SimulatedServer(max_batch=3), steady(random.Random(1), 150, every=87)
    for request in requests:
        request.at += 600_000
    (survivor,) = SimulatedServer().records([ClientRequest(0, 32, 80_000)])
    records, began = [survivor, *server.records(requests)], 600_000 * MS
    assert survivor.ended_at > began
    assert diagnose_requests(records).verdict == "peak"
    assert diagnose_requests(records, began).verdict == "queueing"


def without_steps(record: RequestRecord, first_token_ms: int, **causes_ms: int) -> None:
    """Makes the record one of a request without steps and token count. `first_token_ms` 0: without a first token."""
    record.output_tokens, record.steps, record.summary = 0, None, NO_STEPS
    record.first_token_at = record.arrived_at + first_token_ms * MS if first_token_ms else 0
    record.ended_at = record.arrived_at + sum(causes_ms.values()) * MS
    record.breakdown = LatencyBreakdown({cause: ms * MS for cause, ms in causes_ms.items()}, None)


def embedding(record: RequestRecord) -> None:
    without_steps(record, 0, prefill=2, interference=126)  # computed with 63 others


def slow_client(record: RequestRecord) -> None:
    sending = 3 * record.duration_ns
    record.stages = [stage for stage in record.stages if stage.name != "postprocess"]
    record.stages.append(
        Stage("postprocess", record.ended_at, record.ended_at + sending, {SEND_WAIT: sending / 1e9})
    )
    record.ended_at += sending
    add_time(record, egress=sending)


def stored_at_the_end(record: RequestRecord) -> None:
    record.stages.append(Stage("store", record.ended_at, record.ended_at + 400 * MS, {}))
    record.ended_at += 400 * MS
    add_time(record, application=400 * MS)


def prompts_while_streaming(record: RequestRecord) -> None:
    """Sixteen prompts in one request: the first is done after 30 ms, the others while tokens stream."""
    assert record.breakdown is not None
    later = record.breakdown.streaming["decode"] * 6 // 10
    add_time(record, streaming=True, decode=-later, prefill=later)


def aborted_prompt(record: RequestRecord) -> None:
    without_steps(record, 0, prefill=30_000)
    record.outcome, record.failed_stage = events.ABORTED, "prefill"


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        pytest.param(embedding, "healthy", id="embeddings"),
        pytest.param(lambda r: without_steps(r, 3, ingress=3, decode=3), "healthy", id="6 ms"),
        pytest.param(slow_client, "slow_reader", id="slow clients at the end"),
        pytest.param(prompts_while_streaming, "healthy", id="prompts after the first token"),
        pytest.param(stored_at_the_end, "late_end", id="application after the last token"),
        pytest.param(aborted_prompt, "prefill", id="aborted prompts"),
        pytest.param(
            lambda r: without_steps(r, 2500, prefill=2500, decode=500), "prefill", id="no token count"
        ),
    ],
)
def test_verdict_on_changed_records(change: Callable[[RequestRecord], None], verdict: str) -> None:
    records = healthy_records()
    for record in records:
        change(record)
    assert diagnose_requests(records).verdict == verdict


def test_time_outside_all_symptoms_is_insufficient() -> None:
    records = healthy_records()
    for record in records:
        without_steps(record, 400, transfer=600, decode=400)
    diagnosis = diagnose_requests(records)
    assert diagnosis.verdict == "insufficient" and "60%" in diagnosis.note and "transfer" in diagnosis.note


def test_one_chat_among_embeddings_changes_no_verdict() -> None:
    records = healthy_records()
    for record in records[1:]:
        embedding(record)
    assert diagnose_requests(records).verdict == "healthy"


def test_host_time_of_some_requests_is_no_finding() -> None:
    """Every step has 6 ms of device idle time. It is known for a third of the streams and for all with a pause."""
    server, requests = (
        SimulatedServer(base=20, each=0, noise=0),
        [ClientRequest(at * 2000.0, 32, 40) for at in range(60)],
    )
    server.pauses = [(at * 2000.0 + 300, 70.0) for at in range(0, 60, 10)]
    records = server.records(requests)
    for number, record in enumerate(records):
        if number % 3 and number % 10:
            continue
        record.device_idle = ()
        host = record.summary.gaps_total * 3 // 10
        add_time(record, streaming=True, host_bubble=host, decode=-host)
    assert diagnose_requests(records).findings == []


def test_delay_before_the_first_token_is_not_stutter() -> None:
    records = healthy_records()
    for record in records[::5]:
        record.arrived_at -= 1_200 * MS
        add_time(record, interference=1_200 * MS)
    finding, *others = diagnose_requests(records).findings
    assert (finding.symptom, finding.cause) == ("prefill", "interference")
    assert "long prompts" in finding.change
    assert not others


def test_streams_cancelled_during_an_engine_hang_are_stutter() -> None:
    records = healthy_records()
    for record in records[20:30]:
        hung = 20_000 * MS
        record.outcome, record.error_type = events.ABORTED, "client_disconnect"
        record.failed_stage, record.ended_at = "decode", record.last_token_at + hung
        add_time(record, streaming=True, unexplained=hung)
    finding = first_finding(records)
    assert (finding.symptom, finding.cause) == ("stutter", "unexplained")
    assert "20000 ms" in finding.evidence[0]


def test_queued_aborted_requests_are_not_evidence_for_batching() -> None:
    """Four slots are held by streams that have not ended and therefore have no record."""
    records = healthy_records()
    for record in records[-20:]:
        record.stages = [Stage("queue", record.arrived_at, record.arrived_at + 20_000 * MS, {})]
        record.ended_at, record.outcome = record.stages[0].ended_at, events.ABORTED
        record.failed_stage = "queue"
        record.first_token_at, record.steps, record.summary = 0, None, NO_STEPS
        record.breakdown = LatencyBreakdown({"scheduler_queue": record.duration_ns}, None)
    finding = first_finding(records)
    assert finding.cause == "scheduler_queue"
    assert finding.symptom != "batching"


def test_failed_requests_count_as_running() -> None:
    records = healthy_records()
    heavy, crowd = records[-1], records[:12]
    begin = max(record.ended_at for record in records)
    until = begin + 5_000 * MS
    for record in crowd:
        record.stages = [
            Stage("queue", begin, until, {}),
            Stage("prefill", until, until + 10 * MS, {}),
        ]
        record.arrived_at, record.first_token_at, record.ended_at = begin, until + 10 * MS, until + 10 * MS
        record.breakdown = LatencyBreakdown({"scheduler_queue": until - begin, "prefill": 10 * MS}, None)
    assert diagnose_requests(records).verdict == "batching"
    heavy.outcome, heavy.error_type = events.ERROR, "timeout"
    heavy.stages = [Stage("decode", begin, until, {})]
    assert "batching" not in symptoms(records)


def test_few_long_streams_do_not_explain_queueing() -> None:
    draw = random.Random(4)
    server = SimulatedServer(max_batch=16, noise=0.01)
    requests = [ClientRequest(at * 21.0, 32, draw.randint(28, 36)) for at in range(1000)]
    for request in requests[::33]:
        request.tokens = 240
    finding = first_finding(server.records(requests))
    assert finding.symptom == "queueing"


def test_unfinished_requests_count_as_running() -> None:
    """An unfinished stream holds the slots of the others until long after the recording's end."""
    server = SimulatedServer(max_batch=1)
    heavy, *light = server.records(
        [ClientRequest(0, 32, 400), *(ClientRequest(10, 16, 4) for _ in range(14))]
    )
    light = [record for record in [heavy, *light] if record.output_tokens < 100]
    began = min(stage.started_at for stage in heavy.stages if stage.name == "prefill")
    assert symptoms(light)[0] == "batching", "no other request is known to have run"
    found = symptoms(light, unfinished=[began])
    assert found and "batching" not in found


def test_stall_names_the_interferer_during_streaming() -> None:
    """Interferers that only delayed the first token are not named."""
    story = Story()
    at = warmed_up(story)
    crowd = [story.arrives(at, f"stream {number}") for number in range(12)]
    early = story.arrives(at, "early interferer")
    story.step(at, at + 900, [early, *crowd], {early: 4000, **dict.fromkeys(crowd, 4)})
    story.ends(at + 900, early)
    at += 900
    for number in range(3):
        late = story.arrives(at, f"late {number}")
        for _ in range(10):
            story.step(at, at + 10, crowd)
            at += 10
        story.step(at, at + 200, [*crowd, late], {late: 1000})
        story.ends(at + 200, late)
        at += 200
    for request in crowd:
        story.ends(at, request)
    records = attributed_records(story.in_order())
    (stutter,) = [finding for finding in diagnose_requests(records).findings if finding.symptom == "stutter"]
    assert "interference" in stutter.evidence[1]
    assert ids("early interferer")[0].hex() not in stutter.evidence[-1]
    assert any(ids(f"late {number}")[0].hex() in stutter.evidence[-1] for number in range(3))
