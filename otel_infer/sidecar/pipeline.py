"""One cycle of the reading side: rings → assembler → sampler → exporters.

It is the same in the sidecar and in a thread. The owner decides when a cycle runs. Nothing here blocks:
exporters queue, senders send.
"""

from __future__ import annotations

import logging
import resource as rusage
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

from otel_infer import _clock, semconv
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.requests.ended_requests import GRACE_NS, SETTLED_NS
from otel_infer.config import budget, slo
from otel_infer.config.environment import Config
from otel_infer.export.interfaces import RequestExporter, RequestListener
from otel_infer.export.metrics import prometheus_endpoint, self_metrics
from otel_infer.export.metrics.aggregator import PUSH, SCRAPE, MetricsAggregator
from otel_infer.export.metrics.sender import MetricsSender
from otel_infer.export.request_log import RequestLog
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans.batch_sender import BatchSender
from otel_infer.gpu.nvml_poller import NvmlPoller
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import RecordedEvent, Value
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar import losses, overhead, state_metrics
from otel_infer.sidecar.delivery import Delivery
from otel_infer.sidecar.ordinary_requests import FinishedRequest, OrdinaryRequest, OrdinaryRequests
from otel_infer.sidecar.recording.flight_recorder import FlightRecorder
from otel_infer.sidecar.recording.tape import open_tape
from otel_infer.sidecar.request_accounting import RequestAccounting

log = logging.getLogger(__name__)
_NEVER = 1 << 63
SERVER_RING = 0
"""In place of a ring number: events that belong to no single process."""
CYCLE_NS = 50_000_000
EXPORT_INTERVAL_NS = 500_000_000
"""Under load, time between exports of finished requests: many together cost less per request."""
FINAL_METRICS_S = 1.0
"""Minimum wait for metrics at exit, after spans are flushed (s)."""


class Pipeline:
    """All processing between rings and senders. `resource` gains a service name when the engine is known.

    `watchers` get each request when it is finished; exporters get it after the sampling decision.
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
        self.accounting = RequestAccounting(rings, self.assembler)
        # A provider creates its own span ids, and no spans of requests that it does not sample.
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
        self.requests = self.failed = 0
        self._has_failed_cycle = False
        self._metrics_sender = metrics_outlet
        self.delivery = Delivery(sender, metrics_outlet)
        self._metrics: MetricsAggregator | None = None
        self._metrics_enabled = metrics_outlet is not None or bool(config.scrape_address)
        self._started_wall_ns = started_wall_ns
        self._collected_at = self._exported_at = 0
        self._collection_interval = config.metric_export_interval_ms * 1_000_000
        self._is_service_named = semconv.SERVICE_NAME in resource
        self._governor = overhead.OverheadGovernor(budget.parse_budget(config.budget))
        self._tape = open_tape(config.tape, config.slo)
        self._request_log, self._listeners = RequestLog(config.request_log), watchers
        # Listeners and objectives need a record of each request.
        self._ordinary = OrdinaryRequests(self.sampler, sinks, self._request_log)
        self.assembler.finds_shapes = not (watchers or config.slo) and self._ordinary.can_export
        self._flight_recorder = flight
        self._scrape = (
            prometheus_endpoint.ScrapeEndpoint(config.scrape_address) if config.scrape_address else None
        )
        self._gpu_poller: NvmlPoller | None = None
        if config.gpu_metrics and (sender or metrics_outlet or self._scrape or flight or self._tape):
            self._gpu_poller = NvmlPoller(config.visible_devices)
            self._gpu_poller.start()

    def run_cycle(self, now: int, final: bool = False) -> bool:
        """Reads, assembles and exports; returns whether there were events. `final`: the last cycle.

        An error ends the cycle, not the reader: what it had read is lost and counted, the next one reads on.
        """
        try:
            return self._run_cycle(now, final)
        except Exception:
            self.failed += 1
            if not self._has_failed_cycle:  # in-process, the log is the server's
                self._has_failed_cycle = True
                log.exception("a read cycle failed; later failures are only counted")
            return True

    def _run_cycle(self, now: int, final: bool) -> bool:
        for throttled in self._gpu_poller.drain_events() if self._gpu_poller is not None else ():
            self.rings.add_event(RecordedEvent(SERVER_RING, 0, throttled))
        self.accounting.snapshot_recorded()
        recorded = self.rings.poll(now, final)
        self._record_events(recorded, now + GRACE_NS if final else self.rings.horizon)
        horizon = now + SETTLED_NS if final else self.rings.horizon
        self.assembler.feed_events(recorded)
        self.accounting.count_unseen(now, final)
        if final or now - self._exported_at >= EXPORT_INTERVAL_NS:
            self._exported_at = now if self.export_requests(horizon, final) else 0
        for exporter in self.exporters:
            exporter.flush(0 if final else now)
        if final or now - self._collected_at >= self._collection_interval:
            self._collect_metrics(now, final)
        if self._scrape is not None and self._scrape.has_pending_scrape(now):
            self._scrape.publish_metrics(self._snapshot_metrics(SCRAPE))
        return bool(recorded)

    def has_due_metrics(self, now: int) -> bool:
        """Returns whether metrics can be sent now, or a scrape waits for them."""
        is_scraped = self._scrape is not None and self._scrape.has_pending_scrape(now)
        is_due = now - self._collected_at >= self._collection_interval and self._can_collect()
        return is_scraped or (is_due and self._metrics_sender is not None and self._metrics_sender.is_idle)

    def enforce_budget(self, now: int) -> None:
        """Drops detail if this process exceeds its budget; for a process that does nothing else."""
        usage = rusage.getrusage(rusage.RUSAGE_SELF)
        cpu = round((usage.ru_utime + usage.ru_stime) * 1e9)
        self.sampler.share = self._governor.update_share(now, cpu, self_metrics.read_resident_bytes())

    def _record_events(self, recorded: list[RecordedEvent], horizon: int) -> None:
        if self._flight_recorder is not None:
            self._flight_recorder.add_events(recorded, horizon)
        if self._tape is not None:
            self._tape.add_events(recorded, horizon)

    def export_requests(self, horizon: int, final: bool = False) -> bool:
        """Exports requests that ended before `horizon`; returns whether any did. `final`: holds none.

        They are marked as processed first: a sidecar that is killed in between loses requests, which are counted,
        but none is counted twice.
        """
        self.rings.mark_processed(min(horizon, self.rings.horizon + GRACE_NS))
        self._drain_engine_records()
        self._run_for_all(
            self._export_start, zip(self.assembler.drain_starts(horizon))
        )  # before what links to them
        records: Sequence[FinishedRequest] = self._ordinary.finish_requests(self.assembler, horizon)
        self.requests += len(records)
        decided: list[tuple[FinishedRequest, tail_sampler.Decision]] = []
        # Each phase runs over all requests, because most of its cost is loading its code into the cache.
        self._run_for_all(self._count_request, zip(records))
        self._run_for_all(self._sample_request, zip(records, repeat(decided)))
        oldest_live = _NEVER if final else self.assembler.oldest_open_arrival(horizon)
        decided += self.sampler.flush_held(horizon, oldest_live)
        for work in (self._record_decision, self._export_request):
            self._run_for_all(work, decided)
        self.accounting.count_not_converted(
            self.requests, self.sampler.held_requests + sum(exporter.taken for exporter in self.exporters)
        )
        return bool(records)

    def _drain_engine_records(self) -> None:
        """Drains the records of engines and processes into the metrics."""
        steps, executions = self.assembler.drain_steps(), self.assembler.workers.drain_executions()
        pauses, marks = self.assembler.pauses.drain_pauses(), self.assembler.pauses.drain_marks()
        untraced = self.assembler.processes.drain_untraced()
        if steps:
            self._set_service_name(steps[0].engine)
        if self._metrics_enabled:
            self.metrics.add_steps(steps)
            self.metrics.add_executions(executions)
            self.metrics.add_pauses(pauses)
            self.metrics.add_marks(marks)
            self.metrics.http_requests.add_untraced(untraced)

    def _sample_request(
        self, record: FinishedRequest, decided: list[tuple[FinishedRequest, tail_sampler.Decision]]
    ) -> None:
        if isinstance(record, OrdinaryRequest):
            decided.append(self._ordinary.sample(record))
        else:
            decided += self.sampler.add(record)

    def _run_for_all(self, work: Callable[..., None], rows: Iterable[tuple[Any, ...]]) -> None:
        """Calls `work` with each row: a record, and what belongs to it."""
        for row in rows:
            try:
                work(*row)
            except Exception:  # a failure with one request must not affect the others
                self.failed += 1
                log.exception("request not exported because of an error: trace %s", row[0].trace_id.hex())

    def _export_start(self, record: StartRecord) -> None:
        """Exports the start of a process; it is not sampled, because there is one per process."""
        self._set_service_name(record.engine)
        if self._metrics_enabled:
            self.metrics.add_start(record, exported=not self._uses_provider)
        for export in (
            *(listener.on_start for listener in self._listeners),
            *(exporter.export_start for exporter in self.exporters),
        ):
            export(record)

    def _count_request(self, record: FinishedRequest) -> None:
        """Passes a request to metrics and listeners, before its sampling decision."""
        if isinstance(record, OrdinaryRequest):  # the first requests of its shape named service and model
            if self._metrics_enabled:
                self._ordinary.count(record, self.metrics)
            return
        self._set_service_name(record.engine or record.provider)
        if self._metrics_enabled:
            if record.model and (record.engine or record.provider in events.NAMING_PROVIDERS):
                self.metrics.allow_model(record.model)
            self.metrics.add_request(record, exported=self.sampler.is_exported(record))
        for listener in self._listeners:
            listener.on_request(record)

    def _record_decision(self, record: FinishedRequest, decision: tail_sampler.Decision) -> None:
        if isinstance(record, OrdinaryRequest):
            if self._metrics_enabled:
                self._ordinary.count_decision(record, decision, self.metrics)
            return
        if self._metrics_enabled:
            self.metrics.add_decision(record, decision)
        if self._flight_recorder is not None and decision.missed:
            self._flight_recorder.record_slo_miss(record.ended_at)
        self._request_log.log_request(record, decision)

    def _export_request(self, record: FinishedRequest, decision: tail_sampler.Decision) -> None:
        if isinstance(record, OrdinaryRequest):
            self._ordinary.export(record, decision)
            return
        for exporter in self.exporters:
            if decision.export or not exporter.exported_only:
                exporter.export_request(record, decision)
        if not (decision.export and self.exporters):
            self.accounting.add_dismissed(record.redundant)

    @property
    def metrics(self) -> MetricsAggregator:
        """The aggregator, created on first use, so that the service has its name by then."""
        if self._metrics is None:
            self._metrics = MetricsAggregator(
                resource=self.resource,
                temporality=self.config.temporality,
                exponential=self.config.exponential_histograms,
                started_at_unix_ns=self._started_wall_ns,
                exemplars=self.config.exemplars and bool(self.exporters),
                tenants=frozenset(self.config.tenants) if self.config.tenant else None,
                traffic_classes=bool(self.config.traffic_class),
                has_objectives=bool(self.config.slo),
            )
            self._metrics.begin_known_series()
        return self._metrics

    def close(self, timeout: float) -> None:
        """Sends queued data for at most `timeout` s, metrics slightly longer, then closes everything."""
        left_s = timeout if self.sender is None else self.sender.close(timeout)
        if self._metrics_sender is not None:
            # Once more, because refused spans are known only now; queued behind metrics still being sent.
            self._collect_metrics(_clock.now(), final=True)
            self._metrics_sender.close(max(left_s, FINAL_METRICS_S))
        if self._tape is not None:
            self._tape.close()
        self._request_log.close()
        if self._gpu_poller is not None:
            self._gpu_poller.stop()
        if self._scrape is not None:
            self._scrape.close()

    def export_without_grace(self, now: int) -> None:
        """Exports ended requests without waiting for late events, because a flush was requested."""
        self.export_requests(now + SETTLED_NS, final=True)

    def flush(self, timeout: float) -> bool:
        """Waits up to `timeout` s until all data handed over was tried; returns whether it was."""
        for exporter in self.exporters:
            exporter.flush(0)
        self._collect_metrics(_clock.now(), behind=True)
        return self.is_sent(timeout)

    def is_sent(self, timeout: float = 0.0) -> bool:
        """Returns whether everything queued was tried, now or within `timeout` s."""
        return self.delivery.is_sent(timeout)

    def _set_service_name(self, engine: str) -> None:
        """Names the service after the engine, unless it has a name; without an engine it gets none."""
        self._is_service_named = True
        if engine and semconv.SERVICE_NAME not in self.resource:
            self.resource[semconv.SERVICE_NAME] = engine

    def _collect_metrics(self, now: int, final: bool = False, behind: bool = False) -> None:
        """Sends the metrics, but not before the service name is known.

        Under another name they would look like another, short-lived server. `behind` or `final`: although
        others are still being sent.
        """
        if self._metrics_sender is None or not self._can_collect(final):
            return
        if self._metrics_sender.can_accept(behind=behind or final):
            self._collected_at = now
            self._metrics_sender.put(self._snapshot_metrics(PUSH), is_delta=self.metrics.is_delta)

    def _can_collect(self, final: bool = False) -> bool:
        return self.rings.has_seen_rings and (self._is_service_named or final)

    def _snapshot_metrics(self, reader: str = "") -> Any:
        for delta in self._metrics_sender.drain_refused_deltas() if self._metrics_sender is not None else ():
            self.metrics.restore_self_counts(delta)
        state_metrics.set_state_metrics(
            self.metrics, self.assembler, self.rings, self.sampler, self._gpu_poller, self.sender
        )
        state_metrics.set_loss_metrics(self.metrics, self.count_losses(), self.sampler.dropped_steps)
        state_metrics.set_request_counts(
            self.metrics, self.accounting.read_counts(own_only=self.metrics.is_delta)
        )
        restarts = self.rings.ledger.restarts
        self.metrics.set_value(
            semconv.SELF_RESTARTS, {}, min(restarts, 1) if self.metrics.is_delta else restarts
        )
        return self.metrics.collect(_clock.read_clocks()[1], reader)

    def count_losses(self) -> dict[str, int]:
        """Returns the losses by reason."""
        counts, senders = self.rings.read_counts(), (self.sender, self._metrics_sender)
        return losses.count_losses(counts, self.assembler, self.sampler, self.failed, *senders)
