"""Explains errors of Grafana and of the connection to it, with a remedy for each.

The message of Grafana is quoted if there is one, because it names the missing permission most precisely.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterable
from typing import Any

from otel_infer.config.redaction import mask_secrets, select_secrets

TOKEN_VARIABLE = "GRAFANA_TOKEN"
"""The environment variable of the credential; the command line reads it, this module only names it."""

MAX_QUOTED_CHARS = 200

NOT_GRAFANA = "the server there is not Grafana; give the address of Grafana's web pages, with its sub-path if it has one"
_SET_TOKEN = f"put the token of a service account, or USER:PASSWORD, into {TOKEN_VARIABLE}"
_CONFLICT = "it exists already, or was changed meanwhile: review it and push again"
_SEE_LOG = "see Grafana's log"


class GrafanaError(Exception):
    """A request that Grafana or the connection refused.

    The message names a remedy and holds no credential.
    """


def redact_url(url: str) -> str:
    """Returns the address without its credentials and its query."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    _, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{'***@' if at else ''}{re.split('[?#]', host)[0]}"


def redact_secrets(text: str, secrets: Iterable[str]) -> str:
    """Returns a foreign message without our credentials, on one line.

    It is cut to `MAX_QUOTED_CHARS` characters.
    """
    text = " ".join(mask_secrets(text, select_secrets(secrets)).split())
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "…"


def explain_error(error: Exception, needs: str, secrets: Iterable[str], timeout: float) -> str:
    """Returns what an error of grafana-client means, and what to do.

    `needs`: the permissions that the call requires. `timeout`: s.
    """
    status = getattr(error, "status_code", None)
    if status is None:
        return _explain_transport_error(error, secrets)
    if status == 0:  # grafana-client reports every kind of timeout so
        return f"no answer within {timeout:g} s; check that Grafana and every proxy before it are up"
    answer = getattr(error, "response", None)
    if _is_page(answer):
        return f"HTTP {status}; {_explain_page(status)}"
    message = redact_secrets(str(answer.get("message", "")) if isinstance(answer, dict) else "", secrets)
    quoted = f" “{message}”" if message else ""
    return f"HTTP {status}{quoted}; {_find_remedy(status, message, needs)}"


def error_status(error: Exception) -> int:
    """Returns the HTTP status with which Grafana answered; 0 if another server answered."""
    return 0 if _is_page(getattr(error, "response", None)) else getattr(error, "status_code", 0)


def _is_page(answer: Any) -> bool:
    """Returns whether an answer is a page. Grafana answers with JSON or nothing, so it is another server's."""
    return isinstance(answer, str) and bool(answer.strip())


def _explain_page(status: int) -> str:
    if status in (401, 403, 407):
        return "a proxy before Grafana requires separate credentials: give an address that bypasses it"
    if status >= 500:
        return "a proxy before Grafana returned it: check that Grafana is up"
    return NOT_GRAFANA


def _find_remedy(status: int, message: str, needs: str) -> str:
    if status == 401:
        return f"{_SET_TOKEN}; a token that is set already is wrong, expired or revoked"
    if status == 403:
        return f"give the service account of the token {_missing_permissions(message) or needs}"
    for pattern, remedy in _REMEDIES_BY_MESSAGE:
        if re.search(pattern, message):
            return remedy
    return _REMEDIES_BY_STATUS.get(status, _SEE_LOG if status >= 500 else "correct that and try again")


def _missing_permissions(message: str) -> str:
    return message.rpartition("Permissions needed: ")[2] if "Permissions needed: " in message else ""


_REMEDIES_BY_MESSAGE = (
    (
        r"[Cc]annot save provisioned dashboard",
        "it is provisioned from a file: change that file, or take it out of Grafana's provisioning",
    ),
    (r"v2 format|k8s style|api version not supported", "only classic dashboard JSON is supported, not v2"),
    (r"provided provenance", "this alert rule is provisioned elsewhere: remove it there first"),
    (r"same name", "rename or delete what has that name already"),
    (r"changed by someone else", "it was changed meanwhile: review it and push again"),
)
"""Patterns in Grafana's messages and the remedy of each; the first match counts."""

_REMEDIES_BY_STATUS = {
    404: "it does not exist, or Grafana's alerting is disabled ([unified_alerting] enabled)",
    409: _CONFLICT,
    412: _CONFLICT,
    429: "too many requests: wait and try again",
}


def _explain_transport_error(error: BaseException, secrets: Iterable[str]) -> str:
    """Explains an error before any answer, or an answer that is not Grafana's."""
    # By name, because releases of grafana-client use different HTTP libraries, with the same names of errors.
    kind, cause = type(error).__name__, _root_cause(error)
    detail = redact_secrets(str(cause), secrets)
    if "Redirect" in kind:
        to = getattr(getattr(error, "response", None), "headers", {}).get("location", "elsewhere")
        return f"it redirects to {redact_secrets(redact_url(to), secrets)}; give that address, or one without a login page"
    if "Proxy" in kind:
        return f"the proxy refuses ({detail}); correct HTTPS_PROXY, or add the host to NO_PROXY"
    if "JSON" in kind or not isinstance(error, OSError):
        return NOT_GRAFANA
    if isinstance(cause, ssl.SSLError):
        return f"TLS failure ({detail}); use http:// if it has no TLS, else put its CA file into REQUESTS_CA_BUNDLE"
    if isinstance(cause, socket.gaierror):
        return f"unknown host name ({detail}); correct it"
    return f"no connection ({detail}); check that Grafana is up and that the address is right"


def _root_cause(error: BaseException) -> BaseException:
    """Returns the innermost exception. HTTP libraries wrap it, each time with a vaguer message."""
    wrapped = (getattr(error, "reason", None), *error.args, error.__cause__, error.__context__)
    inner = next((candidate for candidate in wrapped if isinstance(candidate, BaseException)), None)
    return error if inner is None else _root_cause(inner)
