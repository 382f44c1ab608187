"""Writes the pages of docs/ that follow from the code: settings, metrics and spans, commands, alerts. `--check` only compares.

A test runs it with `--check`, so that a page never says what the code does not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from otel_infer import cli, semconv
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
    ("OTEL_EXPORTER_OTLP_ENDPOINT, _TRACES_ENDPOINT, _METRICS_ENDPOINT", "where to send; one switches us on, for traces and metrics: what it is not for goes to localhost, unless its exporter is `none`"),
    ("OTEL_EXPORTER_OTLP_PROTOCOL (and per signal)", "`http/protobuf` (default) or `grpc`"),
    ("OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT, _CERTIFICATE, …", "the SDK exporters' own"),
    ("OTEL_EXPORTER_OTLP_COMPRESSION (and _TRACES_)", "spans: gzip at level 1 unless `none` or `deflate` is asked for"),
    ("OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER", "`otlp` (default) or `none`"),
    ("OTEL_TRACES_SAMPLER, _ARG", "the head decision for requests without a sampled parent"),
    ("OTEL_PROPAGATORS", "how a caller's context is read"),
    ("OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES", "the resource; without them the service is named after the engine, and its metrics begin when that is known"),
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
        "Everything is set by environment variables, read once. A bad value names the variable and what it accepts. It stops our own",
        "commands, and with `otel-infer run` the server that it was to start; a server that is instrumented in any other way goes on",
        "with the default.\n",
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
    reasons = ", ".join(f"`{reason}`" for reason in semconv.KEEP_REASONS)
    return "\n".join([
        "# Spans and metrics\n",
        "## Spans\n",
        "    POST /v1/chat/completions    the server span: your HTTP instrumentation's, or ours",
        "    └─ chat MODEL                the request",
        *(f"       ├─ {name}" for name in semconv.STAGES),
        "\nA stage that was not seen is absent. `decode` has one `decode step` per step that delivered a token to this request, as far",
        f"as steps [are kept](explain.md#what-is-kept): at most {tail_sampler.MAX_STEPS_PER_TRACE} in a trace, the slowest. `prefill` has one `prefill step` per",
        "chunk if there were several. Stages of your own (`otel_infer.stage`) stand among them. So do",
        f"`{semconv.SPAN_FETCH_MEDIA}` and `{semconv.SPAN_PREPARE_MEDIA}`, which are a part of the time of `{semconv.SPAN_TOKENIZE}`, and `{semconv.SPAN_GRAMMAR}` and",
        f"`{semconv.SPAN_KV_TRANSFER}`, a part of that of `{semconv.SPAN_QUEUE}`.\n",
        f"`{semconv.EVENT_PAUSE}` is an event on a kept request: the whole process was held up while the request was there, by",
        f"`{semconv.PAUSE_CAUSE}`, for `{semconv.PAUSE_DURATION}` s of the request's time; where the cause is `{semconv.CAUSE_EVENT_LOOP}`, its event loop",
        f"alone. The {attributes.MAX_PAUSES} longest are told, and how many were not is `{semconv.PAUSES_DROPPED}`. `{semconv.EVENT_MARK}` is another: what",
        f"`{semconv.MARK_NAME}` says happened to the process, `{semconv.MARK_COUNT}` times in the `{semconv.MARK_WINDOW}` s before, and nobody knows for how",
        f"long. `{semconv.EVENT_OUT_OF_MEMORY}` is on any request: a device had no room for the `{semconv.MEMORY_WANTED}` bytes that it asked for.\n",
        f"`{semconv.TENANT}` and `{semconv.TRAFFIC_CLASS}` are on the request, and on the metrics that list them below, only where",
        "`OTEL_INFER_TENANT` and `OTEL_INFER_TRAFFIC_CLASS` say how to find them; metrics name the tenants of `OTEL_INFER_TENANTS`,",
        "every other is `_OTHER`. The link of a request to the one that held it up most has",
        f"`{semconv.INTERFERENCE_DELAY}` (s) and `{semconv.INTERFERENCE_CLASS}`: its traffic class where that was said, else the size of",
        f"its prompt, `{tenancy.SHORT}`, `{tenancy.MEDIUM}` (from {tenancy.MEDIUM_MIN_TOKENS} tokens) or `{tenancy.LONG}` (from",
        f"{tenancy.LONG_MIN_TOKENS}).\n",
        f"`{semconv.KEEP_REASON}` on the request says why its steps were kept: {reasons}.\n",
        "## The start of a server\n",
        f"    {semconv.SPAN_SERVER_START}                 a trace of its own for each server, from its beginning until it was ready",
        *(f"    ├─ {name}" for name in semconv.STARTUP_PHASES),
        *(f"    ├─ {name:<25} the same of {role} processes that it started" for role, name in semconv.SPAN_PROCESS_START.items()),
        f"\n`{semconv.READY_BY}` on it: `lifespan`, `engine` or `request`; `{semconv.ERROR_TYPE}` and `{semconv.FAILED_STAGE}` where it",
        f"was never ready. The first request that was served has `{semconv.FIRST_REQUEST}` and a link to it. It is exported whatever",
        f"is sampled; the {startup.MAX_PHASES} longest phases are, and how many were not is `{semconv.PHASES_DROPPED}`.",
        f"`{semconv.EVENT_IMPORTED}` is an event on `{semconv.SPAN_IMPORTS}` for each library (`{semconv.MODULE}`).\n",
        "| phase | meaning |", "|---|---|", *(f"| `{name}` | {says} |" for name, says in semconv.STARTUP_PHASES.items()),
        "",
        "## Where the time went\n",
        f"On a request that reached an engine, `{semconv.LATENCY_PREFIX}CAUSE` is the time it lost to each cause, in s; they sum to its",
        f"duration. `{semconv.LATENCY_TOP_CAUSE}` is the largest, and a link with `{semconv.INTERFERENCE_DELAY}` leads to the request whose",
        f"prompt held it up most. The metric `{semconv.LATENCY_DURATION.name}` has them for all requests, kept or not.",
        "[How they are told apart](explain.md).\n",
        "| cause | meaning |", "|---|---|", *(f"| `{row.name}` | {row.meaning} |" for row in semconv.CAUSE_TABLE),
        "\n## Metrics\n",
        "| name | kind | unit | attributes | meaning |", "|---|---|---|---|---|", *metrics, "",
    ])  # fmt: skip


def commands() -> str:
    """docs/commands.md."""
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    return "\n".join(["# Commands\n", *_helped(cli.build_parser())])


def _helped(one: argparse.ArgumentParser) -> Iterator[str]:
    """What a command says of itself, and then those below it."""
    yield f"## {one.prog}\n\n```text\n{one.format_help().rstrip()}\n```\n"
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _helped(below)


ALERTS = """# Alerts

Rules on what you promise to people, and rules on causes: what is going wrong, whether somebody feels it already or not. Both are
made from the names that this release emits. Those of the promises that come along lie in
[dashboards/alerts](../dashboards/alerts/otel-infer.rules.yml).

## Get them

Of your own promises, in `slo.yaml`; without that argument, of those that come along. `pip install "otel-infer[alerts]"` has what
reads and writes YAML; `push` wants `otel-infer[grafana]`, [where no server runs](dashboards.md#get-them).

```sh
otel-infer alerts build slo.yaml --out rules.yml                      # for Prometheus, Mimir, Thanos: a file under rule_files
otel-infer alerts build slo.yaml --format grafana --out rules.json    # for Grafana's provisioning API
otel-infer alerts push slo.yaml --grafana http://localhost:3000       # into a Grafana
otel-infer alerts test slo.yaml --prometheus http://localhost:9090    # which rules have data, which not, and why
```

In `GRAFANA_TOKEN` is the token of a service account, or `user:password`. Rules for Grafana ask the data source whose uid is `prometheus`,
those that are pushed the only Prometheus there is; `--datasource UID` names another.

Prometheus has to be 2.42 or newer, since the rules say `keep_firing_for`. In Grafana, which records nothing, each alert asks the whole
question, every {managed} s; no data is no alert there, and a query that fails is one. What has been tried on which release is in
[support](support.md#prometheus-grafana-and-the-rest). On Kubernetes the rules are [PrometheusRules](../examples/kubernetes/README.md).

## What you promise

```yaml
# slo.yaml
windows: standard    # or demo: minutes in place of hours and days, and causes in seconds, to see an alert fire
minimum: {minimum}          # of fewer events in the long window nothing is said
grafana: https://grafana.example.com                # alerts link to the dashboards there
runbooks: https://docs.example.com/docs/alerts.md   # wherever you show this page: alerts link to their headlines on it
objectives:
  - name: ttft       # is in the alert's name: {prefix}TTFTBudgetBurn
    of: ttft         # {of}
    within: 500ms    # a bound of that histogram, see below
    share: 99%       # of the events, over 30 days
  - name: ttft-70b   # another promise for some models
    of: ttft
    within: 1.5s
    share: 99%
    model: "llama-70b.*"    # a regular expression for the whole name
  - name: errors
    of: errors       # has no length
    share: 99.5%
budgets:             # what a stage may take: lines on the dashboard Request anatomy, no alerts
  queue: 100ms
  prefill: 350ms
```

Whether an event was fast enough is known by the histogram's buckets, so `within` has to be one of their bounds:

| `of` | an event | `within`, one of |
|---|---|---|
{bounds}

Without a file it is

| `name` | `of` | `within` | `share` |
|---|---|---|---|
{defaults}

`OTEL_INFER_SLO` has the same words for another purpose: by it the server says of each request whether it missed what was promised,
keeps its steps, and counts it in `infer.request.objectives`. There `itl` is the longest gap of a request, so the same bound is stricter
than here, where each gap counts by itself; it has `queue`, and no `errors`.

## When a budget burns

A share of 99 % leaves 1 % that may go wrong: the budget. An alert fires when it goes so many times as fast as it may, over a long
window, so that it matters, and over a short one, so that it still does. Each server (`job`) and model has its own.

| `windows` | severity | times as fast | long | short | for | of the budget of 30 days, in the long window |
|---|---|---|---|---|---|---|
{windows}

- **A promise that leaves much room.** More than all cannot go wrong: of `share: 90%` a budget cannot go 14.4 times as fast. There an
  alert fires when nine of ten events have missed, and says how many times as fast that is.
- **Little traffic.** One slow request of three is a third of them, and nothing to wake up for. With fewer than `minimum` events in
  the long window nothing is said. The events of `itl` are gaps, of which one answer has many.
- **A new server.** A window that is longer than the server's history looks over what there is: after a bad first hour of {minimum}
  requests the windows of a day and of three are bad too, until better hours make up for it. What was counted before Prometheus'
  first sample is in no rate.
- **Who hangs up** is no error. `errors` counts neither {kinds} nor what its client had stopped.
  `ttft` and `tpot` have values of successful requests only, `itl` the gaps of those that were given up, too. `e2e` counts all
  requests, however they ended. How many leave is an alert of its own: {leave}.
- An alert that has fired stays for {keep} after its reason has gone, so that it does not flap.

## Who is told

`page`: somebody feels it now. `ticket`: it can wait until the morning. `info`: for who is looking already. In Alertmanager:

- **Inhibit.** While a `page` fires, what may be its cause (`ticket` and `info` of the same `job`, and of the same model where they have
  one) need not ring as well, but for TelemetryDropping and HooksMissing: who looks has to know what is not there.
  [The stack's alertmanager.yml](../examples/stack/alertmanager.yml) has these rules.
- **Keep the two minutes before.** A webhook to the server's [flight recorder](flight-recorder.md) writes them down; `group_wait` has
  to be far below its 120 s.
- **{watchdog}** fires always. Send it to something that complains when it
  stops coming: nobody else would say that alerts are lost on their way.
- A server that does not come back is forgotten after ten minutes, and {gone} is over.

## All of them

| alert | severity | people say | dashboard |
|---|---|---|---|
{all}

An objective with a name of your own has no headline below: what is said of the one of the same `of` holds for it, and of `itl` for
`tpot`.
"""
EVENTS = {
    TTFT: "a successful request, to its first token",
    ITL: "a gap between two tokens of a stream",
    TPOT: "a successful request, the time from its first token to its last by the tokens in between",
    E2E: "a request, to its last byte",
    slo_spec.ERRORS: "a request",
}
FELT = {
    TTFT: (
        "More than {budget} of the successful requests wait longer than {within} for their first token.",
        "nothing for a while, then fast",
        "Request anatomy says which has grown: queue (shed or spread load, add a replica) or prefill (shorter prompts, prefix cache).",
    ),
    ITL: (
        "More than {budget} of the gaps between two tokens of a stream are longer than {within}.",
        "starts, then freezes or stutters",
        "The causes of slow requests on Overview name what comes between tokens: others' prompts, preemption, a pause.",
    ),
    E2E: (
        "More than {budget} of the requests take longer than {within} as a whole.",
        "it takes forever",
        "If the budget of TTFT or ITL burns too, begin there. If neither does, answers have become longer: look at tokens per request.",
    ),
    slo_spec.ERRORS: (
        "More than {budget} of the requests fail.",
        "it fails",
        "Overview has errors by type; the trace of each says in which stage it died.",
    ),
}
"""Of what an objective is of: what it means that its budget burns, how people put it, and what to do first."""
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
BOARDS = {board.name: board.title for board in (make() for make in dashboards.DASHBOARD_BUILDERS)}


class Runbook(NamedTuple):
    """What the page says of an alert, under its headline."""

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
    """One for each objective; its alerts differ by their windows."""
    for one, group in zip(
        slo_spec.DEFAULT_SPEC.objectives,
        burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)["groups"],
        strict=False,
    ):
        burns = next(rule for rule in group["rules"] if "alert" in rule)
        recorded = {rule["record"]: rule["expr"] for rule in group["rules"] if "record" in rule}
        labels = burns["labels"]
        asked = [
            f"# over {labels['long']} and {labels['short']}; the other windows are alike",
            _broken(burns["expr"]),
        ]
        asked += [f"\n# {name}\n{_broken(expr)}" for name, expr in recorded.items() if name in burns["expr"]]
        means, complaint, change = FELT[one.of]
        means = means.format(budget=f"{(1 - one.share) * 100:g} %", within=_length(one.within))
        window = "[by window](#when-a-budget-burns)"
        yield Runbook(
            burns["alert"], "page, ticket", window, means, complaint, change, "overview", "\n".join(asked)
        )


def _caused() -> Iterator[Runbook]:
    for one in CAUSE_ALERTS:
        hold = "at once" if one.pending_period == "0s" else one.pending_period
        yield Runbook(
            burn_rate_rules.ALERT_PREFIX + one.name, one.severity, hold, one.meaning, one.symptom, one.change, one.dashboard, _broken(one.expr)
        )  # fmt: skip
    yield Runbook(
        burn_rate_rules.ALERT_PREFIX + WATCHDOG, "none", "at once", "Alerts can come: this one does, always.",
        "nobody told us", "If it does not come: Prometheus, Alertmanager, and the way from there.", "health", "vector(1)",
    )  # fmt: skip


def _runbook(one: Runbook) -> str:
    return "\n".join([
        f"\n### {one.name}\n",
        "| | |", "|---|---|",
        f"| severity | {one.severity} |",
        f"| fires after | {one.hold} |",
        f"| it means | {one.means} |",
        f"| people say | {one.complaint} |",
        f"| change first | {one.change} |",
        f"| look at | [{BOARDS[one.board]}](dashboards.md#{BOARDS[one.board].lower().replace(' ', '-')}) |",
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
    hold = "at once" if one.pending_period == "0s" else one.pending_period
    return f"| {name} | {one.severity} | {one.factor:g} | {one.long} | {one.short} | {hold} | {share:.2g} % |"


def _seconds(length: str) -> int:
    return int(length[:-1]) * SECONDS[length[-1]]


def _broken(expr: str) -> str:
    """Over several lines."""
    return expr.replace(" and ", "\nand ").replace(" unless ", "\nunless ")


PAGES = {
    "configuration.md": configuration,
    "telemetry.md": telemetry,
    "commands.md": commands,
    "alerts.md": alerts,
}


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
