"""Installs and removes the hooks of a server's process at the signal SIGRTMIN+1, which no server uses itself.

This folder is on PYTHONPATH of a measured server, so every Python process of it runs this file at its start. The file
`wanted` in the folder that `WHOLE_STATES` names has the wanted state: `on`, `off`, or `unmarked`, which has hooks and no marks on a
GPU. A process writes its own state to `PID.state` there: how many signals it obeyed, the state, the number of its integrations,
and how many steps it marked and CUDA graphs it captured until then. So the file exists in each process that
listens; the signal would end any other process.
"""

import os
import runpy
import signal
import sys
import threading
from pathlib import Path

_obeyed = _marked = _marked_before = 0
_may_mark = None


def _write_state(state: str, integrations: int = 0) -> None:
    path = Path(os.environ["WHOLE_STATES"]) / f"{os.getpid()}.state"
    temporary = path.with_suffix(".new")
    captures = getattr(sys.modules.get("otel_infer.gpu.graph_capture"), "capture_count", 0)
    temporary.write_text(f"{_obeyed} {state} {integrations} {_marked} {captures}")
    temporary.replace(path)


def _switch_hooks(number: int, frame: object) -> None:
    global _obeyed
    state = (Path(os.environ["WHOLE_STATES"]) / "wanted").read_text()
    install = sys.modules.get("otel_infer._bootstrap.install")
    installation = getattr(install, "installation", None)  # none in a process without hooks
    integrations = installation.installed if installation else []
    for integration in integrations:
        integration.remove() if state == "off" else integration.install()
    if integrations:
        _switch_marks(state == "on")
    _obeyed += 1
    _write_state(state, len(integrations))


def _switch_marks(is_on: bool) -> None:
    """Stops the marks as `OTEL_INFER_DEVICE_TIMING=off` does, or permits them if they were permitted at the start."""
    global _may_mark, _marked, _marked_before
    timing = sys.modules["otel_infer.gpu.timing"].timing
    worker = timing._worker
    timelines = [timeline for _, timeline, _ in worker._active_timelines] if worker else []
    _marked = _marked_before + sum(timeline.begun for timeline in timelines)
    if _may_mark is None:
        _may_mark = timing.is_on
    if not is_on:
        timing.stop()
        _marked_before = _marked
    timing.is_on = is_on and _may_mark


def _listen() -> None:
    if "OTEL_INFER_SIDECAR" in os.environ or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGRTMIN + 1, _switch_hooks)
    _write_state("on")
    os.register_at_fork(after_in_child=lambda: _write_state("on"))


def _run_next_sitecustomize() -> None:
    """Runs the file of this name in the next folder that has one, such as the one beside SGLang's replaced kernels."""
    folders = [Path(entry or ".").resolve() for entry in sys.path]
    for folder in folders[folders.index(Path(__file__).resolve().parent) + 1 :]:
        if (folder / "sitecustomize.py").exists():
            runpy.run_path(str(folder / "sitecustomize.py"))
            return


if "WHOLE_STATES" in os.environ:
    _listen()
_run_next_sitecustomize()
