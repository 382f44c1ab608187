"""What Grafana, or the way to it, did not allow, in words: what happened, and what to do about it.

Grafana's own words are quoted where it has any: it names the permission that is missing better than we can.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterable
from typing import Any

TOKEN_VARIABLE = "GRAFANA_TOKEN"
"""The variable that whoever reads the environment finds the credential in."""

MAX_QUOTED_CHARS = 200

NOT_GRAFANA = "what answers there is no Grafana; give the address at which its own pages open, with its sub-path if it has one"
_SET_TOKEN = f"put the token of a service account, or USER:PASSWORD, into {TOKEN_VARIABLE}"
_CONFLICT = "it is there already, or somebody changed it meanwhile: look, and push again"
_SEE_LOG = "Grafana's log says more"


class GrafanaError(Exception):
    """What Grafana, or the way to it, did not allow. The message says what to do, and holds no credential."""


def redact_url(url: str) -> str:
    """The address without the credentials and the query in it."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    _, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{'***@' if at else ''}{re.split('[?#]', host)[0]}"


def redact_secrets(text: str, secrets: Iterable[str]) -> str:
    """Somebody else's words without our credentials, on one line, and not too many of them."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***") if len(secret) > 3 else text
    text = " ".join(re.sub(r"(?<=://)[^/\s]+@", "***@", text).split())
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "…"


def explain_error(error: Exception, needs: str, secrets: Iterable[str], timeout: float) -> str:
    """What `error`, raised by grafana-client, means, and what to do. `needs`: the permissions that this takes."""
    status = getattr(error, "status_code", None)
    if status is None:
        return _explain_transport_error(error, secrets)
    if status == 0:  # as grafana-client has it for every kind of time-out
        return f"no answer within {timeout:g} s; is it up, and is every proxy on the way?"
    answer = getattr(error, "response", None)
    if _is_page(answer):
        return f"HTTP {status}; {_explain_page(status)}"
    said = redact_secrets(str(answer.get("message", "")) if isinstance(answer, dict) else "", secrets)
    quoted = f" “{said}”" if said else ""
    return f"HTTP {status}{quoted}; {_find_remedy(status, said, needs)}"


def error_status(error: Exception) -> int:
    """The status that Grafana itself answered with; 0 where it was not Grafana."""
    return 0 if _is_page(getattr(error, "response", None)) else getattr(error, "status_code", 0)


def _is_page(answer: Any) -> bool:
    """Grafana answers in JSON, and sometimes with nothing: a page is somebody else's."""
    return isinstance(answer, str) and bool(answer.strip())


def _explain_page(status: int) -> str:
    if status in (401, 403, 407):
        return "a proxy before Grafana wants credentials of its own: give an address past it"
    if status >= 500:
        return "a proxy before Grafana says so: is Grafana behind it up?"
    return NOT_GRAFANA


def _find_remedy(status: int, said: str, needs: str) -> str:
    if status == 401:
        return f"{_SET_TOKEN}; one that was set is wrong, expired or revoked"
    if status == 403:
        return f"give the service account of the token {_missing_permissions(said) or needs}"
    for pattern, remedy in _REMEDIES_BY_MESSAGE:
        if re.search(pattern, said):
            return remedy
    return _REMEDIES_BY_STATUS.get(status, _SEE_LOG if status >= 500 else "correct that and try again")


def _missing_permissions(said: str) -> str:
    return said.rpartition("Permissions needed: ")[2] if "Permissions needed: " in said else ""


_REMEDIES_BY_MESSAGE = (
    (
        r"[Cc]annot save provisioned dashboard",
        "a file makes it: change that file, or take it out of Grafana's provisioning",
    ),
    (r"v2 format|k8s style|api version not supported", "only classic dashboard JSON is understood, not v2"),
    (r"provided provenance", "somebody else provisions this alert rule: remove it there first"),
    (r"same name", "rename or delete what has that name already"),
    (r"changed by someone else", "somebody changed it meanwhile: look, and push again"),
)
"""What is recognised in Grafana's words, and what to do. The first counts."""

_REMEDIES_BY_STATUS = {
    404: "it is not there, or Grafana's alerting is switched off ([unified_alerting] enabled)",
    409: _CONFLICT,
    412: _CONFLICT,
    429: "too many requests: wait a little",
}


def _explain_transport_error(error: BaseException, secrets: Iterable[str]) -> str:
    """What went wrong before there was an answer, or with an answer that is not Grafana's."""
    kind, cause = type(error).__name__, _root_cause(error)
    words = redact_secrets(str(cause), secrets)
    if "Redirect" in kind:
        to = getattr(getattr(error, "response", None), "headers", {}).get("location", "elsewhere")
        return f"it redirects to {redact_secrets(redact_url(to), secrets)}; give that address, or one past the login page"
    if "Proxy" in kind:
        return f"the proxy refuses ({words}); correct HTTPS_PROXY, or add the host to NO_PROXY"
    if "JSON" in kind or not isinstance(error, OSError):
        return NOT_GRAFANA
    if isinstance(cause, ssl.SSLError):
        return f"TLS failure ({words}); http:// where there is none, else its authority in REQUESTS_CA_BUNDLE"
    if isinstance(cause, socket.gaierror):
        return f"the host name is not known ({words}); correct it"
    return f"nothing answers there ({words}); is Grafana up, and is the address right?"


def _root_cause(error: BaseException) -> BaseException:
    """HTTP libraries wrap what happened several times, and each time the words get worse."""
    wrapped = (getattr(error, "reason", None), *error.args, error.__cause__, error.__context__)
    inner = next((one for one in wrapped if isinstance(one, BaseException)), None)
    return error if inner is None else _root_cause(inner)
