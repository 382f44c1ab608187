"""What a KV cache of `generate` takes: nobody shares it, so it is its request's. Asked after the prompt and in the end, since it
costs some µs a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from otel_infer import clock, facts, ingress

_PARTS = ("self_attention_cache", "cross_attention_cache")
"""Of an `EncoderDecoderCache`."""


def say(request: ingress.LiveRequest, cache: Any) -> None:
    """States what it takes now, if it is one."""
    size = bytes_of(cache)
    if size:
        request.state(facts.CacheHeld(clock.now(), size))


def bytes_of(cache: Any) -> int:
    """Of all tensors of all layers, wherever they lie; 0 where it is none of the library's caches (transformers 5.5 to 5.23)."""
    parts = [part for part in (getattr(cache, name, None) for name in _PARTS) if part is not None]
    layers = [layer for part in parts or [cache] for layer in getattr(part, "layers", None) or ()]
    return sum([size for layer in layers for size in _sizes(layer)])


def _sizes(layer: Any) -> Iterator[int]:
    for value in vars(layer).values():
        if getattr(value, "ndim", 0) and hasattr(value, "nbytes"):  # a number is bookkeeping
            yield int(value.nbytes)
