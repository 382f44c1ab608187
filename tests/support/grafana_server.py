"""A strict stand-in for Grafana's HTTP API on loopback, for tests without a Grafana.

with GrafanaServer(token="glsa_x") as grafana:
    ...
    assert [("POST", "/api/folders")] == grafana.writes

Source of each shape:
- health, frontend settings, folders, datasources, dashboards by uid: grafana.com/docs, "HTTP API", pages `other`, `folder`,
  `data_source`, `dashboard` of v9.4 to v13.3 (`api-legacy` there).
- refusals, their texts and status: grafana/grafana, `pkg/services/dashboards/errors.go`,
  `pkg/api/apierrors/{dashboard,folder}.go`, `pkg/api/dashboard.go` (v10 and v12 for 412 and 406, the one with
  `saveDashboardViaK8s` of v13 for 409 and the refusal of v2 JSON), `pkg/services/dashboards/database/database.go` (versions).
- 403 for missing objects: grafana/grafana#109608, and `acimpl/accesscontrol.go` (wildcard scopes are looked at first).
- permissions of a token: grafana/grafana#57538.
- 401: `pkg/services/authn/clients` as answered by 13.0; 403: `pkg/services/accesscontrol/middleware.go`.
- rule groups: docs page `alerting_provisioning` v12.4, `pkg/services/ngalert/api/{api_provisioning,compat}.go`,
  `ngalert/provisioning/alert_rules.go` (409 and its words), `ngalert/models` (validation, defaults added to a query).
"""

from __future__ import annotations

import base64
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote

Json = dict[str, Any]
PROVISIONED = "Cannot save provisioned dashboard"
HOLD = "keep_firing_for"
V2 = (
    "dashboard appears to be in v2 format. Please use the /apis/dashboard.grafana.app/v2 API OR it should include a "
    "object wrapper with an explicit 'apiVersion' and move the body into a 'spec' element"
)
CHANGED = "The dashboard has been changed by someone else"
NAME_EXISTS = "A dashboard with the same name in the folder already exists"
BAD_GATEWAY = "<html><head><title>502 Bad Gateway</title></head><body>nginx/1.25.3</body></html>"


class Answer(NamedTuple):
    """`body`: JSON, or a page."""

    status: int
    body: Any
    headers: Json = {}  # noqa: RUF012  # never changed


class Refusal(Exception):
    """An error response of Grafana."""

    def __init__(self, code: int, message: str, /, **more: Any) -> None:
        self.answer = Answer(code, {"message": message, **more})


class GrafanaServer:
    """`token`: a service account's, or `user:password`. `permissions`: all, except those removed."""

    def __init__(self, token: str = "glsa_stand_in", version: str = "12.4.1", prefix: str = "") -> None:
        self.token, self.version, self.prefix = token, version, prefix
        self.dashboards: dict[str, Json] = {}
        self.folders: dict[str, Json] = {}
        self.groups: dict[tuple[str, str], Json] = {}
        self.datasources: list[Json] = [
            datasource("prometheus", "P1", is_default=True),
            datasource("tempo", "T1"),
        ]
        self.denied: set[str] = set()
        self.is_admin = True
        """Whether the token is an administrator's; other tokens get 403 for a missing folder."""
        self.provenance = "api"
        self.requests: list[tuple[str, str]] = []
        self.instead: Callable[[str, str], Answer | None] = lambda verb, path: None
        """Returns a response in place of Grafana's, or None. Called before each request."""

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [(verb, path) for verb, path in self.requests if verb != "GET"]

    @property
    def is_13(self) -> bool:
        return int(self.version.partition(".")[0]) >= 13

    def __enter__(self) -> GrafanaServer:
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}{self.prefix}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def put_dashboard(self, board: Json, folder: str = "", **meta: Any) -> None:
        """Saves a dashboard, as another user would in Grafana's pages."""
        version = self.dashboards.get(board["uid"], {"dashboard": {"version": 0}})["dashboard"]["version"] + 1
        self.dashboards[board["uid"]] = {
            "dashboard": {**json.loads(json.dumps(board)), "id": 7, "version": version},
            "meta": {"folderUid": folder, "provisioned": False, "version": version, "canSave": True, **meta},
        }

    # ── responses ────────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, verb: str, path: str, headers: Json, body: bytes) -> Answer:
        """Returns the response; never raises."""
        self.requests.append((verb, path))
        instead = self.instead(verb, path)
        if instead is not None:
            return instead
        path = path.removeprefix(self.prefix)
        try:
            if path == "/api/health":
                return Answer(200, {"commit": "0", "database": "ok", "version": self.version})
            self._authenticate(headers.get("Authorization", ""))
            for wanted, pattern, permission, act in ROUTES:
                found = re.fullmatch(pattern, path)
                if wanted == verb and found:
                    self._authorize(permission)
                    named = [unquote(part) for part in found.groups()]
                    return act(self, *named, *([_bound(headers, body)] if body else []))
        except Refusal as refusal:
            return refusal.answer
        if not path.startswith("/api/"):
            return Answer(404, "<!DOCTYPE html><title>Grafana</title>")
        return Answer(404, {"message": "Not found"})

    def _authenticate(self, sent: str) -> None:
        basic = ":" in self.token
        encoded = base64.b64encode(self.token.encode()).decode()
        if sent == (f"Basic {encoded}" if basic else f"Bearer {self.token}") or not (self.token or sent):
            return
        about = {"extra": None, "statusCode": 401, "traceID": ""}
        if not sent:
            raise Refusal(401, "Unauthorized", messageId="auth.unauthorized", **about)
        if sent.startswith("Basic "):
            raise Refusal(401, "Invalid username or password", messageId="password-auth.failed", **about)
        raise Refusal(401, "Invalid API key", messageId="api-key.invalid", **about)

    def _authorize(self, permission: str) -> None:
        if permission in self.denied:
            raise _denial(permission)

    def _absent(self, permission: str, refusal: Refusal) -> Refusal:
        """Returns 403 or 404: Grafana looks an object up before it checks scopes without a wildcard."""
        return refusal if self.is_admin else _denial(permission)

    def _permissions(self) -> Answer:
        permitted = {permission: ["*"] for _, _, permission, _ in ROUTES if permission}
        return Answer(200, {one: scopes for one, scopes in permitted.items() if one not in self.denied})

    def _settings(self) -> Answer:
        build = {"version": self.version, "commit": "0", "buildstamp": 0, "env": "production"}
        return Answer(200, {"appSubUrl": self.prefix, "buildInfo": build, "datasources": {}})

    def _list_datasources(self) -> Answer:
        return Answer(200, self.datasources)

    # ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _get_folder(self, uid: str) -> Answer:
        if uid not in self.folders:
            raise self._absent("folders:read", Refusal(404, "folder not found", status="not-found"))
        return Answer(200, self.folders[uid])

    def _create_folder(self, posted: Json) -> Answer:
        if not posted.get("title"):
            raise Refusal(400, "folder title cannot be empty")
        uid = posted.get("uid") or "generated"
        _check_uid(uid)
        if uid in self.folders:
            raise Refusal(409, "a folder/dashboard with the same uid already exists")
        if not self.is_13 and posted["title"] in [one["title"] for one in self.folders.values()]:
            raise Refusal(409, "a folder with the same name already exists in the current location")
        self.folders[uid] = {"id": 1, "uid": uid, "title": posted["title"], "version": 1, "canSave": True}
        return Answer(200, self.folders[uid])

    # ── dashboards ───────────────────────────────────────────────────────────────────────────────────────────────

    def _get_dashboard(self, uid: str) -> Answer:
        if uid not in self.dashboards:
            raise self._absent("dashboards:read", Refusal(404, "Dashboard not found"))
        found = self.dashboards[uid]
        version = found["meta"].get("apiVersion", "")
        if version.startswith("v2"):
            use = f"/apis/dashboard.grafana.app/{version}/namespaces/default/dashboards/{uid}"
            raise Refusal(406, f"dashboard api version not supported, use {use} instead")
        return Answer(200, found)

    def _save_dashboard(self, posted: Json) -> Answer:
        board, there = posted.get("dashboard"), None
        if not isinstance(board, dict) or "folderId" in posted:
            raise Refusal(400, "bad request data")
        if board.keys() & {"elements", "layout", "spec", "apiVersion"}:
            raise Refusal(400, V2)
        if not board.get("title"):
            raise Refusal(400, "Dashboard title cannot be empty", status="empty-name")
        if len(posted.get("message", "")) > 500:
            raise Refusal(400, "message too long, max 500 characters")
        uid, folder = board.get("uid") or "generated", posted.get("folderUid", "")
        _check_uid(uid)
        if folder and folder not in self.folders:
            raise Refusal(400, "folder not found")
        there = self.dashboards.get(uid)
        if there is not None:
            self._check_version(there, board, posted)
        elif not self.is_13 and not posted.get("overwrite"):
            self._check_name(board["title"], folder)
        self.put_dashboard({**board, "uid": uid}, folder)
        version = self.dashboards[uid]["dashboard"]["version"]
        return Answer(
            200, {"id": 7, "uid": uid, "status": "success", "version": version, "folderUid": folder}
        )

    def _check_version(self, there: Json, board: Json, posted: Json) -> None:
        if there["meta"]["provisioned"]:
            raise Refusal(400, PROVISIONED)
        if posted.get("overwrite") or board.get("version", 0) == there["dashboard"]["version"]:
            return
        if self.is_13:
            raise Refusal(409, "Dashboard already exists. Use overwrite flag to update.")
        raise Refusal(412, CHANGED, status="version-mismatch")

    def _check_name(self, title: str, folder: str) -> None:
        for one in self.dashboards.values():
            if (one["dashboard"]["title"], one["meta"]["folderUid"]) == (title, folder):
                raise Refusal(412, NAME_EXISTS, status="name-exists")

    # ── alert rules ──────────────────────────────────────────────────────────────────────────────────────────────

    def _get_group(self, folder: str, group: str) -> Answer:
        if (folder, group) not in self.groups:
            raise Refusal(
                404, "Not found", messageId="alerting.alert-rule.notFound", statusCode=404, traceID=""
            )
        return Answer(200, self.groups[folder, group])

    def _put_group(self, folder: str, group: str, posted: Json) -> Answer:
        if folder not in self.folders:
            raise Refusal(400, "invalid alert rule: folder does not exist")
        interval = posted.get("interval")
        if not isinstance(interval, int) or interval <= 0 or interval % 10:
            words = f"interval ({interval}s) should be non-zero and divided exactly by scheduler interval: 10"
            raise Refusal(400, f"invalid alert rule: {words}")
        before = self.groups.get((folder, group), {"rules": []})["rules"]
        if before and self.provenance != "api":
            words = f"cannot update with provided provenance 'api', needs '{self.provenance}'"
            raise Refusal(409, words, messageId="alerting.provenanceMismatch", statusCode=409, traceID="")
        rules = [_stored_rule(rule, folder, group) for rule in posted.get("rules", before)]
        if int(self.version.partition(".")[0]) < 12:
            rules = [{key: value for key, value in rule.items() if key != HOLD} for rule in rules]
        if len({rule["title"] for rule in rules}) < len(rules):
            raise Refusal(400, "a conflicting alert rule is found: rule title under the same organisation")
        stored = {"title": group, "folderUid": folder, "interval": interval, "rules": rules}
        self.groups[folder, group] = stored
        return Answer(200, {**posted, "title": group, "folderUid": folder})


ROUTES: tuple[tuple[str, str, str, Callable[..., Answer]], ...] = (
    ("GET", "/api/frontend/settings", "", GrafanaServer._settings),
    ("GET", "/api/access-control/user/permissions", "", GrafanaServer._permissions),
    ("GET", "/api/datasources", "datasources:read", GrafanaServer._list_datasources),
    ("GET", "/api/folders/([^/]+)", "folders:read", GrafanaServer._get_folder),
    ("POST", "/api/folders", "folders:create", GrafanaServer._create_folder),
    ("GET", "/api/dashboards/uid/([^/]+)", "dashboards:read", GrafanaServer._get_dashboard),
    (
        "POST",
        "/api/dashboards/db",
        "any of dashboards:create, dashboards:write",
        GrafanaServer._save_dashboard,
    ),
    (
        "GET",
        "/api/v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)",
        "alert.provisioning:read",
        GrafanaServer._get_group,
    ),
    (
        "PUT",
        "/api/v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)",
        "alert.provisioning:write",
        GrafanaServer._put_group,
    ),
)


def datasource(kind: str, uid: str, name: str = "", is_default: bool = False) -> Json:
    """Returns a datasource as `GET /api/datasources` lists it."""
    return {
        "id": 1,
        "orgId": 1,
        "uid": uid,
        "name": name or kind.title(),
        "type": kind,
        "access": "proxy",
        "url": f"http://{kind}:9090",
        "basicAuth": False,
        "isDefault": is_default,
        "jsonData": {},
        "readOnly": True,
    }


def _denial(permission: str) -> Refusal:
    words = "You'll need additional permissions to perform this action. Permissions needed: " + permission
    return Refusal(403, words, title="Access denied", accessErrorId="ACE5748294812")


def _check_uid(uid: str) -> None:
    if len(uid) > 40:
        raise Refusal(400, "uid too long, max 40 characters")
    if not re.fullmatch("[a-zA-Z0-9_-]+", uid):
        raise Refusal(400, "uid contains illegal characters")


def _bound(headers: Json, body: bytes) -> Json:
    """Returns the posted JSON. Grafana accepts JSON only with its content type."""
    try:
        posted = json.loads(body)
    except ValueError:
        posted = None
    if "application/json" not in headers.get("Content-Type", "") or not isinstance(posted, dict):
        raise Refusal(400, "bad request data")
    return posted


def _check_rule(rule: Json) -> None:
    _check_uid(rule["uid"])
    wrong = ""
    if not rule.get("title"):
        wrong = "title is empty"
    elif not rule.get("data"):
        wrong = "no queries or expressions are found"
    elif rule.get("condition") not in [query["refId"] for query in rule["data"]]:
        wrong = f"condition {rule.get('condition')} does not exist"
    elif rule.get("noDataState") not in ("NoData", "OK", "Alerting", "KeepLast"):
        wrong = f"unknown NoData state option {rule.get('noDataState')}"
    elif rule.get("execErrState") not in ("Error", "OK", "Alerting", "KeepLast"):
        wrong = f"unknown Error state option {rule.get('execErrState')}"
    if wrong:
        raise Refusal(400, f"invalid alert rule: {wrong}")


def _stored_rule(rule: Json, folder: str, group: str) -> Json:
    """Returns a rule as it is read back: durations rewritten, defaults added to each query."""
    _check_rule(rule)
    data = [
        {
            "queryType": "",
            "relativeTimeRange": {"from": 0, "to": 0},
            **query,
            "model": {"intervalMs": 1000, "maxDataPoints": 43200, **query["model"]},
        }
        for query in rule["data"]
    ]
    given = {key: value for key, value in rule.items() if value or key not in ("labels", "annotations")}
    return {
        "id": 3,
        "orgID": 1,
        "updated": "2026-01-01T00:00:00Z",
        "isPaused": False,
        **given,
        "folderUID": folder,
        "ruleGroup": group,
        "data": data,
        **{key: _duration(rule.get(key, "0s")) for key in ("for", HOLD)},
    }


def _duration(text: str) -> str:
    """Returns a duration as Prometheus' `model.Duration` writes it."""
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    left = sum(int(count) * units[unit] for count, unit in re.findall(r"(\d+)([dhms])", text))
    written = ""
    for unit, seconds in units.items():
        count, left = divmod(left, seconds)
        written += f"{count}{unit}" if count else ""
    return written or "0s"


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a client that disconnected."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _handler(grafana: GrafanaServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            path = self.path.partition("?")[0]
            answer = grafana.answer(self.command, path, dict(self.headers.items()), body)
            is_page = isinstance(answer.body, str)
            content = answer.body.encode() if is_page else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            self.send_header("Content-Type", "text/html" if is_page else "application/json")
            self.send_header("Content-Length", str(len(content)))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    for verb in ("POST", "PUT", "DELETE", "PATCH"):
        setattr(Handler, f"do_{verb}", Handler.do_GET)
    return Handler


def late(seconds: float) -> Callable[[str, str], None]:
    """Returns a value for `instead` that delays every response."""

    def wait(verb: str, path: str) -> None:
        time.sleep(seconds)

    return wait
