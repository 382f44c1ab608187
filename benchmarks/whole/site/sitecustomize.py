"""Installs and removes the hooks of a server's process at a signal: SIGUSR1 installs, SIGUSR2 removes.

This folder is on PYTHONPATH of a measured server, so every Python process of it runs this file at its start. A process
writes its state to `PID.state` in the folder that `WHOLE_STATES` names: how many signals it obeyed, `on` or `off`, and
the number of its integrations. So it exists in each process that listens; the signals would end any other process.
"""

import os
import signal
import sys
import threading
from pathlib import Path

_obeyed = 0


def _write_state(state: str, integrations: int) -> None:
    path = Path(os.environ["WHOLE_STATES"]) / f"{os.getpid()}.state"
    temporary = path.with_suffix(".new")
    temporary.write_text(f"{_obeyed} {state} {integrations}")
    temporary.replace(path)


def _switch_hooks(number: int, frame: object) -> None:
    global _obeyed
    install = sys.modules.get("otel_infer._bootstrap.install")
    installation = getattr(install, "installation", None)  # none in a process without hooks
    integrations = installation.installed if installation else []
    for integration in integrations:
        integration.install() if number == signal.SIGUSR1 else integration.remove()
    _obeyed += 1
    _write_state("on" if number == signal.SIGUSR1 else "off", len(integrations))


def _listen() -> None:
    if "OTEL_INFER_SIDECAR" in os.environ or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGUSR1, _switch_hooks)
    signal.signal(signal.SIGUSR2, _switch_hooks)
    _write_state("on", 0)
    os.register_at_fork(after_in_child=lambda: _write_state("on", 0))


if "WHOLE_STATES" in os.environ:
    _listen()
