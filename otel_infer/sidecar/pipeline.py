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
from otel_infer.export.interfaces import RequestSink, Watcher
from otel_infer.export.metrics import gpus, prometheus_endpoint, self_metrics
from otel_infer.export.metrics.aggregator import MetricsSink
from otel_infer.export.metrics.sender import MetricsOutlet
from otel_infer.export.request_log import RequestLog
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans.exporter import Sender
from otel_infer.gpu.nvml_poller import Poller
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import RingFact, Value
from otel_infer.ringbuffer.merged_reader import Rings
from otel_infer.sidecar import overhead
from otel_infer.sidecar.recording import file
from otel_infer.sidecar.recording.flight_recorder import FlightRecorder

log = logging.getLogger(__name__)
_NEVER = 1 << 63

OF_THE_SERVER = 0
"""In place of a ring: what is recorded of no single process."""
WAKE_NS = 50_000_000
CONCLUDE_NS = 500_000_000
"""Under load, requests are concluded so much apart: many at once cost each of them less."""
LAST_S = 1.0
"""How long the end waits for metrics at least, once spans are flushed."""


class Pipeline:
    """Everything between rings and senders. `resource` may gain a service name when the engine is known.

    `watchers` are told of every request when it is concluded; sinks, when it is decided what is kept of it.
    """

    def __init__(
        self,
        config: Config,
        rings: Rings,
        sinks: list[RequestSink],
        sender: Sender | None,
        resource: dict[str, Value],
        metrics_outlet: MetricsOutlet | None,
        started_wall_ns: int,
        watchers: Sequence[Watcher] = (),
        flight: FlightRecorder | None = None,
    ) -> None:
        self.config, self.rings, self.sinks, self.sender = config, rings, sinks, sender
        self.assembler = Assembler()
        # The spans of a provider have ids of its own making, and of what it does not sample there are none.
        self._is_providers = bool(sinks) and sender is None
        self.keeper = tail_sampler.Keeper(
            config.steps,
            config.step_budget,
            config.keep_unsampled and not self._is_providers,
            config.ratio_sampling,
            slo.parse(config.slo),
            config.slow_percent / 100,
        )
        self.resource = resource
        self.requests = 0
        self.failed = 0
        self._outlet = metrics_outlet
        self._metrics: MetricsSink | None = None
        self._is_counted = metrics_outlet is not None or bool(config.scrape_address)
        self._started_wall_ns = started_wall_ns
        self._collected_at = self._concluded_at = 0
        self._is_named = semconv.SERVICE_NAME in resource
        self._governor = overhead.Governor(budget.parse(config.budget))
        self._tape = file.writer(config.tape)
        self._log = RequestLog(config.request_log)
        self._watchers = watchers
        self._flight = flight
        self._scrape = prometheus_endpoint.Scrape(config.scrape_address) if config.scrape_address else None
        self._gpus: Poller | None = None
        if config.gpu_metrics and (sender or metrics_outlet or self._scrape or flight or self._tape):
            self._gpus = Poller(config.visible_devices)
            self._gpus.start()

    def wake(self, now: int, final: bool = False) -> bool:
        """Reads, concludes and hands on; whether there was anything. `final`: there will be no other wake."""
        for throttled in self._gpus.drain_events() if self._gpus is not None else ():
            self.rings.say(RingFact(OF_THE_SERVER, 0, throttled))
        said = self.rings.poll(now, final)
        horizon = now + GRACE_NS if final else self.rings.horizon
        self._save(said, horizon)
        self.assembler.feed(said)
        if final or now - self._concluded_at >= CONCLUDE_NS:
            self._concluded_at = now if self.conclude(horizon, final) else 0
            self.rings.conclude(horizon)
        for sink in self.sinks:
            sink.flush(0 if final else now)
        if final or now - self._collected_at >= self.config.metric_interval_ms * 1_000_000:
            self._collect(now, final)
        if self._scrape is not None and self._scrape.is_wanted(now):
            self._scrape.put(self._counted())
        return bool(said)

    def govern(self, now: int) -> None:
        """Sheds detail if this process takes more than it may; for one that does nothing else."""
        usage = rusage.getrusage(rusage.RUSAGE_SELF)
        cpu = round((usage.ru_utime + usage.ru_stime) * 1e9)
        self.keeper.share = self._governor.observe(now, cpu, self_metrics.resident())

    def _save(self, said: list[RingFact], horizon: int) -> None:
        if self._flight is not None:
            self._flight.keep(said, horizon)
        try:
            if self._tape is not None:
                if said:
                    self._tape.write(said, horizon)
                self._tape.sync(horizon)
        except OSError as reason:
            self._tape = None
            log.error("the tape ends here: %s", reason)

    def conclude(self, horizon: int, final: bool = False) -> bool:
        """Hands on the requests that ended before `horizon`; whether there were any. `final`: none of them waits."""
        self._drain()
        for start in self.assembler.started(horizon):  # before the requests that link to it
            self._guarded(self._hand_on_start, start)
        records = finish_requests(self.assembler, horizon)
        self.requests += len(records)
        decided: list[tail_sampler.Kept] = []
        # One thing after another, each of all requests: the processor has its code at hand then, which is the most of it.
        for record in records:
            self._guarded(self._count, record)
        for record in records:
            self._guarded(self._decide, record, decided)
        oldest_live = _NEVER if final else self.assembler.oldest_live(horizon)
        decided += self.keeper.release(horizon, oldest_live)
        for work in (self._note, self._hand_on):
            for record, decision in decided:
                self._guarded(work, record, decision)
        return bool(records)

    def _drain(self) -> None:
        """What engines and processes did."""
        steps, executions = self.assembler.drain_steps(), self.assembler.devices.drain()
        pauses, marks = self.assembler.drain_pauses(), self.assembler.drain_marks()
        if steps:
            self._name_service(steps[0].engine)
        if self._is_counted:
            self.metrics.steps(steps)
            self.metrics.executions(executions)
            self.metrics.pauses(pauses)
            self.metrics.marks(marks)

    def _decide(self, record: RequestRecord, decided: list[tail_sampler.Kept]) -> None:
        decided += self.keeper.take(record)

    def _guarded(self, work: Callable[..., None], record: RequestRecord | StartRecord, *more: Any) -> None:
        try:
            work(record, *more)
        except Exception:  # one request that we cannot describe must not cost all others
            self.failed += 1
            log.exception("a request is not exported: trace %s", record.trace_id.hex())

    def _hand_on_start(self, record: StartRecord) -> None:
        """Whatever is decided of requests: there is one of these for each process."""
        self._name_service(record.engine)
        if self._is_counted:
            self.metrics.start(record, exported=not self._is_providers)
        for take in (*(one.start for one in self._watchers), *(one.start for one in self.sinks)):
            take(record)

    def _count(self, record: RequestRecord) -> None:
        """What does not wait for the keeper's last word."""
        self._name_service(record.engine or record.provider)
        if self._is_counted:
            if record.model and (record.engine or record.provider == events.TORCH):
                self.metrics.serve(record.model)
            self.metrics.request(record, exported=self.keeper.exports(record))
        for watch in self._watchers:
            watch.request(record)

    def _note(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        if self._is_counted:
            self.metrics.kept(record, decision)
        if self._flight is not None and decision.missed:
            self._flight.missed(record.ended_at)
        self._log.tell(record, decision)

    def _hand_on(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        for sink in self.sinks:
            if decision.export or not sink.exported_only:
                sink.request(record, decision)

    @property
    def metrics(self) -> MetricsSink:
        """Made when first needed, so that the service has its name by then."""
        if self._metrics is None:
            self._metrics = MetricsSink(
                resource=self.resource,
                temporality=self.config.temporality,
                exponential=self.config.exponential,
                started_at_unix_ns=self._started_wall_ns,
                exemplars=self.config.exemplars and bool(self.sinks),
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
        if self._outlet is not None:
            # Once more, since only now it is known which spans were refused; behind what is still being sent.
            self._collect(_clock.now(), final=True)
            self._outlet.close(max((deadline - _clock.now()) / 1e9, LAST_S))
        self._end_tape()
        self._log.close()
        if self._gpus is not None:
            self._gpus.stop()
        if self._scrape is not None:
            self._scrape.close()

    def _end_tape(self) -> None:
        try:
            if self._tape is not None:
                self._tape.close()
        except OSError as reason:  # a full disk, say; others have to be let go of
            log.error("the end of the tape is missing: %s", reason)

    def settle(self, now: int) -> None:
        """Concludes what has ended without waiting for stragglers: somebody wants everything sent."""
        self.conclude(now + GRACE_NS, final=True)
        self.rings.conclude(self.rings.horizon + GRACE_NS)

    def flush(self, timeout: float) -> bool:
        """Waits until what was handed on so far has been tried."""
        for sink in self.sinks:
            sink.flush(0)
        self._collect(_clock.now(), behind=True)
        return self.is_sent(timeout)

    def is_sent(self, timeout: float = 0.0) -> bool:
        """Whether everything queued has been tried, or is within `timeout` s."""
        deadline = _clock.now() + int(timeout * 1e9)
        if self.sender is not None and not self.sender.flush(timeout):
            return False
        return self._outlet is None or self._outlet.wait(max(deadline - _clock.now(), 0) / 1e9)

    def _name_service(self, engine: str) -> None:
        """After the engine, if nobody named it; where there is none it has no name."""
        self._is_named = True
        if engine and semconv.SERVICE_NAME not in self.resource:
            self.resource[semconv.SERVICE_NAME] = engine

    def _collect(self, now: int, final: bool = False, behind: bool = False) -> None:
        """Not before it is known whose metrics they are: what had another name would be another server's, that is soon gone.
        `behind`, or at the end: though others are still being sent."""
        if self._outlet is None or not self.rings.seen_any or not (self._is_named or final):
            return
        if self._outlet.takes(behind=behind or final):
            self._collected_at = now
            self._outlet.put(self._counted(), is_delta=self.metrics.is_delta)

    def _counted(self) -> Any:
        self._state_of_self()
        return self.metrics.collect(_clock.wall_pair()[1])

    def _state_of_self(self) -> None:
        metrics, active, processes = self.metrics, self.assembler.active(), self.assembler.processes
        for state, count in active.items():
            metrics.set(semconv.REQUEST_ACTIVE, {semconv.REQUEST_STATE: state}, count)
        metrics.renew(
            self_metrics.OF_PROCESSES, lambda set_value: self_metrics.say_processes(processes, set_value)
        )
        memory = self.assembler.devices.memory_by_process()
        metrics.renew(gpus.MEMORY, lambda set_value: gpus.say_memory(memory, set_value))
        if self._gpus is not None:
            readings, driver = self._gpus.latest, self._gpus.driver
            metrics.renew(gpus.NOW, lambda set_value: gpus.say(readings, driver, set_value))
        metrics.engines({(log.engine, log.pid) for log in self.assembler.engines.values()})
        if not any(active.values()):
            metrics.rest(self.rings.horizon)
        for reason, count in self.losses().items():
            metrics.set(semconv.SELF_LOST, {semconv.LOSS_REASON: reason}, count)
        for reason, count in self.keeper.left_out.items():
            metrics.set(semconv.SELF_LEFT_OUT, {semconv.KEEP_REASON: reason}, count)
        metrics.set(semconv.SELF_ERRORS, {}, self.rings.errors())
        if self.sender is not None:
            metrics.set(semconv.SELF_SPANS, {}, self.sender.accepted)
            metrics.set(semconv.SELF_BYTES, {}, self.sender.bytes_sent)
        self_metrics.say_usage(metrics.set)
        metrics.set(semconv.SELF_SHARE, {}, self.keeper.share)

    def losses(self) -> dict[str, int]:
        """What did not arrive, by reason."""
        lost = {
            "facts_overwritten": self.assembler.facts_lost,
            "facts_torn": self.assembler.facts_torn,
            semconv.LOSS_OVER_BUDGET: self.keeper.left_out.total(),
            "requests_not_described": self.failed,
            "not_recorded": self.rings.unrecorded(),
        }
        if self._outlet is not None and self.metrics.is_delta:  # else it is said again
            lost["collections_refused"] = self._outlet.failed
        if self.sender is not None:
            lost.update(self.sender.lost)
        return lost
