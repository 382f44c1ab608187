"""A real Grafana, as a check of the stand-in of the unit tests.

GRAFANA_URL=http://localhost:3000 GRAFANA_TOKEN=admin:admin pytest tests/e2e/test_real_grafana.py

Only the folder `otel-infer` remains, if it did not exist before.
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
    pytest.mark.skipif(not URL, reason="GRAFANA_URL is not set"),
]


@pytest.fixture(scope="module")
def grafana() -> GrafanaClient:
    pytest.importorskip("grafana_client", reason="grafana-client is not installed")
    return GrafanaClient(URL, TOKEN)


@pytest.fixture
def uid(grafana: GrafanaClient) -> Iterator[str]:
    """The uid of a dashboard that is removed afterwards."""
    chosen = f"otel-infer-test-{uuid.uuid4().hex[:8]}"
    yield chosen
    if grafana.pull_dashboards([chosen]):
        grafana._api.dashboard.delete_dashboard(chosen)


@pytest.fixture
def title(grafana: GrafanaClient) -> Iterator[str]:
    """The title of a rule group that is removed afterwards."""
    chosen = f"otel-infer test {uuid.uuid4().hex[:8]}"
    yield chosen
    for stored_rule in (grafana._read_rule_group(chosen) or {"rules": []})["rules"]:
        grafana._api.alertingprovisioning.delete_alertrule(stored_rule["uid"])


def test_second_push_changes_nothing(grafana: GrafanaClient, uid: str) -> None:
    boards = {uid: board(uid)}
    planned = grafana.push_dashboards(boards, "otel-infer", dry_run=True)
    assert {} == grafana.pull_dashboards([uid])
    assert planned == grafana.push_dashboards(boards, "otel-infer")
    assert boards == grafana.pull_dashboards([uid])
    assert ["same"] == [diff.state for diff in grafana.diff_dashboards(boards)]
    assert ["unchanged"] == [change.action for change in grafana.push_dashboards(boards, "otel-infer")]


def test_changed_paths_are_named_and_pushed(grafana: GrafanaClient, uid: str) -> None:
    grafana.push_dashboards({uid: board(uid)}, "otel-infer")
    changed = {uid: board(uid, refresh="30s")}
    assert [("refresh",)] == [diff.differing_paths for diff in grafana.diff_dashboards(changed)]
    assert ["updated"] == [change.action for change in grafana.push_dashboards(changed, "otel-infer")]


def test_untagged_dashboard_is_refused(grafana: GrafanaClient, uid: str) -> None:
    grafana.push_dashboards({uid: board(uid, tags=["other"])}, "otel-infer")
    with pytest.raises(GrafanaError, match="not ours"):
        grafana.push_dashboards({uid: board(uid)}, "otel-infer")
    assert ["updated"] == [
        change.action for change in grafana.push_dashboards({uid: board(uid)}, "otel-infer", force=True)
    ]


def test_concurrent_save_is_not_overwritten(grafana: GrafanaClient, uid: str) -> None:
    grafana.push_dashboards({uid: board(uid)}, "otel-infer")
    read_before = grafana._plan_save(uid, board(uid, refresh="30s"), force=False)
    grafana.push_dashboards({uid: board(uid, refresh="1m")}, "otel-infer")
    with pytest.raises(GrafanaError, match="push again"):
        grafana._save_dashboard(read_before)


def test_v2_json_is_refused(grafana: GrafanaClient, uid: str) -> None:
    if int(grafana.version.partition(".")[0] or 0) < 13:
        pytest.skip(f"Grafana {grafana.version} accepts v2 JSON as a classic dashboard")
    with pytest.raises(GrafanaError, match="only classic dashboard JSON"):
        grafana.push_dashboards({uid: board(uid, elements={}, layout={})}, "otel-infer")


def test_invalid_token_is_refused() -> None:
    with pytest.raises(GrafanaError, match="GRAFANA_TOKEN"):
        GrafanaClient(URL, "glsa_no_such_token").select_datasources()


def rule_group(prometheus: str, title: str, **changed: Any) -> dict[str, Any]:
    """Returns a group of one rule that queries this datasource."""
    probe = rule(f"otel-infer-{title[-8:]}", title=title, **changed)
    probe["data"][0]["datasourceUid"] = prometheus
    return group(probe, title=title)


def test_second_push_of_rules_changes_nothing(grafana: GrafanaClient, title: str) -> None:
    uid = grafana.select_datasources().prometheus.uid
    rules = [rule_group(uid, title)]
    planned = grafana.push_rules(rules, "otel-infer", dry_run=True)
    assert planned == grafana.push_rules(rules, "otel-infer")
    assert ["unchanged"] == [change.action for change in grafana.push_rules(rules, "otel-infer")]
    assert ["updated"] == [
        one.action
        for one in grafana.push_rules([rule_group(uid, title, labels={"severity": "ticket"})], "otel-infer")
    ]


def test_folder_is_identified_by_its_uid(grafana: GrafanaClient, uid: str) -> None:
    grafana.push_dashboards({uid: board(uid)}, "otel-infer")
    assert FOLDER == grafana._read_dashboard(uid)["meta"]["folderUid"]  # type: ignore[index]
