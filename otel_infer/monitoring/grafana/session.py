"""A connection to a Grafana, through grafana-client. Its errors are `GrafanaError`, without credentials."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Container
from typing import Any
from urllib.parse import SplitResult, urlsplit

from otel_infer._version import VERSION
from otel_infer.monitoring.grafana.errors import (
    NOT_GRAFANA,
    TOKEN_VARIABLE,
    GrafanaError,
    error_status,
    explain_error,
    redact_url,
)

MIN_MAJOR_VERSION = 9
"""The first major version with this API: folders and dashboards by uid, alert rules by group."""


class GrafanaSession:
    """A connection, opened and checked on construction.

    `token`: a service account's, or `user:password`; "" = anonymous. `timeout`: s, per request.
    """

    def __init__(self, url: str, token: str, timeout: float) -> None:
        token = token.strip()
        self.display_url = redact_url(url)
        self._timeout = timeout
        # Basic authentication sends USER:PASSWORD in base64, which an error page may echo.
        self._secrets = (token, token.partition(":")[2], base64.b64encode(token.encode()).decode())
        self.api = self._create_client(url, token)
        # A redirect turns a POST into a GET, and makes a login page look like an answer.
        self.api.client.s.max_redirects = 0
        self.version = self._read_version()

    def call_api(self, doing: str, needs: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of a call; raises `GrafanaError` with an explanation.

        `doing`: the failed action for the message. `needs`: the permissions that the call requires.
        """
        try:
            answer = call(*arguments)
        except Exception as error:  # grafana-client does not wrap the errors of its HTTP library
            kind = _ERRORS_BY_STATUS.get(error_status(error), GrafanaError)
            why = explain_error(error, needs, self._secrets, self._timeout)
        else:
            if isinstance(answer, dict | list):
                return answer
            kind, why = GrafanaError, NOT_GRAFANA
        raise kind(f"{self.display_url}: {doing}: {why}")

    def find_resource(self, doing: str, needs: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of a call; None if Grafana has no such resource. `needs`: one permission."""
        try:
            return self.call_api(doing, needs, call, *arguments)
        except _NotFoundError:
            return None
        except _ForbiddenError:
            # Without admin rights, a missing resource gives 403: https://github.com/grafana/grafana/issues/109608
            if needs in self._read_permissions():
                return None
            raise

    def _read_permissions(self) -> Container[str]:
        """Returns the permissions of the credential, for which grafana-client has no call."""
        doing, path = "could not read permissions", "/access-control/user/permissions"
        permitted: Container[str] = self.call_api(doing, "any role", self.api.client.GET, path)
        return permitted

    def _create_client(self, url: str, token: str) -> Any:
        try:
            from grafana_client import GrafanaApi
        except ImportError:
            raise GrafanaError(
                "grafana-client is not installed: pip install 'otel-infer[grafana]' in a separate environment, "
                "because its HTTP library replaces urllib3"
            ) from None
        parts, port = self._parse_url(url)
        if not re.fullmatch(r"[!-~]*", token) and ":" not in token:
            raise GrafanaError(f"{TOKEN_VARIABLE} holds a character that no token has: copy it again")
        user, separator, password = token.partition(":")
        # `from_url` loses the end of a sub-path and the brackets of an IPv6 address.
        return GrafanaApi(
            (user.encode(), password.encode()) if separator else token or None,
            protocol=parts.scheme,
            host=f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname,
            port=port,
            url_path_prefix=f"{parts.path.strip('/')}/".lstrip("/"),
            timeout=self._timeout,
            user_agent=f"otel-infer/{VERSION}",
        )

    def _parse_url(self, url: str) -> tuple[SplitResult, int | None]:
        if "@" in url:
            raise GrafanaError(
                f"{self.display_url} holds credentials, which all users of this machine can read: "
                f"put USER:PASSWORD into {TOKEN_VARIABLE}"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as wrong:
            raise GrafanaError(f"{self.display_url} is not a valid address: {wrong}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GrafanaError(
                f"{self.display_url} is not a valid address: give http:// or https://, then the host"
            )
        return parts, port

    def _read_version(self) -> str:
        health = self.find_resource("could not connect", "any role", self.api.health.check)
        if not isinstance(health, dict) or not health.keys() & {"version", "database"}:
            raise GrafanaError(f"{self.display_url}: could not connect: {NOT_GRAFANA}")
        version = str(health.get("version") or "")  # an administrator can hide it
        major = re.match(r"\d+", version)
        if major and int(major[0]) < MIN_MAJOR_VERSION:
            raise GrafanaError(
                f"{self.display_url}: Grafana {version} is too old: {MIN_MAJOR_VERSION} or newer is needed"
            )
        return version


class _NotFoundError(GrafanaError):
    """Grafana answered 404: the resource does not exist."""


class _ForbiddenError(GrafanaError):
    """Grafana answered 403: the credential lacks the permission, or the resource does not exist."""


_ERRORS_BY_STATUS: dict[int, type[GrafanaError]] = {403: _ForbiddenError, 404: _NotFoundError}
