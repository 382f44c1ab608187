"""The client of Grafana against a stand-in server: dashboards, alert rules, datasources and errors."""

from __future__ import annotations

import base64
import copy
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from otel_infer.monitoring.grafana import diff
from otel_infer.monitoring.grafana.client import (
    FOLDER,
    DashboardDiff,
    GrafanaChange,
    GrafanaClient,
    GrafanaError,
)
from otel_infer.monitoring.grafana.errors import redact_secrets, redact_url
from tests.support.grafana_server import BAD_GATEWAY, Answer, GrafanaServer, datasource, late

pytest.importorskip("grafana_client", reason="grafana-client is not installed")

TOKEN = "glsa_stand_in"


def board(uid: str = "otel-infer-overview", **changed: Any) -> dict[str, Any]:
    """A small classic dashboard with our tag."""
    panel = {
        "id": 1,
        "type": "timeseries",
        "title": "TTFT",
        "targets": [{"refId": "A", "expr": "up"}],
        "fieldConfig": {"defaults": {"unit": "s", "max": 1.0}},
    }
    return {
        "uid": uid,
        "title": f"Board {uid}",
        "tags": ["otel-infer"],
        "schemaVersion": 39,
        "panels": [panel],
        **changed,
    }


def rule(uid: str = "otel-infer-slow", **changed: Any) -> dict[str, Any]:
    """A small alert rule: a query, and a condition on it."""
    query = {
        "refId": "A",
        "datasourceUid": "P1",
        "relativeTimeRange": {"from": 600, "to": 0},
        "model": {"refId": "A", "expr": "up", "instant": True},
    }
    condition = {
        "refId": "B",
        "datasourceUid": "__expr__",
        "model": {
            "refId": "B",
            "type": "threshold",
            "expression": "A",
            "conditions": [{"evaluator": {"type": "gt", "params": [0]}}],
        },
    }
    return {
        "uid": uid,
        "title": f"Rule {uid}",
        "condition": "B",
        "data": [query, condition],
        "noDataState": "OK",
        "execErrState": "Error",
        "for": "90s",
        "keep_firing_for": "300s",
        "isPaused": False,
        "labels": {"severity": "page"},
        "annotations": {},
        **changed,
    }


def group(*rules: dict[str, Any], title: str = "otel-infer / slo", interval: int = 60) -> dict[str, Any]:
    return {"title": title, "interval": interval, "rules": list(rules or [rule()])}


@pytest.fixture
def server() -> Iterator[GrafanaServer]:
    with GrafanaServer(TOKEN) as started:
        yield started


@pytest.fixture
def grafana(server: GrafanaServer) -> GrafanaClient:
    return GrafanaClient(server.url, TOKEN)


def connection_error(url: str, token: str = TOKEN, timeout: float = 5.0) -> str:
    with pytest.raises(GrafanaError) as error:
        GrafanaClient(url, token, timeout=timeout)
    return str(error.value)


# ── dashboards ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_push_creates_the_folder_and_the_dashboards(server: GrafanaServer, grafana: GrafanaClient) -> None:
    pushed = grafana.push_dashboards({"a": board("a"), "b": board("b")}, "Inference")
    assert [
        GrafanaChange("folder", FOLDER, "created"),
        GrafanaChange("dashboard", "a", "created"),
        GrafanaChange("dashboard", "b", "created"),
    ] == pushed
    assert "Inference" == server.folders[FOLDER]["title"]
    assert FOLDER == server.dashboards["b"]["meta"]["folderUid"]


def test_second_push_writes_nothing(server: GrafanaServer, grafana: GrafanaClient) -> None:
    grafana.push_dashboards({"a": board("a")}, "Inference")
    written = list(server.writes)
    assert [GrafanaChange("dashboard", "a", "unchanged")] == grafana.push_dashboards(
        {"a": board("a")}, "Inference"
    )
    assert written == server.writes


def test_push_works_without_admin_rights(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.is_admin = False
    assert ["created", "created"] == [
        change.action for change in grafana.push_dashboards({"a": board("a")}, "Inference")
    ]
    assert {"a": board("a")} == grafana.pull_dashboards(["a", "absent"])


def test_dry_run_reports_the_changes_without_writing(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.put_dashboard(board("old"))
    boards = {"new": board("new"), "old": board("old", title="Better")}
    planned = grafana.push_dashboards(boards, "Inference", dry_run=True)
    assert [] == server.writes
    assert planned == grafana.push_dashboards(boards, "Inference")
    assert ["created", "created", "updated"] == [change.action for change in planned]


def test_moved_dashboard_stays_in_its_folder(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.folders["other"] = {"uid": "other", "title": "Other"}
    server.put_dashboard(board("a"), folder="other")
    grafana.push_dashboards({"a": board("a", title="Better")}, "Inference")
    assert "other" == server.dashboards["a"]["meta"]["folderUid"]
    assert [("POST", "/api/dashboards/db")] == server.writes


def test_untagged_dashboard_is_refused_before_any_write(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    server.put_dashboard(board("other", tags=["kubernetes"]))
    with pytest.raises(GrafanaError, match=r"other is not ours .*force"):
        grafana.push_dashboards({"new": board("new"), "other": board("other")}, "Inference")
    assert [] == server.writes


def test_untagged_dashboard_is_replaced_when_forced(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.put_dashboard(board("other", tags=["kubernetes"]))
    assert [GrafanaChange("dashboard", "other", "updated")] == grafana.push_dashboards(
        {"other": board("other")}, "Inference", force=True
    )
    assert ["otel-infer"] == server.dashboards["other"]["dashboard"]["tags"]


def test_provisioned_dashboard_is_refused_even_in_dry_run(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    server.put_dashboard(board("a"), provisioned=True, provisionedExternalId="a.json")
    assert [GrafanaChange("dashboard", "a", "unchanged")] == grafana.push_dashboards(
        {"a": board("a")}, "Inference"
    )
    with pytest.raises(GrafanaError, match=r"provisioned from a file \(a.json\)"):
        grafana.push_dashboards({"a": board("a", title="Better")}, "Inference", dry_run=True)


def test_dashboard_provisioned_before_the_save_is_refused(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    error = Answer(400, {"message": "Cannot save provisioned dashboard"})
    server.instead = lambda verb, path: error if path == "/api/dashboards/db" else None
    with pytest.raises(
        GrafanaError, match=r"HTTP 400 “Cannot save provisioned dashboard”; it is provisioned"
    ):
        grafana.push_dashboards({"a": board("a")}, "Inference")


@pytest.mark.parametrize(("version", "status"), [("12.4.1", 412), ("13.2.0", 409)])
def test_concurrent_save_is_not_overwritten(server: GrafanaServer, version: str, status: int) -> None:
    server.version = version
    server.put_dashboard(board("a", title="Old"))

    def save_first(verb: str, path: str) -> None:
        if verb == "POST":
            server.put_dashboard(board("a", title="Concurrent"))

    server.instead = save_first
    with pytest.raises(GrafanaError, match=f"HTTP {status} .*push again"):
        GrafanaClient(server.url, TOKEN).push_dashboards({"a": board("a")}, "Inference", force=True)
    assert "Concurrent" == server.dashboards["a"]["dashboard"]["title"]


def test_v2_json_is_refused_naming_classic_json(server: GrafanaServer, grafana: GrafanaClient) -> None:
    with pytest.raises(GrafanaError, match=r"HTTP 400 .*v2 format.*only classic dashboard JSON"):
        grafana.push_dashboards({"a": board("a", elements={})}, "Inference")


def test_dashboard_stored_as_v2_is_refused(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.put_dashboard(board("a"), apiVersion="v2beta1")
    with pytest.raises(GrafanaError, match=r"HTTP 406 .*only classic dashboard JSON"):
        grafana.pull_dashboards(["a"])


def test_duplicate_dashboard_title_is_refused(server: GrafanaServer, grafana: GrafanaClient) -> None:
    grafana.push_dashboards({"a": board("a", title="Same")}, "Inference")
    with pytest.raises(GrafanaError, match=r"HTTP 412 .*rename or delete"):
        grafana.push_dashboards({"b": board("b", title="Same")}, "Inference")


def test_duplicate_folder_title_is_refused(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.folders["other"] = {"uid": "other", "title": "Inference"}
    with pytest.raises(GrafanaError, match=r"create folder Inference: HTTP 409 .*rename or delete"):
        grafana.push_dashboards({"a": board("a")}, "Inference")


@pytest.mark.parametrize("uid", ["a" * 41, "a.b"])
def test_invalid_uid_is_refused_with_grafanas_message(
    server: GrafanaServer, grafana: GrafanaClient, uid: str
) -> None:
    with pytest.raises(GrafanaError, match=r"HTTP 400 “uid (too long, max 40|contains illegal) characters”"):
        grafana.push_dashboards({uid: board(uid)}, "Inference")


def test_pull_returns_the_pushed_dashboards(server: GrafanaServer, grafana: GrafanaClient) -> None:
    grafana.push_dashboards({"a": board("a")}, "Inference")
    assert {"a": board("a")} == grafana.pull_dashboards(["a", "absent"])


def test_diff_names_the_changed_paths(server: GrafanaServer, grafana: GrafanaClient) -> None:
    boards = {"absent": board("absent"), "changed": board("changed"), "same": board("same", id=9, version=3)}
    changed = copy.deepcopy(board("changed"))
    changed["panels"][0]["targets"][0]["expr"] = "down"
    changed["panels"].append({"id": 2})
    changed["refresh"] = "5s"
    server.put_dashboard(changed)
    server.put_dashboard(board("same"))
    assert [
        DashboardDiff("absent", "missing"),
        DashboardDiff("changed", "differs", ("panels[0].targets[0].expr", "panels[1]", "refresh")),
        DashboardDiff("same", "same"),
    ] == grafana.diff_dashboards(boards)


def test_diff_separates_bool_but_not_int_and_float() -> None:
    assert ["a"] == list(diff.find_differences({"a": True, "b": 1.0, "c": None}, {"a": 1, "b": 1}))


# ── alert rules ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_rule_groups_are_saved_in_our_folder(server: GrafanaServer, grafana: GrafanaClient) -> None:
    assert [
        GrafanaChange("folder", FOLDER, "created"),
        GrafanaChange("rule group", "otel-infer / slo", "created"),
    ] == grafana.push_rules([group()], "Inference")
    stored = server.groups[FOLDER, "otel-infer / slo"]
    assert (60, FOLDER) == (stored["interval"], stored["rules"][0]["folderUID"])


def test_unchanged_rules_are_not_written_again(server: GrafanaServer, grafana: GrafanaClient) -> None:
    grafana.push_rules([group()], "Inference")
    written = list(server.writes)
    assert [GrafanaChange("rule group", "otel-infer / slo", "unchanged")] == grafana.push_rules(
        [group()], "Inference"
    )
    assert written == server.writes


@pytest.mark.parametrize(
    "changed",
    [
        group(rule(**{"for": "2m"})),
        group(rule(labels={})),
        group(interval=30),
        group(rule(), rule("otel-infer-second")),
        group(rule(condition="A")),
        group(rule(keep_firing_for="0s")),
    ],
    ids=["for", "labels", "interval", "added rule", "condition", "keep_firing_for"],
)
def test_changed_rule_group_is_written(
    server: GrafanaServer, grafana: GrafanaClient, changed: dict[str, Any]
) -> None:
    grafana.push_rules([group()], "Inference")
    assert [GrafanaChange("rule group", "otel-infer / slo", "updated")] == grafana.push_rules(
        [changed], "Inference"
    )
    assert "unchanged" == grafana.push_rules([changed], "Inference")[0].action


def test_rule_missing_from_its_group_is_removed(server: GrafanaServer, grafana: GrafanaClient) -> None:
    grafana.push_rules([group(rule("a"), rule("b"))], "Inference")
    planned = grafana.push_rules([group(rule("a"))], "Inference", dry_run=True)
    assert planned == grafana.push_rules([group(rule("a"))], "Inference")
    assert GrafanaChange("alert rule", "b", "removed") == planned[-1]
    assert ["a"] == [stored_rule["uid"] for stored_rule in server.groups[FOLDER, "otel-infer / slo"]["rules"]]


def test_dry_run_of_rules_writes_nothing(server: GrafanaServer, grafana: GrafanaClient) -> None:
    planned = grafana.push_rules([group()], "Inference", dry_run=True)
    assert ["created", "created"] == [change.action for change in planned]
    assert [] == server.writes


def test_a_paused_rule_stays_paused(server: GrafanaServer, grafana: GrafanaClient) -> None:
    grafana.push_rules([group()], "Inference")
    stored = server.groups[FOLDER, "otel-infer / slo"]["rules"]
    stored[0]["isPaused"] = True
    assert "unchanged" == grafana.push_rules([group()], "Inference")[0].action
    grafana.push_rules([group(rule(title="Better"))], "Inference")
    assert server.groups[FOLDER, "otel-infer / slo"]["rules"][0]["isPaused"]


def test_fields_dropped_by_old_grafana_are_not_rewritten(
    server: GrafanaServer,
) -> None:
    server.version = "11.6.0"
    grafana = GrafanaClient(server.url, TOKEN)
    grafana.push_rules([group()], "Inference")
    assert "keep_firing_for" not in server.groups[FOLDER, "otel-infer / slo"]["rules"][0]
    assert "unchanged" == grafana.push_rules([group()], "Inference")[0].action


def test_rule_with_an_unknown_datasource_is_refused(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.datasources = [datasource("prometheus", "other")]
    with pytest.raises(GrafanaError, match=r"rule otel-infer-slow .* datasource P1, which does not exist"):
        grafana.push_rules([group()], "Inference")
    assert [] == server.writes


def test_rules_provisioned_from_a_file_are_refused(server: GrafanaServer, grafana: GrafanaClient) -> None:
    grafana.push_rules([group()], "Inference")
    server.provenance = "file"
    with pytest.raises(GrafanaError, match=r"HTTP 409 .*needs 'file'”; .*provisioned elsewhere"):
        grafana.push_rules([group(interval=30)], "Inference")


def test_invalid_interval_is_refused_with_grafanas_message(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    with pytest.raises(
        GrafanaError, match=r"save rule group .*HTTP 400 .*divided exactly by scheduler interval"
    ):
        grafana.push_rules([group(interval=7)], "Inference")


# ── datasources ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_default_prometheus_is_selected_and_tempo_is_optional(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    server.datasources = [datasource("prometheus", "a"), datasource("prometheus", "b", is_default=True)]
    used = grafana.select_datasources()
    assert ("b", None) == (used.prometheus.uid, used.tempo)
    assert "a" == grafana.select_datasources(prometheus="a").prometheus.uid


def test_missing_datasource_is_named(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.datasources = [datasource("tempo", "T1")]
    with pytest.raises(GrafanaError, match="no Prometheus datasource"):
        grafana.select_datasources()
    with pytest.raises(GrafanaError, match="no prometheus datasource has the name or uid P2"):
        server.datasources.append(datasource("prometheus", "P1"))
        grafana.select_datasources(prometheus="P2")


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("denied", "action"),
    [
        ("datasources:read", "could not list datasources"),
        ("folders:read", "could not look for folder"),
        ("folders:create", "could not create folder Inference"),
        ("dashboards:read", "could not read dashboard a"),
        ("any of dashboards:create, dashboards:write", "could not save dashboard a"),
        ("alert.provisioning:read", "could not read rule group"),
        ("alert.provisioning:write", "could not save rule group"),
    ],
)
def test_a_missing_permission_is_named(
    server: GrafanaServer, grafana: GrafanaClient, denied: str, action: str
) -> None:
    server.denied = {denied}
    with pytest.raises(
        GrafanaError, match=f"{action}.*HTTP 403 .*give the service account of the token {denied}"
    ):
        grafana.push_dashboards({"a": board("a")}, "Inference")
        grafana.push_rules([group()], "Inference")


def test_permission_not_named_by_grafana_is_named(server: GrafanaServer, grafana: GrafanaClient) -> None:
    error = Answer(403, {"message": "Access denied to save dashboard"})
    server.instead = lambda verb, path: error if path == "/api/dashboards/db" else None
    with pytest.raises(
        GrafanaError, match=r"give the service account .*dashboards:create and dashboards:write"
    ):
        grafana.push_dashboards({"a": board("a")}, "Inference")


@pytest.mark.parametrize("token", ["", "glsa_wrong_secret", "admin:wrong-secret"])
def test_rejected_token_names_its_variable(server: GrafanaServer, token: str) -> None:
    with pytest.raises(GrafanaError, match=r"HTTP 401 .*into GRAFANA_TOKEN") as error:
        GrafanaClient(server.url, token).select_datasources()
    assert "secret" not in str(error.value)


def test_user_and_password_are_accepted() -> None:
    with GrafanaServer("admin:pässword:1") as server:
        assert {} == GrafanaClient(server.url, "admin:pässword:1\n").pull_dashboards(["a"])


def test_anonymous_access_needs_no_token() -> None:
    with GrafanaServer("") as server:
        assert {} == GrafanaClient(server.url).pull_dashboards(["a"])


def test_malformed_token_is_not_shown(server: GrafanaServer) -> None:
    message = connection_error(server.url, "glsa_very\nsecret")
    assert "GRAFANA_TOKEN" in message and "secret" not in message


@pytest.mark.parametrize(
    "url", ["http://admin:s3cr3t@{}/x?y=s3cr3t", "admin:s3cr3t@{}", "http://a:s3/cr3t@{}"]
)
def test_credentials_in_the_url_are_refused_and_redacted(server: GrafanaServer, url: str) -> None:
    message = connection_error(url.format("127.0.0.1"))
    assert "***@127.0.0.1" in message and "put USER:PASSWORD into GRAFANA_TOKEN" in message
    assert "s3" not in message


def test_server_messages_are_quoted_without_the_token(server: GrafanaServer) -> None:
    server.instead = lambda verb, path: Answer(500, {"message": f"no {TOKEN} at http://u:p@db/x"})
    message = connection_error(server.url)
    assert "HTTP 500 “no *** at http://***@db/x”; " in message


def test_an_echoed_basic_credential_and_escapes_are_not_printed() -> None:
    token = "admin:very-secret"
    echoed = base64.b64encode(token.encode()).decode()
    with GrafanaServer(token) as server:
        server.instead = lambda verb, path: Answer(500, {"message": f"\x1b[2Jbad header Basic {echoed}\x9b"})
        with pytest.raises(GrafanaError) as error:
            GrafanaClient(server.url, token)
    assert echoed not in str(error.value)
    assert "bad header Basic ***" in str(error.value)
    assert str(error.value).isprintable()


def test_messages_are_truncated_and_urls_lose_their_query() -> None:
    assert "a b" == redact_secrets("a\n  b", ("",))
    assert redact_secrets("x" * 999, ()).endswith("x…")
    assert "https://g/x" == redact_url("https://g/x?token=1#a")
    assert "https://***@g/" == redact_url("https://u:p@g/?to=http://x")


def test_refused_connection_names_the_address() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert f"{url}: could not connect: no connection" in connection_error(url)


def test_unknown_host_is_named() -> None:
    assert "unknown host name" in connection_error("http://grafana.invalid:3000")


@pytest.mark.parametrize("url", ["grafana:3000", "ftp://grafana", "http://", "http://grafana:port"])
def test_invalid_address_is_refused(url: str) -> None:
    assert f"{url} is not a valid address" in connection_error(url)


def test_tls_to_a_plain_server_is_named(server: GrafanaServer) -> None:
    assert "TLS failure" in connection_error(server.url.replace("http://", "https://"))


def test_timeout_is_named(server: GrafanaServer) -> None:
    server.instead = late(1.0)
    assert "no answer within 0.2 s" in connection_error(server.url, timeout=0.2)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, "<html>a page</html>"),
        Answer(200, {"status": "ok"}),
        Answer(200, []),
        Answer(404, "<html>not found</html>"),
        Answer(404, {"detail": "Not Found"}),
    ],
    ids=["html", "other json", "list", "html 404", "json 404"],
)
def test_other_servers_are_not_taken_for_grafana(server: GrafanaServer, answer: Answer) -> None:
    server.instead = lambda verb, path: answer
    assert "is not Grafana" in connection_error(server.url)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(502, BAD_GATEWAY), "HTTP 502; a proxy before Grafana"),
        (Answer(401, "<html>401</html>"), "HTTP 401; a proxy before Grafana requires separate credentials"),
        (
            Answer(302, "", {"Location": "https://sso.example/in?x=1"}),
            "it redirects to https://sso.example/in;",
        ),
        (Answer(429, {"message": "slow down"}), "HTTP 429 “slow down”; too many requests"),
    ],
    ids=["bad gateway", "proxy authentication", "redirect", "rate limit"],
)
def test_proxy_errors_are_distinguished_from_grafana_errors(
    server: GrafanaServer, answer: Answer, expected: str
) -> None:
    server.instead = lambda verb, path: answer
    assert expected in connection_error(server.url)


def test_html_page_instead_of_an_answer_is_reported(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.instead = lambda verb, path: Answer(200, "<html>signed out</html>")
    with pytest.raises(GrafanaError, match=r"could not read dashboard a: .*not Grafana"):
        grafana.pull_dashboards(["a"])


def test_old_version_is_refused_and_hidden_version_accepted(server: GrafanaServer) -> None:
    server.version = "8.5.27"
    assert "Grafana 8.5.27 is too old" in connection_error(server.url)
    server.version = ""
    assert "" == GrafanaClient(server.url, TOKEN).version


def test_sub_path_works_with_and_without_a_slash() -> None:
    with GrafanaServer(TOKEN, prefix="/monitoring/grafana") as server:
        assert ["12.4.1"] * 2 == [GrafanaClient(url, TOKEN).version for url in (server.url, f"{server.url}/")]


def test_missing_grafana_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grafana_client", None)
    assert "pip install 'otel-infer[grafana]'" in connection_error("http://127.0.0.1:3000")
