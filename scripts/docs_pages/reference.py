"""The pages on settings, commands, spans and metrics, and causes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from otel_infer import cli, semconv
from otel_infer.analysis.diagnosis.symptoms import SYMPTOMS
from otel_infer.config.settings import SETTINGS
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans import attributes, startup

STANDARD = (
    ("OTEL_EXPORTER_OTLP_ENDPOINT, _TRACES_ENDPOINT, _METRICS_ENDPOINT", "the destination; one of them turns on traces and metrics. A signal without an endpoint goes to localhost, unless its exporter is `none`"),
    ("OTEL_EXPORTER_OTLP_PROTOCOL (and per signal)", "`http/protobuf` (default) or `grpc`"),
    ("OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT, _CERTIFICATE, …", "read by the exporters of the SDK"),
    ("OTEL_EXPORTER_OTLP_COMPRESSION (and per signal)", "`gzip`, `none` or `deflate`. Default: spans with gzip at level 1, metrics uncompressed"),
    ("OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER", "`otlp` (default) or `none`"),
    ("OTEL_TRACES_SAMPLER, _ARG", "the head decision for requests without a sampled parent"),
    ("OTEL_PROPAGATORS", "formats of the caller's context. One that is not installed is left out, with one line"),
    ("OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES", "the resource. Without a name the service is named after its engine, and metrics are sent once the engine is known. Workers with one given `service.instance.id` that are started on their own have `ID`, `ID.2` and so on"),
    ("OTEL_METRIC_EXPORT_INTERVAL", "ms between metric exports; default 10000, because queues change within a minute"),
    ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "`cumulative`, `delta`, `lowmemory`"),
    ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "`base2_exponential_bucket_histogram` for exponential histograms"),
    ("OTEL_METRICS_EXEMPLAR_FILTER", "`always_off` for no exemplars"),
    ("OTEL_PYTHON_EXCLUDED_URLS, OTEL_PYTHON_OTEL_INFER_EXCLUDED_URLS", "comma-separated regular expressions: URLs that are not traced"),
    ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "`otel_infer`, or names of single integrations"),
    ("OTEL_SDK_DISABLED", "`true`: otel_infer does nothing"),
    ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT, …", "limits for what your code sets on the request span"),
)  # fmt: skip


def build_configuration_page() -> str:
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


def build_telemetry_page() -> str:
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


def build_causes_page() -> str:
    """docs/reference/causes.md."""
    return "\n".join([
        "# Causes of latency\n",
        "The time of every request is divided among these causes. They sum to its duration.",
        "The last column is the change to try first.\n",
        f"The request span has `{semconv.LATENCY_PREFIX}CAUSE` in seconds, and `{semconv.LATENCY_TOP_CAUSE}` names the largest.",
        f"The metric `{semconv.LATENCY_DURATION.name}` has them for all requests.",
        "[Explain](../explain.md#how-time-is-attributed) describes how they are measured.\n",
        "| name | meaning | change |", "|---|---|---|",
        *(f"| `{row.name}` | {row.meaning} | {row.change or 'depends on the symptom: see below'} |" for row in semconv.CAUSE_TABLE),
        "\n## Symptoms\n",
        "`otel-infer explain` reports a symptom. Its change is that of its largest cause, or else this one.\n",
        "| symptom | complaint | meaning | change |", "|---|---|---|---|",
        *(f"| `{name}` | {row.complaint} | {row.meaning} | {row.change} |" for name, row in SYMPTOMS.items()),
        "",
    ])  # fmt: skip


def build_commands_page() -> str:
    """docs/reference/commands.md."""
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    intro = "Every command of `otel-infer`, with all its options, as `--help` prints them.\n"
    return "\n".join(["# Commands\n", intro, *_iter_help(cli.build_parser())])


def _iter_help(one: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the help of a command, then of its subcommands."""
    yield f"## {one.prog}\n\n```text\n{one.format_help().rstrip()}\n```\n"
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _iter_help(below)
