"""Compares the durations of requests with the objectives of `OTEL_INFER_SLO`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config import slo
from otel_infer.config.slo import Objectives
from otel_infer.ringbuffer import events


def find_missed_objectives(record: RequestRecord, objectives: Objectives) -> tuple[str, ...]:
    """Returns the objectives that a request missed, sampled or not."""
    if not objectives.sections:
        return ()
    route = str(record.attributes.get(semconv.HTTP_ROUTE, ""))
    return objectives.find_missed(record.model, route, measure_durations(record))


def list_missed_objectives(
    records: Iterable[RequestRecord], objectives: Objectives
) -> dict[bytes, tuple[str, ...]]:
    """Returns by span id the objectives that each request missed. Requests that missed none are absent."""
    return {
        record.span_id: names for record in records if (names := find_missed_objectives(record, objectives))
    }


def is_client_cancelled(record: RequestRecord) -> bool:
    """Returns whether the client ended the request.

    That is no fault of the server, but the wait until then may be.
    """
    return record.outcome == events.ABORTED and record.error_type in semconv.NON_ERROR_TYPES


def measure_durations(record: RequestRecord) -> dict[str, int]:
    """Returns the durations that objectives apply to, ns. Durations that a request does not have are absent.

    A request that its client cancelled has no end-to-end duration.
    """
    queue_stages = [stage for stage in record.stages if stage.name == semconv.SPAN_QUEUE]
    durations = {slo.QUEUE: sum(stage.ended_at - stage.started_at for stage in queue_stages)}
    if not is_client_cancelled(record):
        durations[slo.E2E] = record.duration_ns
    if record.ttft_ns:
        durations[slo.TTFT] = record.ttft_ns
    if record.summary.gaps:
        durations[slo.ITL] = record.summary.gap_max
    for name, waited in _iter_unserved_waits(record):
        durations[name] = max(durations.get(name, 0), waited)
    if record.tokens_after_first > 0:
        durations[slo.TPOT] = round(record.decode_ns / record.tokens_after_first)
    return durations


def _iter_unserved_waits(record: RequestRecord) -> Iterator[tuple[str, int]]:
    """Yields the objective and the wait (ns) for the token that a failed or aborted request still waited for.

    The token would have taken longer than this wait.
    """
    if record.outcome == events.OK or record.telemetry_lost or not (record.generative and record.engine):
        return
    if record.operation == semconv.OPERATION_EMBEDDINGS:
        return
    if record.failed_stage in (semconv.SPAN_QUEUE, semconv.SPAN_PREFILL):
        yield slo.TTFT, record.duration_ns
    elif record.final_wait_ns:
        yield slo.ITL, record.final_wait_ns
