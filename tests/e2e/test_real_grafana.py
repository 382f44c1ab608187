"""A real Grafana: what the stand-in of the unit tests promises in its place.

GRAFANA_URL=http://localhost:3000 GRAFANA_TOKEN=admin:admin pytest tests/e2e/test_real_grafana.py

Leaves nothing behind but the folder `otel-infer`, if it was not there.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from otel_infer.monitoring.grafana.client import FOLDER, GrafanaClient, GrafanaError
from tests.unit.monitoring.grafana.test_client import board, group, rule

URL, TOKEN = os.environ.get("GRAFANA_URL", ""), os.environ.get("GRAFANA_TOKEN", "")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not URL, reason="GRAFANA_URL names no Grafana to try this on"),
]


@pytest.fixture(scope="module")
def grafana() -> GrafanaClient:
    pytest.importorskip("grafana_client", reason="grafana-client is not installed")
    return GrafanaClient(URL, TOKEN)


@pytest.fixture
def uid(grafana: GrafanaClient) -> Iterator[str]:
    """Of a dashboard that is removed again."""
    chosen = f"otel-infer-test-{uuid.uuid4().hex[:8]}"
    yield chosen
    if grafana.pull_dashboards([chosen]):
        grafana._api.dashboard.delete_dashboard(chosen)


@pytest.fixture
def title(grafana: GrafanaClient) -> Iterator[str]:
    """Of a rule group whose rules are removed again."""
    chosen = f"otel-infer test {uuid.uuid4().hex[:8]}"
    yield chosen
    for one in (grafana._read_rule_group(chosen) or {"rules": []})["rules"]:
        grafana._api.alertingprovisioning.delete_alertrule(one["uid"])


def test_a_push_is_there_and_a_second_one_changes_nothing(grafana: GrafanaClient, uid: str) -> None:
    boards = {uid: board(uid)}
    foretold = grafana.push_dashboards(boards, "otel-infer", dry_run=True)
    assert {} == grafana.pull_dashboards([uid])
    assert foretold == grafana.push_dashboards(boards, "otel-infer")
    assert boards == grafana.pull_dashboards([uid])
    assert ["same"] == [one.state for one in grafana.diff_dashboards(boards)]
    assert ["unchanged"] == [one.action for one in grafana.push_dashboards(boards, "otel-infer")]


def test_what_changed_is_named_and_pushed(grafana: GrafanaClient, uid: str) -> None:
    grafana.push_dashboards({uid: board(uid)}, "otel-infer")
    changed = {uid: board(uid, refresh="30s")}
    assert [("refresh",)] == [one.differing_paths for one in grafana.diff_dashboards(changed)]
    assert ["updated"] == [one.action for one in grafana.push_dashboards(changed, "otel-infer")]


def test_what_is_not_ours_is_refused(grafana: GrafanaClient, uid: str) -> None:
    grafana.push_dashboards({uid: board(uid, tags=["theirs"])}, "otel-infer")
    with pytest.raises(GrafanaError, match="not ours"):
        grafana.push_dashboards({uid: board(uid)}, "otel-infer")
    assert ["updated"] == [
        one.action for one in grafana.push_dashboards({uid: board(uid)}, "otel-infer", force=True)
    ]


def test_what_was_saved_meanwhile_is_not_overwritten(grafana: GrafanaClient, uid: str) -> None:
    grafana.push_dashboards({uid: board(uid)}, "otel-infer")
    read_before = grafana._plan_save(uid, board(uid, refresh="30s"), force=False)
    grafana.push_dashboards({uid: board(uid, refresh="1m")}, "otel-infer")
    with pytest.raises(GrafanaError, match="look, and push again"):
        grafana._save_dashboard(read_before)


def test_v2_json_is_refused(grafana: GrafanaClient, uid: str) -> None:
    if int(grafana.version.partition(".")[0] or 0) < 13:
        pytest.skip(f"Grafana {grafana.version} takes v2 JSON for a classic dashboard")
    with pytest.raises(GrafanaError, match="only classic dashboard JSON"):
        grafana.push_dashboards({uid: board(uid, elements={}, layout={})}, "otel-infer")


def test_a_wrong_token_is_refused() -> None:
    with pytest.raises(GrafanaError, match="GRAFANA_TOKEN"):
        GrafanaClient(URL, "glsa_no_such_token").select_datasources()


def ours(prometheus: str, title: str, **changed: Any) -> dict[str, Any]:
    """A group of one rule that asks this datasource."""
    one = rule(f"otel-infer-{title[-8:]}", title=title, **changed)
    one["data"][0]["datasourceUid"] = prometheus
    return group(one, title=title)


def test_rules_are_there_and_a_second_push_changes_nothing(grafana: GrafanaClient, title: str) -> None:
    uid = grafana.select_datasources().prometheus.uid
    rules = [ours(uid, title)]
    foretold = grafana.push_rules(rules, "otel-infer", dry_run=True)
    assert foretold == grafana.push_rules(rules, "otel-infer")
    assert ["unchanged"] == [one.action for one in grafana.push_rules(rules, "otel-infer")]
    assert ["updated"] == [
        one.action
        for one in grafana.push_rules([ours(uid, title, labels={"severity": "ticket"})], "otel-infer")
    ]


def test_the_folder_is_known_by_its_uid(grafana: GrafanaClient, uid: str) -> None:
    grafana.push_dashboards({uid: board(uid)}, "otel-infer")
    assert FOLDER == grafana._read_dashboard(uid)["meta"]["folderUid"]  # type: ignore[index]
