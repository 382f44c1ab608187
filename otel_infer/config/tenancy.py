"""Who asks, and whether somebody waits for it: what the settings accept, and what follows for one request. Pure.

    header:X-Tenant | baggage:tenant | lora                           of which tenant a request is
    header:X-Traffic-Class,route:/v1/batches=batch                    of which traffic class

What a caller wrote is cut, or hashed with a key, before it goes anywhere.
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
"""Tokens of a prompt."""
_HTTP_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TRAFFIC_SYNTAX = "header:NAME and route:/PATH=interactive or route:/PATH=batch, comma-separated"


class TenantSource(NamedTuple):
    """Where the tenant of a request is found: `header`, `baggage` or `lora`, and under which name."""

    kind: str
    name: str = ""


class TrafficClassRules(NamedTuple):
    """How a request tells its class: by a header (lower case; empty: by none), else by its path."""

    header: str = ""
    routes: tuple[tuple[re.Pattern[str], str], ...] = ()

    def classify_request(self, header: str | None, path: str) -> str:
        """The class of a request with this header (None: without it); the first route that fits decides."""
        if header is not None:
            return BATCH if header.strip().lower() == BATCH else INTERACTIVE
        return next((named for pattern, named in self.routes if pattern.match(path)), INTERACTIVE)


class CallerSettings(NamedTuple):
    """What is to be found out of each request; None: not that. `key`: tenants are told as their hash with it."""

    tenant_source: TenantSource | None = None
    tenant_hash_key: bytes = b""
    traffic_rules: TrafficClassRules | None = None


NO_CALLER_SETTINGS = CallerSettings()


def parse_caller_settings(tenant: str, key: str, traffic: str) -> CallerSettings:
    """From the settings as they were written; raises `ValueError` with what is accepted."""
    if not tenant and not traffic:
        return NO_CALLER_SETTINGS
    return CallerSettings(
        parse_tenant_source(tenant) if tenant else None,
        derive_hash_key(key),
        parse_traffic_rules(traffic) if traffic else None,
    )


def parse_tenant_source(text: str) -> TenantSource:
    """Where tenants are found; raises `ValueError` with what is accepted."""
    kind, separator, name = text.partition(":")
    if kind == LORA and not separator:
        return TenantSource(LORA)
    if kind not in (HEADER, BAGGAGE) or not _HTTP_TOKEN.fullmatch(name):
        raise ValueError("header:NAME, baggage:KEY or lora")
    return TenantSource(kind, name.lower() if kind == HEADER else name)


def parse_tenants(text: str) -> tuple[str, ...]:
    """The tenants that metrics may name; raises `ValueError` if they are too many."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if len(names) > MAX_TENANTS:
        raise ValueError(f"at most {MAX_TENANTS} names, comma-separated, not {len(names)}")
    return names


def parse_traffic_rules(text: str) -> TrafficClassRules:
    """By what requests are classified; raises `ValueError` with what is accepted."""
    header, routes = "", []
    for part in filter(None, map(str.strip, text.split(","))):
        kind, _, rule = part.partition(":")
        path, _, named = rule.rpartition("=")
        if kind == HEADER and not header and _HTTP_TOKEN.fullmatch(rule):
            header = rule.lower()
        elif kind == "route" and path.startswith("/") and named in TRAFFIC_CLASSES:
            routes.append((_compile_route(path), named))
        else:
            raise ValueError(f"{_TRAFFIC_SYNTAX}, not {part!r}")
    return TrafficClassRules(header, tuple(routes))


def _compile_route(path: str) -> re.Pattern[str]:
    """Fits this path and what is below it; a segment in braces stands for any one."""
    segments = path.rstrip("/").split("/")
    return re.compile(
        "/".join("[^/]+" if _is_placeholder(one) else re.escape(one) for one in segments) + r"(?:/|\Z)"
    )


def _is_placeholder(segment: str) -> bool:
    return segment.startswith("{") and segment.endswith("}")


def derive_hash_key(text: str) -> bytes:
    """The key for `told`, of any text; empty for none."""
    return hashlib.sha256(text.encode()).digest() if text else b""


def sanitize_tenant(name: str, key: bytes) -> str:
    """A tenant's name as it may be written down."""
    if key and name:
        return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=HASH_BYTES, key=key).hexdigest()
    return "".join(letter if letter.isprintable() else "?" for letter in name[:MAX_TENANT_LENGTH])


def request_class(traffic_class: object, prompt_tokens: int) -> str:
    """The traffic class where one was said, else the size of the prompt: `short`, `medium`, `long`; `unknown` for 0."""
    if traffic_class in TRAFFIC_CLASSES:
        return str(traffic_class)
    if prompt_tokens <= 0:
        return UNKNOWN
    if prompt_tokens < MEDIUM_MIN_TOKENS:
        return SHORT
    return MEDIUM if prompt_tokens < LONG_MIN_TOKENS else LONG
