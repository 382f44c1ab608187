"""The page on alerts, with a runbook for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.config.slo import E2E, ITL, TPOT, TTFT
from otel_infer.monitoring import dashboards
from otel_infer.monitoring.alerts import burn_rate_rules, grafana_rules, slo_spec
from otel_infer.monitoring.alerts.cause_alerts import CAUSE_ALERTS, WATCHDOG
from otel_infer.monitoring.names import ALERT_PREFIX

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
  error rate of 90 %, and reports the resulting factor.
- **Little traffic.** With fewer than `minimum` events in the long window there is no alert. The events of `itl` are gaps, and one
  response has many.
- **A new server.** A window that is longer than the server's history covers what there is. After a bad first hour with {minimum}
  requests the windows of one and three days are bad too, until better hours follow. Events before Prometheus' first sample are in no
  rate; therefore a series with an error type is sent with 0 before its first value.
- **Clients that disconnect** are no errors. `errors` counts neither {kinds} nor requests that their client cancelled.
  `ttft` and `tpot` count successful requests, `itl` also the gaps of aborted ones, and `e2e` all requests. {leave} alerts on
  disconnects.
- **Hysteresis.** An alert continues for {keep} after its condition has ended.

## Routing

`page` needs attention now. `ticket` can wait until the next working day. `info` helps with a diagnosis. In Alertmanager:

- **Inhibit.** While a `page` fires, mute `ticket` and `info` of the same `job` and model, because they may be its cause. Do not mute
  TelemetryDropping, SidecarRestarted, HookFailed and HooksMissing: they report that data is missing.
  [The stack's alertmanager.yml](../examples/stack/alertmanager.yml) has these rules.
- **Save a recording.** Send pages to the webhook of the [flight recorder](flight-recorder.md#save-a-recording-when-an-alert-fires).
  `group_wait` must be far below its 120 s. List the webhook of each server: each writes a tape for its own `job` and `instance` only.
- **Watch the alerting path.** {watchdog} always fires. Send it to a service that raises an alarm when it stops.
- {gone} ends ten minutes after the last metrics of a server, because Prometheus then has no series for it. It does not fire for a
  server that was stopped on purpose: the last export has `infer.server.stopped` = 1. A server that is scraped ends before Prometheus
  reads that; silence the alert for the stop, or send metrics over OTLP.

## From an alert to the request

1. **Open the dashboard.** The annotation `dashboard_url` leads to a dashboard with the alert's `job` selected, if `slo.yaml` has `grafana`. `runbook_url`
   leads to the runbook below, if `slo.yaml` has `runbooks`. Set the time range to the minutes before the alert.
2. **Find the cause.** Open *Overview*, if the alert led to another dashboard. In row *Causes of slow requests*, compare *Slow requests: time by cause* with
   *All requests: time by cause*. The band that is wider for slow requests is the cause. [Causes](reference/causes.md) has its change.
3. **Open a slow request.** In the heatmap *Time to first token* or *Time between tokens*, click a point above the main band.
   Then click *Trace* in its box. [The data source](dashboards.md#from-a-point-to-its-trace) must have exemplars configured.
   Without exemplars, *Latency breakdown*, row *Single requests*, lists slow requests.
4. **Read its request span.** `infer.latency.top_cause` names its largest cause. `infer.slo.missed` names the objective it missed.
   A span link with `infer.interference.delay` leads to the request that delayed it most.
5. **Explain it.** Within 120 s run `explain` on the server. Later use the recording that the webhook saved. Only a `page` goes to the
   webhook: for a `ticket` or `info`, run `otel-infer dump` on the server now.

```bash
otel-infer explain --request 4bf92f3577b34da6                                       # the trace id, or its beginning
otel-infer explain otel_infer-20260102T030405.678901Z-webhook-4711.tape --request 4bf92f3577b34da6
```

6. **Check the change.** Apply it, then [compare](operate/compare-releases.md) a new recording with this one.

These clicks follow Grafana's documentation. [They were not tested in a real Grafana](dashboards.md#test-status).

## All alerts

| alert | severity | complaint | dashboard |
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


def build_alerts_page() -> str:
    """docs/alerts.md."""
    runbooks = [*_iter_burn_runbooks(), *_iter_cause_runbooks()]
    kinds = list(slo_spec.OBJECTIVE_METRICS)
    page = ALERTS.format(
        managed=grafana_rules.EVALUATION_INTERVAL_S,
        minimum=slo_spec.DEFAULT_SPEC.minimum,
        prefix=ALERT_PREFIX,
        of=f"{', '.join(kinds[:-1])} or {kinds[-1]}",
        bounds="\n".join(f"| `{of}` | {EVENTS[of]} | {_format_bounds(of)} |" for of in kinds),
        defaults="\n".join(
            f"| {one.name} | `{one.of}` | {_format_seconds(one.within)} | {one.share * 100:g} % |" for one in slo_spec.DEFAULT_SPEC.objectives
        ),
        windows="\n".join(_format_window(name, one) for name, several in slo_spec.WINDOW_SETS.items() for one in several),
        kinds=" nor ".join(f"`{kind}`" for kind in semconv.NON_ERROR_TYPES if kind),
        keep=burn_rate_rules.KEEP_FIRING,
        leave=_link_alert("ClientsLeave"),
        gone=_link_alert("ServerGone"),
        watchdog=_link_alert(WATCHDOG),
        all="\n".join(
            f"| [{one.name}](#{one.name.lower()}) | {one.severity} | {one.complaint} | {BOARDS[one.board]} |" for one in runbooks
        ),
    )  # fmt: skip
    return page + "".join(map(_format_runbook, runbooks))


def _iter_burn_runbooks() -> Iterator[Runbook]:
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
            _break_query(burns["expr"]),
        ]
        asked += [
            f"\n# {name}\n{_break_query(expr)}" for name, expr in recorded.items() if name in burns["expr"]
        ]
        means, complaint, change = BURN_RUNBOOKS[one.of]
        means = means.format(budget=f"{(1 - one.share) * 100:g} %", within=_format_seconds(one.within))
        window = "[by window](#burn-rates)"
        yield Runbook(
            burns["alert"], "page, ticket", window, means, complaint, change, "overview", "\n".join(asked)
        )


def _iter_cause_runbooks() -> Iterator[Runbook]:
    for one in CAUSE_ALERTS:
        hold = "immediately" if one.pending_period == "0s" else one.pending_period
        yield Runbook(
            ALERT_PREFIX + one.name, one.severity, hold, one.meaning, one.symptom, one.change, one.dashboard, _break_query(one.expr)
        )  # fmt: skip
    yield Runbook(
        ALERT_PREFIX + WATCHDOG, "none", "immediately", "It always fires, which shows that alerts arrive.",
        "alerts are missing", "If it stops: check Prometheus, Alertmanager and the notification path.", "self-monitoring", "vector(1)",
    )  # fmt: skip


def _format_runbook(one: Runbook) -> str:
    return "\n".join([
        f"\n### {one.name}\n",
        "| | |", "|---|---|",
        f"| severity | {one.severity} |",
        f"| fires after | {one.hold} |",
        f"| meaning | {one.means} |",
        f"| complaint | {one.complaint} |",
        f"| change first | {one.change} |",
        f"| dashboard | [{BOARDS[one.board]}](dashboards.md#{BOARDS[one.board].lower().replace(' ', '-')}) |",
        f"\n```promql\n{one.query}\n```\n",
    ])  # fmt: skip


def _link_alert(name: str) -> str:
    return f"[{ALERT_PREFIX}{name}](#{burn_rate_rules.runbook_anchor(name)})"


def _format_bounds(of: str) -> str:
    return (
        ", ".join(map(_format_seconds, slo_spec.OBJECTIVE_METRICS[of].bounds))
        if of != slo_spec.ERRORS
        else "—"
    )


def _format_seconds(seconds: float) -> str:
    if not seconds:
        return "—"
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def _format_window(name: str, one: slo_spec.BurnRateWindow) -> str:
    share = one.factor * _parse_seconds(one.long) / _parse_seconds("30d") * 100
    hold = "immediately" if one.pending_period == "0s" else one.pending_period
    return f"| {name} | {one.severity} | {one.factor:g} | {one.long} | {one.short} | {hold} | {share:.2g} % |"


def _parse_seconds(length: str) -> int:
    return int(length[:-1]) * SECONDS[length[-1]]


def _break_query(expr: str) -> str:
    """Breaks an expression into lines."""
    return expr.replace(" and ", "\nand ").replace(" unless ", "\nunless ")
