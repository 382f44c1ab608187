"""Checks whether the code of late threads can be sampled: a signal to a process, and its stacks in a file."""

from __future__ import annotations

import os
import subprocess
import sys

from otel_infer.cli.doctor.check import Check
from otel_infer.config.environment import Config
from otel_infer.config.settings import SETTINGS
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.stack_signal import find_free_signal

_TRIAL = """
import faulthandler, signal, sys, time
faulthandler.register(int(sys.argv[1]), file=sys.stdout, all_threads=False, chain=False)
print("ready", flush=True)
time.sleep(5)
"""
NAME, LOST = "stacks", "the code of late threads is not recorded"


def check_stacks(settings: Config) -> Check:
    """Checks it with a separate process, which is signalled as a server would be."""
    if not settings.stacks:
        return Check(NAME, "ok", f"{LOST}, because {SETTINGS['stacks'].variable}=off")
    if native is None:
        return Check(
            NAME, "warn", f"{LOST}: the compiled module is missing", "install the wheel of this platform"
        )
    try:
        reason = _try_signal()
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error)
    if reason:
        return Check(NAME, "warn", f"{LOST}: {reason}", "allow pidfd_open and tgkill (Linux 5.3, seccomp)")
    return Check(NAME, "ok", "the code of late threads is recorded while something is late")


def _try_signal() -> str:
    """Returns why the stacks of a process cannot be read; "" if they can."""
    number = find_free_signal()
    if not number:
        return "all real-time signals are in use"
    with subprocess.Popen([sys.executable, "-c", _TRIAL, str(number)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            os.close(os.pidfd_open(process.pid))
            native.signal_thread(process.pid, process.pid, number)
            return "" if process.stdout.readline().startswith(b"Stack") else "the signal did not arrive"
        finally:
            process.kill()
