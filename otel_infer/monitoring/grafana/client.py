"""Dashboards and alert rules in a running Grafana: put there, fetched, compared.

Idempotent: what is there as it should be is not written again. All is read before anything is written, and a dashboard
that is not ours (no tag `otel-infer`) is refused unless forced. Things are known by their uid alone; dashboards that were
moved to another folder stay there. Only the classic API under `/api` is used: every version from 9 on has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from otel_infer._version import VERSION
from otel_infer.monitoring.grafana import diff
from otel_infer.monitoring.grafana.errors import TOKEN_VARIABLE, GrafanaError
from otel_infer.monitoring.grafana.session import GrafanaSession

__all__ = [
    "FOLDER",
    "TAG",
    "TOKEN_VARIABLE",
    "DashboardDiff",
    "Datasource",
    "GrafanaChange",
    "GrafanaClient",
    "GrafanaError",
    "SelectedDatasources",
]

TAG = "otel-infer"
"""What a dashboard that we made is tagged with."""
FOLDER = "otel-infer"
"""The uid of our folder, whatever its title."""

EXPRESSION_DATASOURCES = ("__expr__", "-100")
"""What a step of an alert rule that asks no datasource names in place of one."""

_SAVE_PERMISSIONS = "dashboards:create and dashboards:write"
_READ_RULES_PERMISSION, _WRITE_RULES_PERMISSION = "alert.provisioning:read", "alert.provisioning:write"

Action = Literal["created", "updated", "unchanged", "removed"]
DiffState = Literal["missing", "same", "differs"]


class GrafanaChange(NamedTuple):
    """What was done with one thing, or would be done in a dry run."""

    kind: str
    uid: str
    action: Action


class DashboardDiff(NamedTuple):
    """How a dashboard in Grafana compares. `paths`: where it differs, such as `panels[3].targets[0].expr`."""

    uid: str
    state: DiffState
    differing_paths: tuple[str, ...] = ()


class Datasource(NamedTuple):
    uid: str
    name: str
    type: str
    is_default: bool


class SelectedDatasources(NamedTuple):
    """Those that will be used. Without Tempo, exemplars lead nowhere."""

    prometheus: Datasource
    tempo: Datasource | None


class _PlannedSave(NamedTuple):
    """A dashboard, what is to be done with it, where, and instead of which version."""

    uid: str
    dashboard: dict[str, Any]
    action: Action
    folder: str
    version: int | None


class GrafanaClient:
    """A running Grafana of version 9 or newer; everything raises `Refused`, and so does making one.

    `token`: of a service account, or `user:password`, or nothing where everybody may. `timeout`: s, for each request.
    """

    def __init__(self, url: str, token: str = "", *, timeout: float = 10.0) -> None:
        self._session = GrafanaSession(url, token, timeout)
        self._api = self._session.api
        self.version = self._session.version

    # ── datasources ──────────────────────────────────────────────────────────────────────────────────────────────

    def select_datasources(self, prometheus: str = "", tempo: str = "") -> SelectedDatasources:
        """Those of this name or uid, else Grafana's default, else the first by name."""
        there = self._list_datasources()
        found = self._select_datasource("prometheus", prometheus, there)
        if found is None:
            raise GrafanaError(
                f"{self._session.display_url}: no Prometheus datasource: add one under Connections → Data sources"
            )
        return SelectedDatasources(found, self._select_datasource("tempo", tempo, there))

    def _list_datasources(self) -> list[Datasource]:
        doing = "could not list datasources"
        there = self._session.call_api(doing, "datasources:read", self._api.datasource.list_datasources)
        return [Datasource(one["uid"], one["name"], one["type"], bool(one.get("isDefault"))) for one in there]

    def _select_datasource(self, kind: str, wanted: str, there: Iterable[Datasource]) -> Datasource | None:
        fitting = [one for one in there if one.type == kind and wanted in ("", one.uid, one.name)]
        if wanted and not fitting:
            raise GrafanaError(
                f"{self._session.display_url}: no {kind} datasource has the name or uid {wanted}"
            )
        return min(fitting, key=lambda one: (not one.is_default, one.name), default=None)

    # ── dashboards ───────────────────────────────────────────────────────────────────────────────────────────────

    def push_dashboards(
        self, boards: Mapping[str, dict[str, Any]], folder: str, *, dry_run: bool = False, force: bool = False
    ) -> list[GrafanaChange]:
        """Puts classic JSON by uid; new ones into our folder, which gets the title `folder` if it is not there."""
        plans = [self._plan_save(uid, board, force) for uid, board in boards.items()]
        changes = []
        if any(plan.action == "created" for plan in plans) and not self._has_folder():
            changes.append(self._create_folder(folder, dry_run))
        for plan in plans:
            if plan.action != "unchanged" and not dry_run:
                self._save_dashboard(plan)
            changes.append(GrafanaChange("dashboard", plan.uid, plan.action))
        return changes

    def pull_dashboards(self, uids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Those of them that are there, as files hold them."""
        found = {uid: self._read_dashboard(uid) for uid in uids}
        return {uid: diff.stable_content(there["dashboard"]) for uid, there in found.items() if there}

    def diff_dashboards(self, boards: Mapping[str, dict[str, Any]]) -> list[DashboardDiff]:
        """How each compares with the one of its uid in Grafana."""
        pulled = self.pull_dashboards(boards)
        return [self._compare_dashboard(uid, board, pulled.get(uid)) for uid, board in boards.items()]

    @staticmethod
    def _compare_dashboard(uid: str, board: dict[str, Any], there: dict[str, Any] | None) -> DashboardDiff:
        if there is None:
            return DashboardDiff(uid, "missing")
        ours = {**diff.stable_content(board), "uid": uid}
        paths = tuple(diff.find_differences(ours, {**there, "uid": uid}))
        return DashboardDiff(uid, "differs" if paths else "same", paths)

    def _read_dashboard(self, uid: str) -> dict[str, Any] | None:
        doing = f"could not read dashboard {uid}"
        found = self._session.find_resource(
            doing, "dashboards:read", self._api.dashboard.get_dashboard, quote(uid, "")
        )
        return dict(found) if found else None

    def _plan_save(self, uid: str, board: dict[str, Any], force: bool) -> _PlannedSave:
        there = self._read_dashboard(uid)
        if there is None:
            return _PlannedSave(uid, board, "created", FOLDER, None)
        dashboard, about = there["dashboard"], there.get("meta", {})
        same = self._compare_dashboard(uid, board, diff.stable_content(dashboard)).state == "same"
        if not same and TAG not in (dashboard.get("tags") or ()) and not force:
            raise GrafanaError(
                f"{self._session.display_url}: dashboard {uid} is not ours (no tag {TAG}): "
                "delete it or give it another uid, or force"
            )
        if not same and about.get("provisioned"):
            raise GrafanaError(
                f"{self._session.display_url}: dashboard {uid} is made by a file ({about.get('provisionedExternalId')}): "
                "change that file, or take it out of Grafana's provisioning"
            )
        action: Action = "unchanged" if same else "updated"
        return _PlannedSave(uid, board, action, about.get("folderUid", ""), dashboard.get("version"))

    def _save_dashboard(self, plan: _PlannedSave) -> None:
        """Never over what somebody has saved since it was read: the version says which one is meant."""
        version = {} if plan.version is None else {"version": plan.version}
        posted = {
            "dashboard": {**diff.stable_content(plan.dashboard), "uid": plan.uid, **version},
            "folderUid": plan.folder,
            "overwrite": False,
            "message": f"otel-infer {VERSION}",
        }
        doing = f"could not save dashboard {plan.uid}"
        self._session.call_api(doing, _SAVE_PERMISSIONS, self._api.dashboard.update_dashboard, posted)

    # ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _has_folder(self) -> bool:
        doing = f"could not look for folder {FOLDER}"
        return bool(self._session.find_resource(doing, "folders:read", self._api.folder.get_folder, FOLDER))

    def _create_folder(self, title: str, dry_run: bool) -> GrafanaChange:
        if not dry_run:
            doing = f"could not create folder {title}"
            self._session.call_api(doing, "folders:create", self._api.folder.create_folder, title, FOLDER)
        return GrafanaChange("folder", FOLDER, "created")

    # ── alert rules ──────────────────────────────────────────────────────────────────────────────────────────────

    def push_rules(
        self, groups: Sequence[dict[str, Any]], folder: str, *, dry_run: bool = False
    ) -> list[GrafanaChange]:
        """Puts Grafana-managed rule groups into our folder: `{"title", "interval": seconds, "rules": […]}`, as the
        alerting provisioning API has them, each rule with its uid. A group is replaced: rules that are no longer in it
        are removed. They cannot be edited in Grafana's pages; whether a rule is paused is left as it is there.
        """
        self._check_datasources(groups)
        has_folder = self._has_folder()
        there = {
            group["title"]: self._read_rule_group(group["title"]) if has_folder else None for group in groups
        }
        changes = [] if has_folder or not groups else [self._create_folder(folder, dry_run)]
        for group in groups:
            found = there[group["title"]]
            action = _rule_group_action(group, found)
            if action != "unchanged" and not dry_run:
                self._replace_rule_group(group, found)
            changes.append(GrafanaChange("rule group", group["title"], action))
            gone = sorted(_rules_by_uid(found).keys() - _rules_by_uid(group).keys())
            changes.extend(GrafanaChange("alert rule", uid, "removed") for uid in gone)
        return changes

    def _check_datasources(self, groups: Iterable[dict[str, Any]]) -> None:
        """Grafana takes a rule that asks a datasource it has not, and the rule then never fires."""
        known = {*EXPRESSION_DATASOURCES, *(one.uid for one in self._list_datasources())}
        for group in groups:
            for rule in group["rules"]:
                for query in rule.get("data", ()):
                    if query["datasourceUid"] not in known:
                        raise GrafanaError(
                            f"{self._session.display_url}: alert rule {rule['uid']} asks datasource "
                            f"{query['datasourceUid']}, which is not there: add it, or name another"
                        )

    def _read_rule_group(self, title: str) -> dict[str, Any] | None:
        doing = f"could not read rule group {title}"
        call = self._api.alertingprovisioning.get_rule_group
        found = self._session.find_resource(doing, _READ_RULES_PERMISSION, call, FOLDER, quote(title, ""))
        return dict(found) if found else None

    def _replace_rule_group(self, group: dict[str, Any], there: dict[str, Any] | None) -> None:
        title, before = group["title"], _rules_by_uid(there)
        rules = [
            {
                **rule,
                "folderUID": FOLDER,
                "ruleGroup": title,
                "isPaused": bool(before.get(rule["uid"], rule).get("isPaused")),
            }
            for rule in group["rules"]
        ]
        posted = {"title": title, "folderUid": FOLDER, "interval": group["interval"], "rules": rules}
        doing = f"could not save rule group {title}"
        call = self._api.alertingprovisioning.update_rule_group
        self._session.call_api(doing, _WRITE_RULES_PERMISSION, call, FOLDER, quote(title, ""), posted)


def _rules_by_uid(group: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {rule["uid"]: rule for rule in (group or {}).get("rules") or ()}


def _rule_group_action(group: dict[str, Any], there: dict[str, Any] | None) -> Action:
    if there is None:
        return "created"
    ours, theirs = _rules_by_uid(group), _rules_by_uid(there)
    same = (
        group["interval"] == there["interval"]
        and ours.keys() == theirs.keys()
        and all(diff.is_same_rule(rule, theirs[uid]) for uid, rule in ours.items())
    )
    return "unchanged" if same else "updated"
