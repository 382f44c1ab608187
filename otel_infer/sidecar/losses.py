"""Counts lost telemetry by reason, from everything that can lose it."""

from __future__ import annotations

from collections.abc import Mapping

from otel_infer import semconv
from otel_infer.assembly.assembler import Assembler
from otel_infer.export.metrics.sender import MetricsSender
from otel_infer.export.sampling.tail_sampler import TailSampler
from otel_infer.export.spans.batch_sender import BatchSender


def count_losses(
    writer_counts: Mapping[str, int],
    assembler: Assembler,
    sampler: TailSampler,
    failed_requests: int,
    sender: BatchSender | None,
    metrics_sender: MetricsSender | None,
) -> dict[str, int]:
    """Returns the losses by reason; every reason is present.

    `writer_counts`: of `MergedReader.read_counts`.
    """
    lost = {
        **dict.fromkeys(semconv.LOSS_REASONS, 0),
        semconv.LOSS_EVENTS_OVERWRITTEN: assembler.events_lost,
        semconv.LOSS_EVENTS_TORN: assembler.events_torn,
        semconv.LOSS_OVER_BUDGET: sampler.dropped_steps.total(),
        semconv.LOSS_NOT_CONVERTED: failed_requests,
        semconv.LOSS_NOT_RECORDED: writer_counts["unrecorded"],
        semconv.LOSS_OTHER_DESTINATION: writer_counts["discarded"],
        semconv.LOSS_VALUES_CUT: writer_counts["values_cut"],
    }
    if metrics_sender is not None:
        lost[semconv.LOSS_METRICS_REFUSED] = metrics_sender.lost_collections
    if sender is not None:
        lost.update(sender.lost)
    return lost
