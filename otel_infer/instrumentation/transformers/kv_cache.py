"""Reads the size and the usage of KV caches.

The cache of a `generate` belongs to one request. Its size is read after the prompt and at the end, because
that costs several µs per layer. All requests share the cache of continuous batching; its blocks in use are
read at each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span

_SUBCACHES = ("self_attention_cache", "cross_attention_cache")
"""Attributes of an `EncoderDecoderCache` that hold a cache."""
_CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the cache among the library's arguments: from 5.24 on, and before."""


def find_cache(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache among these arguments, or None."""
    return next((cache for cache in map(arguments.get, _CACHE_ARGUMENTS) if cache is not None), None)


def record_size(request: request_span.RequestSpan, cache: Any) -> None:
    """Records the cache's current size in bytes; nothing if that is unknown.

    A model may create a cache of any kind, so a cache that cannot be read is not an error.
    """
    try:
        size = count_cache_bytes(cache)
    except Exception:
        return
    if size:
        request.record_event(events.CacheHeld(_clock.now(), size))


def count_cache_bytes(cache: Any) -> int:
    """Returns the bytes of all tensor storages of all layers, on any device, each storage once.

    0 if the cache is not one of the library's (transformers 5.5 to 5.24).
    """
    parts = [part for part in (getattr(cache, name, None) for name in _SUBCACHES) if part is not None]
    layers = [layer for part in parts or [cache] for layer in getattr(part, "layers", None) or ()]
    return sum(
        dict([storage for layer in layers for storage in _iter_storages(vars(layer).values())]).values()
    )


def cached_tokens(cache: Any) -> int:
    """Returns the tokens per row that a cache holds; 0 = unknown."""
    try:
        return events.clamp_count(cache.get_seq_length())
    except Exception:
        return 0


def _iter_storages(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yields (address, bytes) of each tensor's storage.

    Quantized layers hold tensors in tuples; layers with a recurrent state hold them in dictionaries.
    """
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _iter_storages(value)
        elif isinstance(value, dict):
            yield from _iter_storages(value.values())
        elif getattr(value, "ndim", 0) and hasattr(value, "untyped_storage"):  # a scalar is bookkeeping
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def find_free_blocks(cache: Any) -> tuple[Callable[[], float], int, int]:
    """Returns (function, scale, all blocks): the function's result times the scale are the free blocks.

    0 blocks = unknown. The function reads the cache's free lists, so its cost does not depend on the batch.
    """
    total = int(getattr(cache, "num_blocks", 0) or 0)
    if not total:
        return int, 0, 0
    if hasattr(cache, "compute_free_capacity"):
        return cache.compute_free_capacity, total, total
    return cache.get_num_free_blocks, 1, total


def bind_pool(tracker: Any, cache: Any) -> None:
    """Lets compiled code read the counts of the cache's pool, if they give what the cache itself computes.

    The pool is that of transformers from 5.18 on.
    """
    with contextlib.suppress(Exception):
        allocators = list(cache.cache_allocators.values())
        if all(allocator.pool is cache.pool for allocator in allocators):
            blocks = [(allocator.index, allocator.bytes_per_block) for allocator in allocators]
            whole = cache.num_sectors * cache.bytes_per_sector
            free = tracker.use_pool(cache.pool, cache.bytes_per_sector, whole, blocks)
            if free == round(tracker.read_free() * tracker.free_scale):
                return
    tracker.pool = None


def tokens_per_block(cache: Any) -> int:
    """Returns the tokens per block, from the cache (up to 5.17) or its allocators; 0 = unknown."""
    allocators = list(getattr(cache, "cache_allocators", {}).values())
    sizes = [
        getattr(cache, "block_size", 0),
        *(getattr(allocator, "tokens_per_page", 0) for allocator in allocators),
    ]
    return int(next(filter(None, sizes), 0))
