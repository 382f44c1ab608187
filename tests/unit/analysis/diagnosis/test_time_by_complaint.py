"""The time of requests by complaint: everybody's waits, the excess of slow requests, cores, and what is not covered."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.analysis.diagnosis import excess
from otel_infer.analysis.diagnosis.concurrency import estimate_shared_time
from otel_infer.analysis.diagnosis.cpu_use import CpuUse, measure_cores_in_use, measure_cpu_use
from otel_infer.analysis.diagnosis.rules import Diagnosis, diagnose_requests
from otel_infer.analysis.diagnosis.uncovered import locate_uncovered_time
from otel_infer.assembly.engine.step_rows import NO_STEPS
from otel_infer.assembly.records.request import LatencyBreakdown, RequestRecord, Stage
from otel_infer.ringbuffer.events import CpuSeen
from otel_infer.semconv import SEND_WAIT
from tests.support.served_load import MS, ClientRequest, SimulatedServer

Causes = dict[str, float]
STAGE_OF_CAUSE = {
    "ingress": "ingress", "socket_queue": "accept", "tokenize": "tokenize", "lock_queue": "lock wait",
    "pool_queue": "pool wait", "scheduler_queue": "queue", "work_queue": "queue wait", "prefill": "prefill", "decode": "decode",
    "starved": "decode", "blocked": "decode", "batching": "decode", "egress": "postprocess",
}  # fmt: skip
SECOND = 1_000 * MS
TEMPLATE = SimulatedServer().records([ClientRequest(0, 16, 4)])[0]


def make_record(
    at_ms: float, causes_ms: Causes, tokens: int = 20, send_wait_ms: float = 0.0
) -> RequestRecord:
    """Returns a request whose causes follow each other in the order given, each in its stage.

    `unexplained` has no stage.
    """
    record = copy.copy(TEMPLATE)
    at = int(at_ms * MS)
    record.arrived_at, record.stages = at, []
    for cause, length_ms in causes_ms.items():
        until = at + int(length_ms * MS)
        if cause in STAGE_OF_CAUSE:
            attributes = {SEND_WAIT: send_wait_ms / 1000} if cause == "egress" else {}
            record.stages.append(Stage(STAGE_OF_CAUSE[cause], at, until, dict(attributes)))
        at = until
    record.ended_at, record.output_tokens = at, tokens
    record.steps, record.summary = None, NO_STEPS
    before = sum(length for cause, length in causes_ms.items() if cause not in ("decode", "egress"))
    record.first_token_at = record.arrived_at + int(before * MS)
    record.last_token_at = at - int(causes_ms.get("egress", 0) * MS)
    record.breakdown = LatencyBreakdown({cause: int(ms * MS) for cause, ms in causes_ms.items()}, None)
    return record


def make_load(
    slow: Causes, usual: Causes | None = None, every: int = 8, **more: float
) -> list[RequestRecord]:
    """Returns 48 requests 1 s apart; each eighth is slow."""
    usual = usual or {"ingress": 2, "prefill": 10, "decode": 100, "egress": 1}
    draw = random.Random(1)
    return [
        make_record(
            number * 1000.0,
            {
                cause: ms * draw.uniform(0.95, 1.05)
                for cause, ms in (slow if number % every == 0 else usual).items()
            },
            **(more if number % every == 0 else {}),  # type: ignore[arg-type]
        )
        for number in range(48)
    ]


def diagnose(records: list[RequestRecord], **more: Any) -> Diagnosis:
    return diagnose_requests(records, **more)


def first(records: list[RequestRecord], **more: Any) -> tuple[str, str]:
    diagnosis = diagnose(records, **more)
    return diagnosis.verdict, diagnosis.findings[0].cause if diagnosis.findings else ""


BUSY = {"prefill": 10, "decode": 100, "egress": 1}


@pytest.mark.parametrize(
    ("slow", "verdict", "cause"),
    [
        ({"socket_queue": 400, **BUSY}, "pre_engine", "socket_queue"),
        ({"ingress": 400, **BUSY}, "pre_engine", "ingress"),
        ({"lock_queue": 400, **BUSY}, "queueing", "lock_queue"),
        ({"pool_queue": 400, **BUSY}, "queueing", "pool_queue"),
        ({"prefill": 10, "decode": 100, "egress": 400}, "late_end", "egress"),
        ({"prefill": 10, "starved": 400, "decode": 100}, "not_enough_cpu", "starved"),
    ],
)
def test_slow_requests_show_their_excess(slow: Causes, verdict: str, cause: str) -> None:
    diagnosis = diagnose(make_load(slow))
    named = diagnosis.findings[0]
    assert (diagnosis.verdict, named.cause) == (verdict, cause)
    assert named.weight > 0.9 and "beyond ordinary ones" in diagnosis.weighed
    assert all(other.weight <= named.weight for other in diagnosis.findings)


@pytest.mark.filterwarnings("error")
def test_stall_before_the_first_token_of_a_stream_stutters() -> None:
    records = make_load({"gc": 400, **BUSY})
    for record in records:
        record.summary = NO_STEPS._replace(gaps=19, gaps_total=100 * MS, gap_max=6 * MS)
    assert first(records) == ("stutter", "gc")


@pytest.mark.parametrize("cause", ["lock_queue", "ingress", "socket_queue", "egress"])
def test_wait_of_everybody_is_a_complaint(cause: str) -> None:
    """There is no excess: each request waits 30 ms of 140."""
    usual = {"prefill": 10, "decode": 100, cause: 30}
    diagnosis = diagnose(make_load(usual, usual))
    assert diagnosis.findings and diagnosis.findings[0].cause == cause
    assert diagnosis.weighed == "the time of all requests"
    assert diagnosis.findings[0].weight == pytest.approx(30 / 140, rel=0.1)


@pytest.mark.parametrize("cause", ["lock_queue", "egress"])
def test_short_wait_of_everybody_is_healthy(cause: str) -> None:
    usual = {"prefill": 10, "decode": 100, cause: 12}
    assert diagnose(make_load(usual, usual)).verdict == "healthy"


@pytest.mark.parametrize("is_crowded", [True, False], ids=["while others run", "while nothing runs"])
def test_a_loop_that_is_late_beside_many_model_calls_shares_their_cores(is_crowded: bool) -> None:
    """Six requests wait in the socket: while six others run, or before all of them run."""
    quiet = [make_record(at * 1000.0, {"prefill": 10, "decode": 50}) for at in range(30)]
    first = (
        {"prefill": 10, "decode": 1200} if is_crowded else {"socket_queue": 500, "prefill": 10, "decode": 700}
    )
    crowd = [make_record(100_000.0 + i, first) for i in range(6)]
    late = [make_record(100_100.0 + i, {"socket_queue": 500, "prefill": 10, "decode": 700}) for i in range(6)]
    divided = excess.divide_time([*quiet, *crowd, *late])
    before_engine = divided.time[-6:, excess.KINDS.index("pre_engine")] / MS
    assert before_engine.tolist() == pytest.approx([0 if is_crowded else 500] * 6, abs=1)


def test_slow_reader_is_not_a_late_end() -> None:
    slow = {"prefill": 10, "decode": 100, "egress": 600}
    assert first(make_load(slow, send_wait_ms=590.0)) == ("slow_reader", "egress")
    assert first(make_load(slow, send_wait_ms=20.0)) == ("late_end", "egress")


def test_longer_answers_are_no_excess() -> None:
    """A request with ten times the tokens takes ten times as long."""
    draw = random.Random(2)
    records = []
    for number in range(60):
        tokens = draw.choice([10, 100])
        records.append(make_record(number * 2000.0, {"prefill": 10, "decode": 5.0 * tokens}, tokens=tokens))
    time = excess.divide_time(records)
    assert not time.has_excess
    assert diagnose(records).verdict == "healthy"


@pytest.mark.parametrize(("ingress_ms", "verdict"), [(120, "healthy"), (260, "pre_engine")])
def test_a_complaint_is_small_beside_more_work_of_their_own(ingress_ms: float, verdict: str) -> None:
    """The slow requests decode for 500 ms longer than ordinary ones."""
    assert diagnose(make_load({"ingress": ingress_ms, "prefill": 10, "decode": 600})).verdict == verdict


def test_prefill_of_slow_requests_is_a_complaint_beside_other_waits() -> None:
    findings = diagnose(make_load({"ingress": 120, "prefill": 100, "decode": 100})).findings
    assert [finding.symptom for finding in findings] == ["pre_engine", "prefill"]


def test_noise_is_no_excess() -> None:
    draw = random.Random(3)
    records = [
        make_record(
            number * 1000.0, {"prefill": 10, "decode": draw.uniform(90, 130), "starved": draw.uniform(0, 8)}
        )
        for number in range(60)
    ]
    assert diagnose(records).verdict == "healthy"


def test_uncovered_excess_is_insufficient_and_located() -> None:
    slow = {"ingress": 2, "tokenize": 1, "unexplained": 500, "scheduler_queue": 1, **BUSY}
    diagnosis = diagnose(make_load(slow))
    assert diagnosis.verdict == "insufficient" and not diagnosis.findings
    assert "between `tokenize` and `queue`" in diagnosis.note and "otel_infer.stage" in diagnosis.note


def test_verdict_is_never_smaller_than_what_is_uncovered() -> None:
    slow = {"ingress": 150, "unexplained": 500, **BUSY}
    assert diagnose(make_load(slow)).verdict == "insufficient"
    slow = {"ingress": 500, "unexplained": 150, **BUSY}
    assert diagnose(make_load(slow)).verdict == "pre_engine"


@pytest.mark.parametrize(
    ("causes_ms", "place"),
    [
        ({"unexplained": 50, "ingress": 1}, "before `ingress`"),
        ({"ingress": 1, "unexplained": 50, "prefill": 5}, "between `ingress` and `prefill`"),
        ({"decode": 5, "unexplained": 50}, "after `decode`"),
        ({"unexplained": 50}, "in the whole request"),
    ],
)
def test_uncovered_time_has_a_place(causes_ms: Causes, place: str) -> None:
    assert locate_uncovered_time([make_record(0, causes_ms)]) == place


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def make_crowd(size: int, slowdown: float) -> list[RequestRecord]:
    """Returns 30 requests that run alone, and a crowd that runs at the same time, slower by a factor."""
    alone = [make_record(number * 1000.0, {"prefill": 10, "decode": 100}) for number in range(30)]
    at = 40_000.0
    return [*alone, *(make_record(at + i, {"prefill": 10, "decode": 100 * slowdown}) for i in range(size))]


def test_crowd_of_generations_is_too_many_at_once() -> None:
    diagnosis = diagnose(make_crowd(12, 10.0))
    named = diagnosis.findings[0]
    assert diagnosis.verdict == "too_many_at_once"
    assert "12 model calls ran at the same time" in named.evidence[0]
    assert "a token takes 6 ms with few at the same time, and 50 ms with many" in named.evidence[1]


def test_few_at_once_are_healthy() -> None:
    assert diagnose(make_crowd(3, 2.0)).verdict == "healthy"


def test_concurrency_that_costs_nothing_has_no_shared_time() -> None:
    assert estimate_shared_time(make_crowd(12, 1.0)) is None


def test_batching_engine_has_no_shared_time() -> None:
    server = SimulatedServer(max_batch=8)
    records = server.records([ClientRequest(at * 20.0, 16, 20) for at in range(30)])
    assert max(record.summary.batch_size_max for record in records) > 1
    assert estimate_shared_time(records) is None


# ── cores ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_cpu(busy: float, server: float, others: float) -> list[CpuSeen]:
    """Returns readings of 2 cores over 100 s. Shares: in use, in use by the server, by threads without an engine."""
    return [
        CpuSeen(
            (second + 1) * SECOND, second * SECOND, 2,
            int(busy * 2 * SECOND), int(server * 2 * SECOND), int(others * 2 * SECOND),
        )
        for second in range(100)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cpu_usage", "verdict", "evidence"),
    [
        (read_cpu(1.0, 0.4, 0.0), "not_enough_cpu", "other processes used 60% of this server's cores"),
        (read_cpu(1.0, 1.0, 0.7), "not_enough_cpu", "run no engine used 70% of its cores"),
        (read_cpu(1.0, 1.0, 0.1), "too_many_at_once", ""),
        (read_cpu(0.5, 0.1, 0.0), "too_many_at_once", ""),
        ([], "too_many_at_once", ""),
    ],
)
def test_crowd_is_due_to_who_takes_the_cores(cpu_usage: list[CpuSeen], verdict: str, evidence: str) -> None:
    diagnosis = diagnose(make_crowd(12, 10.0), cpu_usage=cpu_usage)
    assert diagnosis.verdict == verdict
    assert any(evidence in line for line in diagnosis.findings[0].evidence)


def test_a_queue_is_due_to_others_that_take_the_cores_of_its_worker() -> None:
    slow = {"work_queue": 400, **BUSY}
    assert diagnose(make_load(slow)).verdict == "queueing"
    assert diagnose(make_load(slow), cpu_usage=read_cpu(1.0, 0.9, 0.0)).verdict == "queueing"
    assert diagnose(make_load(slow), cpu_usage=read_cpu(1.0, 0.2, 0.0)).verdict == "not_enough_cpu"


@pytest.mark.parametrize(("tokens", "verdict"), [(250, "healthy"), (500, "prefill")])
def test_inputs_are_a_complaint_where_some_are_several_times_as_long(tokens: int, verdict: str) -> None:
    records = make_load({"decode": 200}, {"decode": 40})
    for record in records:
        is_long = record.duration_ns > 100 * MS
        record.output_tokens, record.first_token_at = 0, 0
        record.input_tokens = tokens if is_long else 100
        record.stages = (Stage(semconv.SPAN_FORWARD, record.arrived_at, record.ended_at, {}),)
    assert diagnose(records).verdict == verdict


def test_cpu_use_is_that_of_the_slow_requests() -> None:
    readings = [
        CpuSeen(SECOND, 0, 2, 2 * SECOND, 0, 0),
        CpuSeen(2 * SECOND, SECOND, 2, SECOND, SECOND, 0),
        CpuSeen(3 * SECOND, 2 * SECOND, 2, 0, 0, 0),
    ]
    record = make_record(1200, {"decode": 100})
    assert measure_cpu_use(readings, [record]) == CpuUse(0.5, 0.0, 0.0)
    assert measure_cpu_use(readings, []) == measure_cpu_use([], [record]) == CpuUse()


def test_waits_beside_abandoned_work_are_due_to_it() -> None:
    slow = {"lock_queue": 400, **BUSY}
    assert diagnose(make_load(slow), abandoned_share=0.1).verdict == "queueing"
    diagnosis = diagnose(make_load(slow), abandoned_share=0.4)
    assert diagnosis.verdict == "abandoned_work"
    assert "40% of the engine's time" in diagnosis.findings[0].evidence[0]
    assert "disconnects" in diagnosis.findings[0].change


def test_abandoned_work_without_waits_is_healthy() -> None:
    assert diagnose(make_load(BUSY, BUSY), abandoned_share=0.9).verdict == "healthy"


def test_stalls_without_a_stream_are_found() -> None:
    """A classifier or an embedding has no gaps between tokens."""
    records = make_load({"gc": 300, "decode": 40}, {"decode": 40})
    for record in records:
        record.output_tokens, record.first_token_at = 0, 0
    diagnosis = diagnose(records)
    assert (diagnosis.verdict, diagnosis.findings[0].cause) == ("stutter", "gc")
    assert "gc: 2" in diagnosis.findings[0].evidence[0] or "gc: 3" in diagnosis.findings[0].evidence[0]


def test_wait_for_a_core_is_estimated_where_threads_are_not_measured() -> None:
    usual = {"ingress": 2, "decode": 100}
    records = make_load(usual, usual)
    assert all(record.thread_delays is None for record in records)
    assert diagnose(records, cpu_usage=read_cpu(1.0, 1.0, 0.1)).verdict == "healthy"
    diagnosis = diagnose(records, cpu_usage=read_cpu(1.0, 0.5, 0.0))
    assert diagnosis.verdict == "not_enough_cpu"
    assert diagnosis.findings[0].weight == pytest.approx(0.5 * 100 / 102, rel=0.1)


def test_lock_with_no_call_meanwhile_is_no_batch_window() -> None:
    """An engine's queue that waits while nothing runs waits for a batch to fill; a lock does not."""
    slow = {"lock_queue": 400, **BUSY}
    assert diagnose(make_load(slow)).verdict == "queueing"
    slow = {"scheduler_queue": 400, **BUSY}
    assert diagnose(make_load(slow)).verdict == "batching"


# ── the model itself ─────────────────────────────────────────────────────────────────────────────────────────────


def miss_all(records: list[RequestRecord], *names: str) -> dict[bytes, tuple[str, ...]]:
    """Returns missed objectives of all requests, which get a span id of their own."""
    for number, record in enumerate(records):
        record.span_id = number.to_bytes(8, "big")
    return {record.span_id: names for record in records}


def test_a_model_that_always_misses_its_objective_is_slow() -> None:
    usual = {"ingress": 2, "prefill": 30, "decode": 900, "egress": 1}
    records = make_load(usual, usual)
    diagnosis = diagnose(records, missed_objectives=miss_all(records, "tpot", "e2e"))
    assert diagnosis.verdict == "slow_model"
    missed, work = diagnosis.findings[0].evidence
    assert missed == "48 of 48 requests miss an objective: tpot (48), e2e (48)"
    assert re.fullmatch(r"the model works \d{3} ms on the median request, of \d{3} ms", work)


def test_the_same_model_without_objectives_is_healthy() -> None:
    usual = {"ingress": 2, "prefill": 30, "decode": 900, "egress": 1}
    assert diagnose(make_load(usual, usual)).verdict == "healthy"


def test_missed_objectives_because_of_a_queue_are_queueing() -> None:
    usual = {"lock_queue": 700, "prefill": 30, "decode": 300}
    records = make_load(usual, usual)
    assert diagnose(records, missed_objectives=miss_all(records, "e2e")).verdict == "queueing"


def test_objectives_missed_by_few_requests_concern_the_slow_ones() -> None:
    usual = {"prefill": 10, "decode": 300}
    records = make_load({**usual, "blocked": 800}, usual)
    missed = dict(list(miss_all(records, "e2e").items())[::8])
    assert diagnose(records, missed_objectives=missed).verdict == "stutter"


@pytest.mark.parametrize(
    ("used_ms", "advice"), [(1900, "smaller or quantized weights"), (900, "more threads for the model")]
)
def test_the_use_of_the_cores_decides_what_makes_the_model_faster(used_ms: int, advice: str) -> None:
    usual = {"prefill": 30, "decode": 900}
    records = make_load(usual, usual)
    until = records[-1].ended_at
    seen = CpuSeen(until, 0, 2, used_ms * until // 1000, used_ms * until // 1000, 0)
    finding = diagnose(records, missed_objectives=miss_all(records, "e2e"), cpu_usage=[seen]).findings[0]
    assert re.search(r"uses \d\.\d of 2 cores", finding.evidence[-1])
    assert finding.change.startswith(advice)


def test_a_server_that_is_mostly_idle_has_no_figure_of_its_cores() -> None:
    records = [make_record(number * 1000.0, {"decode": 100}) for number in range(10)]
    seen = CpuSeen(10 * SECOND, 0, 2, SECOND, SECOND, 0)
    assert measure_cores_in_use([seen], records) == (0.0, 0)


def test_overlapping_requests_count_once_for_cores_in_use() -> None:
    records = [make_record(at, {"decode": 600}) for at in (0.0, 200.0)]
    seen = CpuSeen(SECOND, 0, 2, SECOND, 1200 * MS, 0)
    assert measure_cores_in_use([seen], records) == (1.5, 2)
