from __future__ import annotations

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
    """A small classic dashboard of ours."""
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


def refusal_of(url: str, token: str = TOKEN, timeout: float = 5.0) -> str:
    with pytest.raises(GrafanaError) as refused:
        GrafanaClient(url, token, timeout=timeout)
    return str(refused.value)


# ── dashboards ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_push_makes_the_folder_and_the_dashboards_in_it(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    pushed = grafana.push_dashboards({"a": board("a"), "b": board("b")}, "Inference")
    assert [
        GrafanaChange("folder", FOLDER, "created"),
        GrafanaChange("dashboard", "a", "created"),
        GrafanaChange("dashboard", "b", "created"),
    ] == pushed
    assert "Inference" == server.folders[FOLDER]["title"]
    assert FOLDER == server.dashboards["b"]["meta"]["folderUid"]


def test_a_second_push_writes_nothing(server: GrafanaServer, grafana: GrafanaClient) -> None:
    grafana.push_dashboards({"a": board("a")}, "Inference")
    written = list(server.writes)
    assert [GrafanaChange("dashboard", "a", "unchanged")] == grafana.push_dashboards(
        {"a": board("a")}, "Inference"
    )
    assert written == server.writes


def test_who_is_no_administrator_pushes_too(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.is_admin = False
    assert ["created", "created"] == [
        change.action for change in grafana.push_dashboards({"a": board("a")}, "Inference")
    ]
    assert {"a": board("a")} == grafana.pull_dashboards(["a", "absent"])


def test_a_dry_run_says_the_same_and_writes_nothing(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.put_dashboard(board("old"))
    boards = {"new": board("new"), "old": board("old", title="Better")}
    foretold = grafana.push_dashboards(boards, "Inference", dry_run=True)
    assert [] == server.writes
    assert foretold == grafana.push_dashboards(boards, "Inference")
    assert ["created", "created", "updated"] == [change.action for change in foretold]


def test_a_dashboard_that_was_moved_stays_where_it_is(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.folders["theirs"] = {"uid": "theirs", "title": "Theirs"}
    server.put_dashboard(board("a"), folder="theirs")
    grafana.push_dashboards({"a": board("a", title="Better")}, "Inference")
    assert "theirs" == server.dashboards["a"]["meta"]["folderUid"]
    assert [("POST", "/api/dashboards/db")] == server.writes


def test_a_dashboard_that_is_not_ours_is_refused_before_anything_is_written(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    server.put_dashboard(board("theirs", tags=["kubernetes"]))
    with pytest.raises(GrafanaError, match=r"theirs is not ours .*give it another uid, or force"):
        grafana.push_dashboards({"new": board("new"), "theirs": board("theirs")}, "Inference")
    assert [] == server.writes


def test_a_dashboard_that_is_not_ours_is_replaced_when_forced(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    server.put_dashboard(board("theirs", tags=["kubernetes"]))
    assert [GrafanaChange("dashboard", "theirs", "updated")] == grafana.push_dashboards(
        {"theirs": board("theirs")}, "Inference", force=True
    )
    assert ["otel-infer"] == server.dashboards["theirs"]["dashboard"]["tags"]


def test_a_dashboard_that_a_file_makes_is_refused_in_a_dry_run_too(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    server.put_dashboard(board("a"), provisioned=True, provisionedExternalId="a.json")
    assert [GrafanaChange("dashboard", "a", "unchanged")] == grafana.push_dashboards(
        {"a": board("a")}, "Inference"
    )
    with pytest.raises(GrafanaError, match=r"made by a file \(a.json\): change that file"):
        grafana.push_dashboards({"a": board("a", title="Better")}, "Inference", dry_run=True)


def test_a_dashboard_that_became_a_files_meanwhile_says_so_too(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    refused = Answer(400, {"message": "Cannot save provisioned dashboard"})
    server.instead = lambda verb, path: refused if path == "/api/dashboards/db" else None
    with pytest.raises(GrafanaError, match=r"HTTP 400 “Cannot save provisioned dashboard”; a file makes it"):
        grafana.push_dashboards({"a": board("a")}, "Inference")


@pytest.mark.parametrize(("version", "status"), [("12.4.1", 412), ("13.2.0", 409)])
def test_what_somebody_saved_meanwhile_is_not_overwritten(
    server: GrafanaServer, version: str, status: int
) -> None:
    server.version = version
    server.put_dashboard(board("a", title="Old"))

    def save_first(verb: str, path: str) -> None:
        if verb == "POST":
            server.put_dashboard(board("a", title="Theirs"))

    server.instead = save_first
    with pytest.raises(GrafanaError, match=f"HTTP {status} .*look, and push again"):
        GrafanaClient(server.url, TOKEN).push_dashboards({"a": board("a")}, "Inference", force=True)
    assert "Theirs" == server.dashboards["a"]["dashboard"]["title"]


def test_v2_json_is_refused_with_what_would_be_understood(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    with pytest.raises(GrafanaError, match=r"HTTP 400 .*v2 format.*only classic dashboard JSON"):
        grafana.push_dashboards({"a": board("a", elements={})}, "Inference")


def test_a_dashboard_kept_as_v2_is_refused_with_what_would_be_understood(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    server.put_dashboard(board("a"), apiVersion="v2beta1")
    with pytest.raises(GrafanaError, match=r"HTTP 406 .*only classic dashboard JSON"):
        grafana.pull_dashboards(["a"])


def test_another_dashboard_of_the_same_name_is_to_be_renamed(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    grafana.push_dashboards({"a": board("a", title="Same")}, "Inference")
    with pytest.raises(GrafanaError, match=r"HTTP 412 .*rename or delete what has that name"):
        grafana.push_dashboards({"b": board("b", title="Same")}, "Inference")


def test_a_folder_of_the_same_name_is_to_be_renamed(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.folders["theirs"] = {"uid": "theirs", "title": "Inference"}
    with pytest.raises(GrafanaError, match=r"create folder Inference: HTTP 409 .*rename or delete"):
        grafana.push_dashboards({"a": board("a")}, "Inference")


@pytest.mark.parametrize("uid", ["a" * 41, "a.b"])
def test_a_uid_that_grafana_cannot_have_is_refused_in_its_words(
    server: GrafanaServer, grafana: GrafanaClient, uid: str
) -> None:
    with pytest.raises(GrafanaError, match=r"HTTP 400 “uid (too long, max 40|contains illegal) characters”"):
        grafana.push_dashboards({uid: board(uid)}, "Inference")


def test_what_is_pulled_is_what_was_pushed(server: GrafanaServer, grafana: GrafanaClient) -> None:
    grafana.push_dashboards({"a": board("a")}, "Inference")
    assert {"a": board("a")} == grafana.pull_dashboards(["a", "absent"])


def test_a_difference_names_the_places(server: GrafanaServer, grafana: GrafanaClient) -> None:
    boards = {"absent": board("absent"), "changed": board("changed"), "same": board("same", id=9, version=3)}
    theirs = copy.deepcopy(board("changed"))
    theirs["panels"][0]["targets"][0]["expr"] = "down"
    theirs["panels"].append({"id": 2})
    theirs["refresh"] = "5s"
    server.put_dashboard(theirs)
    server.put_dashboard(board("same"))
    assert [
        DashboardDiff("absent", "missing"),
        DashboardDiff("changed", "differs", ("panels[0].targets[0].expr", "panels[1]", "refresh")),
        DashboardDiff("same", "same"),
    ] == grafana.diff_dashboards(boards)


def test_a_true_is_no_one_and_one_is_one_point_nought() -> None:
    assert ["a"] == list(diff.find_differences({"a": True, "b": 1.0, "c": None}, {"a": 1, "b": 1}))


# ── alert rules ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_rules_are_put_into_our_folder_by_group(server: GrafanaServer, grafana: GrafanaClient) -> None:
    assert [
        GrafanaChange("folder", FOLDER, "created"),
        GrafanaChange("rule group", "otel-infer / slo", "created"),
    ] == grafana.push_rules([group()], "Inference")
    stored = server.groups[FOLDER, "otel-infer / slo"]
    assert (60, FOLDER) == (stored["interval"], stored["rules"][0]["folderUID"])


def test_rules_that_are_there_are_not_written_again(server: GrafanaServer, grafana: GrafanaClient) -> None:
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
)
def test_a_group_that_changed_is_written(
    server: GrafanaServer, grafana: GrafanaClient, changed: dict[str, Any]
) -> None:
    grafana.push_rules([group()], "Inference")
    assert [GrafanaChange("rule group", "otel-infer / slo", "updated")] == grafana.push_rules(
        [changed], "Inference"
    )
    assert "unchanged" == grafana.push_rules([changed], "Inference")[0].action


def test_a_rule_that_is_no_longer_in_its_group_is_removed(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    grafana.push_rules([group(rule("a"), rule("b"))], "Inference")
    foretold = grafana.push_rules([group(rule("a"))], "Inference", dry_run=True)
    assert foretold == grafana.push_rules([group(rule("a"))], "Inference")
    assert GrafanaChange("alert rule", "b", "removed") == foretold[-1]
    assert ["a"] == [one["uid"] for one in server.groups[FOLDER, "otel-infer / slo"]["rules"]]


def test_a_dry_run_of_rules_writes_nothing(server: GrafanaServer, grafana: GrafanaClient) -> None:
    foretold = grafana.push_rules([group()], "Inference", dry_run=True)
    assert ["created", "created"] == [change.action for change in foretold]
    assert [] == server.writes


def test_a_paused_rule_stays_paused(server: GrafanaServer, grafana: GrafanaClient) -> None:
    grafana.push_rules([group()], "Inference")
    stored = server.groups[FOLDER, "otel-infer / slo"]["rules"]
    stored[0]["isPaused"] = True
    assert "unchanged" == grafana.push_rules([group()], "Inference")[0].action
    grafana.push_rules([group(rule(title="Better"))], "Inference")
    assert server.groups[FOLDER, "otel-infer / slo"]["rules"][0]["isPaused"]


def test_what_an_older_grafana_drops_from_a_rule_is_not_written_again_and_again(
    server: GrafanaServer,
) -> None:
    server.version = "11.6.0"
    grafana = GrafanaClient(server.url, TOKEN)
    grafana.push_rules([group()], "Inference")
    assert "keep_firing_for" not in server.groups[FOLDER, "otel-infer / slo"]["rules"][0]
    assert "unchanged" == grafana.push_rules([group()], "Inference")[0].action


def test_a_rule_that_asks_a_datasource_that_is_not_there_is_refused(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    server.datasources = [datasource("prometheus", "other")]
    with pytest.raises(
        GrafanaError, match="rule otel-infer-slow asks datasource P1, which is not there: add it"
    ):
        grafana.push_rules([group()], "Inference")
    assert [] == server.writes


def test_rules_that_a_file_provisions_are_to_be_removed_there(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    grafana.push_rules([group()], "Inference")
    server.provenance = "file"
    with pytest.raises(GrafanaError, match=r"HTTP 409 .*needs 'file'”; somebody else provisions"):
        grafana.push_rules([group(interval=30)], "Inference")


def test_an_interval_that_the_scheduler_has_not_is_refused_in_grafanas_words(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    with pytest.raises(
        GrafanaError, match=r"save rule group .*HTTP 400 .*divided exactly by scheduler interval"
    ):
        grafana.push_rules([group(interval=7)], "Inference")


# ── datasources ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_default_prometheus_is_used_and_tempo_need_not_be_there(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    server.datasources = [datasource("prometheus", "a"), datasource("prometheus", "b", is_default=True)]
    used = grafana.select_datasources()
    assert ("b", None) == (used.prometheus.uid, used.tempo)
    assert "a" == grafana.select_datasources(prometheus="a").prometheus.uid


def test_a_missing_prometheus_is_to_be_added(server: GrafanaServer, grafana: GrafanaClient) -> None:
    server.datasources = [datasource("tempo", "T1")]
    with pytest.raises(GrafanaError, match="no Prometheus datasource: add one under Connections"):
        grafana.select_datasources()
    with pytest.raises(GrafanaError, match="no tempo datasource has the name or uid T2"):
        server.datasources.append(datasource("prometheus", "P1"))
        grafana.select_datasources(tempo="T2")


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("denied", "doing"),
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
    server: GrafanaServer, grafana: GrafanaClient, denied: str, doing: str
) -> None:
    server.denied = {denied}
    with pytest.raises(
        GrafanaError, match=f"{doing}.*HTTP 403 .*give the service account of the token {denied}"
    ):
        grafana.push_dashboards({"a": board("a")}, "Inference")
        grafana.push_rules([group()], "Inference")


def test_a_permission_that_grafana_does_not_name_is_named_by_us(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    refused = Answer(403, {"message": "Access denied to save dashboard"})
    server.instead = lambda verb, path: refused if path == "/api/dashboards/db" else None
    with pytest.raises(
        GrafanaError, match=r"give the service account .*dashboards:create and dashboards:write"
    ):
        grafana.push_dashboards({"a": board("a")}, "Inference")


@pytest.mark.parametrize("token", ["", "glsa_wrong_secret", "admin:wrong-secret"])
def test_a_token_that_is_not_accepted_names_its_variable(server: GrafanaServer, token: str) -> None:
    with pytest.raises(GrafanaError, match=r"HTTP 401 .*into GRAFANA_TOKEN") as refused:
        GrafanaClient(server.url, token).select_datasources()
    assert "secret" not in str(refused.value)


def test_user_and_password_are_accepted() -> None:
    with GrafanaServer("admin:pässword:1") as server:
        assert {} == GrafanaClient(server.url, "admin:pässword:1\n").pull_dashboards(["a"])


def test_nothing_is_asked_for_where_everybody_may() -> None:
    with GrafanaServer("") as server:
        assert {} == GrafanaClient(server.url).pull_dashboards(["a"])


def test_a_token_with_a_line_break_in_it_is_not_shown(server: GrafanaServer) -> None:
    told = refusal_of(server.url, "glsa_very\nsecret")
    assert "GRAFANA_TOKEN holds a character" in told and "secret" not in told


@pytest.mark.parametrize(
    "url", ["http://admin:s3cr3t@{}/x?y=s3cr3t", "admin:s3cr3t@{}", "http://a:s3/cr3t@{}"]
)
def test_credentials_in_the_address_are_refused_and_not_shown(server: GrafanaServer, url: str) -> None:
    told = refusal_of(url.format("127.0.0.1"))
    assert "***@127.0.0.1" in told and "put USER:PASSWORD into GRAFANA_TOKEN" in told
    assert "s3" not in told


def test_what_somebody_else_says_is_repeated_without_the_token(server: GrafanaServer) -> None:
    server.instead = lambda verb, path: Answer(500, {"message": f"no {TOKEN} at http://u:p@db/x"})
    told = refusal_of(server.url)
    assert "HTTP 500 “no *** at http://***@db/x”; Grafana's log says more" in told


def test_words_are_cut_and_addresses_shown_without_their_query() -> None:
    assert "a b" == redact_secrets("a\n  b", ("",))
    assert redact_secrets("x" * 999, ()).endswith("x…")
    assert "https://g/x" == redact_url("https://g/x?token=1#a")
    assert "https://***@g/" == redact_url("https://u:p@g/?to=http://x")


def test_an_address_that_nothing_answers_at_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert f"{url}: could not connect: nothing answers there" in refusal_of(url)


def test_a_host_that_is_not_known_is_to_be_corrected() -> None:
    assert "the host name is not known" in refusal_of("http://grafana.invalid:3000")


@pytest.mark.parametrize("url", ["grafana:3000", "ftp://grafana", "http://", "http://grafana:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    assert f"{url} is no address" in refusal_of(url)


def test_tls_where_there_is_none_is_named(server: GrafanaServer) -> None:
    assert "TLS failure" in refusal_of(server.url.replace("http://", "https://"))


def test_no_answer_in_time_is_named(server: GrafanaServer) -> None:
    server.instead = late(1.0)
    assert "no answer within 0.2 s" in refusal_of(server.url, timeout=0.2)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, "<html>a page</html>"),
        Answer(200, {"status": "ok"}),
        Answer(200, []),
        Answer(404, "<html>not found</html>"),
        Answer(404, {"detail": "Not Found"}),
    ],
)
def test_what_is_no_grafana_is_told_so(server: GrafanaServer, answer: Answer) -> None:
    server.instead = lambda verb, path: answer
    assert "what answers there is no Grafana; give the address" in refusal_of(server.url)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Answer(502, BAD_GATEWAY), "HTTP 502; a proxy before Grafana says so: is Grafana behind it up?"),
        (Answer(401, "<html>401</html>"), "HTTP 401; a proxy before Grafana wants credentials of its own"),
        (
            Answer(302, "", {"Location": "https://sso.example/in?x=1"}),
            "it redirects to https://sso.example/in;",
        ),
        (Answer(429, {"message": "slow down"}), "HTTP 429 “slow down”; too many requests"),
    ],
)
def test_a_proxy_before_grafana_is_told_from_it(server: GrafanaServer, answer: Answer, told: str) -> None:
    server.instead = lambda verb, path: answer
    assert told in refusal_of(server.url)


def test_a_page_in_place_of_an_answer_later_on_is_told_so(
    server: GrafanaServer, grafana: GrafanaClient
) -> None:
    server.instead = lambda verb, path: Answer(200, "<html>signed out</html>")
    with pytest.raises(GrafanaError, match="could not read dashboard a: what answers there is no Grafana"):
        grafana.pull_dashboards(["a"])


def test_a_version_that_is_too_old_is_refused_and_a_hidden_one_is_not(server: GrafanaServer) -> None:
    server.version = "8.5.27"
    assert "Grafana 8.5.27 is too old: 9 or newer is needed" in refusal_of(server.url)
    server.version = ""
    assert "" == GrafanaClient(server.url, TOKEN).version


def test_a_grafana_below_a_sub_path_is_found_with_and_without_a_slash() -> None:
    with GrafanaServer(TOKEN, prefix="/monitoring/grafana") as server:
        assert ["12.4.1"] * 2 == [GrafanaClient(url, TOKEN).version for url in (server.url, f"{server.url}/")]


def test_without_grafana_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grafana_client", None)
    assert "pip install 'otel-infer[grafana]'" in refusal_of("http://127.0.0.1:3000")
