"""From a tape to the complaint: each row of the table is told from the others, and from a server that is fine."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from otel_infer.analysis.diagnosis.rules import diagnose
from otel_infer.analysis.diagnosis.symptoms import SYMPTOMS
from otel_infer.assembly.engine.step_rows import NO_STEPS
from otel_infer.assembly.records.request import Interferer, LatencyBreakdown, RequestRecord, Stage
from otel_infer.ringbuffer import events
from otel_infer.semconv import SEND_WAIT
from tests.support.served_load import MS, Asked, Served
from tests.support.story import Story, ids
from tests.unit.analysis.attribution.test_attribution import blamed, warmed_up

Draw = random.Random


def steady(draw: Draw, count: int = 60, every: float = 60.0, **more: float) -> list[Asked]:
    """Requests that come one by one, of mixed lengths."""
    at, asked = 0.0, []
    for _ in range(count):
        at += draw.expovariate(1 / every)
        asked.append(Asked(at, draw.randint(16, 64), draw.randint(12, 48), **more))
    return asked


def healthy(draw: Draw) -> tuple[Served, list[Asked]]:
    return Served(seed=draw.randint(0, 9999)), steady(draw)


def uniformly_slow(draw: Draw) -> tuple[Served, list[Asked]]:
    slow = draw.uniform(20, 60)
    return Served(base=slow, seed=draw.randint(0, 9999)), steady(draw, every=8 * slow)


def before_the_engine(draw: Draw) -> tuple[Served, list[Asked]]:
    return healthy(draw)[0], steady(draw, before_ms=draw.uniform(80, 400))


def queueing(draw: Draw) -> tuple[Served, list[Asked]]:
    """More users than places, all the time: each sends again when it has its answer."""
    batch = draw.randint(2, 4)
    return Served(max_batch=batch, seed=draw.randint(0, 9999)), steady(
        draw, 80, every=draw.uniform(0.8, 1.0) * 290 / batch
    )


def prefill(draw: Draw) -> tuple[Served, list[Asked]]:
    served = Served(prompt_token=draw.uniform(0.1, 0.3), seed=draw.randint(0, 9999))
    asked = steady(draw, every=5000)
    for one in asked:
        one.prompt = draw.randint(1500, 4000)
    return served, asked


def stutter(draw: Draw) -> tuple[Served, list[Asked]]:
    served, asked = healthy(draw)
    if draw.random() < 0.5:
        last = asked[-1].at
        served.pauses = [(draw.uniform(0, last), draw.uniform(80, 300)) for _ in range(round(last / 250))]
        return served, asked
    served.prompt_token = 0.1
    for one in draw.sample(asked, len(asked) // 6):
        one.prompt = draw.randint(1000, 3000)
    return served, asked


def peak(draw: Draw) -> tuple[Served, list[Asked]]:
    served, asked = Served(max_batch=8, seed=draw.randint(0, 9999)), steady(draw, every=80)
    middle = asked[len(asked) // 2].at
    asked += [
        Asked(middle + draw.uniform(0, 300), 32, draw.randint(24, 48)) for _ in range(draw.randint(40, 90))
    ]
    return served, asked


def big_and_small(draw: Draw) -> tuple[Served, list[Asked]]:
    served, asked = Served(max_batch=4, seed=draw.randint(0, 9999)), steady(draw, 70, every=120)
    for one in asked:
        one.tokens = draw.randint(6, 14)
    for at in range(6):
        asked += [
            Asked(at * 1400 + draw.uniform(0, 40), 400, draw.randint(90, 130))
            for _ in range(4 if at % 2 == 0 else 0)
        ]
    return served, asked


def batching(draw: Draw) -> tuple[Served, list[Asked]]:
    if draw.random() < 0.5:
        served = Served(batch_delay=draw.uniform(150, 400), seed=draw.randint(0, 9999))
        asked = steady(draw, every=400)
        for one in asked:
            one.tokens = draw.randint(4, 8)
        return served, asked
    return Served(base=4, each=draw.uniform(1.0, 2.0), max_batch=64, seed=draw.randint(0, 9999)), steady(
        draw, 120, every=25
    )


ROWS: dict[str, Callable[[Draw], tuple[Served, list[Asked]]]] = {
    "pre_engine": before_the_engine,
    "queueing": queueing,
    "prefill": prefill,
    "stutter": stutter,
    "peak": peak,
    "head_of_line_blocking": big_and_small,
    "batching": batching,
}


def test_every_row_of_the_table_has_its_load() -> None:
    assert ROWS.keys() == SYMPTOMS.keys()


@pytest.mark.parametrize("row", ROWS)
def test_a_complaint_is_recognized_by_what_the_requests_say(row: str) -> None:
    right = 0
    for seed in range(10):
        served, asked = ROWS[row](random.Random(f"{row} {seed}"))
        right += diagnose(served.records(asked)).verdict == row
    assert right >= 9


@pytest.mark.parametrize("load", [healthy, uniformly_slow])
def test_a_server_that_is_fine_or_slow_as_a_whole_has_no_complaint(
    load: Callable[[Draw], tuple[Served, list[Asked]]],
) -> None:
    for seed in range(10):
        served, asked = load(random.Random(f"fine {seed}"))
        diagnosis = diagnose(served.records(asked))
        assert (diagnosis.verdict, diagnosis.findings) == ("healthy", []), seed


def test_a_few_requests_are_not_evidence() -> None:
    served, asked = healthy(random.Random(1))
    diagnosis = diagnose(served.records(asked[:5]))
    assert (diagnosis.verdict, diagnosis.note) == ("insufficient", "5 requests; at least 12 are needed")


def test_the_evidence_names_the_cause_and_who_held_up_whom() -> None:
    served, asked = healthy(random.Random(3))
    served.prompt_token = 0.1
    asked[20].prompt = asked[40].prompt = 4000
    finding, *_ = diagnose(served.records(asked)).findings
    assert (finding.symptom, finding.cause) == ("stutter", "interference")
    assert re.fullmatch("held up most by trace 0{6}[0-9a-f]{26} and by 1 more", finding.evidence[-1])


def test_who_held_up_most_is_named_and_not_who_comes_first_by_its_id() -> None:
    served, asked = healthy(random.Random(3))
    served.prompt_token = 0.1
    asked[20].prompt = asked[40].prompt = 4000
    records = served.records(asked)
    heavy, light = Interferer(b"\xff" * 16, b"h" * 8, 10**10), Interferer(b"\x01" * 16, b"l" * 8, 10**6)
    named = [record for record in records if record.breakdown and record.breakdown.stalled_by]
    for number, record in enumerate(named):
        assert record.breakdown is not None
        record.breakdown = record.breakdown._replace(stalled_by=light if number % 2 else heavy)
    finding, *_ = diagnose(records).findings
    assert finding.evidence[-1] == f"held up most by trace {'ff' * 16} and by 1 more"


def test_what_the_application_does_after_the_first_token_is_not_before_the_engine() -> None:
    served, asked = healthy(random.Random(3))
    records = served.records(asked)
    for record in records:
        assert record.breakdown is not None
        stored = Stage("store", record.ended_at, record.ended_at + 400_000_000, {})
        record.stages.append(stored)
        record.ended_at = stored.ended_at
        causes = {**record.breakdown.causes, "application": 400_000_000}
        record.breakdown = record.breakdown._replace(causes=causes)
    assert "pre_engine" not in [finding.symptom for finding in diagnose(records).findings]


def test_what_to_change_first_follows_from_what_interrupts() -> None:
    served, asked = healthy(random.Random(3))
    served.pauses = [(at * 300.0, 200.0) for at in range(10)]
    finding, *_ = diagnose(served.records(asked)).findings
    assert (finding.cause, finding.change) == (
        "gc",
        "gc.freeze() once the server is warm, a higher threshold, fewer long-lived objects",
    )


def test_streams_that_the_event_loop_does_not_send_stutter_though_no_step_is_slow() -> None:
    served, asked = healthy(random.Random(3))
    served.frozen = [(at * 300.0, 250.0) for at in range(10)]
    records = served.records(asked)
    finding, *_ = diagnose(records).findings
    assert (finding.symptom, finding.cause) == ("stutter", "event_loop")
    assert "asyncio.to_thread" in finding.change
    assert "the event loop stood still for" in finding.evidence[0]
    assert not any("event_loop" in record.breakdown.causes for record in records if record.breakdown)


def test_a_loop_that_a_collection_holds_up_is_no_finding_of_its_own() -> None:
    served, asked = healthy(random.Random(3))
    served.pauses = [(at * 300.0, 200.0) for at in range(10)]
    paused = {pause for record in served.records(asked) for pause in record.pauses}
    served.frozen = [(p.started_at / 1e6 + 1, (p.ended_at - p.started_at) / 1e6 - 1) for p in paused]
    assert [finding.cause for finding in diagnose(served.records(asked)).findings] == ["gc"]


def test_requests_that_wait_for_the_event_loop_before_the_engine_are_told_so() -> None:
    served, asked = Served(), steady(random.Random(3), every=5000)
    for one in asked[10:16]:
        one.before_ms = 305.0
    served.frozen = [(one.at + 2, 300.0) for one in asked[10:16]]
    finding, *_ = diagnose(served.records(asked)).findings
    assert (finding.symptom, finding.cause) == ("pre_engine", "event_loop")
    assert "asyncio.to_thread" in finding.change


def test_the_first_requests_of_a_server_that_is_cold_are_told_to_be() -> None:
    served, asked = Served(), steady(random.Random(3), every=5000)
    served.cold_ms = 3000.0
    finding, *_ = diagnose(served.records(asked)).findings
    assert (finding.symptom, finding.cause) == ("prefill", "warmup")
    assert finding.change.startswith("run a batch and a prompt of each size once")


# ── what is told from what it looks like ─────────────────────────────────────────────────────────────────────────


def test_a_prompt_that_takes_less_than_anybody_feels_is_no_complaint() -> None:
    served = Served(base=7, prompt_token=0.033)
    asked = [Asked(at * 2500.0, 1500, 200) for at in range(40)]
    assert diagnose(served.records(asked)).verdict == "healthy"


def test_a_burst_on_a_server_of_ordinary_prompts_is_a_peak_and_not_the_prompts_fault() -> None:
    draw = random.Random(5)
    served = Served(max_batch=4, prompt_token=0.05, noise=0.01)
    asked = [Asked(at * 700.0 + draw.uniform(0, 200), 3000, 12) for at in range(100)]
    asked += [Asked(asked[50].at + draw.uniform(0, 300), 3000, 12) for _ in range(20)]
    assert diagnose(served.records(asked)).verdict == "peak"


def test_who_came_long_before_a_tape_makes_no_peak_of_a_steady_load() -> None:
    """Of those who came before it, only who is still there is known: few, and so the others look like many."""
    served, asked = Served(max_batch=3), steady(random.Random(1), 150, every=87)
    for one in asked:
        one.at += 600_000
    (survivor,) = Served().records([Asked(0, 32, 80_000)])
    records, began = [survivor, *served.records(asked)], 600_000 * MS
    assert survivor.ended_at > began
    assert diagnose(records).verdict == "peak"
    assert diagnose(records, began).verdict == "queueing"


def embedded(records: list[RequestRecord], ms: int = 120) -> list[RequestRecord]:
    """The same, had they been embeddings that are computed with 63 others each: a prompt, and no token."""
    for record in records:
        record.output_tokens, record.first_token_at, record.steps, record.summary = 0, 0, None, NO_STEPS
        record.ended_at = record.arrived_at + ms * MS
        own = record.duration_ns // 64
        record.breakdown = LatencyBreakdown({"prefill": own, "interference": record.duration_ns - own}, None)
    return records


@pytest.mark.parametrize("ms", [60, 120])
def test_embeddings_do_nothing_but_their_prompt(ms: int) -> None:
    served, asked = healthy(random.Random(3))
    assert diagnose(embedded(served.records(asked), ms)).verdict == "healthy"
    talked = served.records(asked[:1])
    assert diagnose([*embedded(served.records(asked), ms), *talked]).verdict == "healthy"


def test_prompts_that_nobody_waited_the_end_of_are_expensive_all_the_same() -> None:
    served, asked = healthy(random.Random(3))
    records = embedded(served.records(asked), 30_000)
    for record in records:
        record.outcome, record.failed_stage = events.ABORTED, "prefill"
        record.breakdown = LatencyBreakdown({"prefill": record.duration_ns}, None)
    assert diagnose(records).verdict == "prefill"


def test_prompts_of_a_server_that_counts_no_tokens_may_be_expensive_too() -> None:
    served, asked = healthy(random.Random(3))
    records = served.records(asked)
    for record in records:
        record.output_tokens, record.steps, record.summary = 0, None, NO_STEPS
        record.first_token_at = record.arrived_at + 2_500 * MS
        record.ended_at = record.first_token_at + 500 * MS
        record.breakdown = LatencyBreakdown({"prefill": 2_500 * MS, "decode": 500 * MS}, None)
    assert diagnose(records).verdict == "prefill"


def test_a_prompt_that_came_after_the_first_token_is_no_part_of_the_time_to_it() -> None:
    """Sixteen prompts in one request: the first is done after 30 ms, the others while its tokens come."""
    served, asked = healthy(random.Random(3))
    records = served.records(asked)
    for record in records:
        assert record.breakdown is not None
        causes, streaming = dict(record.breakdown.causes), dict(record.breakdown.streaming)
        later = 0.6 * streaming["decode"]
        causes["decode"] -= int(later)
        streaming["decode"] -= int(later)
        causes["prefill"] = causes.get("prefill", 0) + int(later)
        streaming["prefill"] = int(later)
        record.breakdown = record.breakdown._replace(causes=causes, streaming=streaming)
    said = diagnose(records)
    assert "prefill" not in [finding.symptom for finding in said.findings]


def test_what_nobody_feels_needs_no_name() -> None:
    served, asked = healthy(random.Random(3))
    records = served.records(asked)
    for record in records:
        record.ended_at = record.arrived_at + 6 * MS
        record.steps, record.summary = None, NO_STEPS
        record.breakdown = LatencyBreakdown({"ingress": 3 * MS, "decode": 3 * MS}, None)
    assert diagnose(records).verdict == "healthy"


def test_what_is_known_of_some_requests_only_is_not_held_against_the_others() -> None:
    """Every step has 6 ms in which the device is idle; of a third of the streams, and of all with a pause, that is known."""
    served, asked = Served(base=20, each=0, noise=0), [Asked(at * 2000.0, 32, 40) for at in range(60)]
    served.pauses = [(at * 2000.0 + 300, 70.0) for at in range(0, 60, 10)]
    records = served.records(asked)
    for number, record in enumerate(records):
        if number % 3 and number % 10:
            continue
        assert record.breakdown is not None
        host = record.summary.gaps_total * 3 // 10
        record.device_idle = ()
        streaming = {**record.breakdown.streaming, "host_bubble": host}
        streaming["decode"] -= host
        record.breakdown = record.breakdown._replace(streaming=streaming)
    assert diagnose(records).findings == []


def test_time_that_no_row_of_the_table_knows_is_not_called_their_own_work() -> None:
    served, asked = healthy(random.Random(3))
    records = served.records(asked)
    for record in records:
        host = record.duration_ns * 6 // 10
        record.breakdown = LatencyBreakdown({"host_bubble": host, "decode": record.duration_ns - host}, None)
    diagnosis = diagnose(records)
    assert (diagnosis.verdict, diagnosis.note) == (
        "insufficient",
        "no complaint of the table fits, but 60% of the slow requests' time is host_bubble",
    )


def test_readers_that_are_slow_at_the_end_are_not_the_servers_fault() -> None:
    served, asked = healthy(random.Random(3))
    records = served.records(asked)
    for record in records:
        sending = 3 * record.duration_ns
        record.stages = [stage for stage in record.stages if stage.name != "postprocess"]
        record.stages.append(
            Stage("postprocess", record.ended_at, record.ended_at + sending, {SEND_WAIT: sending / 1e9})
        )
        record.ended_at += sending
        assert record.breakdown is not None
        record.breakdown = record.breakdown._replace(causes={**record.breakdown.causes, "egress": sending})
    assert diagnose(records).verdict == "healthy"


def test_what_was_before_the_first_token_is_no_stutter() -> None:
    served, asked = healthy(random.Random(3))
    records = served.records(asked)
    for record in records[::5]:
        assert record.breakdown is not None and record.first_token_at
        late = 1_200 * MS
        record.arrived_at -= late
        causes = {
            **record.breakdown.causes,
            "interference": record.breakdown.causes.get("interference", 0) + late,
        }
        record.breakdown = record.breakdown._replace(causes=causes)
    finding, *others = diagnose(records).findings
    assert (finding.symptom, finding.cause) == ("prefill", "interference")
    assert finding.change.startswith("long prompts apart")
    assert not others


def test_streams_that_are_given_up_while_the_engine_hangs_froze() -> None:
    served, asked = healthy(random.Random(3))
    records = served.records(asked)
    for record in records[20:30]:
        hung = 20_000 * MS
        record.outcome, record.error_type = events.ABORTED, "client_disconnect"
        record.failed_stage, record.ended_at = "decode", record.last_token_at + hung
        assert record.breakdown is not None
        record.breakdown = record.breakdown._replace(
            causes={**record.breakdown.causes, "unexplained": hung}, streaming={"unexplained": hung}
        )
    finding, *_ = diagnose(records).findings
    assert (finding.symptom, finding.cause) == ("stutter", "unexplained")
    assert "is 20000 ms" in finding.evidence[0]


def test_requests_that_never_had_their_turn_do_not_say_that_nothing_ran() -> None:
    """Four places are held by answers that are not over yet: of them there is no record."""
    served, asked = healthy(random.Random(3))
    records = served.records(asked)
    for record in records[-20:]:
        record.stages = [Stage("queue", record.arrived_at, record.arrived_at + 20_000 * MS, {})]
        record.ended_at, record.outcome, record.failed_stage = (
            record.stages[0].ended_at,
            events.ABORTED,
            "queue",
        )
        record.first_token_at, record.steps, record.summary = 0, None, NO_STEPS
        record.breakdown = LatencyBreakdown({"scheduler_queue": record.duration_ns}, None)
    finding, *_ = diagnose(records).findings
    assert finding.cause == "scheduler_queue"
    assert finding.symptom != "batching"


def test_requests_that_failed_were_running_too() -> None:
    served, asked = healthy(random.Random(3))
    records = served.records(asked)
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
    assert diagnose(records).verdict == "batching"
    heavy.outcome, heavy.error_type = events.ERROR, "timeout"
    heavy.stages = [Stage("decode", begin, until, {})]
    assert "batching" not in [finding.symptom for finding in diagnose(records).findings]


def test_a_few_heavy_requests_that_are_always_there_are_not_why_others_wait() -> None:
    draw = random.Random(4)
    served = Served(max_batch=16, noise=0.01)
    asked = [Asked(at * 21.0, 32, draw.randint(28, 36)) for at in range(1000)]
    for one in asked[::33]:
        one.tokens = 240
    finding, *_ = diagnose(served.records(asked)).findings
    assert finding.symptom == "queueing"


def test_who_waits_beside_one_that_has_not_ended_does_not_wait_while_nothing_runs() -> None:
    """One has its answer computed all along, and takes the places of the others until long after the tape's end."""
    served = Served(max_batch=1)
    heavy, *light = served.records([Asked(0, 32, 400), *(Asked(10, 16, 4) for _ in range(14))])
    light = [record for record in [heavy, *light] if record.output_tokens < 100]
    began = min(stage.started_at for stage in heavy.stages if stage.name == "prefill")
    assert diagnose(light).findings[0].symptom == "batching", "nothing else is known to have run"
    assert [one.symptom for one in diagnose(light, unfinished=[began]).findings] != []
    assert "batching" not in [one.symptom for one in diagnose(light, unfinished=[began]).findings]


def test_a_stream_is_stalled_by_who_came_while_it_streamed_and_not_by_who_delayed_its_first_token() -> None:
    story = Story()
    at = warmed_up(story)
    crowd = [story.arrives(at, f"reader {number}") for number in range(12)]
    early = story.arrives(at, "early offender")
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
    for one in crowd:
        story.ends(at, one)
    records = blamed(story.in_order())
    (stutter,) = [one for one in diagnose(records).findings if one.symptom == "stutter"]
    assert "interference" in stutter.evidence[1]
    assert ids("early offender")[0].hex() not in stutter.evidence[-1]
    assert any(ids(f"late {number}")[0].hex() in stutter.evidence[-1] for number in range(3))
