"""Pushes dashboards and alert rules to a running Grafana, pulls them, and compares them.

Idempotent: a resource that is up to date is not written again. Everything is read before anything is written.
A dashboard without the tag `otel-infer` is not ours, and is not replaced unless forced. Resources are
identified by their uid alone; a dashboard that was moved to another folder stays there. Only the classic API
under `/api` is used, which every version from 9 on has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from otel_infer._version import VERSION
from otel_infer.monitoring.grafana import diff
from otel_infer.monitoring.grafana.errors import TOKEN_VARIABLE, GrafanaError
from otel_infer.monitoring.grafana.session import GrafanaSession
from otel_infer.monitoring.names import TAG

__all__ = [
    "FOLDER",
    "TOKEN_VARIABLE",
    "DashboardDiff",
    "Datasource",
    "GrafanaChange",
    "GrafanaClient",
    "GrafanaError",
    "SelectedDatasources",
]

FOLDER = "otel-infer"
"""The uid of our folder; its title may differ."""

EXPRESSION_DATASOURCES = ("__expr__", "-100")
"""Datasource uids of steps in an alert rule that query no datasource."""

_SAVE_PERMISSIONS = "dashboards:create and dashboards:write"
_READ_RULES_PERMISSION, _WRITE_RULES_PERMISSION = "alert.provisioning:read", "alert.provisioning:write"

Action = Literal["created", "updated", "unchanged", "removed"]
DiffState = Literal["missing", "same", "differs"]


class GrafanaChange(NamedTuple):
    """A change of one resource: done, or planned in a dry run."""

    kind: str
    uid: str
    action: Action


class DashboardDiff(NamedTuple):
    """How a dashboard in Grafana compares with ours.

    `differing_paths`: where it differs, such as `panels[3].targets[0].expr`.
    """

    uid: str
    state: DiffState
    differing_paths: tuple[str, ...] = ()


class Datasource(NamedTuple):
    uid: str
    name: str
    type: str
    is_default: bool


class SelectedDatasources(NamedTuple):
    """The datasources to use. Without Tempo, exemplars link to no trace."""

    prometheus: Datasource
    tempo: Datasource | None


class _PlannedSave(NamedTuple):
    """A planned save of a dashboard: the action, the folder's uid, and the version to replace (None = new)."""

    uid: str
    dashboard: dict[str, Any]
    action: Action
    folder: str
    version: int | None


class GrafanaClient:
    """A running Grafana, version 9 or newer. All methods and the constructor raise `GrafanaError`.

    `token`: a service account's, or `user:password`; "" = anonymous. `timeout`: s, per request.
    """

    def __init__(self, url: str, token: str = "", *, timeout: float = 10.0) -> None:
        self._session = GrafanaSession(url, token, timeout)
        self._api = self._session.api
        self.version = self._session.version

    # ── datasources ──────────────────────────────────────────────────────────────────────────────────────────────

    def select_datasources(self, prometheus: str = "") -> SelectedDatasources:
        """Returns the datasources to use.

        `prometheus`: the name or uid of the Prometheus datasource; "" = Grafana's default, else the first by
        name, as for Tempo.
        """
        available = self._list_datasources()
        selected = self._select_datasource("prometheus", prometheus, available)
        if selected is None:
            raise GrafanaError(
                f"{self._session.display_url}: no Prometheus datasource: add one under Connections → Data sources"
            )
        return SelectedDatasources(selected, self._select_datasource("tempo", "", available))

    def _list_datasources(self) -> list[Datasource]:
        doing = "could not list datasources"
        listed = self._session.call_api(doing, "datasources:read", self._api.datasource.list_datasources)
        return [
            Datasource(source["uid"], source["name"], source["type"], bool(source.get("isDefault")))
            for source in listed
        ]

    def _select_datasource(
        self, kind: str, wanted: str, available: Iterable[Datasource]
    ) -> Datasource | None:
        matching = [
            source for source in available if source.type == kind and wanted in ("", source.uid, source.name)
        ]
        if wanted and not matching:
            raise GrafanaError(
                f"{self._session.display_url}: no {kind} datasource has the name or uid {wanted}"
            )
        return min(matching, key=lambda source: (not source.is_default, source.name), default=None)

    # ── dashboards ───────────────────────────────────────────────────────────────────────────────────────────────

    def push_dashboards(
        self, boards: Mapping[str, dict[str, Any]], folder: str, *, dry_run: bool = False, force: bool = False
    ) -> list[GrafanaChange]:
        """Saves dashboards (classic JSON by uid) and returns the changes.

        New dashboards go into our folder, which is created with the title `folder` if it is missing. `force`:
        replace dashboards that are not ours.
        """
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
        """Returns the dashboards that exist, by uid, as their files hold them."""
        stored = {uid: self._read_dashboard(uid) for uid in uids}
        return {uid: diff.stable_content(found["dashboard"]) for uid, found in stored.items() if found}

    def diff_dashboards(self, boards: Mapping[str, dict[str, Any]]) -> list[DashboardDiff]:
        """Compares each dashboard with the dashboard in Grafana that has its uid."""
        pulled = self.pull_dashboards(boards)
        return [self._compare_dashboard(uid, board, pulled.get(uid)) for uid, board in boards.items()]

    @staticmethod
    def _compare_dashboard(uid: str, board: dict[str, Any], stored: dict[str, Any] | None) -> DashboardDiff:
        if stored is None:
            return DashboardDiff(uid, "missing")
        expected = {**diff.stable_content(board), "uid": uid}
        paths = tuple(diff.find_differences(expected, {**stored, "uid": uid}))
        return DashboardDiff(uid, "differs" if paths else "same", paths)

    def _read_dashboard(self, uid: str) -> dict[str, Any] | None:
        doing = f"could not read dashboard {uid}"
        found = self._session.find_resource(
            doing, "dashboards:read", self._api.dashboard.get_dashboard, quote(uid, "")
        )
        return dict(found) if found else None

    def _plan_save(self, uid: str, board: dict[str, Any], force: bool) -> _PlannedSave:
        stored = self._read_dashboard(uid)
        if stored is None:
            return _PlannedSave(uid, board, "created", FOLDER, None)
        dashboard, meta = stored["dashboard"], stored.get("meta", {})
        same = self._compare_dashboard(uid, board, diff.stable_content(dashboard)).state == "same"
        if not same and TAG not in (dashboard.get("tags") or ()) and not force:
            raise GrafanaError(
                f"{self._session.display_url}: dashboard {uid} is not ours (no tag {TAG}): "
                "delete it, give it another uid, or force"
            )
        if not same and meta.get("provisioned"):
            raise GrafanaError(
                f"{self._session.display_url}: dashboard {uid} is provisioned from a file ({meta.get('provisionedExternalId')}): "
                "change that file, or take it out of Grafana's provisioning"
            )
        action: Action = "unchanged" if same else "updated"
        return _PlannedSave(uid, board, action, meta.get("folderUid", ""), dashboard.get("version"))

    def _save_dashboard(self, plan: _PlannedSave) -> None:
        """Saves a dashboard; the posted version makes Grafana refuse if it was changed after the read."""
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
        """Saves Grafana-managed rule groups in our folder and returns the changes.

        A group is `{"title", "interval": seconds, "rules": […]}`, as in the alerting provisioning API, each
        rule with its uid. A group is replaced: rules that it no longer contains are removed. Users cannot
        edit the rules in Grafana's pages; a rule that is paused there stays paused.
        """
        self._check_datasources(groups)
        has_folder = self._has_folder()
        stored = {
            group["title"]: self._read_rule_group(group["title"]) if has_folder else None for group in groups
        }
        changes = [] if has_folder or not groups else [self._create_folder(folder, dry_run)]
        for group in groups:
            before = stored[group["title"]]
            action = _rule_group_action(group, before)
            if action != "unchanged" and not dry_run:
                self._replace_rule_group(group, before)
            changes.append(GrafanaChange("rule group", group["title"], action))
            removed = sorted(_rules_by_uid(before).keys() - _rules_by_uid(group).keys())
            changes.extend(GrafanaChange("alert rule", uid, "removed") for uid in removed)
        return changes

    def _check_datasources(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raises if a rule queries a missing datasource. Grafana accepts such a rule, which never fires."""
        known = {*EXPRESSION_DATASOURCES, *(source.uid for source in self._list_datasources())}
        for group in groups:
            for rule in group["rules"]:
                for query in rule.get("data", ()):
                    if query["datasourceUid"] not in known:
                        raise GrafanaError(
                            f"{self._session.display_url}: alert rule {rule['uid']} queries datasource "
                            f"{query['datasourceUid']}, which does not exist: add it or name another"
                        )

    def _read_rule_group(self, title: str) -> dict[str, Any] | None:
        doing = f"could not read rule group {title}"
        call = self._api.alertingprovisioning.get_rule_group
        found = self._session.find_resource(doing, _READ_RULES_PERMISSION, call, FOLDER, quote(title, ""))
        return dict(found) if found else None

    def _replace_rule_group(self, group: dict[str, Any], stored: dict[str, Any] | None) -> None:
        title, before = group["title"], _rules_by_uid(stored)
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


def _rule_group_action(group: dict[str, Any], stored: dict[str, Any] | None) -> Action:
    if stored is None:
        return "created"
    rules, stored_rules = _rules_by_uid(group), _rules_by_uid(stored)
    same = (
        group["interval"] == stored["interval"]
        and rules.keys() == stored_rules.keys()
        and all(diff.is_same_rule(rule, stored_rules[uid]) for uid, rule in rules.items())
    )
    return "unchanged" if same else "updated"
