"""Determines which function a late thread is in, or waits for.

A frame of the user's own code is preferred to one of a library; the function that it called in a library is named too.
A thread that waits for a lock is resolved to the thread that is inside a `with` block of the same lock. One that waits
for the interpreter lock, or for another thread's result, is resolved to the only other thread that works. Where that is
ambiguous, no function is named.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from otel_infer.ringbuffer import events
from otel_infer.sidecar.probes.stalls.stack_text import Frame

_OUTER_FRAMES = frozenset(
    (
        ("asyncio/base_events.py", "_run_once"),
        ("asyncio/base_events.py", "run_forever"),
        ("asyncio/events.py", "_run"),
        ("asyncio/runners.py", "run"),
        ("futures/thread.py", "run"),
        ("futures/thread.py", "_worker"),
        ("_backends/_asyncio.py", "run"),
        ("threading.py", "run"),
        ("threading.py", "_bootstrap_inner"),
        ("threading.py", "_bootstrap"),
        ("multiprocessing/pool.py", "worker"),
    )
)
"""Frames that run other people's callbacks: only what they called is at work."""
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+t?/|^<frozen ")
_NUMERIC = re.compile(r"/(?:site|dist)-packages/(?:torch|numpy|functorch)/")
_SERVING = re.compile(
    r"/(?:site|dist)-packages/(?:uvicorn|hypercorn|gunicorn|werkzeug|waitress|gevent|flask|django|falcon|uvloop|h11|httptools|starlette|fastapi|anyio|click|typer)/"
)
_ENGINES = re.compile(r"/(?:site|dist)-packages/(?:vllm|transformers|sentence_transformers|sglang)/")
_OWN = re.compile(r"/otel_infer/(?:_bootstrap|cli|config|gpu|instrumentation|ringbuffer|sidecar|tracing)/")
_LOCK_LINE = re.compile(
    r"\s*(?:with\s+(?P<block>[\w.\[\]]+)(?:\s*:|\s+as\b|,).*|.*?(?P<lock>[\w.]+)\.acquire\(.*)"
)
_WAITING_LINE = re.compile(
    r".*\.(?:acquire|wait|join|get|result|select|poll|recv|accept|read|readline)\(|.*\bsleep\(|\s*with\s"
)
_PARTS_OF_FUNCTIONS = frozenset(("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"))
"""Frames that are a part of the function which calls them."""
_THREAD_WAITS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")
MAX_SOURCE_BYTES = 1 << 20
Stack = Sequence[Frame]
"""The frames of a thread, innermost first."""


class Place(NamedTuple):
    """A place in the code. `callee`: the innermost frame of a library that it called, if any."""

    frame: Frame
    callee: Frame | None = None


class BlockingCode(NamedTuple):
    """The function that a late thread is in. `waiter`: the late thread's own place, if another thread is in the function."""

    place: Place
    waiter: Frame | None = None


class OtherThreads(Protocol):
    """The stacks of the other threads of a process, which are read on demand."""

    def read_all(self) -> Iterable[Stack]:
        """Yields the stacks of all of them, of those that wait for a lock last."""
        ...

    def read_running(self) -> Iterable[Stack]:
        """Yields the stacks of the threads that run."""
        ...


def find_blocking_code(
    late: Stack, others: OtherThreads, reason: str, waits_for_futex: bool
) -> BlockingCode | None:
    """Returns what a late thread is in or waits for; None where that is unknown.

    `reason`: what is late. `waits_for_futex`: the kernel reports that it waits for a lock.
    """
    working = list(_work_frames(late))
    place = _choose_place(working, is_step=reason == events.STALLED_STEP)
    lock = _waited_lock(working)
    if place is not None and lock is not None:
        holder = _find_holder(others.read_all(), lock)
        return BlockingCode(holder, place.frame) if holder is not None else BlockingCode(place)
    if place is not None and reason == events.PAUSE_EVENT_LOOP and _is_waiting_line(working[0]):
        return BlockingCode(place)  # whatever it waits for, it must not wait on the loop
    if working and waits_for_futex and _NUMERIC.search(working[0].file):
        return BlockingCode(place) if place is not None else None  # it waits for the threads of its library
    if _waits_for_thread(working):
        return _name_running(others.read_all(), place)
    if waits_for_futex:
        return _name_running(others.read_running(), place)
    return _check_ambiguity(place, reason, others)


def _name_running(others: Iterable[Stack], waiting: Place | None) -> BlockingCode | None:
    running = _find_only_working(others)
    if running is None:
        return None
    return BlockingCode(running, waiting.frame if waiting is not None else None)


def _check_ambiguity(place: Place | None, reason: str, others: OtherThreads) -> BlockingCode | None:
    """Returns the place, but not that of a library on a late loop beside a thread that works.

    The loop may just have got the interpreter lock from that thread.
    """
    if place is None:
        return None
    is_library = reason == events.PAUSE_EVENT_LOOP and _INSTALLED.search(place.frame.file)
    return None if is_library and _find_only_working(others.read_running()) else BlockingCode(place)


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _work_frames(stack: Stack) -> Iterator[Frame]:
    """Yields the frames of what a loop or pool called, innermost first, without ours."""
    for frame in stack:
        if _is_outer(frame):
            return
        if not _is_own(frame):
            yield frame


@lru_cache(maxsize=1024)
def _is_outer(frame: Frame) -> bool:
    folder, _, name = frame.file.rpartition("/")
    in_folder = f"{folder.rpartition('/')[2]}/{name}", frame.function
    return in_folder in _OUTER_FRAMES or (name, frame.function) in _OUTER_FRAMES


@lru_cache(maxsize=1024)
def _is_own(frame: Frame) -> bool:
    return bool(_OWN.search(frame.file))


def _choose_place(frames: Sequence[Frame], is_step: bool) -> Place | None:
    """Returns the place to name: the user's innermost frame; of a step, only one that an engine called."""
    library: Frame | None = None
    for frame in frames:
        if is_standard(frame.file) or _NUMERIC.search(frame.file) or frame.function in _PARTS_OF_FUNCTIONS:
            continue
        if not _INSTALLED.search(frame.file):
            return Place(frame, library)
        if _SERVING.search(frame.file):
            continue
        if is_step and _ENGINES.search(frame.file):
            return Place(library or frame)
        library = library or frame
    return Place(library) if library is not None else None


def is_standard(file: str) -> bool:
    """Returns whether a file is of the standard library."""
    return bool(_STANDARD.search(file)) and not _INSTALLED.search(file)


# ── locks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _waited_lock(frames: Sequence[Frame]) -> tuple[str, str] | None:
    """Returns file and expression of the lock that the innermost frame waits for; None if it waits for none."""
    for frame in frames:
        if is_standard(frame.file):
            if frame.file.endswith("/threading.py"):  # a lock that is written in Python
                continue
            return None
        found = _LOCK_LINE.match(linecache.getline(frame.file, frame.line))
        return (frame.file, found["block"] or found["lock"]) if found is not None else None
    return None


def _find_holder(others: Iterable[Stack], lock: tuple[str, str]) -> Place | None:
    """Returns where the thread is that is inside of a `with` block of the same lock."""
    file, expression = lock
    for stack in others:
        frames = list(_work_frames(stack))
        for frame in frames:
            if frame.file == file and _is_inside_block(frame, expression) and _waited_lock(frames) != lock:
                return _choose_place(frames, is_step=False)
    return None


def _is_inside_block(frame: Frame, expression: str) -> bool:
    """Returns whether a frame is in the body of a `with` statement of a lock of this name."""
    name = expression.rpartition(".")[2]
    return any(begin <= frame.line <= end and name in names for begin, end, names in _list_blocks(frame.file))


@lru_cache(maxsize=64)
def _list_blocks(file: str) -> list[tuple[int, int, frozenset[str]]]:
    """Returns the bodies of all `with` statements of a file: first and last line, and the names they enter."""
    source = "".join(linecache.getlines(file))
    if len(source) > MAX_SOURCE_BYTES:
        return []
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [
        (
            node.body[0].lineno,
            node.end_lineno or node.body[-1].lineno,
            frozenset(ast.unparse(item.context_expr).rpartition(".")[2] for item in node.items),
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
    ]


# ── other threads ─────────────────────────────────────────────────────────────────────────────────────────────


def _waits_for_thread(frames: Sequence[Frame]) -> bool:
    """Returns whether the innermost frame waits for what another thread puts into a queue, a future or an event."""
    return bool(frames) and frames[0].file.endswith(_THREAD_WAITS) and is_standard(frames[0].file)


def _find_only_working(others: Iterable[Stack]) -> Place | None:
    """Returns where the only other thread is that does not wait; None if there are several places."""
    places: set[Place] = set()
    for stack in others:
        frames = list(_work_frames(stack))
        place = _choose_place(frames, is_step=False)
        if place is not None and not _is_waiting_line(frames[0]):
            places.add(place)
        if len(places) > 1:
            return None
    return places.pop() if len(places) == 1 else None


def _is_waiting_line(frame: Frame) -> bool:
    """Returns whether the line of a frame is one that waits."""
    is_wait = frame.file.endswith(
        ("/threading.py", "/selectors.py", "/queue.py", "/subprocess.py", "/socket.py")
    )
    return is_wait or bool(_WAITING_LINE.match(linecache.getline(frame.file, frame.line)))
