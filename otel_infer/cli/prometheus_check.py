"""Runs the queries of all panels and rules on a live Prometheus: which have data, which not, and why."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer._version import VERSION
from otel_infer.cli.prometheus_names import explain_names
from otel_infer.config.environment import mask_configured_secrets
from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from otel_infer.monitoring.native_histograms import HISTOGRAM_FAMILIES, convert_queries
from otel_infer.semconv import prometheus

DATA, EMPTY, ERROR = "data", "empty", "error"
CLASSIC, NATIVE = "classic", "native"
_SERIES_NAMES = {name for metric in semconv.METRICS for name in prometheus.series_names(metric)}
_SERIES_NAMES.update(HISTOGRAM_FAMILIES)
_METRIC_NAME = re.compile(r"[a-zA-Z_:][\w:]*")


class PrometheusError(Exception):
    """The address does not respond as a Prometheus; the message holds the address and the error."""


class QueryResult(NamedTuple):
    """The result of one query: the panel or rule, the outcome (`data`, `empty`, `error`), and the reason.

    `has_series`: False if Prometheus has no series of a name in the query.
    """

    location: str
    outcome: str
    reason: str
    expr: str
    has_series: bool = True


class PrometheusClient:
    """A client of the HTTP API of one Prometheus. `timeout`: s per request."""

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        self._url, self._timeout = url.rstrip("/"), timeout

    def get(self, path: str, **parameters: str) -> Any:
        """Returns the `data` of a response.

        Raises `ValueError` with the error of a rejected query, `PrometheusError` if there is no Prometheus.
        """
        if not self._url.startswith(("http://", "https://")):
            raise PrometheusError(f"{self._url}: the address must begin with http:// or https://")
        address = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        request = urllib.request.Request(address, headers={"User-Agent": f"otel-infer/{VERSION}"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                body = json.load(response)
            return body["data"]
        except urllib.error.HTTPError as error:
            raise self._parse_error(error) from None
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as reason:
            raise PrometheusError(f"{self._url} does not respond as a Prometheus: {reason!r}") from None

    def _parse_error(self, error: urllib.error.HTTPError) -> Exception:
        try:
            return ValueError(json.load(error)["error"])
        except (ValueError, KeyError, TypeError):
            return PrometheusError(f"{self._url} responds {error.code} {error.reason}")

    def fetch_series_names(self) -> set[str]:
        """Returns the names of all series; raises `PrometheusError`, also if the query is rejected."""
        try:
            return set(self.get("label/__name__/values"))
        except ValueError as error:
            raise PrometheusError(f"{self._url} does not list its series: {error}") from None

    def has_data(self, expr: str) -> bool:
        """Returns whether an instant query has a result other than NaN."""
        series = self.get("query", query=expr)["result"]
        return any("histogram" in sample or str(sample["value"][1]) != "NaN" for sample in series)


def check_panels(
    client: PrometheusClient, names: set[str], boards: Mapping[str, Any], window: str
) -> Iterator[QueryResult]:
    """Yields the result of every Prometheus query of these dashboards, by file. Queries to Tempo are skipped.

    `names`: the names of all series.
    """
    for file, board in boards.items():
        for panel in _iter_panels(board):
            for target in panel.get("targets", ()):
                if "expr" in target:
                    location = f"{file}: {panel['title']} ({target['refId']})"
                    yield _check_query(client, names, location, resolve_variables(target["expr"], window))


def check_rules(client: PrometheusClient, names: set[str], rules: Mapping[str, Any]) -> Iterator[QueryResult]:
    """Yields the result of every rule. An alert that does not fire counts as `data` if its series exist."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            location = f"{group['name']}: {rule.get('alert') or rule['record']}"
            result = _check_query(client, names, location, rule["expr"])
            yield _classify_alert(result) if "alert" in rule else result


def _check_query(client: PrometheusClient, names: set[str], location: str, expr: str) -> QueryResult:
    try:
        if client.has_data(expr):
            return QueryResult(location, DATA, "", expr)
    except ValueError as error:
        return QueryResult(location, ERROR, str(error), expr)
    missing = sorted(_extract_series(expr) - names)
    reason = f"no series {', '.join(missing)}" if missing else "the series exist, but no value matches"
    return QueryResult(location, EMPTY, reason, expr, has_series=not missing)


def _classify_alert(result: QueryResult) -> QueryResult:
    if result.outcome == EMPTY and result.has_series:
        return result._replace(outcome=DATA, reason="silent")
    return result._replace(reason=result.reason or "fires")


def _extract_series(expr: str) -> set[str]:
    return {
        word for word in _METRIC_NAME.findall(expr) if word in _SERIES_NAMES or word.startswith("otel_infer:")
    }


def _iter_panels(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def add_histograms_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the kind of histograms that queries ask."""
    parser.add_argument(
        "--histograms",
        choices=(CLASSIC, NATIVE),
        default=CLASSIC,
        help="native: Prometheus stores exponential histograms of OTLP as native ones (classic)",
    )


def convert_histograms(arguments: argparse.Namespace, document: Any) -> Any:
    """Returns dashboards or rules for the selected kind of histograms."""
    return convert_queries(document) if getattr(arguments, "histograms", CLASSIC) == NATIVE else document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select a Prometheus."""
    parser.add_argument("--prometheus", metavar="URL", required=True, help="its address")
    parser.add_argument("--all", action="store_true", help="also list queries with data")


def print_panels(arguments: argparse.Namespace, boards: Mapping[str, Any]) -> int:
    """Checks and prints the panels.

    Returns 1 if a query was rejected, if none has data, or if Prometheus has other names than the queries; 2 if
    there is no Prometheus, else 0.
    """
    return _print_results(
        arguments, lambda client, names: check_panels(client, names, boards, arguments.window)
    )


def print_rules(arguments: argparse.Namespace, rules: Mapping[str, Any]) -> int:
    """Checks and prints the rules; returns the same status as `print_panels`."""
    return _print_results(arguments, lambda client, names: check_rules(client, names, rules))


def _print_results(
    arguments: argparse.Namespace,
    run_checks: Callable[[PrometheusClient, set[str]], Iterator[QueryResult]],
) -> int:
    counts: Counter[str] = Counter()
    has_own_data = False
    client = PrometheusClient(arguments.prometheus)
    try:
        names = client.fetch_series_names()
        for result in run_checks(client, names):
            counts[result.outcome] += 1
            has_own_data |= result.outcome == DATA and bool(_extract_series(result.expr))
            if arguments.all or result.outcome != DATA:
                print(
                    f"{result.outcome:6} {result.location}"
                    + (f": {mask_configured_secrets(result.reason)}" if result.reason else "")
                )
    except PrometheusError as reason:
        print(f"otel-infer: {mask_configured_secrets(str(reason))}", file=sys.stderr)
        return 2
    print(f"{counts[DATA]} with data, {counts[EMPTY]} empty, {counts[ERROR]} rejected")
    mismatches = list(explain_names(names, arguments.histograms == NATIVE))
    if not has_own_data and not mismatches:
        mismatches.append("nothing has data; run `otel-infer doctor` on a server")
    for mismatch in mismatches:
        print(f"otel-infer: {mismatch}")
    return 1 if counts[ERROR] or mismatches else 0
