"""Whose a sample of the GIL's holder is."""

from __future__ import annotations

import pytest

from benchmarks.whole import gil_samples
from benchmarks.whole.gil_samples import PACKAGE, STDLIB, GilShares, find_our_frames

APP = "app (/srv/app.py:3)"
HOOK = f"call_router ({PACKAGE}instrumentation/asgi/__init__.py:193)"
WRITER = f"Writer.write ({PACKAGE}ringbuffer/writer.py:10)"
STARLETTE = "Router.__call__ (/v/lib/python3.11/site-packages/starlette/routing.py:683)"
OURS = ["call_router (instrumentation/asgi/__init__.py)"]


@pytest.mark.parametrize(
    "caller",
    [
        "s_pack_into (/tmp/build/Python-3.11.7/Modules/_struct.c:2270)",
        "0x7f0012 (/usr/lib/python3.11/lib-dynload/_struct.cpython-311-x86_64-linux-gnu.so)",
        "time_monotonic_ns (/usr/bin/python3.11)",
        "clock_gettime ([vdso])",
        "PyLong_FromLong (/opt/python/lib/libpython3.11.so.1.0)",
        "memcpy (/usr/lib/x86_64-linux-gnu/libc.so.6)",
        f"suppress.__exit__ ({STDLIB}contextlib.py:40)",
        "get_current (/v/lib/python3.11/site-packages/opentelemetry/context/__init__.py:8)",
        "wrapt_call (/v/lib/python3.11/site-packages/wrapt/_wrappers.cpython-311-x86_64-linux-gnu.so)",
    ],
)
def test_what_works_only_for_its_caller_belongs_to_it(caller: str) -> None:
    assert find_our_frames([APP, HOOK, caller]) == OURS
    assert find_our_frames([HOOK, APP, caller]) == []


@pytest.mark.parametrize(
    "called",
    [
        STARLETTE,
        APP,
        f"Queue.put ({STDLIB}queue.py:133)",
        f"Thread.run ({STDLIB}threading.py:982)",
        "task_step (/tmp/build/Python-3.11.7/Modules/_asynciomodule.c:2990)",
        "0x12 (/usr/lib/python3.11/lib-dynload/_queue.cpython-311-x86_64-linux-gnu.so)",
        "at::add (/v/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so)",
        "UVStream_write (/project/uvloop/loop.c:110085)",
    ],
)
def test_a_library_that_a_hook_calls_is_not_ours(called: str) -> None:
    assert find_our_frames([APP, HOOK, called]) == []
    assert find_our_frames([APP, HOOK, called, "write (/usr/lib/x86_64-linux-gnu/libc.so.6)"]) == []


def test_a_hook_called_by_a_library_is_ours_from_its_first_frame() -> None:
    assert find_our_frames([HOOK, STARLETTE, HOOK, WRITER]) == [*OURS, "Writer.write (ringbuffer/writer.py)"]


def test_a_compiled_module_is_ours_by_its_file_or_its_source() -> None:
    assert find_our_frames([APP, f"write_step ({PACKAGE}ringbuffer/_hot.abi3.so)"])
    by_source = [APP, "write_step (/tmp/build/hot.c:12)", "Py_DECREF (/usr/include/python3.11/object.h:538)"]
    assert find_our_frames(by_source, frozenset({"hot.c"}))
    assert not find_our_frames(by_source)
    inlined = [APP, "Py_DECREF (/build/include/python3.11/object.h:538)", "Py_DECREF (/tmp/build/other.c:9)"]
    assert not find_our_frames(inlined, frozenset({"hot.c"}))


def test_samples_are_counted_by_process_without_the_sidecar() -> None:
    server = 'process 7:"python -c import a; b;"'
    worker = f'{server};process 9:"Worker"'
    sidecar = f'{server};process 8:"python {gil_samples.SIDECAR}.main"'
    shares = GilShares()
    shares.add_samples(
        [
            f"{server};{APP};{HOOK};{WRITER} 2",
            f"{server};{APP} 6",
            f"{sidecar};{WRITER} 50",
            f"{worker};{APP} 2",
        ]
    )
    assert (shares.total, shares.share) == (10, 0.2)
    assert shares.processes == {"process 7": [8, 2], "process 9": [2, 0]}
    assert shares.hooks == {OURS[0]: 2}
    assert shares.functions == {"Writer.write (ringbuffer/writer.py)": 2}
