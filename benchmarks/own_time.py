"""How long hooks take in a loop that runs: the time in what was put around the engine's functions, less that in the functions.

Where steps of one kind differ by 10 % among themselves, holding loops against each other cannot tell 0.1 % from nothing; this can.
What hooks do to the speed of other code is not in it. What reading the clock takes is: who asks subtracts
what it comes to with `nothing`.
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
    """ns so far, on the thread that `began` was called on. `nothing`: hooks are left out from here on, and only their places
    are timed."""

    def __init__(self) -> None:
        self.ns = 0
        self.nothing = False
        self._thread = 0

    def began(self) -> None:
        """From here on, for what this thread calls."""
        self._thread, self.ns = threading.get_ident(), 0

    def around(
        self, make: Callable[[Callable[..., Any]], Callable[..., Any]], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """What `make` puts in the place of `original`, timed."""
        inner = self._timed(original, -1)
        return self._timed(inner if self.nothing else make(inner), 1)

    @contextmanager
    def of_ours(self) -> Iterator[None]:
        """Of the step hooks that are installed meanwhile."""
        made = HotPathPatch._wrap_original
        HotPathPatch._wrap_original = lambda place, original: self.around(
            functools.partial(made, place), original
        )  # type: ignore[method-assign]
        try:
            yield
        finally:
            HotPathPatch._wrap_original = made  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            began = _now()
            try:
                return function(*args, **kwargs)
            finally:
                self.ns += sign * (_now() - began)

        return timed
