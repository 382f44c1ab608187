"""Writes the pages of docs/ that follow from the code: settings, commands, spans and metrics, causes, attributes, alerts.

`--check` only compares. A test runs it with `--check`, so that a page never differs from the code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from otel_infer import cli, semconv
from otel_infer.analysis.diagnosis.symptoms import SYMPTOMS
from otel_infer.config import tenancy
from otel_infer.config.settings import SETTINGS
from otel_infer.config.slo import E2E, ITL, TPOT, TTFT
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans import attributes, startup
from otel_infer.monitoring import dashboards
from otel_infer.monitoring.alerts import burn_rate_rules, grafana_rules, slo_spec
from otel_infer.monitoring.alerts.cause_alerts import CAUSE_ALERTS, WATCHDOG

DOCS = Path(__file__).parent.parent / "docs"
MADE = "<!-- made by scripts/generate_docs.py; do not edit -->\n\n"
STANDARD = (
    ("OTEL_EXPORTER_OTLP_ENDPOINT, _TRACES_ENDPOINT, _METRICS_ENDPOINT", "the destination; one of them turns on traces and metrics. A signal without an endpoint goes to localhost, unless its exporter is `none`"),
    ("OTEL_EXPORTER_OTLP_PROTOCOL (and per signal)", "`http/protobuf` (default) or `grpc`"),
    ("OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT, _CERTIFICATE, …", "read by the exporters of the SDK"),
    ("OTEL_EXPORTER_OTLP_COMPRESSION (and _TRACES_)", "spans: gzip at level 1, unless it is `none` or `deflate`"),
    ("OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER", "`otlp` (default) or `none`"),
    ("OTEL_TRACES_SAMPLER, _ARG", "the head decision for requests without a sampled parent"),
    ("OTEL_PROPAGATORS", "formats of the caller's context"),
    ("OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES", "the resource. Without a name the service is named after its engine, and metrics are sent once the engine is known"),
    ("OTEL_METRIC_EXPORT_INTERVAL", "ms between metric exports; default 10000, because queues change within a minute"),
    ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "`cumulative`, `delta`, `lowmemory`"),
    ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "`base2_exponential_bucket_histogram` for exponential histograms"),
    ("OTEL_METRICS_EXEMPLAR_FILTER", "`always_off` for no exemplars"),
    ("OTEL_PYTHON_EXCLUDED_URLS, OTEL_PYTHON_OTEL_INFER_EXCLUDED_URLS", "comma-separated regular expressions: URLs that are not traced"),
    ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "`otel_infer`, or names of single integrations"),
    ("OTEL_SDK_DISABLED", "`true`: otel_infer does nothing"),
    ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT, …", "limits for what your code sets on the request span"),
)  # fmt: skip


def configuration() -> str:
    """docs/reference/configuration.md."""
    rows = [f"| `{s.variable}` | `{s.default or '—'}` | {s.meaning} |" for s in SETTINGS.values()]
    standard = [
        f"| {', '.join(f'`{n.strip()}`' for n in names.split(','))} | {meaning} |"
        for names, meaning in STANDARD
    ]
    return "\n".join([
        "# Configuration\n",
        "Every setting is an environment variable. It is read once, when the process starts.\n",
        "- A bad value is reported with the name of its variable and the accepted values.",
        "- `otel-infer` commands then stop, and so does the server that `otel-infer run` would start.",
        "- A server that is instrumented in another way continues with the default.\n",
        "A `tracer_provider` is given in code: see [the API](api.md#instrument), which also states its cost.\n",
        "| variable | default | meaning |", "|---|---|---|", *rows,
        "\n## Standard variables\n",
        "These variables have the meaning that OpenTelemetry defines.\n",
        "| variable | purpose |", "|---|---|", *standard, "",
    ])  # fmt: skip


def telemetry() -> str:
    """docs/reference/telemetry.md."""
    metrics = [
        f"| `{m.name}` | {m.instrument} | {m.unit} | {', '.join(f'`{a}`' for a in m.attributes) or '—'} | {m.description} |"
        for m in semconv.METRICS
    ]
    return "\n".join([
        "# Spans and metrics\n",
        "This page lists every span, event and metric. [Attributes](attributes.md) and [causes](causes.md) have pages of their own.",
        "[Read a trace](../read-a-trace.md) explains them by example.\n",
        "## Spans\n",
        "    POST /v1/chat/completions    the server span: of your HTTP instrumentation, or of otel_infer",
        "    └─ chat MODEL                the request",
        *(f"       ├─ {name}" for name in semconv.STAGES),
        "\n- A stage that was not observed is absent.",
        "- `decode` has one `decode step` for each step that delivered a token to the request, within",
        f"  [the budget](../read-a-trace.md#which-steps-are-exported) and at most {tail_sampler.MAX_STEPS_PER_TRACE} per trace.",
        "- `prefill` has one `prefill step` for each chunk of the prompt, if there were several.",
        "- Stages of `otel_infer.stage` are siblings of the others.",
        f"- `{semconv.SPAN_FETCH_MEDIA}` and `{semconv.SPAN_PREPARE_MEDIA}` are part of the time of `{semconv.SPAN_TOKENIZE}`.",
        f"- `{semconv.SPAN_GRAMMAR}` and `{semconv.SPAN_KV_TRANSFER}` are part of the time of `{semconv.SPAN_QUEUE}`.\n",
        "## Events\n",
        "| event | on | meaning |", "|---|---|---|",
        f"| `{semconv.EVENT_PAUSE}` | a request with a keep reason | a pause of the whole process during the request; of its event loop only, if the cause is `{semconv.CAUSE_EVENT_LOOP}`. The {attributes.MAX_PAUSES} longest are exported |",
        f"| `{semconv.EVENT_MARK}` | a request with a keep reason | something of unknown duration happened to the process: {', '.join(f'`{name}`' for name in semconv.MARK_NAMES)} |",
        f"| `{semconv.EVENT_OUT_OF_MEMORY}` | any request | a device allocation failed |",
        f"| `{semconv.EVENT_IMPORTED}` | `{semconv.SPAN_IMPORTS}` of a start | the import of a library was complete (`{semconv.MODULE}`) |",
        "\n## The start of a server\n",
        f"    {semconv.SPAN_SERVER_START}                 one trace per server start, until the server was ready",
        *(f"    ├─ {name}" for name in semconv.STARTUP_PHASES),
        *(f"    ├─ {name:<25} the start of {role} processes of the server" for role, name in semconv.SPAN_PROCESS_START.items()),
        f"\nThis trace is always exported, with at most {startup.MAX_PHASES} phases; `{semconv.PHASES_DROPPED}` counts the others.",
        f"`{semconv.READY_BY}` is `lifespan`, `engine` or `request`. A start that failed has `{semconv.ERROR_TYPE}` and `{semconv.FAILED_STAGE}`.",
        f"The first request that was served has `{semconv.FIRST_REQUEST}` and a link to the start.\n",
        "| phase | meaning |", "|---|---|", *(f"| `{name}` | {meaning} |" for name, meaning in semconv.STARTUP_PHASES.items()),
        "\n## Metrics\n",
        "Prometheus names are those of its OTLP receiver: dots become underscores, and the unit and `_total` are suffixes.\n",
        "| name | kind | unit | attributes | meaning |", "|---|---|---|---|---|", *metrics, "",
    ])  # fmt: skip


def causes() -> str:
    """docs/reference/causes.md."""
    return "\n".join([
        "# Causes of latency\n",
        "The time of every request is divided among these causes. They sum to its duration.",
        "The last column is the change to try first; the changes in the second table apply where it is empty.\n",
        f"The request span has `{semconv.LATENCY_PREFIX}CAUSE` in seconds, and `{semconv.LATENCY_TOP_CAUSE}` names the largest.",
        f"The metric `{semconv.LATENCY_DURATION.name}` has them for all requests.",
        "[Explain](../explain.md#how-time-is-attributed) describes how they are measured.\n",
        "| name | meaning | change |", "|---|---|---|",
        *(f"| `{row.name}` | {row.meaning} | {row.change} |" for row in semconv.CAUSE_TABLE),
        "\n## Symptoms\n",
        "`otel-infer explain` reports a symptom. Its change is that of its largest cause, or else this one.\n",
        "| symptom | complaint | meaning | change |", "|---|---|---|---|",
        *(f"| `{name}` | {row.complaint} | {row.meaning} | {row.change} |" for name, row in SYMPTOMS.items()),
        "",
    ])  # fmt: skip


NUMBER, NAME, ID, CALLER = (
    "number or fixed word",
    "name from your server",
    "id of the request",
    "from the caller",
)
"""Kinds of values, by what they can reveal."""
REQUEST_ATTRIBUTES = {
    semconv.OPERATION_NAME: (NAME, "`chat`, `text_completion`, `embeddings`, `inference`, or as given to `otel_infer.request`"),
    semconv.PROVIDER_NAME: (NUMBER, "the engine; `custom` for a hand-written server"),
    semconv.REQUEST_MODEL: (NAME, "the served model: a hub id, or the last component of a path"),
    semconv.RESPONSE_ID: (ID, "the id in the response (`chatcmpl-…`). The caller can choose it with `X-Request-Id`: see [privacy](../operate/privacy.md)"),
    semconv.REQUEST_ID: (ID, "the id in the engine. The caller can choose it as above"),
    semconv.RESPONSE_FINISH_REASONS: (NUMBER, "why each sequence ended, in the engine's words"),
    semconv.REQUEST_MAX_TOKENS: (NUMBER, "limit of output tokens"),
    semconv.USAGE_INPUT_TOKENS: (NUMBER, "prompt tokens"),
    semconv.USAGE_OUTPUT_TOKENS: (NUMBER, "output tokens"),
    semconv.USAGE_CACHE_READ: (NUMBER, "prompt tokens that the prefix cache had"),
    semconv.SEQUENCES: (NUMBER, "sequences, if more than one"),
    semconv.PREEMPTIONS: (NUMBER, "preemptions"),
    semconv.TOKENS_DRAFTED: (NUMBER, "draft tokens (speculative decoding)"),
    semconv.TOKENS_ACCEPTED: (NUMBER, "accepted draft tokens"),
    semconv.TTFT: (NUMBER, "s from arrival to the first token"),
    semconv.ERROR_TYPE: (NAME, "HTTP status, the type of an exception, `client_disconnect`, `timeout`, `cancelled` or `process_died`; never a message"),
    semconv.FAILED_STAGE: (NAME, "the stage in which the request ended"),
    semconv.ENGINE: (NUMBER, "the engine that computed it"),
    semconv.KEEP_REASON: (NUMBER, "why its steps were exported; [the values](#keep-reasons)"),
    semconv.SLO_MISSED: (NUMBER, "the objectives of `OTEL_INFER_SLO` that it missed"),
    semconv.LATENCY_TOP_CAUSE: (NUMBER, "the cause with the largest share"),
    semconv.UNSAMPLED: (NUMBER, "true: exported although the context is not sampled"),
    semconv.TELEMETRY_LOST: (NUMBER, "true: events of this request are missing"),
    semconv.FIRST_REQUEST: (NUMBER, "true: the first request after a start"),
    semconv.THROTTLE_REASON: (NUMBER, "why GPU clocks were throttled during the request"),
    semconv.PAUSES_DROPPED: (NUMBER, f"pauses beyond the {attributes.MAX_PAUSES} longest"),
    semconv.MEMORY_FREE_START: (NUMBER, "free bytes of the device at arrival"),
    semconv.MEMORY_FREE_FIRST_TOKEN: (NUMBER, "the same at the first token"),
    semconv.MEMORY_FREE_END: (NUMBER, "the same at the end"),
    semconv.TENANT: (CALLER, "the tenant; only with `OTEL_INFER_TENANT`, and a hash with `OTEL_INFER_TENANT_HASH_KEY`"),
    semconv.TRAFFIC_CLASS: (CALLER, "`interactive` or `batch`; only with `OTEL_INFER_TRAFFIC_CLASS`"),
    **{name: (NUMBER, f"s: {semconv.describe_cause(cause)}") for cause, name in semconv.LATENCY_BY_CAUSE.items()},
    **dict.fromkeys((semconv.LATENCY_QUEUE, semconv.LATENCY_TTFT, semconv.LATENCY_E2E, semconv.LATENCY_PREFILL, semconv.LATENCY_DECODE), (NUMBER, "s, with vLLM's meaning; only with `OTEL_INFER_LATENCY_ATTRIBUTES`")),
}  # fmt: skip
"""Of the request span: what a value reveals, and its meaning."""
SERVER_ATTRIBUTES = {
    semconv.HTTP_REQUEST_METHOD: (NUMBER, "the method, or `_OTHER`"),
    semconv.URL_SCHEME: (NUMBER, "`http` or `https`"),
    semconv.HTTP_ROUTE: (NAME, "the template of the route, never the path"),
    semconv.HTTP_RESPONSE_STATUS_CODE: (NUMBER, "the status"),
    semconv.ERROR_TYPE: (NAME, "as on the request span"),
}  # fmt: skip
STAGE_ATTRIBUTES = {
    semconv.QUEUE_HIDDEN: ("`queue`", "s until the scheduler received the request"),
    semconv.QUEUE_SCHEDULER: ("`queue`", "s in the scheduler's queue"),
    semconv.KV_UTILIZATION_START: ("`prefill`, `decode`", "KV cache in use, 0 to 1, at the first step; of `decode` at the step after the first token"),
    semconv.KV_UTILIZATION_END: ("`decode`", "the same at the last step"),
    semconv.KV_SIZE: ("`prefill`, `decode`", "bytes of a KV cache that only this request uses"),
    semconv.STEPS_COUNT: ("`decode`", "decode steps of the request"),
    semconv.STEPS_SUM: ("`decode`", "s, sum of all steps"),
    semconv.STEPS_P50: ("`decode`", "s, median of the steps"),
    semconv.STEPS_P95: ("`decode`", "s, 95th percentile of the steps"),
    semconv.STEPS_MAX: ("`decode`", "s, longest step"),
    semconv.STEPS_SLOWEST_ID: ("`decode`", "id of the longest step"),
    semconv.STEPS_DISCARDED: ("`decode`", "steps whose result the engine discarded"),
    semconv.STEPS_DROPPED: ("`decode`", "steps without a span"),
    semconv.ITL_MAX: ("`decode`", "s, longest gap between tokens"),
    semconv.BATCH_SIZE_MAX: ("`decode`", "largest batch"),
    semconv.STEP_ID: ("a step", "number of the step in its engine; the same on all requests of the batch"),
    semconv.BATCH_SIZE: ("a step", "sequences in the batch"),
    semconv.STEP_TOKENS: ("a step", "tokens of this request; absent if 1"),
    semconv.INTERFERENCE_PREFILL_TOKENS: ("`decode step`", "prompt tokens of other requests in the step"),
    semconv.DEVICE_SPAN: ("`decode step`", "ns on the device"),
    semconv.SEND_WAIT: ("`postprocess`", "s that the server waited for the client's socket"),
    semconv.DETOKENIZE_DURATION: ("`postprocess`", "s of detokenization of the whole request"),
    semconv.RESPONSE_CHUNKS: ("`postprocess`", "chunks of the response body"),
    semconv.ITEMS: ("`tokenize`, `forward`", "of `tokenize`: tokens; of `forward`: inputs in the batch"),
    semconv.CLOCK: ("`h2d`, `forward`, `d2h`", "`host`: the clock of the span's times"),
    semconv.TRANSFER_SIZE: ("`h2d`, `d2h`", "bytes"),
    semconv.TRANSFER_PINNED: ("`h2d`, `d2h`", "whether the host memory was page-locked"),
    semconv.DEVICE_METHOD: ("a stage", "`event` or `host`"),
    semconv.DEVICE_STEPS: ("a stage", "steps that were timed"),
    semconv.DEVICE_STEPS_ALL: ("a stage", "all its steps"),
    semconv.DEVICE_DURATION: ("a stage", "s on the device"),
    semconv.DEVICE_LAUNCH: ("a stage", "s of launching"),
    semconv.DEVICE_QUEUE: ("a stage", "s between launch and execution"),
    semconv.DEVICE_GAP: ("a stage", "s in which the device was idle before a step"),
    semconv.DEVICE_BOTTLENECK: ("a stage", "what limited the device"),
    semconv.DEVICE_CLOCK_ERROR: ("a stage", "s, bound of the error of any of its instants"),
    semconv.DEVICE_SHARE: ("a stage", "s of the duration that are attributed to this request"),
    semconv.DEVICE_SHARE_METHOD: ("a stage", "`tokens`"),
    semconv.PAUSE_CAUSE: (f"`{semconv.EVENT_PAUSE}`", "the cause"),
    semconv.PAUSE_DURATION: (f"`{semconv.EVENT_PAUSE}`", "s during the request"),
    semconv.MARK_NAME: (f"`{semconv.EVENT_MARK}`", "what happened"),
    semconv.MARK_COUNT: (f"`{semconv.EVENT_MARK}`", "how often"),
    semconv.MARK_WINDOW: (f"`{semconv.EVENT_MARK}`", "s before the event in which it happened"),
    semconv.MEMORY_WANTED: (f"`{semconv.EVENT_OUT_OF_MEMORY}`", "bytes that were requested"),
    semconv.MEMORY_LIMIT: (f"`{semconv.EVENT_OUT_OF_MEMORY}`", "bytes of the device, or the limit that torch has"),
    semconv.MEMORY_FREE: (f"`{semconv.EVENT_OUT_OF_MEMORY}`", "bytes that were free"),
    semconv.INTERFERENCE_DELAY: ("a link", "s of delay by the linked request, which delayed this one most"),
    semconv.INTERFERENCE_CLASS: ("a link", f"traffic class of the linked request; without one, its prompt size: `{tenancy.SHORT}`, `{tenancy.MEDIUM}` (from {tenancy.MEDIUM_MIN_TOKENS} tokens) or `{tenancy.LONG}` (from {tenancy.LONG_MIN_TOKENS})"),
}  # fmt: skip
"""Of spans below the request, events and links: where, and its meaning. All are numbers or fixed words."""
KEEP_REASONS = {
    semconv.KEEP_REASON_ERROR: "the request failed",
    semconv.KEEP_REASON_ABORTED: "its client disconnected or cancelled it, or it timed out",
    semconv.KEEP_REASON_PREEMPTED: "it was preempted",
    semconv.KEEP_REASON_SLO: "it missed an objective of `OTEL_INFER_SLO`",
    semconv.KEEP_REASON_SLOW: "it is among the slowest of its size (`OTEL_INFER_SLOW_PERCENT`)",
    semconv.KEEP_REASON_INTERFERER: "it delayed one of the above most",
    semconv.KEEP_REASON_BASELINE: "an ordinary request, exported for comparison while the budget is short",
    semconv.KEEP_REASON_SAMPLED: "an ordinary request within the budget; the sampler is a ratio",
    semconv.KEEP_REASON_ALL: "an ordinary request with `OTEL_INFER_STEPS=all`",
    semconv.KEEP_REASON_BUDGET: "an ordinary request within the budget",
    semconv.KEEP_REASON_NONE: "exported without its steps",
    semconv.KEEP_REASON_UNSAMPLED: "not exported; a value of the metric only",
}  # fmt: skip


def attributes_page() -> str:
    """docs/reference/attributes.md."""
    _check_attributes_complete()
    return "\n".join([
        "# Attributes\n",
        "These are all attributes that otel_infer sets on spans. The column *reveals* helps with a privacy review.",
        "Attributes of metrics are in [spans and metrics](telemetry.md#metrics).\n",
        "| reveals | values |",
        "|---|---|",
        f"| {NUMBER} | a measurement, a flag, or a word from a list in the code |",
        f"| {NAME} | chosen by the operator or the code: a model, a route template, an exception type |",
        f"| {ID} | identifies one request |",
        f"| {CALLER} | text of the caller, only if you configure it |\n",
        "Attributes and events that *your* code sets on the request span are exported as you set them.",
        "`OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT` and `OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT` apply to them.\n",
        "## Request span\n",
        "| attribute | reveals | meaning |", "|---|---|---|",
        *(f"| `{name}` | {reveals} | {meaning} |" for name, (reveals, meaning) in REQUEST_ATTRIBUTES.items()),
        "\n## Keep reasons\n",
        f"`{semconv.KEEP_REASON}` on the request span and on metrics has one of these values.",
        "[Which steps are exported](../read-a-trace.md#which-steps-are-exported) explains them.\n",
        "| value | meaning |", "|---|---|",
        *(f"| `{reason}` | {KEEP_REASONS[reason]} |" for reason in semconv.KEEP_REASONS),
        "\n## Server span\n",
        "Another HTTP instrumentation may make this span. Its attributes are then the attributes of that instrumentation.\n",
        "| attribute | reveals | meaning |", "|---|---|---|",
        *(f"| `{name}` | {reveals} | {meaning} |" for name, (reveals, meaning) in SERVER_ATTRIBUTES.items()),
        "\n## Stages, steps, events and links\n",
        f"All of these are a {NUMBER}. Durations are in seconds unless the table says otherwise.\n",
        "| attribute | on | meaning |", "|---|---|---|",
        *(f"| `{name}` | {place} | {meaning} |" for name, (place, meaning) in STAGE_ATTRIBUTES.items()),
        "",
    ])  # fmt: skip


def _check_attributes_complete() -> None:
    """Raises ValueError if the exporter sets an attribute on the request span that the page does not list."""
    exported = {
        *attributes._STRING_KEYS,
        *attributes._COUNT_KEYS,
        *semconv.LATENCY_BY_CAUSE.values(),
        semconv.TTFT,
    }
    missing = sorted(exported - REQUEST_ATTRIBUTES.keys())
    if missing:
        raise ValueError(f"attributes of the request span without a description: {', '.join(missing)}")


def commands() -> str:
    """docs/reference/commands.md."""
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    intro = "Every command of `otel-infer`, with all its options, as `--help` prints them.\n"
    return "\n".join(["# Commands\n", intro, *_helped(cli.build_parser())])


def _helped(one: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the help of a command, then of its subcommands."""
    yield f"## {one.prog}\n\n```text\n{one.format_help().rstrip()}\n```\n"
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _helped(below)


ALERTS = """# Alerts

Two commands write the rules: alerts on your objectives, and alerts on causes. Each alert has a runbook below.
[From an alert to the request](#from-an-alert-to-the-request) shows the way to the trace that explains it.
The rules for the default objectives are in [dashboards/alerts](../dashboards/alerts/otel-infer.rules.yml).

## Install the rules

Install `otel-infer[alerts]`, which reads and writes YAML. `push` needs `otel-infer[grafana]`, on a machine
[where no server runs](dashboards.md#install-the-dashboards). Without `slo.yaml` the default objectives apply.

```sh
otel-infer alerts build slo.yaml --out rules.yml                      # Prometheus, Mimir, Thanos: a file under rule_files
otel-infer alerts build slo.yaml --format grafana --out rules.json    # Grafana's provisioning API
otel-infer alerts push slo.yaml --grafana http://localhost:3000       # into a Grafana
otel-infer alerts test slo.yaml --prometheus http://localhost:9090    # which rules have data, which do not, and why
```

- `GRAFANA_TOKEN` holds the token of a service account, or `user:password`.
- Rules for provisioning query the data source with the uid `prometheus`; `--datasource UID` changes it.
- `push` uses the only Prometheus data source that it finds.
- Prometheus 2.42 or newer is required, because the rules use `keep_firing_for`.
- Grafana has no recorded series, so each alert evaluates its whole query every {managed} s. No data is no alert; a query error is one.
- [Support](reference/support.md#prometheus-grafana-and-the-rest) lists the releases that were tested.
- For Kubernetes the rules are [PrometheusRules](../examples/kubernetes/README.md).

## Your objectives

```yaml
# slo.yaml
windows: standard    # or demo: minutes in place of hours and days, and causes in seconds, to see an alert fire
minimum: {minimum}          # no alert with fewer events in the long window
grafana: https://grafana.example.com                # alerts link to the dashboards there
runbooks: https://docs.example.com/docs/alerts.md   # where you publish this page: alerts link to its headings
objectives:
  - name: ttft       # is in the alert's name: {prefix}TTFTBudgetBurn
    of: ttft         # {of}
    within: 500ms    # a bound of that histogram, see below
    share: 99%       # of the events, over 30 days
  - name: ttft-70b   # another objective for some models
    of: ttft
    within: 1.5s
    share: 99%
    model: "llama-70b.*"    # a regular expression for the whole name
  - name: errors
    of: errors       # has no length
    share: 99.5%
budgets:             # time budget of a stage: lines on the dashboard Latency breakdown, no alerts
  queue: 100ms
  prefill: 350ms
```

An event is counted by the buckets of its histogram. So `within` must be one of their bounds:

| `of` | an event | `within`, one of |
|---|---|---|
{bounds}

The default objectives are:

| `name` | `of` | `within` | `share` |
|---|---|---|---|
{defaults}

`OTEL_INFER_SLO` has a different purpose. The server applies it to each request, exports the steps of a request that missed it, and
counts it in `infer.request.objectives`. There `itl` is the longest gap of a request, so the same bound is stricter than here.
`OTEL_INFER_SLO` also has `queue`, and no `errors`.

## Burn rates

A share of 99 % leaves an error budget of 1 %. An alert fires when the budget burns faster than the factor in this table, over
a long and a short window. The long window makes it significant; the short window ends it soon after the problem.
Each server (`job`) and model has its own budget.

| `windows` | severity | factor | long | short | for | of the budget of 30 days, in the long window |
|---|---|---|---|---|---|---|
{windows}

- **A low share.** The error rate cannot exceed 100 %, so a budget of 10 % cannot burn 14.4 times as fast. Such an alert fires at an
  error rate of 90 %, and reports the factor that this is.
- **Little traffic.** With fewer than `minimum` events in the long window there is no alert. The events of `itl` are gaps, and one
  response has many.
- **A new server.** A window that is longer than the server's history covers what there is. After a bad first hour with {minimum}
  requests the windows of one and three days are bad too, until better hours follow. Events before Prometheus' first sample are in no
  rate.
- **Clients that disconnect** are no errors. `errors` counts neither {kinds} nor requests that their client cancelled.
  `ttft` and `tpot` count successful requests, `itl` also the gaps of aborted ones, and `e2e` all requests. {leave} alerts on
  disconnects.
- **Hysteresis.** An alert continues for {keep} after its condition has ended.

## Routing

`page` needs attention now. `ticket` can wait until the next working day. `info` helps with a diagnosis. In Alertmanager:

- **Inhibit.** While a `page` fires, mute `ticket` and `info` of the same `job` and model, because they may be its cause. Do not mute
  TelemetryDropping and HooksMissing: they report that data is missing.
  [The stack's alertmanager.yml](../examples/stack/alertmanager.yml) has these rules.
- **Save a recording.** Send pages to the webhook of the [flight recorder](flight-recorder.md#save-a-recording-when-an-alert-fires).
  `group_wait` must be far below its 120 s.
- **Watch the alerting path.** {watchdog} always fires. Send it to a service that raises an alarm when it stops.
- {gone} ends ten minutes after the last metrics of a server, because Prometheus then has no series for it.

## From an alert to the request

1. **Open the dashboard.** The annotation `dashboard_url` leads to a dashboard with the alert's `job` selected. `runbook_url`
   leads to the runbook below, if `slo.yaml` has `runbooks`. Set the time range to the minutes before the alert.
2. **Find the cause.** On *Overview*, row *Causes of slow requests*, compare *Slow requests: time by cause* with
   *All requests: time by cause*. The band that is wider for slow requests is the cause. [Causes](reference/causes.md) has its change.
3. **Open a slow request.** In the heatmap *Time to first token* or *Time between tokens*, click a point above the main band.
   Then click *Trace* in its box. [The data source](dashboards.md#from-a-point-to-its-trace) must have exemplars configured.
   Without exemplars, *Latency breakdown*, row *Single requests*, lists slow requests.
4. **Read its request span.** `infer.latency.top_cause` names its largest cause. `infer.slo.missed` names the objective it missed.
   A span link with `infer.interference.delay` leads to the request that delayed it most.
5. **Explain it.** Within 120 s run `explain` on the server. Later use the recording that the webhook saved.

```bash
otel-infer explain --request 4bf92f3577b34da6                                       # the trace id, or its beginning
otel-infer explain otel_infer-20260102T030405.678901Z-webhook-4711.tape --request 4bf92f3577b34da6
```

6. **Check the change.** Apply it, then [compare](operate/compare-releases.md) a new recording with this one.

These clicks follow Grafana's documentation. [They were not tested in a real Grafana](dashboards.md#test-status).

## All alerts

| alert | severity | symptom | dashboard |
|---|---|---|---|
{all}

An objective with a name of your own has no heading below. Read the runbook of the default objective with the same `of`; for `tpot`
read that of `itl`.
"""
EVENTS = {
    TTFT: "a successful request, to its first token",
    ITL: "a gap between two tokens of a stream",
    TPOT: "a successful request: time from the first token to the last, per token",
    E2E: "a request, to its last byte",
    slo_spec.ERRORS: "a request",
}
BURN_RUNBOOKS = {
    TTFT: (
        "More than {budget} of the successful requests wait longer than {within} for their first token.",
        "nothing for a while, then fast",
        "On Latency breakdown see which stage grew: queue (shed or spread load, add a replica) or prefill (shorter prompts, prefix cache).",
    ),
    ITL: (
        "More than {budget} of the gaps between two tokens of a stream are longer than {within}.",
        "starts, then freezes or stutters",
        "On Overview see the causes of slow requests: prefill of other requests, preemption, a pause.",
    ),
    E2E: (
        "More than {budget} of the requests take longer than {within} as a whole.",
        "it takes forever",
        "If the budget of TTFT or ITL burns too, begin there. Otherwise answers are longer: see tokens per request.",
    ),
    slo_spec.ERRORS: (
        "More than {budget} of the requests fail.",
        "it fails",
        "Overview has errors by type; the trace of each names the stage in which it failed.",
    ),
}
"""By the metric of an objective: what a burning budget means, the symptom, and what to change first."""
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
BOARDS = {board.name: board.title for board in (make() for make in dashboards.DASHBOARD_BUILDERS)}


class Runbook(NamedTuple):
    """The runbook of an alert: one section of the page."""

    name: str
    severity: str
    hold: str
    means: str
    complaint: str
    change: str
    board: str
    query: str


def alerts() -> str:
    """docs/alerts.md."""
    runbooks = [*_promised(), *_caused()]
    kinds = list(slo_spec.OBJECTIVE_METRICS)
    page = ALERTS.format(
        managed=grafana_rules.EVALUATION_INTERVAL_S,
        minimum=slo_spec.DEFAULT_SPEC.minimum,
        prefix=burn_rate_rules.ALERT_PREFIX,
        of=f"{', '.join(kinds[:-1])} or {kinds[-1]}",
        bounds="\n".join(f"| `{of}` | {EVENTS[of]} | {_bounds(of)} |" for of in kinds),
        defaults="\n".join(
            f"| {one.name} | `{one.of}` | {_length(one.within)} | {one.share * 100:g} % |" for one in slo_spec.DEFAULT_SPEC.objectives
        ),
        windows="\n".join(_window(name, one) for name, several in slo_spec.WINDOW_SETS.items() for one in several),
        kinds=" nor ".join(f"`{kind}`" for kind in semconv.NON_ERROR_TYPES if kind),
        keep=burn_rate_rules.KEEP_FIRING,
        leave=_linked("ClientsLeave"),
        gone=_linked("ServerGone"),
        watchdog=_linked(WATCHDOG),
        all="\n".join(
            f"| [{one.name}](#{one.name.lower()}) | {one.severity} | {one.complaint} | {BOARDS[one.board]} |" for one in runbooks
        ),
    )  # fmt: skip
    return page + "".join(map(_runbook, runbooks))


def _promised() -> Iterator[Runbook]:
    """Yields one runbook per objective; its alerts differ by their windows."""
    for one, group in zip(
        slo_spec.DEFAULT_SPEC.objectives,
        burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)["groups"],
        strict=False,
    ):
        burns = next(rule for rule in group["rules"] if "alert" in rule)
        recorded = {rule["record"]: rule["expr"] for rule in group["rules"] if "record" in rule}
        labels = burns["labels"]
        asked = [
            f"# over {labels['long']} and {labels['short']}; the other windows are similar",
            _broken(burns["expr"]),
        ]
        asked += [f"\n# {name}\n{_broken(expr)}" for name, expr in recorded.items() if name in burns["expr"]]
        means, complaint, change = BURN_RUNBOOKS[one.of]
        means = means.format(budget=f"{(1 - one.share) * 100:g} %", within=_length(one.within))
        window = "[by window](#burn-rates)"
        yield Runbook(
            burns["alert"], "page, ticket", window, means, complaint, change, "overview", "\n".join(asked)
        )


def _caused() -> Iterator[Runbook]:
    for one in CAUSE_ALERTS:
        hold = "immediately" if one.pending_period == "0s" else one.pending_period
        yield Runbook(
            burn_rate_rules.ALERT_PREFIX + one.name, one.severity, hold, one.meaning, one.symptom, one.change, one.dashboard, _broken(one.expr)
        )  # fmt: skip
    yield Runbook(
        burn_rate_rules.ALERT_PREFIX + WATCHDOG, "none", "immediately", "It always fires, which shows that alerts arrive.",
        "alerts are missing", "If it stops: check Prometheus, Alertmanager and the notification path.", "self-monitoring", "vector(1)",
    )  # fmt: skip


def _runbook(one: Runbook) -> str:
    return "\n".join([
        f"\n### {one.name}\n",
        "| | |", "|---|---|",
        f"| severity | {one.severity} |",
        f"| fires after | {one.hold} |",
        f"| meaning | {one.means} |",
        f"| symptom | {one.complaint} |",
        f"| change first | {one.change} |",
        f"| dashboard | [{BOARDS[one.board]}](dashboards.md#{BOARDS[one.board].lower().replace(' ', '-')}) |",
        f"\n```promql\n{one.query}\n```\n",
    ])  # fmt: skip


def _linked(name: str) -> str:
    return f"[{burn_rate_rules.ALERT_PREFIX}{name}](#{burn_rate_rules.runbook_anchor(name)})"


def _bounds(of: str) -> str:
    return ", ".join(map(_length, slo_spec.OBJECTIVE_METRICS[of].bounds)) if of != slo_spec.ERRORS else "—"


def _length(seconds: float) -> str:
    if not seconds:
        return "—"
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def _window(name: str, one: slo_spec.BurnRateWindow) -> str:
    share = one.factor * _seconds(one.long) / _seconds("30d") * 100
    hold = "immediately" if one.pending_period == "0s" else one.pending_period
    return f"| {name} | {one.severity} | {one.factor:g} | {one.long} | {one.short} | {hold} | {share:.2g} % |"


def _seconds(length: str) -> int:
    return int(length[:-1]) * SECONDS[length[-1]]


def _broken(expr: str) -> str:
    """Breaks an expression into lines."""
    return expr.replace(" and ", "\nand ").replace(" unless ", "\nunless ")


PAGES = {
    "alerts.md": alerts,
    "reference/attributes.md": attributes_page,
    "reference/causes.md": causes,
    "reference/commands.md": commands,
    "reference/configuration.md": configuration,
    "reference/telemetry.md": telemetry,
}

COMPARED_ON = {"reference/commands.md": (3, 11)}
"""The wording of argparse's help differs by Python version, so this page is compared on one of them only."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is not what would be written")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        if check and COMPARED_ON.get(name, sys.version_info[:2]) != sys.version_info[:2]:
            continue
        path, text = DOCS / name, MADE + make()
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.write_text(text)
    if stale:
        print(f"stale: {', '.join(stale)}; run python scripts/generate_docs.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
