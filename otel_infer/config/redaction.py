"""Removes credentials and control characters from texts that are printed or logged.

A text from outside (a setting, an answer of a destination, an exception of a library) may quote a header, the query
or the user of an endpoint, and characters that a terminal would execute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote, urlsplit

MASK = "***"
MIN_SECRET_CHARS = 4
"""Shorter values are not masked, because they are parts of ordinary words."""
_SECRET_VARIABLES = ("OTEL_INFER_TENANT_HASH_KEY", "GRAFANA_TOKEN")
_CONTROL = {code: "?" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
_USER = re.compile(r"(?<=://)[^/\s]+@")
_QUERY = re.compile(r"((?:://|/)[^\s?'\"]*)\?[^\s,)'\"]+")


def replace_controls(text: str) -> str:
    """Returns the text with `?` for control characters, which a terminal would execute, and lone surrogates."""
    return text.translate(_CONTROL).encode("utf-8", "replace").decode("utf-8")


def redact_url(url: str) -> str:
    """Returns a URL without its user, password and query."""
    target = url.partition("?")[0]
    without_user = _USER.sub("", target) if "://" in target else target.rpartition("@")[2]
    return replace_controls(without_user)


def list_secrets(environ: Mapping[str, str]) -> list[str]:
    """Returns the credentials in these variables, the longest first: headers, keys, users and queries of URLs."""
    secrets = {environ.get(name, "") for name in _SECRET_VARIABLES}
    for name, text in environ.items():
        if _is_headers(name):
            for pair in text.split(","):
                value = pair.partition("=")[2].strip()
                secrets |= {value, unquote(value), unquote(value).rpartition(" ")[2]}
        elif name.startswith("OTEL_") and name.endswith("_ENDPOINT"):
            secrets |= _list_url_secrets(text)
    return select_secrets(secrets)


def select_secrets(texts: Iterable[str]) -> list[str]:
    """Returns the texts that are long enough to be masked, the longest first."""
    return sorted((text for text in texts if len(text) >= MIN_SECRET_CHARS), key=len, reverse=True)


def _is_headers(variable: str) -> bool:
    return variable.startswith("OTEL_EXPORTER_") and variable.endswith("_HEADERS")


def _list_url_secrets(url: str) -> set[str]:
    try:
        parts = urlsplit(url)
    except ValueError:
        return set()
    return {parts.query, parts.password or "", *(pair.partition("=")[2] for pair in parts.query.split("&"))}


def mask_secrets(text: str, secrets: list[str]) -> str:
    """Returns a text for a log or a terminal, without these secrets, users and queries of URLs, and controls."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return replace_controls(_QUERY.sub(rf"\1?{MASK}", _USER.sub(f"{MASK}@", text)))


def describe_value(variable: str, value: str) -> str:
    """Returns the value of a variable for a message; a credential is hidden."""
    if variable in _SECRET_VARIABLES or _is_headers(variable):
        return MASK
    return repr(redact_url(value) if variable.endswith("_ENDPOINT") else value)
