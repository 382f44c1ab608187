"""KV caches. That of a `generate` is its request's alone: what it takes is asked after the prompt and in the end, since that costs
some µs a layer. That of continuous batching is everybody's: how many of its blocks are in use is asked in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span

_SUBCACHES = ("self_attention_cache", "cross_attention_cache")
"""Of an `EncoderDecoderCache`."""
_CACHE_ARGUMENTS = ("cache", "past_key_values")
"""What the library calls it among its arguments: since 5.24, and before."""


def find_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among these, or None."""
    return next((cache for cache in map(arguments.get, _CACHE_ARGUMENTS) if cache is not None), None)


def record_size(request: request_span.RequestSpan, cache: Any) -> None:
    """States what it takes now, where that can be known: a cache may be anything that a model makes, and what is odd is no error."""
    try:
        size = cache_bytes(cache)
    except Exception:
        return
    if size:
        request.record_event(events.CacheHeld(_clock.now(), size))


def cache_bytes(cache: Any) -> int:
    """The memory behind all tensors of all layers, wherever they lie, each piece once; 0 where it is none of the library's caches
    (transformers 5.5 to 5.24)."""
    parts = [part for part in (getattr(cache, name, None) for name in _SUBCACHES) if part is not None]
    layers = [layer for part in parts or [cache] for layer in getattr(part, "layers", None) or ()]
    return sum(dict([piece for layer in layers for piece in _iter_storages(vars(layer).values())]).values())


def cached_tokens(cache: Any) -> int:
    """Tokens per row that it holds; 0 where nobody knows."""
    try:
        return events.clamp_count(cache.get_seq_length())
    except Exception:
        return 0


def _iter_storages(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Address and bytes. Quantized layers hold tensors in tuples, those with a state by name."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _iter_storages(value)
        elif isinstance(value, dict):
            yield from _iter_storages(value.values())
        elif getattr(value, "ndim", 0) and hasattr(value, "untyped_storage"):  # a number is bookkeeping
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def make_usage_reader(cache: Any) -> Callable[[], tuple[int, int]]:
    """How many blocks this cache has in use, and in all: a look at its free lists, whatever the batch."""
    total = int(getattr(cache, "num_blocks", 0) or 0)
    if not total:
        return lambda: (0, 0)
    if hasattr(cache, "compute_free_capacity"):
        free_share = cache.compute_free_capacity
        return lambda: (total - round(free_share() * total), total)
    free_blocks = cache.get_num_free_blocks
    return lambda: (total - int(free_blocks()), total)


def tokens_per_block(cache: Any) -> int:
    """What a block holds, as the cache says (up to 5.17) or its allocators do; 0 = neither."""
    allocators = list(getattr(cache, "cache_allocators", {}).values())
    said = [getattr(cache, "block_size", 0), *(getattr(one, "tokens_per_page", 0) for one in allocators)]
    return int(next(filter(None, said), 0))
