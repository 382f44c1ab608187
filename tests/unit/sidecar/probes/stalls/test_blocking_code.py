"""The function that a late thread is in, or waits for, is named; where several may be to blame, none is."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_infer.ringbuffer import events
from otel_infer.sidecar.probes.stalls.blocking_code import BlockingCode, find_blocking_code
from otel_infer.sidecar.probes.stalls.stack_text import Frame

LIB = "/usr/lib/python3.11"
SITE = "/venv/lib/python3.11/site-packages"
LOOP = (
    Frame(f"{LIB}/asyncio/events.py", 84, "_run"),
    Frame(f"{LIB}/asyncio/base_events.py", 1936, "_run_once"),
)
POOL = (Frame(f"{SITE}/anyio/_backends/_asyncio.py", 1113, "run"),)
Stack = tuple[Frame, ...]


class Others:
    """The other threads of a process. `running`: how many of them, from the first on, run."""

    def __init__(self, stacks: tuple[Stack, ...], running: int) -> None:
        self._stacks, self._running = stacks, running

    def read_all(self) -> tuple[Stack, ...]:
        return self._stacks

    def read_running(self) -> tuple[Stack, ...]:
        return self._stacks[: self._running]


def find(
    late: Stack, *others: Stack, reason: str = events.PAUSE_EVENT_LOOP, futex: bool = False, running: int = 9
) -> BlockingCode | None:
    return find_blocking_code(late, Others(others, running), reason, futex)


def stack(*frames: Frame) -> Stack:
    return frames


def named(code: BlockingCode | None) -> str:
    return code.place.frame.function if code is not None else ""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(
        "import threading, time\nlock = threading.Lock()\ndef refresh():\n    with lock:\n        time.sleep(1)\n"
        "def lookup():\n    with lock:\n        return 1\ndef compute():\n    return sum(range(9))\n"
    )
    return path


def test_a_call_on_the_loop_is_the_users_innermost_function() -> None:
    frames = (
        Frame(f"{SITE}/redis/connection.py", 9, "read"),
        Frame("/srv/app.py", 31, "lookup"),
        Frame("/srv/app.py", 5, "handle"),
    )
    code = find(stack(Frame(f"{LIB}/socket.py", 706, "readinto"), *frames, *LOOP))
    assert code == BlockingCode((frames[1], frames[0]))


def test_code_around_the_loop_is_not_named() -> None:
    main = Frame(f"{SITE}/uvicorn/server.py", 86, "run"), Frame("/srv/app.py", 99, "<module>")
    assert find(stack(Frame(f"{LIB}/selectors.py", 468, "select"), LOOP[1], *main)) is None


def test_a_comprehension_belongs_to_its_function() -> None:
    assert (
        named(find(stack(Frame("/srv/app.py", 8, "<listcomp>"), Frame("/srv/app.py", 7, "lookup"), *LOOP)))
        == "lookup"
    )


def test_the_holder_of_a_lock_is_named(app: Path) -> None:
    waiter, holder = Frame(str(app), 7, "lookup"), Frame(str(app), 5, "refresh")
    code = find(
        stack(waiter, *POOL),
        stack(holder),
        stack(waiter, *POOL),
        reason=events.STALLED_REQUEST,
        futex=True,
    )
    assert code == BlockingCode((holder, None), waiter)
    alone = find(stack(waiter, *POOL), stack(waiter, *POOL), reason=events.STALLED_REQUEST, futex=True)
    assert alone == BlockingCode((waiter, None))


def test_the_only_thread_that_can_hold_the_interpreter_is_named(app: Path) -> None:
    late, busy = (
        stack(Frame(f"{LIB}/selectors.py", 468, "select"), *LOOP),
        Frame(str(app), 10, "compute"),
    )
    idle = stack(Frame(f"{LIB}/threading.py", 327, "wait"), Frame(f"{LIB}/queue.py", 171, "get"), *POOL)
    assert named(find(late, stack(busy, *POOL), idle, futex=True)) == "compute"
    other = Frame("/srv/other.py", 3, "train")
    assert find(late, stack(busy, *POOL), stack(other), futex=True) is None
    assert find(late, stack(busy, *POOL), futex=False) is None  # it is not the interpreter that it waits for


def test_a_thread_that_waits_for_a_result_is_not_to_blame(app: Path) -> None:
    waits = (
        Frame(f"{LIB}/threading.py", 327, "wait"),
        Frame(f"{LIB}/queue.py", 171, "get"),
        Frame("/srv/app.py", 4, "ask"),
    )
    late = stack(*waits, *POOL)
    assert find(late, reason=events.STALLED_REQUEST) is None
    code = find(late, stack(Frame(str(app), 10, "compute")), reason=events.STALLED_REQUEST)
    assert code is not None and (named(code), code.waiter) == ("compute", waits[2])


def test_a_wait_on_the_loop_is_to_blame() -> None:
    waits = Frame(f"{LIB}/concurrent/futures/_base.py", 451, "result"), Frame("/srv/app.py", 4, "ask")
    assert named(find(stack(*waits, *LOOP), futex=True)) == "ask"


def test_a_step_is_the_engines_code_or_the_users_below_it() -> None:
    model = (
        Frame(f"{SITE}/torch/nn/functional.py", 9, "linear"),
        Frame(f"{SITE}/transformers/models/llama/modeling_llama.py", 164, "forward"),
    )
    outer = (
        Frame(f"{SITE}/transformers/generation/utils.py", 3288, "_sample"),
        Frame("/srv/app.py", 88, "handle"),
    )
    assert named(find(stack(*model, *outer, *POOL), reason=events.STALLED_STEP, futex=True)) == "forward"
    mine = Frame("/srv/app.py", 12, "pick_token")
    assert named(find(stack(mine, *outer, *POOL), reason=events.STALLED_STEP)) == "pick_token"


def test_library_code_on_a_loop_beside_a_working_thread_is_not_named() -> None:
    loop = stack(Frame(f"{SITE}/pydantic/main.py", 9, "validate"), *LOOP)
    assert named(find(loop)) == "validate"
    assert find(loop, stack(Frame("/srv/app.py", 3, "train"))) is None


def test_our_own_frames_are_left_out() -> None:
    own = Frame(f"{SITE}/otel_infer/instrumentation/waits.py", 49, "__call__")
    assert named(find(stack(own, Frame("/srv/app.py", 31, "lookup"), *LOOP))) == "lookup"
