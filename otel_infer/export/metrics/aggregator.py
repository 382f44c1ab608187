"""Records → counts → the SDK's `MetricsData`, which the SDK's own OTLP exporter sends.

There are no instruments: every value is counted here, whether its request is exported or not, and becomes a
data point when somebody collects. Exemplars name exported requests only. One thread calls all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_infer import semconv
from otel_infer._version import VERSION
from otel_infer.assembly.engine.types import Execution, StepRecord
from otel_infer.assembly.records.process import Mark, Pause, StartRecord
from otel_infer.assembly.records.request import Blame, RequestRecord
from otel_infer.config import tenancy
from otel_infer.export.metrics import engine_steps, request_counters
from otel_infer.export.metrics.counters import CUMULATIVE, DELTA, FirstCome, Numbers, Set, renew
from otel_infer.export.metrics.histograms import Histograms, Key, Label, Source
from otel_infer.export.metrics.inter_token_latency import Gaps
from otel_infer.export.metrics.request_counters import count_missed, count_slow
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import Value

MAX_MODELS = 50
MAX_NAMES = 64

REST_NS = 1_000_000_000


class MetricsSink:
    """Counts finished requests and engine steps.

    `temporality`: `cumulative`, `delta` or `lowmemory`. `resource` is read at each collection, so it may still
    gain names. `tenants`: those that may be named, None where nobody asked for tenants; `traffic_classes`: they are told;
    `promises`: there are objectives.
    """

    def __init__(
        self,
        *,
        resource: Mapping[str, Value],
        temporality: str = "cumulative",
        exponential: bool = False,
        started_at_unix_ns: int,
        exemplars: bool = True,
        tenants: Collection[str] | None = None,
        traffic_classes: bool = False,
        promises: bool = False,
    ) -> None:
        self._resource = resource
        self._promises = promises
        self.is_delta = temporality in ("delta", "lowmemory")  # the same, but for observable counters
        self._stepped_at = 0
        self._exemplars = exemplars
        self._started_at = self._collected_at = started_at_unix_ns
        self._histograms = {
            metric.name: Histograms(metric, exponential)
            for metric in semconv.METRICS
            if metric.instrument == semconv.HISTOGRAM
        }
        self._numbers = {
            metric.name: Numbers(metric) for metric in semconv.METRICS if metric.name not in self._histograms
        }
        self._gaps = Gaps(self._histograms[semconv.INTER_TOKEN_LATENCY.name])
        self._blamed: dict[Key, dict[str, int]] = {}
        self._served: set[str] = set()
        self._operations, self._providers = FirstCome(MAX_MODELS), FirstCome(MAX_MODELS)
        self._stages, self._errors = FirstCome(MAX_NAMES), FirstCome(MAX_NAMES)
        self._causes = FirstCome(MAX_NAMES)
        self._tenants, self._traffic_classes = tenants, traffic_classes

    def serve(self, model: str) -> None:
        """This model is served, so metrics may name it; the first 50 are. Every other model is `_OTHER`."""
        if model and len(self._served) < MAX_MODELS:
            self._served.add(model)

    def kept(self, record: RequestRecord, decision: Decision) -> None:
        """Counts why a request was kept, or that it was not; what it missed; where the time of a slow one went."""
        self._numbers[semconv.REQUEST_KEPT.name].add((decision.reason,), 1)
        if not (record.generative and record.operation and (self._promises or decision.slow)):
            return  # a POST that reached no engine keeps no promise
        who = (*self._who(record), *self._caller(record))
        if self._promises:
            count_missed(self._numbers, record, decision, who)
        if decision.slow and record.blame is not None:
            count_slow(self._numbers, record.blame, who)

    def request(self, record: RequestRecord, *, exported: bool) -> None:
        """Counts a finished request, kept or not; only an exported one becomes an exemplar."""
        who, caller = self._who(record), self._caller(record)
        source = _source(record) if exported and self._exemplars else None
        error_type = record.error_type or (semconv.OTHER if record.outcome == events.ERROR else "")
        error = self._errors.admit(error_type) if error_type else None
        self._record(semconv.REQUEST_DURATION, (*who, error, *caller), record.duration_ns, source)
        self._count_stages(record, who, source)
        if not record.generative:
            return
        request_counters.count(self._numbers, record, who, caller)
        if record.outcome == events.ABORTED:
            key = (self._stages.admit(record.died_in), error, *who, *caller)
            self._record(semconv.REQUEST_ABANDONED, key, record.duration_ns, source)
        if record.blame is not None and record.operation:
            self._count_blame(record, record.blame, (*who, *caller))
        if record.preemptions:
            self._numbers[semconv.REQUEST_PREEMPTIONS.name].add(who, record.preemptions)
        self._count_tokens(record, (*who, *caller), source)

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Counts engine steps, and takes over the KV usage that each engine said last."""
        groups: dict[Key, list[StepRecord]] = {}
        latest: dict[Key, StepRecord] = {}
        for record in records:
            self._stepped_at = max(self._stepped_at, record.ended_at)
            engine = (record.engine or None, record.pid)
            groups.setdefault((record.kind, *engine), []).append(record)
            if record.kv_total:
                latest[engine] = record
        for key, group in groups.items():
            engine_steps.count(self._histograms, self._numbers, key[0], key[1:], group)
        for key, record in latest.items():
            self._numbers[semconv.KV_USAGE.name].set(key, record.kv_used)
            self._numbers[semconv.KV_LIMIT.name].set(key, record.kv_total)
            self._numbers[semconv.KV_UTILIZATION.name].set(key, record.kv_used / record.kv_total)
            if record.block_tokens:
                free = (record.kv_total - record.kv_used) * record.block_tokens
                self._numbers[semconv.KV_BLOCK_SIZE.name].set(key, record.block_tokens)
                self._numbers[semconv.KV_HEADROOM.name].set(key, free / max(record.running, 1))

    def executions(self, executions: Sequence[Execution]) -> None:
        """Counts what workers took for steps."""
        engine_steps.count_executions(self._histograms, executions)

    def pauses(self, pauses: Sequence[Pause]) -> None:
        """Counts what held up a process; what holds up several is counted for each."""
        for pause in pauses:
            key = (self._causes.admit(pause.cause),)
            self._record(semconv.PAUSES, key, pause.ended_at - pause.started_at, None)

    def marks(self, marks: Sequence[Mark]) -> None:
        """Counts what happened to processes."""
        for mark in marks:
            if mark.name == semconv.MARK_EVICTION:
                self._numbers[semconv.KV_EVICTIONS.name].add((), mark.times)
            else:
                name = mark.name if mark.name in semconv.MARK_NAMES else semconv.OTHER
                self._numbers[semconv.MARKS.name].add((name,), mark.times)

    def start(self, record: StartRecord, *, exported: bool) -> None:
        """Counts the start of a process: each phase, which may have been there several times, and the whole. Only one that is
        exported under its own ids becomes an exemplar."""
        source = Source(*_numbers(record.trace_id, record.span_id), record.ended_at + record.wall_offset)
        is_named = exported and self._exemplars
        error = self._errors.admit(record.error_type) if record.error_type else None
        lengths: Counter[Label] = Counter({semconv.STARTUP_TOTAL: record.duration_ns})
        for phase in record.phases:
            lengths[self._stages.admit(phase.name)] += phase.ended_at - phase.started_at
        for name, length in lengths.items():
            key = (name, record.ready_by or None, error)
            self._record(semconv.STARTUP_DURATION, key, length, source if is_named else None)

    def engines(self, living: Collection[tuple[str, int]]) -> None:
        """These (engine, pid) are there: nothing uses the KV cache of any other."""
        keys = {(engine or None, pid) for engine, pid in living}
        for metric in semconv.KV_OF_ENGINE:
            self._numbers[metric.name].retain(keys)

    def rest(self, now: int) -> None:
        """Nobody is in flight: where no step was taken for a while, nothing is in a KV cache."""
        if now - self._stepped_at > REST_NS:
            for metric in (semconv.KV_USAGE, semconv.KV_UTILIZATION):
                self._numbers[metric.name].reset()
            self._numbers[semconv.KV_HEADROOM.name].retain(())

    def set(self, metric: semconv.Metric, attributes: Mapping[str, Value], value: float) -> None:
        """The value of a gauge or an up-down counter, or the total of a counter, from now on."""
        self._numbers[metric.name].say(attributes, value)

    def renew(self, metrics: Collection[semconv.Metric], say: Callable[[Set], None]) -> None:
        """Sets what `say` says; of these metrics, what it does not say is of things that are gone."""
        renew(self._numbers, metrics, say)

    def add(self, metric: semconv.Metric, attributes: Mapping[str, Value], value: float) -> None:
        """Adds to a counter or an up-down counter."""
        numbers = self._numbers[metric.name]
        numbers.add(numbers.key(attributes), value)

    def collect(self, now_unix_ns: int) -> export.MetricsData:
        """All data points there are; where it is delta, those of the time since the last collection."""
        self._gaps.count()
        self._add_blamed()
        metrics = []
        for metric in semconv.METRICS:
            series = self._histograms.get(metric.name) or self._numbers[metric.name]
            delta = self.is_delta and metric.instrument in (semconv.HISTOGRAM, semconv.COUNTER)
            since = min(self._collected_at, now_unix_ns) if delta else self._started_at
            data = series.data(DELTA if delta else CUMULATIVE, since, now_unix_ns)
            if data is not None:
                name, meaning, unit = metric.name, metric.description, metric.unit
                metrics.append(export.Metric(name=name, description=meaning, unit=unit, data=data))
        self._collected_at = now_unix_ns
        named: Any = {semconv.SERVICE_NAME: semconv.UNKNOWN_SERVICE, **self._resource}
        scope = export.ScopeMetrics(
            scope=InstrumentationScope(semconv.SCOPE, VERSION, semconv.SCHEMA_URL),
            metrics=metrics,
            schema_url=semconv.SCHEMA_URL,
        )
        resource = export.ResourceMetrics(resource=Resource(named), scope_metrics=[scope], schema_url="")
        return export.MetricsData(resource_metrics=[resource])

    def _who(self, record: RequestRecord) -> Key:
        """What every metric of requests carries: operation, provider, model."""
        model = record.model if record.model in self._served else semconv.OTHER
        return (
            self._operations.admit(record.operation),
            self._providers.admit(record.provider),
            model if record.model else None,
        )

    def _caller(self, record: RequestRecord) -> Key:
        """A tenant that may be named, and the traffic class; nothing where nobody asked for either."""
        tenant = traffic = None
        if self._tenants is not None:
            said = str(record.attributes.get(semconv.TENANT, ""))
            tenant = said if said in self._tenants else semconv.OTHER
        if self._traffic_classes:
            batch = record.attributes.get(semconv.TRAFFIC_CLASS) == tenancy.BATCH
            traffic = tenancy.BATCH if batch else tenancy.INTERACTIVE
        return (tenant, traffic) if tenant or traffic else ()

    def _record(self, metric: semconv.Metric, key: Key, length_ns: float, source: Source | None) -> None:
        self._histograms[metric.name].at(key).record(length_ns / 1e9, source)

    def _count_stages(self, record: RequestRecord, who: Key, source: Source | None) -> None:
        points = self._histograms[semconv.STAGE_DURATION.name]
        for name, started_at, ended_at, attributes in record.stages:
            key = (self._stages.admit(name), semconv.CLOCK_HOST, *who)
            points.at(key).record((ended_at - started_at) / 1e9, source)
            if name == semconv.SPAN_POSTPROCESS:
                detokenize = attributes.get(semconv.DETOKENIZE)
                if isinstance(detokenize, (int, float)):
                    points.at((semconv.STAGE_DETOKENIZE, *key[1:])).record(detokenize, source)
        if record.device_share:
            attributed = self._numbers[semconv.DEVICE_ATTRIBUTED.name]
            attributed.add((*who, *self._caller(record)), record.device_share / 1e9)
        for name, length in record.device_ns:
            points.at((self._stages.admit(name), semconv.CLOCK_DEVICE, *who)).record(length / 1e9, source)

    def _count_blame(self, record: RequestRecord, blame: Blame, who: Key) -> None:
        spent = self._blamed.setdefault(who, {})
        for cause, length in blame.causes.items():
            spent[cause] = spent.get(cause, 0) + length
        if blame.classes:
            prompt = record.input_tokens or sum(chunk.tokens for chunk in record.prefill_steps)
            victim = tenancy.class_of(record.attributes.get(semconv.TRAFFIC_CLASS), prompt)
            held_up = self._numbers[semconv.INTERFERENCE_DURATION.name]
            for offender, length in blame.classes:
                held_up.add((offender, victim), length / 1e9)

    def _add_blamed(self) -> None:
        """What requests were blamed for since the last collection, in s."""
        spent = self._numbers[semconv.BLAME_DURATION.name]
        for who, causes in self._blamed.items():
            for cause, length in causes.items():
                spent.add((cause, *who), length / 1e9)
        self._blamed = {}

    def _count_tokens(self, record: RequestRecord, who: Key, source: Source | None) -> None:
        if record.outcome == events.ERROR:
            return
        if record.summary.gaps:
            self._gaps.add(who, record, source)
        if record.outcome != events.OK:
            return
        if record.ttft_ns:
            self._record(semconv.TIME_TO_FIRST_TOKEN, who, record.ttft_ns, source)
        tokens = record.tokens_after_first
        if tokens > 0:
            self._record(semconv.TIME_PER_OUTPUT_TOKEN, who, record.decode_ns / tokens, source)


def _source(record: RequestRecord) -> Source | None:
    """The span that stands for this request in a trace: its own, or the server's if it was no inference."""
    span_id = record.span_id if record.operation else record.server_span_id or record.span_id
    if not any(record.trace_id) or not any(span_id):
        return None
    ended_at = record.ended_at + record.wall_offset
    return Source(*_numbers(record.trace_id, span_id), ended_at)


def _numbers(trace_id: bytes, span_id: bytes) -> tuple[int, int]:
    return int.from_bytes(trace_id, "big"), int.from_bytes(span_id, "big")
