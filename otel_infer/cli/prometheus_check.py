"""Every panel and every rule, asked of a live Prometheus: which have data, which have none, and why."""

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
from otel_infer.monitoring import dashboards
from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from otel_infer.semconv import prometheus

DATA, EMPTY, ERROR = "data", "empty", "error"
_SERIES_NAMES = {name for metric in semconv.METRICS for name in prometheus.series_names(metric)}
_METRIC_NAME = re.compile(r"[a-zA-Z_:][\w:]*")


class PrometheusError(Exception):
    """Nobody answers there as a Prometheus does; the message says what was tried."""


class QueryResult(NamedTuple):
    """Of one query: where it is, what came of it (`data`, `empty`, `error`), and why."""

    location: str
    outcome: str
    reason: str
    expr: str


class PrometheusClient:
    """Questions to the Prometheus at this address."""

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        self._url, self._timeout = url.rstrip("/"), timeout

    def get(self, path: str, **what: str) -> Any:
        """The `data` of an answer; raises `ValueError` with what it refuses, and `NoPrometheus`."""
        if not self._url.startswith(("http://", "https://")):
            raise PrometheusError(f"{self._url}: an address begins with http:// or https://")
        address = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(what)}"
        request = urllib.request.Request(address, headers={"User-Agent": f"otel-infer/{VERSION}"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                said = json.load(answer)
            return said["data"]
        except urllib.error.HTTPError as refusal:
            raise self._parse_error(refusal) from None
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as reason:
            raise PrometheusError(f"{self._url} does not answer as a Prometheus does: {reason!r}") from None

    def _parse_error(self, refusal: urllib.error.HTTPError) -> Exception:
        try:
            return ValueError(json.load(refusal)["error"])
        except (ValueError, KeyError, TypeError):
            return PrometheusError(f"{self._url} answers {refusal.code} {refusal.reason}")

    def fetch_series_names(self) -> set[str]:
        """The names of all series; raises `NoPrometheus` also where it refuses to tell them."""
        try:
            return set(self.get("label/__name__/values"))
        except ValueError as refusal:
            raise PrometheusError(f"{self._url} does not tell its series: {refusal}") from None

    def has_data(self, expr: str) -> bool:
        """Whether an instant query finds anything that is a number."""
        found = self.get("query", query=expr)["result"]
        return any(str(one["value"][1]) != "NaN" for one in found)


def check_panels(ask: PrometheusClient, window: str) -> Iterator[QueryResult]:
    """The queries of all dashboards; those to Tempo are not asked."""
    names = ask.fetch_series_names()
    for file, board in dashboards.build_dashboards().items():
        for panel in _iter_panels(board):
            for target in panel.get("targets", ()):
                if "expr" in target:
                    where = f"{file}: {panel['title']} ({target['refId']})"
                    yield _check_query(ask, names, where, resolve_variables(target["expr"], window))


def check_rules(ask: PrometheusClient, rules: Mapping[str, Any]) -> Iterator[QueryResult]:
    """The series that each rule is about: an alert that is silent has no data, and should have none."""
    names = ask.fetch_series_names()
    for group in rules["groups"]:
        for rule in group["rules"]:
            where = f"{group['name']}: {rule.get('alert') or rule['record']}"
            verdict = _check_query(ask, names, where, rule["expr"])
            yield _classify_alert(verdict) if "alert" in rule else verdict


def _check_query(ask: PrometheusClient, names: set[str], where: str, expr: str) -> QueryResult:
    try:
        if ask.has_data(expr):
            return QueryResult(where, DATA, "", expr)
    except ValueError as refusal:
        return QueryResult(where, ERROR, str(refusal), expr)
    missing = sorted(_extract_series(expr) - names)
    why = f"no series {', '.join(missing)}" if missing else "the series are there, and nothing fits"
    return QueryResult(where, EMPTY, why, expr)


def _classify_alert(verdict: QueryResult) -> QueryResult:
    if verdict.outcome == EMPTY and not verdict.reason.startswith("no series"):
        return verdict._replace(outcome=DATA, reason="silent")
    return verdict._replace(reason=verdict.reason or "fires")


def _extract_series(expr: str) -> set[str]:
    return {
        word for word in _METRIC_NAME.findall(expr) if word in _SERIES_NAMES or word.startswith("otel_infer:")
    }


def _iter_panels(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which Prometheus."""
    parser.add_argument("--prometheus", metavar="URL", required=True, help="where it answers")
    parser.add_argument("--all", action="store_true", help="also those that have data")


def print_panels(arguments: argparse.Namespace) -> int:
    """1 if a query is refused, 2 if nobody answers."""
    return _print_results(arguments, lambda ask: check_panels(ask, arguments.window))


def print_rules(arguments: argparse.Namespace, rules: Mapping[str, Any]) -> int:
    """As `print_panels`."""
    return _print_results(arguments, lambda ask: check_rules(ask, rules))


def _print_results(
    arguments: argparse.Namespace, look: Callable[[PrometheusClient], Iterator[QueryResult]]
) -> int:
    found: Counter[str] = Counter()
    try:
        for verdict in look(PrometheusClient(arguments.prometheus)):
            found[verdict.outcome] += 1
            if arguments.all or verdict.outcome != DATA:
                print(
                    f"{verdict.outcome:6} {verdict.location}"
                    + (f": {verdict.reason}" if verdict.reason else "")
                )
    except PrometheusError as reason:
        print(f"otel-infer: {reason}", file=sys.stderr)
        return 2
    print(f"{found[DATA]} with data, {found[EMPTY]} empty, {found[ERROR]} refused")
    return 1 if found[ERROR] else 0
