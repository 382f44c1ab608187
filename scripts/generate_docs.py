"""Writes the pages of docs/ that follow from the code: settings, metrics and spans, commands. `--check` only compares.

A test runs it with `--check`, so that a page never says what the code does not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from otel_infer import callers, cli, keeper, semconv
from otel_infer.config import SETTINGS
from otel_infer.sinks import starts

DOCS = Path(__file__).parent.parent / "docs"
MADE = "<!-- made by scripts/generate_docs.py; do not edit -->\n\n"
STANDARD = (
    ("OTEL_EXPORTER_OTLP_ENDPOINT, _TRACES_ENDPOINT, _METRICS_ENDPOINT", "where to send; setting one switches us on"),
    ("OTEL_EXPORTER_OTLP_PROTOCOL (and per signal)", "`http/protobuf` (default) or `grpc`"),
    ("OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT, _CERTIFICATE, …", "the SDK exporters' own"),
    ("OTEL_EXPORTER_OTLP_COMPRESSION (and _TRACES_)", "spans: gzip at level 1 unless `none` or `deflate` is asked for"),
    ("OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER", "`otlp` (default) or `none`"),
    ("OTEL_TRACES_SAMPLER, _ARG", "the head decision for requests without a sampled parent"),
    ("OTEL_PROPAGATORS", "how a caller's context is read"),
    ("OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES", "the resource; without them the service is named after the engine"),
    ("OTEL_METRIC_EXPORT_INTERVAL", "ms between metric exports; 10000 here, since queues move faster than a minute"),
    ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "`cumulative`, `delta`, `lowmemory`"),
    ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "`base2_exponential_bucket_histogram` for those"),
    ("OTEL_METRICS_EXEMPLAR_FILTER", "`always_off` for no exemplars"),
    ("OTEL_PYTHON_EXCLUDED_URLS, OTEL_PYTHON_OTEL_INFER_EXCLUDED_URLS", "URLs that are no requests, comma-separated regexes"),
    ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "`otel_infer`, or names of single integrations"),
    ("OTEL_SDK_DISABLED", "`true`: nothing at all"),
    ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT, …", "honoured for what your code sets on the request span"),
)  # fmt: skip


def configuration() -> str:
    """docs/configuration.md."""
    rows = [f"| `{s.variable}` | `{s.default or '—'}` | {s.meaning} |" for s in SETTINGS.values()]
    standard = [
        f"| {', '.join(f'`{n.strip()}`' for n in names.split(','))} | {says} |" for names, says in STANDARD
    ]
    return "\n".join([
        "# Configuration\n",
        "Everything is set by environment variables, read once. A bad value names the variable and what it accepts; it",
        "stops our own commands, and never your server, which goes on with the default.\n",
        "| variable | default | meaning |", "|---|---|---|", *rows,
        "\n## Standard variables\n",
        "These mean what OpenTelemetry says they mean.\n",
        "| variable | what for |", "|---|---|", *standard, "",
    ])  # fmt: skip


def telemetry() -> str:
    """docs/telemetry.md."""
    metrics = [
        f"| `{m.name}` | {m.instrument} | {m.unit} | {', '.join(f'`{a}`' for a in m.attributes) or '—'} | {m.description} |"
        for m in semconv.METRICS
    ]
    reasons = ", ".join(f"`{reason}`" for reason in keeper.REASONS)
    return "\n".join([
        "# Spans and metrics\n",
        "## Spans\n",
        "    POST /v1/chat/completions    the server span: your HTTP instrumentation's, or ours",
        "    └─ chat MODEL                the request",
        *(f"       ├─ {name}" for name in semconv.STAGES),
        "\nA stage that was not seen is absent. `decode` has one `decode step` per step that delivered a token to this request,",
        "`prefill` one `prefill step` per chunk if there were several. Stages of your own (`otel_infer.stage`) stand among them.\n",
        f"`{semconv.EVENT_PAUSE}` is an event on a kept request: the whole process was held up while the request was there, by",
        f"`{semconv.PAUSE_CAUSE}`, for `{semconv.PAUSE_DURATION}` s of the request's time. The 32 longest are told, and how many",
        f"were not is `{semconv.PAUSES_LEFT_OUT}`.\n",
        f"`{semconv.TENANT}` and `{semconv.TRAFFIC_CLASS}` are on the request, and on the metrics that list them below, only where",
        "`OTEL_INFER_TENANT` and `OTEL_INFER_TRAFFIC_CLASS` say how to find them; metrics name the tenants of `OTEL_INFER_TENANTS`,",
        "every other is `_OTHER`. The link of a request to the one that held it up most has",
        f"`{semconv.OFFENDER_DELAY}` (s) and `{semconv.OFFENDER_CLASS}`: its traffic class where that was said, else the size of",
        f"its prompt, `{callers.SHORT}`, `{callers.MEDIUM}` (from {callers.MEDIUM_FROM} tokens) or `{callers.LONG}` (from",
        f"{callers.LONG_FROM}).\n",
        f"`{semconv.KEEP_REASON}` on the request says why its steps were kept: {reasons}.\n",
        "## The start of a server\n",
        f"    {semconv.SPAN_START}             a trace of its own for each process, from its beginning until it was ready",
        *(f"    ├─ {name}" for name in semconv.PHASES),
        f"\n`{semconv.READY_BY}` on it: `lifespan`, `engine` or `request`; `{semconv.ERROR_TYPE}` and `{semconv.DIED_IN}` where it",
        f"was never ready. The first request that was served has `{semconv.FIRST_REQUEST}` and a link to it. It is exported whatever",
        f"is sampled; the {starts.MOST_PHASES} longest phases are, and how many were not is `{semconv.PHASES_LEFT_OUT}`.",
        f"`{semconv.EVENT_IMPORTED}` is an event on `{semconv.SPAN_IMPORTS}` for each library (`{semconv.MODULE}`).\n",
        "| phase | meaning |", "|---|---|", *(f"| `{name}` | {says} |" for name, says in semconv.PHASES.items()),
        "",
        "## Where the time went\n",
        f"On a request that reached an engine, `{semconv.BLAME_PREFIX}CAUSE` is the time it lost to each cause, in s; they sum to its",
        f"duration. `{semconv.BLAME_TOP}` is the largest, and a link with `{semconv.OFFENDER_DELAY}` leads to the request whose",
        f"prompt held it up most. The metric `{semconv.BLAME_DURATION.name}` has them for all requests, kept or not.",
        "[How they are told apart](explain.md).\n",
        "| cause | meaning |", "|---|---|", *(f"| `{cause}` | {says} |" for cause, says in semconv.CAUSES.items()),
        "\n## Metrics\n",
        "| name | kind | unit | attributes | meaning |", "|---|---|---|---|---|", *metrics, "",
    ])  # fmt: skip


def commands() -> str:
    """docs/commands.md."""
    pages = ["# Commands\n"]
    for name in ("", *cli.COMMANDS):
        arguments = [name, "--help"] if name else ["--help"]
        environ = {"COLUMNS": "100", "PATH": "/usr/bin:/bin", "NO_COLOR": "1"}
        ran = subprocess.run(
            [sys.executable, "-m", "otel_infer", *arguments],
            capture_output=True,
            text=True,
            check=True,
            env=environ,
        )
        pages.append(f"## otel-infer {name}".rstrip() + f"\n\n```text\n{ran.stdout.rstrip()}\n```\n")
    return "\n".join(pages)


PAGES = {"configuration.md": configuration, "telemetry.md": telemetry, "commands.md": commands}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is not what would be written")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
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
