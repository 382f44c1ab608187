"""One wake of the reading side: rings → assembler → keeper → sinks. The same in the sidecar and in a thread.

Who wakes it, and how often, is the owner's business. Nothing here blocks: sinks queue, senders send.

A little longer than a module should be: a wake is one thing, from the first fact to the last word of ourselves.
"""

from __future__ import annotations

import logging
import resource as rusage
from collections.abc import Callable, Sequence
from typing import Any

from otel_infer import _clock, semconv
from otel_infer.analysis.finish import finish_requests
from otel_infer.assembly.assembler import GRACE_NS, Assembler
from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config import budget, slo
from otel_infer.config.environment import Config
from otel_infer.export.interfaces import RequestExporter, RequestListener
from otel_infer.export.metrics import gpus, prometheus_endpoint, self_metrics
from otel_infer.export.metrics.aggregator import MetricsAggregator
from otel_infer.export.metrics.sender import MetricsSender
from otel_infer.export.request_log import RequestLog
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans.exporter import BatchSender
from otel_infer.gpu.nvml_poller import NvmlPoller
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import RecordedEvent, Value
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar import overhead
from otel_infer.sidecar.recording import file
from otel_infer.sidecar.recording.flight_recorder import FlightRecorder

log = logging.getLogger(__name__)
_NEVER = 1 << 63

SERVER_RING = 0
"""In place of a ring: what is recorded of no single process."""
CYCLE_NS = 50_000_000
EXPORT_INTERVAL_NS = 500_000_000
"""Under load, requests are concluded so much apart: many at once cost each of them less."""
FINAL_METRICS_S = 1.0
"""How long the end waits for metrics at least, once spans are flushed."""


class Pipeline:
    """Everything between rings and senders. `resource` may gain a service name when the engine is known.

    `watchers` are told of every request when it is concluded; sinks, when it is decided what is kept of it.
    """

    def __init__(
        self,
        config: Config,
        rings: MergedReader,
        sinks: list[RequestExporter],
        sender: BatchSender | None,
        resource: dict[str, Value],
        metrics_outlet: MetricsSender | None,
        started_wall_ns: int,
        watchers: Sequence[RequestListener] = (),
        flight: FlightRecorder | None = None,
    ) -> None:
        self.config, self.rings, self.exporters, self.sender = config, rings, sinks, sender
        self.assembler = Assembler()
        # The spans of a provider have ids of its own making, and of what it does not sample there are none.
        self._uses_provider = bool(sinks) and sender is None
        self.sampler = tail_sampler.TailSampler(
            config.steps,
            config.step_budget,
            config.keep_unsampled and not self._uses_provider,
            config.ratio_sampling,
            slo.parse_objectives(config.slo),
            config.slow_percent / 100,
        )
        self.resource = resource
        self.requests = 0
        self.failed = 0
        self._metrics_sender = metrics_outlet
        self._metrics: MetricsAggregator | None = None
        self._metrics_enabled = metrics_outlet is not None or bool(config.scrape_address)
        self._started_wall_ns = started_wall_ns
        self._collected_at = self._exported_at = 0
        self._is_service_named = semconv.SERVICE_NAME in resource
        self._governor = overhead.OverheadGovernor(budget.parse_budget(config.budget))
        self._recording = file.open_writer(config.tape)
        self._request_log = RequestLog(config.request_log)
        self._listeners = watchers
        self._flight_recorder = flight
        self._scrape = (
            prometheus_endpoint.ScrapeEndpoint(config.scrape_address) if config.scrape_address else None
        )
        self._gpu_poller: NvmlPoller | None = None
        if config.gpu_metrics and (sender or metrics_outlet or self._scrape or flight or self._recording):
            self._gpu_poller = NvmlPoller(config.visible_devices)
            self._gpu_poller.start()

    def run_cycle(self, now: int, final: bool = False) -> bool:
        """Reads, concludes and hands on; whether there was anything. `final`: there will be no other wake."""
        for throttled in self._gpu_poller.drain_events() if self._gpu_poller is not None else ():
            self.rings.add_event(RecordedEvent(SERVER_RING, 0, throttled))
        said = self.rings.poll(now, final)
        horizon = now + GRACE_NS if final else self.rings.horizon
        self._record_events(said, horizon)
        self.assembler.feed_events(said)
        if final or now - self._exported_at >= EXPORT_INTERVAL_NS:
            self._exported_at = now if self.export_requests(horizon, final) else 0
            self.rings.mark_processed(horizon)
        for sink in self.exporters:
            sink.flush(0 if final else now)
        if final or now - self._collected_at >= self.config.metric_export_interval_ms * 1_000_000:
            self._collect_metrics(now, final)
        if self._scrape is not None and self._scrape.has_pending_scrape(now):
            self._scrape.publish_metrics(self._snapshot_metrics())
        return bool(said)

    def enforce_budget(self, now: int) -> None:
        """Sheds detail if this process takes more than it may; for one that does nothing else."""
        usage = rusage.getrusage(rusage.RUSAGE_SELF)
        cpu = round((usage.ru_utime + usage.ru_stime) * 1e9)
        self.sampler.share = self._governor.update_share(now, cpu, self_metrics.read_resident_bytes())

    def _record_events(self, said: list[RecordedEvent], horizon: int) -> None:
        if self._flight_recorder is not None:
            self._flight_recorder.add_events(said, horizon)
        try:
            if self._recording is not None:
                if said:
                    self._recording.write(said, horizon)
                self._recording.sync_if_due(horizon)
        except OSError as reason:
            self._recording = None
            log.error("the tape ends here: %s", reason)

    def export_requests(self, horizon: int, final: bool = False) -> bool:
        """Hands on the requests that ended before `horizon`; whether there were any. `final`: none of them waits."""
        self._drain_engine_records()
        for start in self.assembler.drain_starts(horizon):  # before the requests that link to it
            self._run_guarded(self._export_start, start)
        records = finish_requests(self.assembler, horizon)
        self.requests += len(records)
        decided: list[tail_sampler.SampledRequest] = []
        # One thing after another, each of all requests: the processor has its code at hand then, which is the most of it.
        for record in records:
            self._run_guarded(self._count_request, record)
        for record in records:
            self._run_guarded(self._sample_request, record, decided)
        oldest_live = _NEVER if final else self.assembler.oldest_open_arrival(horizon)
        decided += self.sampler.flush_held(horizon, oldest_live)
        for work in (self._record_decision, self._export_request):
            for record, decision in decided:
                self._run_guarded(work, record, decision)
        return bool(records)

    def _drain_engine_records(self) -> None:
        """What engines and processes did."""
        steps, executions = self.assembler.drain_steps(), self.assembler.workers.drain_executions()
        pauses, marks = self.assembler.drain_pauses(), self.assembler.drain_marks()
        if steps:
            self._set_service_name(steps[0].engine)
        if self._metrics_enabled:
            self.metrics.add_steps(steps)
            self.metrics.add_executions(executions)
            self.metrics.add_pauses(pauses)
            self.metrics.add_marks(marks)

    def _sample_request(self, record: RequestRecord, decided: list[tail_sampler.SampledRequest]) -> None:
        decided += self.sampler.add(record)

    def _run_guarded(
        self, work: Callable[..., None], record: RequestRecord | StartRecord, *more: Any
    ) -> None:
        try:
            work(record, *more)
        except Exception:  # one request that we cannot describe must not cost all others
            self.failed += 1
            log.exception("a request is not exported: trace %s", record.trace_id.hex())

    def _export_start(self, record: StartRecord) -> None:
        """Whatever is decided of requests: there is one of these for each process."""
        self._set_service_name(record.engine)
        if self._metrics_enabled:
            self.metrics.add_start(record, exported=not self._uses_provider)
        for take in (
            *(one.on_start for one in self._listeners),
            *(one.export_start for one in self.exporters),
        ):
            take(record)

    def _count_request(self, record: RequestRecord) -> None:
        """What does not wait for the keeper's last word."""
        self._set_service_name(record.engine or record.provider)
        if self._metrics_enabled:
            if record.model and (record.engine or record.provider == events.TORCH):
                self.metrics.allow_model(record.model)
            self.metrics.add_request(record, exported=self.sampler.is_exported(record))
        for watch in self._listeners:
            watch.on_request(record)

    def _record_decision(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        if self._metrics_enabled:
            self.metrics.add_decision(record, decision)
        if self._flight_recorder is not None and decision.missed:
            self._flight_recorder.record_slo_miss(record.ended_at)
        self._request_log.log_request(record, decision)

    def _export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        for sink in self.exporters:
            if decision.export or not sink.exported_only:
                sink.export_request(record, decision)

    @property
    def metrics(self) -> MetricsAggregator:
        """Made when first needed, so that the service has its name by then."""
        if self._metrics is None:
            self._metrics = MetricsAggregator(
                resource=self.resource,
                temporality=self.config.temporality,
                exponential=self.config.exponential_histograms,
                started_at_unix_ns=self._started_wall_ns,
                exemplars=self.config.exemplars and bool(self.exporters),
                tenants=frozenset(self.config.tenants) if self.config.tenant else None,
                traffic_classes=bool(self.config.traffic_class),
                promises=bool(self.config.slo),
            )
        return self._metrics

    def close(self, timeout: float) -> None:
        """Sends what is queued for at most `timeout` s, metrics a moment longer, then lets go."""
        deadline = _clock.now() + int(timeout * 1e9)
        if self.sender is not None:
            self.sender.close(timeout)
        if self._metrics_sender is not None:
            # Once more, since only now it is known which spans were refused; behind what is still being sent.
            self._collect_metrics(_clock.now(), final=True)
            self._metrics_sender.close(max((deadline - _clock.now()) / 1e9, FINAL_METRICS_S))
        self._close_recording()
        self._request_log.close()
        if self._gpu_poller is not None:
            self._gpu_poller.stop()
        if self._scrape is not None:
            self._scrape.close()

    def _close_recording(self) -> None:
        try:
            if self._recording is not None:
                self._recording.close()
        except OSError as reason:  # a full disk, say; others have to be let go of
            log.error("the end of the tape is missing: %s", reason)

    def export_without_grace(self, now: int) -> None:
        """Concludes what has ended without waiting for stragglers: somebody wants everything sent."""
        self.export_requests(now + GRACE_NS, final=True)
        self.rings.mark_processed(self.rings.horizon + GRACE_NS)

    def flush(self, timeout: float) -> bool:
        """Waits until what was handed on so far has been tried."""
        for sink in self.exporters:
            sink.flush(0)
        self._collect_metrics(_clock.now(), behind=True)
        return self.is_sent(timeout)

    def is_sent(self, timeout: float = 0.0) -> bool:
        """Whether everything queued has been tried, or is within `timeout` s."""
        deadline = _clock.now() + int(timeout * 1e9)
        if self.sender is not None and not self.sender.flush(timeout):
            return False
        return self._metrics_sender is None or self._metrics_sender.wait(
            max(deadline - _clock.now(), 0) / 1e9
        )

    def _set_service_name(self, engine: str) -> None:
        """After the engine, if nobody named it; where there is none it has no name."""
        self._is_service_named = True
        if engine and semconv.SERVICE_NAME not in self.resource:
            self.resource[semconv.SERVICE_NAME] = engine

    def _collect_metrics(self, now: int, final: bool = False, behind: bool = False) -> None:
        """Not before it is known whose metrics they are: what had another name would be another server's, that is soon gone.
        `behind`, or at the end: though others are still being sent."""
        if (
            self._metrics_sender is None
            or not self.rings.has_seen_rings
            or not (self._is_service_named or final)
        ):
            return
        if self._metrics_sender.can_accept(behind=behind or final):
            self._collected_at = now
            self._metrics_sender.put(self._snapshot_metrics(), is_delta=self.metrics.is_delta)

    def _snapshot_metrics(self) -> Any:
        self._update_self_metrics()
        return self.metrics.collect(_clock.read_clocks()[1])

    def _update_self_metrics(self) -> None:
        metrics, active, processes = self.metrics, self.assembler.count_active(), self.assembler.processes
        for state, count in active.items():
            metrics.set_value(semconv.REQUEST_ACTIVE, {semconv.REQUEST_STATE: state}, count)
        metrics.replace_values(
            self_metrics.PROCESS_METRICS,
            lambda set_value: self_metrics.set_process_metrics(processes, set_value),
        )
        memory = self.assembler.workers.memory_by_process()
        metrics.replace_values(
            gpus.MEMORY_METRICS, lambda set_value: gpus.set_memory_metrics(memory, set_value)
        )
        if self._gpu_poller is not None:
            readings, driver = self._gpu_poller.latest, self._gpu_poller.driver
            metrics.replace_values(
                gpus.STATE_METRICS, lambda set_value: gpus.set_gpu_metrics(readings, driver, set_value)
            )
        metrics.retain_engines({(log.engine, log.pid) for log in self.assembler.engines.values()})
        if not any(active.values()):
            metrics.reset_idle_kv_usage(self.rings.horizon)
        for reason, count in self.count_losses().items():
            metrics.set_value(semconv.SELF_LOST, {semconv.LOSS_REASON: reason}, count)
        for reason, count in self.sampler.dropped_steps.items():
            metrics.set_value(semconv.SELF_STEPS_DROPPED, {semconv.KEEP_REASON: reason}, count)
        metrics.set_value(semconv.SELF_ERRORS, {}, self.rings.count_errors())
        if self.sender is not None:
            metrics.set_value(semconv.SELF_SPANS, {}, self.sender.accepted)
            metrics.set_value(semconv.SELF_BYTES, {}, self.sender.bytes_sent)
        self_metrics.set_self_usage(metrics.set_value)
        metrics.set_value(semconv.SELF_SHARE, {}, self.sampler.share)

    def count_losses(self) -> dict[str, int]:
        """What did not arrive, by reason."""
        lost = {
            "events_overwritten": self.assembler.events_lost,
            "events_torn": self.assembler.events_torn,
            semconv.LOSS_OVER_BUDGET: self.sampler.dropped_steps.total(),
            "requests_not_converted": self.failed,
            "not_recorded": self.rings.count_unrecorded(),
        }
        if self._metrics_sender is not None and self.metrics.is_delta:  # else it is said again
            lost["metrics_refused"] = self._metrics_sender.failed_exports
        if self.sender is not None:
            lost.update(self.sender.lost)
        return lost
