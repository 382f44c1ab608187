"""Names the method and the scheme of an HTTP request, in fixed vocabularies."""

from __future__ import annotations

from typing import Any

from otel_infer.ringbuffer import events


def to_known_names(method: Any, scheme: Any) -> tuple[str, str]:
    """Returns method and scheme; a method outside `events.METHODS` as `events.OTHER`, another scheme as ""."""
    return (
        method if method in events.METHODS else events.OTHER,
        scheme if scheme in events.SCHEMES else "",
    )


def encode_method(method: Any, scheme: Any) -> int:
    """Returns method and scheme as one number, as `events.ExchangeEnded` holds them."""
    code = events.HTTP_CODES.get((method, scheme))
    return events.HTTP_CODES[to_known_names(method, scheme)] if code is None else code
