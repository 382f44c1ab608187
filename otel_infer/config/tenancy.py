"""Parses the settings for tenant and traffic class, and classifies requests by them. Pure.

    header:X-Tenant | baggage:tenant | lora                           source of a request's tenant
    header:X-Traffic-Class,route:/v1/batches=batch                    rules for its traffic class

A client's text is cut, or hashed with a key, before it is recorded.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

HEADER, BAGGAGE, LORA = "header", "baggage", "lora"
MAX_TENANTS = 50
"""Tenants that metrics may name."""
MAX_TENANT_LENGTH = 64
"""Characters of a tenant's name; the rest is cut."""
HASH_BYTES = 8

INTERACTIVE, BATCH = TRAFFIC_CLASSES = ("interactive", "batch")
SHORT, MEDIUM, LONG = "short", "medium", "long"
UNKNOWN = "unknown"
MEDIUM_MIN_TOKENS, LONG_MIN_TOKENS = 256, 2048
"""Prompt tokens from which a prompt is medium or long."""
_HTTP_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TRAFFIC_SYNTAX = "header:NAME and route:/PATH=interactive or route:/PATH=batch, comma-separated"


class TenantSource(NamedTuple):
    """The source of a tenant: `header`, `baggage` or `lora`, and the name of the header or baggage entry."""

    kind: str
    name: str = ""


class TrafficClassRules(NamedTuple):
    """Rules for the traffic class of a request: its header (lower case; empty = none), else its path."""

    header: str = ""
    routes: tuple[tuple[re.Pattern[str], str], ...] = ()

    def classify_request(self, header: str | None, path: str) -> str:
        """Returns the class of a request with this header value (None = the header is absent).

        Without the header, the first matching route decides.
        """
        if header is not None:
            return BATCH if header.strip().lower() == BATCH else INTERACTIVE
        return next(
            (traffic_class for pattern, traffic_class in self.routes if pattern.match(path)), INTERACTIVE
        )


class CallerSettings(NamedTuple):
    """Settings for the tenant and traffic class of requests; None = not recorded.

    `tenant_hash_key`: tenants are recorded as their hash with this key; empty = as their name.
    """

    tenant_source: TenantSource | None = None
    tenant_hash_key: bytes = b""
    traffic_rules: TrafficClassRules | None = None


NO_CALLER_SETTINGS = CallerSettings()


def parse_caller_settings(tenant: str, key: str, traffic: str) -> CallerSettings:
    """Returns the parsed settings; raises `ValueError` with the accepted syntax."""
    if not tenant and not traffic:
        return NO_CALLER_SETTINGS
    return CallerSettings(
        parse_tenant_source(tenant) if tenant else None,
        derive_hash_key(key),
        parse_traffic_rules(traffic) if traffic else None,
    )


def parse_tenant_source(text: str) -> TenantSource:
    """Returns the source of tenants; raises `ValueError` with the accepted syntax."""
    kind, separator, name = text.partition(":")
    if kind == LORA and not separator:
        return TenantSource(LORA)
    if kind not in (HEADER, BAGGAGE) or not _HTTP_TOKEN.fullmatch(name):
        raise ValueError("header:NAME, baggage:KEY or lora")
    return TenantSource(kind, name.lower() if kind == HEADER else name)


def parse_tenants(text: str) -> tuple[str, ...]:
    """Returns the tenants that metrics may name; raises `ValueError` if there are more than 50."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if len(names) > MAX_TENANTS:
        raise ValueError(f"at most {MAX_TENANTS} names, comma-separated, not {len(names)}")
    return names


def parse_traffic_rules(text: str) -> TrafficClassRules:
    """Returns the rules for traffic classes; raises `ValueError` with the accepted syntax."""
    header, routes = "", []
    for part in filter(None, map(str.strip, text.split(","))):
        kind, _, rule = part.partition(":")
        path, _, traffic_class = rule.rpartition("=")
        if kind == HEADER and not header and _HTTP_TOKEN.fullmatch(rule):
            header = rule.lower()
        elif kind == "route" and path.startswith("/") and traffic_class in TRAFFIC_CLASSES:
            routes.append((_compile_route(path), traffic_class))
        else:
            raise ValueError(f"{_TRAFFIC_SYNTAX}, not {part!r}")
    return TrafficClassRules(header, tuple(routes))


def _compile_route(path: str) -> re.Pattern[str]:
    """Returns a pattern for this path and all paths below it; a segment in braces matches any segment."""
    segments = path.rstrip("/").split("/")
    return re.compile(
        "/".join("[^/]+" if _is_placeholder(segment) else re.escape(segment) for segment in segments)
        + r"(?:/|\Z)"
    )


def _is_placeholder(segment: str) -> bool:
    return segment.startswith("{") and segment.endswith("}")


def derive_hash_key(text: str) -> bytes:
    """Returns the key for `sanitize_tenant`, from any text; empty for an empty text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() if text else b""


def sanitize_tenant(name: str, key: bytes) -> str:
    """Returns a tenant's name as it may be recorded: hashed if there is a key, else cut and printable."""
    if key and name:
        return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=HASH_BYTES, key=key).hexdigest()
    return "".join(letter if letter.isprintable() else "?" for letter in name[:MAX_TENANT_LENGTH])


def request_class(traffic_class: object, prompt_tokens: int) -> str:
    """Returns the traffic class if there is one, else the size of the prompt: `short`, `medium`, `long`;
    `unknown` for 0 tokens.
    """
    if traffic_class in TRAFFIC_CLASSES:
        return str(traffic_class)
    if prompt_tokens <= 0:
        return UNKNOWN
    if prompt_tokens < MEDIUM_MIN_TOKENS:
        return SHORT
    return MEDIUM if prompt_tokens < LONG_MIN_TOKENS else LONG
