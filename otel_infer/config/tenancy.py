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
MAX_LENGTH = 64
"""Characters of a tenant's name; the rest is cut."""
HASH_BYTES = 8

INTERACTIVE, BATCH = CLASSES = ("interactive", "batch")
SHORT, MEDIUM, LONG = "short", "medium", "long"
UNKNOWN = "unknown"
MEDIUM_FROM, LONG_FROM = 256, 2048
"""Tokens of a prompt."""
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TRAFFIC = "header:NAME and route:/PATH=interactive or route:/PATH=batch, comma-separated"


class Source(NamedTuple):
    """Where the tenant of a request is found: `header`, `baggage` or `lora`, and under which name."""

    kind: str
    name: str = ""


class Traffic(NamedTuple):
    """How a request tells its class: by a header (lower case; empty: by none), else by its path."""

    header: str = ""
    routes: tuple[tuple[re.Pattern[str], str], ...] = ()

    def of(self, header: str | None, path: str) -> str:
        """The class of a request with this header (None: without it); the first route that fits decides."""
        if header is not None:
            return BATCH if header.strip().lower() == BATCH else INTERACTIVE
        return next((named for pattern, named in self.routes if pattern.match(path)), INTERACTIVE)


class Wanted(NamedTuple):
    """What is to be found out of each request; None: not that. `key`: tenants are told as their hash with it."""

    tenant: Source | None = None
    key: bytes = b""
    traffic: Traffic | None = None


NOTHING = Wanted()


def wanted(tenant: str, key: str, traffic: str) -> Wanted:
    """From the settings as they were written; raises `ValueError` with what is accepted."""
    if not tenant and not traffic:
        return NOTHING
    return Wanted(
        source(tenant) if tenant else None, hash_key(key), traffic_classes(traffic) if traffic else None
    )


def source(text: str) -> Source:
    """Where tenants are found; raises `ValueError` with what is accepted."""
    kind, separator, name = text.partition(":")
    if kind == LORA and not separator:
        return Source(LORA)
    if kind not in (HEADER, BAGGAGE) or not _TOKEN.fullmatch(name):
        raise ValueError("header:NAME, baggage:KEY or lora")
    return Source(kind, name.lower() if kind == HEADER else name)


def tenants(text: str) -> tuple[str, ...]:
    """The tenants that metrics may name; raises `ValueError` if they are too many."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if len(names) > MAX_TENANTS:
        raise ValueError(f"at most {MAX_TENANTS} names, comma-separated, not {len(names)}")
    return names


def traffic_classes(text: str) -> Traffic:
    """By what requests are classified; raises `ValueError` with what is accepted."""
    header, routes = "", []
    for part in filter(None, map(str.strip, text.split(","))):
        kind, _, rule = part.partition(":")
        path, _, named = rule.rpartition("=")
        if kind == HEADER and not header and _TOKEN.fullmatch(rule):
            header = rule.lower()
        elif kind == "route" and path.startswith("/") and named in CLASSES:
            routes.append((_below(path), named))
        else:
            raise ValueError(f"{_TRAFFIC}, not {part!r}")
    return Traffic(header, tuple(routes))


def _below(path: str) -> re.Pattern[str]:
    """Fits this path and what is below it; a segment in braces stands for any one."""
    segments = path.rstrip("/").split("/")
    return re.compile(
        "/".join("[^/]+" if _is_open(one) else re.escape(one) for one in segments) + r"(?:/|\Z)"
    )


def _is_open(segment: str) -> bool:
    return segment.startswith("{") and segment.endswith("}")


def hash_key(text: str) -> bytes:
    """The key for `told`, of any text; empty for none."""
    return hashlib.sha256(text.encode()).digest() if text else b""


def told(name: str, key: bytes) -> str:
    """A tenant's name as it may be written down."""
    if key and name:
        return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=HASH_BYTES, key=key).hexdigest()
    return "".join(letter if letter.isprintable() else "?" for letter in name[:MAX_LENGTH])


def class_of(traffic_class: object, prompt_tokens: int) -> str:
    """The traffic class where one was said, else the size of the prompt: `short`, `medium`, `long`; `unknown` for 0."""
    if traffic_class in CLASSES:
        return str(traffic_class)
    if prompt_tokens <= 0:
        return UNKNOWN
    if prompt_tokens < MEDIUM_FROM:
        return SHORT
    return MEDIUM if prompt_tokens < LONG_FROM else LONG
