"""Aggregates records into the SDK's `MetricsData`, which the SDK's own OTLP exporter sends.

There are no instruments. Every value is counted here, whether its request is exported or not, and becomes a
data point at collection. Exemplars refer to exported requests only. All calls come from one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from opentelemetry.sdk.metrics import export

from otel_infer import semconv
from otel_infer.assembly.engine.types import Execution, StepRecord
from otel_infer.assembly.records.process import Mark, Pause, StartRecord
from otel_infer.assembly.records.request import LatencyBreakdown, RequestRecord
from otel_infer.config import tenancy
from otel_infer.export.metrics import engine_steps, request_counters
from otel_infer.export.metrics.counters import (
    CUMULATIVE,
    DELTA,
    CardinalityLimit,
    NumberSeries,
    SetValue,
    build_metrics_data,
    replace_values,
)
from otel_infer.export.metrics.histograms import ExemplarSource, HistogramSeries, Key, Label, make_source
from otel_infer.export.metrics.http_requests import HttpRequestDurations
from otel_infer.export.metrics.inter_token_latency import InterTokenLatency
from otel_infer.export.metrics.request_counters import RequestSeries, count_objectives, count_slow_causes
from otel_infer.export.metrics.request_keys import RequestKeys
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import Value

MAX_NAMES = 64

KV_IDLE_NS = 1_000_000_000

PUSH, SCRAPE = "push", "scrape"
"""Readers of the metrics: the OTLP destination and the scrape endpoint."""


class MetricsAggregator:
    """Counts finished requests, engine steps and process events.

    `temporality`: `cumulative`, `delta` or `lowmemory`. `resource`: read at each collection, so it may still
    gain attributes. `tenants`: tenants that metrics may name, None = no tenants. `traffic_classes`: metrics
    carry the traffic class. `has_objectives`: objectives are configured.
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
        has_objectives: bool = False,
    ) -> None:
        self._resource = resource
        self._has_objectives = has_objectives
        self.is_delta = temporality in ("delta", "lowmemory")  # they differ only for observable counters
        self._last_step_at = self._resets = 0
        self.has_exemplars = exemplars
        self._started_at = self._collected_at = started_at_unix_ns
        self._histograms = {
            metric.name: HistogramSeries(metric, exponential)
            for metric in semconv.METRICS
            if metric.instrument == semconv.HISTOGRAM
        }
        self._number_series = {
            metric.name: NumberSeries(metric)
            for metric in semconv.METRICS
            if metric.name not in self._histograms
        }
        self._inter_token_latency = InterTokenLatency(self._histograms[semconv.INTER_TOKEN_LATENCY.name])
        self.http_requests = HttpRequestDurations(self._histograms[semconv.HTTP_REQUEST_DURATION.name])
        self._cause_totals: dict[Key, dict[str, int]] = {}
        self._request_keys = RequestKeys()
        self.allow_model = self._request_keys.allow_model
        self._stages, self._errors = CardinalityLimit(MAX_NAMES), CardinalityLimit(MAX_NAMES)
        self._causes = CardinalityLimit(MAX_NAMES)
        self._tenants, self._traffic_classes = tenants, traffic_classes

    def begin_known_series(self) -> None:
        """Begins the counters of single events at 0, because `rate()` does not count what a series begins with."""
        for name in semconv.MARK_NAMES:
            self._number_series[semconv.MARKS.name].set((name,), 0)

    def count_kept(self, reason: str) -> None:
        """Counts the keep reason of a request."""
        self._number_series[semconv.REQUEST_KEPT.name].add((reason,), 1)

    def count_slow(self, causes: Mapping[str, int], key: Key) -> None:
        """Counts the causes of a slow request, ns."""
        count_slow_causes(self._number_series, causes, key)

    def add_decision(self, record: RequestRecord, decision: Decision) -> None:
        """Counts the keep reason of a request, its missed objectives, and the causes of a slow one."""
        self.count_kept(decision.reason)
        if not (record.generative and record.operation and (self._has_objectives or decision.slow)):
            return  # objectives do not apply to a POST that reached no engine
        key = (*self._request_keys.make_key(record), *self._make_caller_key(record))
        if self._has_objectives:
            count_objectives(self._number_series, record, decision, key)
        if decision.slow and record.breakdown is not None:
            self.count_slow(record.breakdown.causes, key)

    def add_request(self, record: RequestRecord, *, exported: bool) -> None:
        """Counts a finished request, exported or not. Only an exported request becomes an exemplar.

        An HTTP request that inferred nothing has no operation, and counts as an HTTP request only.
        """
        source = _source_of_request(record) if exported and self.has_exemplars else None
        self.http_requests.add_request(record, source)
        if not record.operation:
            return
        request_key, caller_key = self._request_keys.make_key(record), self._make_caller_key(record)
        error_type = record.error_type or (semconv.OTHER if record.outcome == events.ERROR else "")
        error = self._errors.admit_label(error_type) if error_type else None
        self._record_duration(
            semconv.REQUEST_DURATION, (*request_key, error, *caller_key), record.duration_ns, source
        )
        self._record_stages(record, request_key, source)
        if not record.generative:
            return
        request_counters.count_usage(self._number_series, record, request_key, caller_key)
        if record.outcome == events.ABORTED:
            key = (self._stages.admit_label(record.failed_stage), error, *request_key, *caller_key)
            self._record_duration(semconv.REQUEST_ABANDONED, key, record.duration_ns, source)
        if record.breakdown is not None:
            self._count_breakdown(record, record.breakdown, (*request_key, *caller_key))
        self._number_series[semconv.REQUEST_PREEMPTIONS.name].add(request_key, record.preemptions)
        self._record_token_latency(record, (*request_key, *caller_key), source)

    def find_request_series(self, record: RequestRecord) -> RequestSeries:
        """Returns the series that `add_request` counts a success without steps in."""
        found = self.http_requests.find_durations(record)
        histograms = [] if found is None else [found]
        if not record.operation:
            return RequestSeries(histograms, None, None, self.series_version)
        request_key, caller_key = self._request_keys.make_key(record), self._make_caller_key(record)
        of_requests, of_stages = (
            self._histograms[metric.name] for metric in (semconv.REQUEST_DURATION, semconv.STAGE_DURATION)
        )
        histograms.append(of_requests.get_or_create((*request_key, None, *caller_key)))
        for stage in record.stages:
            key = (self._stages.admit_label(stage.name), semconv.CLOCK_HOST, *request_key)
            histograms.append(of_stages.get_or_create(key))
        of_sizes = self._histograms[semconv.REQUEST_BATCH_SIZE.name]
        sizes = of_sizes.get_or_create(request_key) if request_counters.find_batch_size(record) else None
        if not record.generative:
            return RequestSeries(histograms, sizes, None, self.series_version)
        self._number_series[semconv.REQUEST_PREEMPTIONS.name].add(request_key, 0)
        return RequestSeries(histograms, sizes, (*request_key, *caller_key), self.series_version)

    @property
    def series_version(self) -> tuple[int, int]:
        """Changes when other series than before may count a request."""
        return self._resets, self._request_keys.version

    def add_causes(self, key: Key, causes: Iterable[tuple[str, int]]) -> None:
        """Adds the times of the causes of a request, ns."""
        totals = self._cause_totals.setdefault(key, {})
        for cause, length in causes:
            totals[cause] = totals.get(cause, 0) + length

    def add_steps(self, records: Sequence[StepRecord]) -> None:
        """Counts engine steps, and sets the KV usage of each engine from its latest step."""
        groups: dict[Key, list[StepRecord]] = {}
        latest: dict[Key, StepRecord] = {}
        for record in records:
            self._last_step_at = max(self._last_step_at, record.ended_at)
            engine = (record.engine or None, record.pid)
            groups.setdefault((record.kind, *engine), []).append(record)
            if record.kv_total:
                latest[engine] = record
        for key, group in groups.items():
            engine_steps.record_steps(self._histograms, self._number_series, key[0], key[1:], group)
        engine_steps.set_kv_usage(self._number_series, latest)

    def add_executions(self, executions: Sequence[Execution]) -> None:
        """Counts the execution times of workers."""
        engine_steps.record_executions(self._histograms, executions)

    def add_pauses(self, pauses: Sequence[Pause]) -> None:
        """Counts the pauses of processes. A pause of several processes counts once for each."""
        for pause in pauses:
            key = (self._causes.admit_label(pause.cause),)
            self._record_duration(semconv.PAUSES, key, pause.ended_at - pause.started_at, None)

    def add_marks(self, marks: Sequence[Mark]) -> None:
        """Counts the marks of processes."""
        for mark in marks:
            if mark.name == semconv.MARK_EVICTION:
                self._number_series[semconv.KV_EVICTIONS.name].add((), mark.times)
            else:
                name = mark.name if mark.name in semconv.MARK_NAMES else semconv.OTHER
                self._number_series[semconv.MARKS.name].add((name,), mark.times)

    def add_start(self, record: StartRecord, *, exported: bool) -> None:
        """Counts the start of a process: the sum of each phase, and the whole.

        Only a start that is exported under its own ids becomes an exemplar.
        """
        source = make_source(record.trace_id, record.span_id, record.ended_at + record.wall_offset)
        is_named = exported and self.has_exemplars
        error = self._errors.admit_label(record.error_type) if record.error_type else None
        durations: Counter[Label] = Counter({semconv.STARTUP_TOTAL: record.duration_ns})
        for phase in record.phases:
            durations[self._stages.admit_label(phase.name)] += phase.ended_at - phase.started_at
        for name, duration in durations.items():
            key = (name, record.ready_by or None, error)
            self._record_duration(semconv.STARTUP_DURATION, key, duration, source if is_named else None)

    def retain_engines(self, living: Collection[tuple[str, int]]) -> None:
        """Removes the KV-cache series of all engines except these (engine, pid)."""
        keys = {(engine or None, pid) for engine, pid in living}
        for metric in semconv.ENGINE_KV_METRICS:
            self._number_series[metric.name].retain_keys(keys)

    def reset_idle_kv_usage(self, now: int) -> None:
        """Sets the KV usage to 0 if no step ran for `KV_IDLE_NS`. For a time without requests in flight."""
        if now - self._last_step_at > KV_IDLE_NS:
            for metric in (semconv.KV_USAGE, semconv.KV_UTILIZATION):
                self._number_series[metric.name].reset_values()
            self._number_series[semconv.KV_HEADROOM.name].retain_keys(())

    def set_value(self, metric: semconv.Metric, attributes: Mapping[str, Value], value: float) -> None:
        """Sets the value of a gauge or up-down counter, or the total of a counter."""
        self._number_series[metric.name].set_for_attributes(attributes, value)

    def replace_values(
        self, metrics: Collection[semconv.Metric], set_values: Callable[[SetValue], None]
    ) -> None:
        """Sets the values that `set_values` sets.

        Other series of these metrics are removed, because what they measured is gone.
        """
        replace_values(self._number_series, metrics, set_values)

    def restore_self_counts(self, refused: export.MetricsData) -> None:
        """Adds the counts of otel_infer itself in a delta that was refused to the next one.

        Otherwise the refusals, and other losses, would be counted in what is refused.
        """
        for metric in refused.resource_metrics[0].scope_metrics[0].metrics:
            if metric.name.startswith(semconv.SELF_PREFIX) and isinstance(metric.data, export.Sum):
                self._number_series[metric.name].restore_delta(metric.data)

    def collect(self, now_unix_ns: int, reader: str = "") -> export.MetricsData:
        """Returns all data points; for delta, those since the last collection.

        `reader`: the destination (`PUSH`, `SCRAPE`), which gets each series with an error type first with 0.
        """
        self._inter_token_latency.record_pending()
        self._flush_cause_totals()
        metrics = []
        for metric in semconv.METRICS:
            delta = self.is_delta and metric.instrument in (semconv.HISTOGRAM, semconv.COUNTER)
            since = min(self._collected_at, now_unix_ns) if delta else self._started_at
            span = (DELTA if delta else CUMULATIVE, since, now_unix_ns)
            if metric.instrument == semconv.HISTOGRAM:
                data = self._histograms[metric.name].collect_data(*span, reader)
            else:
                data = self._number_series[metric.name].collect_data(*span)
            if data is not None:
                name, meaning, unit = metric.name, metric.description, metric.unit
                metrics.append(export.Metric(name=name, description=meaning, unit=unit, data=data))
        self._collected_at = now_unix_ns
        self._resets += self.is_delta
        return build_metrics_data(metrics, self._resource)

    def _make_caller_key(self, record: RequestRecord) -> Key:
        """Returns tenant and traffic class; empty if neither is configured."""
        tenant = traffic = None
        if self._tenants is not None:
            name = str(record.attributes.get(semconv.TENANT, ""))
            tenant = name if name in self._tenants else semconv.OTHER
        if self._traffic_classes:
            batch = record.attributes.get(semconv.TRAFFIC_CLASS) == tenancy.BATCH
            traffic = tenancy.BATCH if batch else tenancy.INTERACTIVE
        return (tenant, traffic) if tenant or traffic else ()

    def _record_duration(
        self, metric: semconv.Metric, key: Key, length_ns: float, source: ExemplarSource | None
    ) -> None:
        self._histograms[metric.name].get_or_create(key).record(length_ns / 1e9, source)

    def _record_stages(self, record: RequestRecord, request_key: Key, source: ExemplarSource | None) -> None:
        points = self._histograms[semconv.STAGE_DURATION.name]
        for name, started_at, ended_at, attributes in record.stages:
            key = (self._stages.admit_label(name), semconv.CLOCK_HOST, *request_key)
            points.get_or_create(key).record((ended_at - started_at) / 1e9, source)
            if name == semconv.SPAN_POSTPROCESS:
                detokenize = attributes.get(semconv.DETOKENIZE_DURATION)
                if isinstance(detokenize, (int, float)):
                    points.get_or_create((semconv.STAGE_DETOKENIZE, *key[1:])).record(detokenize, source)
        size = request_counters.find_batch_size(record)
        if size:
            self._histograms[semconv.REQUEST_BATCH_SIZE.name].get_or_create(request_key).record(size, source)
        if record.device_share:
            attributed = self._number_series[semconv.DEVICE_ATTRIBUTED.name]
            attributed.add((*request_key, *self._make_caller_key(record)), record.device_share / 1e9)
        for name, length in record.device_ns:
            points.get_or_create((self._stages.admit_label(name), semconv.CLOCK_DEVICE, *request_key)).record(
                length / 1e9, source
            )

    def _count_breakdown(self, record: RequestRecord, breakdown: LatencyBreakdown, key: Key) -> None:
        self.add_causes(key, breakdown.causes.items())
        if breakdown.interference_by_class:
            prompt = record.input_tokens or sum(chunk.tokens for chunk in record.prefill_steps)
            waiting_class = tenancy.request_class(record.attributes.get(semconv.TRAFFIC_CLASS), prompt)
            delays = self._number_series[semconv.INTERFERENCE_DURATION.name]
            for interfering_class, length in breakdown.interference_by_class:
                delays.add((interfering_class, waiting_class), length / 1e9)

    def _flush_cause_totals(self) -> None:
        """Adds the cause times since the last collection to their counter, in s."""
        seconds = self._number_series[semconv.LATENCY_DURATION.name]
        for key, causes in self._cause_totals.items():
            for cause, length in causes.items():
                seconds.add((cause, *key), length / 1e9)
        self._cause_totals = {}

    def _record_token_latency(self, record: RequestRecord, key: Key, source: ExemplarSource | None) -> None:
        if record.outcome == events.ERROR:
            return
        if record.summary.gaps:
            self._inter_token_latency.add_request(key, record, source)
        if record.outcome != events.OK:
            return
        if record.ttft_ns:
            self._record_duration(semconv.TIME_TO_FIRST_TOKEN, key, record.ttft_ns, source)
        tokens = record.tokens_after_first
        if tokens > 0:
            self._record_duration(semconv.TIME_PER_OUTPUT_TOKEN, key, record.decode_ns / tokens, source)


def _source_of_request(record: RequestRecord) -> ExemplarSource | None:
    """Returns the request span, or the server span of a request that reached no engine."""
    span_id = record.span_id if record.operation else record.server_span_id or record.span_id
    return make_source(record.trace_id, span_id, record.ended_at + record.wall_offset)
