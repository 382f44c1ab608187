"""Sets the metrics that describe a state: requests in flight, processes, GPUs, losses, the sidecar itself."""

from __future__ import annotations

from collections.abc import Mapping

from otel_infer import semconv
from otel_infer.assembly.assembler import Assembler
from otel_infer.export.metrics import gpus, self_metrics
from otel_infer.export.metrics.aggregator import MetricsAggregator
from otel_infer.export.sampling.tail_sampler import TailSampler
from otel_infer.export.spans.batch_sender import BatchSender
from otel_infer.gpu.nvml_poller import NvmlPoller
from otel_infer.ringbuffer.ledger import RequestCounts
from otel_infer.ringbuffer.merged_reader import MergedReader


def set_state_metrics(
    metrics: MetricsAggregator,
    assembler: Assembler,
    rings: MergedReader,
    sampler: TailSampler,
    gpu_poller: NvmlPoller | None,
    sender: BatchSender | None,
) -> None:
    """Sets what is true now of requests, processes, engines, GPUs and the sidecar."""
    active, processes = assembler.count_active(), assembler.processes
    for state, count in active.items():
        metrics.set_value(semconv.REQUEST_ACTIVE, {semconv.REQUEST_STATE: state}, count)
    metrics.replace_values(
        self_metrics.PROCESS_METRICS,
        lambda set_value: self_metrics.set_process_metrics(processes, set_value),
    )
    memory = assembler.workers.memory_by_process()
    metrics.replace_values(gpus.MEMORY_METRICS, lambda set_value: gpus.set_memory_metrics(memory, set_value))
    if gpu_poller is not None:
        readings, driver = gpu_poller.latest, gpu_poller.driver
        metrics.replace_values(
            gpus.STATE_METRICS, lambda set_value: gpus.set_gpu_metrics(readings, driver, set_value)
        )
    metrics.retain_engines({(log.engine, log.pid) for log in assembler.engines.values()})
    if not any(active.values()):
        metrics.reset_idle_kv_usage(rings.horizon)
    metrics.set_value(semconv.SELF_ERRORS, {}, rings.read_counts()["errors"])
    if sender is not None:
        metrics.set_value(semconv.SELF_SPANS, {}, sender.accepted)
        metrics.set_value(semconv.SELF_BYTES, {}, sender.bytes_sent)
    self_metrics.set_self_usage(metrics.set_value)
    metrics.set_value(semconv.SELF_SHARE, {}, sampler.share)


def set_loss_metrics(
    metrics: MetricsAggregator, losses: Mapping[str, int], dropped_steps: Mapping[str, int]
) -> None:
    """Sets the losses by reason, and the dropped step spans by keep reason."""
    for reason, count in losses.items():
        metrics.set_value(semconv.SELF_LOST, {semconv.LOSS_REASON: reason}, count)
    for reason, count in dropped_steps.items():
        metrics.set_value(semconv.SELF_STEPS_DROPPED, {semconv.KEEP_REASON: reason}, count)


def set_request_counts(metrics: MetricsAggregator, counts: RequestCounts) -> None:
    """Sets what became of the requests of this server.

    Cumulative counts go on after a restart of the sidecar, so that nothing is missing from an increase.
    """
    metrics.set_value(semconv.SELF_REQUESTS_OFFERED, {}, counts.offered)
    metrics.set_value(semconv.SELF_REQUESTS_OPEN, {}, counts.open)
    for result, count in counts.results.items():
        metrics.set_value(semconv.SELF_REQUESTS, {semconv.EXPORT_RESULT: result}, count)
    for reason, count in counts.lost.items():
        metrics.set_value(semconv.SELF_REQUESTS_LOST, {semconv.LOSS_REASON: reason}, count)
