"""Measures the time of hooks in a running loop: the time of the hooked functions minus that of the originals inside
them.

Steps of one kind differ by 10 %, so a comparison of loops cannot show 0.1 %. Effects of hooks on the speed of other
code are not included. Clock reads are: subtract the result with `empty`.

A hook may take itself out of the library for a while, if it is still in its place. It sees the timer there instead, as if the timer
were the hook. While it is out, nothing is timed, as nothing of ours runs.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from otel_infer.instrumentation.hooks.patch import HotPathPatch

_now = time.perf_counter_ns


class OwnTime:
    """The time of hooks so far (ns) on the thread that called `reset`. With `empty` no hooks are made, only their
    time is measured."""

    def __init__(self) -> None:
        self.ns = 0
        self.empty = False
        self._thread = self._depth = 0

    def reset(self) -> None:
        """Starts at 0, for calls of the calling thread."""
        self._thread, self.ns = threading.get_ident(), 0

    def wrap_timed(
        self, make: Callable[[Callable[..., Any]], Callable[..., Any]], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Returns what `make` returns for `original`, timed."""
        inner = self._add_time(original, -1)
        hooked = make(inner)
        cells = [cell for cell in getattr(hooked, "__closure__", None) or () if cell.cell_contents is hooked]
        if self.empty:
            return original if cells else self._add_time(inner, 1)
        timed = self._add_time(hooked, 1)
        for cell in cells:
            cell.cell_contents = timed
        return timed

    @contextmanager
    def time_our_hooks(self) -> Iterator[None]:
        """Times the step hooks that are installed meanwhile."""
        wrap_original = HotPathPatch._wrap_original
        HotPathPatch._wrap_original = lambda place, original: self.wrap_timed(
            functools.partial(wrap_original, place), original
        )  # type: ignore[method-assign]
        try:
            yield
        finally:
            HotPathPatch._wrap_original = wrap_original  # type: ignore[method-assign]

    def _add_time(self, function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or (sign < 0 and not self._depth):
                return function(*args, **kwargs)
            self._depth += sign
            began = _now()
            try:
                return function(*args, **kwargs)
            finally:
                self.ns += sign * (_now() - began)
                self._depth -= sign

        return timed
