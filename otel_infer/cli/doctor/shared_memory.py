"""Checks shared memory, the sidecar that reads it, and the rings that dead servers left."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from otel_infer.cli.doctor.check import Check, State
from otel_infer.cli.doctor.probe_process import MAX_REASON_CHARS
from otel_infer.config.environment import Config
from otel_infer.config.resource import detect_resource
from otel_infer.ringbuffer import dead_servers, directory, layout
from otel_infer.ringbuffer.arena import (
    FileArena,
    ForeignFolder,
    NotOnTmpfs,
    RingLimitReached,
    RingUnavailable,
    SharedMemoryFull,
    choose_sizes,
)
from otel_infer.ringbuffer.layout import RingSizes
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar import launcher

RINGS = "OTEL_INFER_RINGS"
MORE_MEMORY_HINT = f"give it more memory: Docker --shm-size=256m; Kubernetes an emptyDir with medium: Memory, and a folder of it as {RINGS}"
SUFFIXES = (layout.SUFFIX_REQUESTS, layout.SUFFIX_STEPS)
START_S, READ_S, END_S, POLL_S = 20.0, 10.0, 15.0, 0.05


def check_shared_memory(settings: Config) -> tuple[Check, str]:
    """Allocates and frees the rings of one server.

    Returns the check, and why the allocation failed (empty if it succeeded).
    """
    base = Path(settings.rings or directory.BASE)
    try:
        with scratch_folder(settings) as folder:
            divisor, free = _allocate_rings(folder)
    except (RingUnavailable, OSError) as refusal:
        return _report_no_memory(settings, base, refusal), str(refusal)
    found = f"{base} on tmpfs, {free >> 20} MiB free; mode: {describe_fallback(settings, '') or 'sidecar'}"
    if divisor > 1:
        return Check(
            "shared memory", "warn", f"{found}; rings fit only at 1/{divisor} of their size", MORE_MEMORY_HINT
        ), ""
    return Check("shared memory", "ok", f"{found}; rings fit at full size"), ""


def describe_fallback(settings: Config, refused: str) -> str:
    """Returns the mode that replaces the sidecar, and why; empty if a sidecar is used.

    `refused`: why the rings cannot be allocated; empty if they can.
    """
    if settings.mode == "in-process":
        return "in-process, because OTEL_INFER_MODE=in-process"
    if not sys.executable or getattr(sys, "frozen", False):
        return "in-process, because the interpreter is frozen or embedded"
    if not refused:
        return ""
    return (
        "off, because OTEL_INFER_MODE=sidecar"
        if settings.mode == "sidecar"
        else "in-process, which costs more"
    )


@contextlib.contextmanager
def scratch_folder(settings: Config) -> Iterator[Path]:
    """Yields a new server folder in the usual place, and removes it afterwards; raises `RingUnavailable`.

    The folder has a private parent, because a sidecar recovers the rings of dead servers beside its folder.
    """
    base = directory.BASE
    with contextlib.ExitStack() as undo:
        if settings.rings:
            rings = Path(settings.rings)
            for path in reversed([path for path in (rings, *rings.parents) if not path.exists()]):
                undo.callback(_remove_if_empty, path)
            base = directory.resolve_rings_folder(rings)
            undo.callback(_remove_if_empty, directory.get_user_folder(base))
        parent = directory.create_server_folder(base)
        undo.callback(directory.remove_server_folder, parent)
        folder = directory.ensure_private_folder(parent / "server")
        undo.callback(directory.remove_server_folder, folder)
        yield folder


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _allocate_rings(folder: Path) -> tuple[int, int]:
    """Returns (divisor of the full ring size; 1 = full size, free bytes before the allocation)."""
    arena = FileArena(folder)
    free = os.statvfs(folder)
    try:
        cells = RingSizes().cells // choose_sizes(arena, lambda sizes: sizes.requests_bytes).cells
        RequestWriter(arena, "doctor", "doctor")
        steps = RingSizes().step_cells // choose_sizes(arena, lambda sizes: sizes.steps_bytes).step_cells
        StepWriter(arena, "doctor-1", "doctor")
    finally:
        arena.close()
    return max(cells, steps), free.f_bavail * free.f_frsize


def _report_no_memory(settings: Config, base: Path, refusal: Exception) -> Check:
    found = f"none: {refusal}; mode: {describe_fallback(settings, str(refusal))}"
    if settings.mode == "in-process":
        return Check("shared memory", "ok", found)
    return Check(
        "shared memory", "fail" if settings.mode == "sidecar" else "warn", found, _find_remedy(refusal, base)
    )


def _find_remedy(refusal: Exception, base: Path) -> str:
    if isinstance(refusal, NotOnTmpfs):
        return f"unset {RINGS}, or set it to a folder on tmpfs, such as /dev/shm/NAME"
    if isinstance(refusal, ForeignFolder):
        return f"have its owner remove it, or set {RINGS} to your own folder on tmpfs"
    if isinstance(refusal, RingLimitReached):
        return f"give some of the server's processes another folder on tmpfs: {RINGS}"
    if isinstance(refusal, SharedMemoryFull) or getattr(refusal, "errno", 0) == errno.ENOSPC:
        return MORE_MEMORY_HINT
    return f"let user {os.getuid()} write to {base}, or set {RINGS} to a writable folder on tmpfs"


# ── the sidecar ──────────────────────────────────────────────────────────────────────────────────────────────────


def check_sidecar(settings: Config, refused: str) -> Check:
    """Starts a real sidecar on temporary rings and checks that it locks, reads and leaves them.

    The sidecar exports nothing.
    """
    fallback = describe_fallback(settings, refused)
    if fallback:
        no_memory = refused and settings.mode != "in-process"
        state: State = "ok" if not no_memory else "fail" if settings.mode == "sidecar" else "warn"
        return Check(
            "sidecar",
            state,
            f"not started: {fallback}",
            "first fix shared memory, see above" if no_memory else "",
        )
    for folder in _configured_folders(settings):
        if any(directory.is_held(folder / lock) for lock in (directory.SIDECAR_LOCK, directory.OWNER_LOCK)):
            return Check("sidecar", "ok", f"a sidecar reads {folder} already")
    began = time.monotonic()
    try:
        with scratch_folder(settings) as folder:
            error = _try_sidecar(folder, settings)
    except launcher.SidecarStartError as reason:
        found = f"it cannot be started: {reason}; mode: {describe_fallback(settings, str(reason))}"
        do = "let this user start processes, or set OTEL_INFER_MODE=in-process"
        return Check("sidecar", "fail" if settings.mode == "sidecar" else "warn", found, do)
    if not error:
        return Check("sidecar", "ok", f"starts, reads and exits ({time.monotonic() - began:.1f} s)")
    do = f"run `{sys.executable} -c 'import otel_infer.sidecar.main'` to see why; meanwhile set OTEL_INFER_MODE=in-process"
    return Check("sidecar", "fail", error, do)


def _try_sidecar(folder: Path, settings: Config) -> str:
    """Returns the error of a sidecar on this folder.

    Empty on success. Raises `launcher.SidecarStartError`.
    """
    log_path = folder.parent / "log"
    without_exports = dataclasses.replace(
        settings, traces_exporter="none", metrics_exporter="none", console=False, request_log="", tape="",
        dump_port="", metrics_port="", dump_on_slo="",
    )  # fmt: skip
    arena = FileArena(folder)
    header = RequestWriter(arena, "doctor", "doctor").words
    try:
        child = launcher.start_sidecar(
            folder, dataclasses.replace(without_exports, log=str(log_path)), detect_resource()
        )
        try:
            error = _watch_sidecar(child, folder, header, arena)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        return error and f"{error}{_read_last_line(log_path)}"
    finally:
        arena.close()
        log_path.unlink(missing_ok=True)


def _read_last_line(log_path: Path) -> str:
    """Returns the last line of the log, after `: `; empty if there is none."""
    lines = log_path.read_text("utf-8", "replace").strip().splitlines() if log_path.exists() else []
    return f": {lines[-1][:MAX_REASON_CHARS]}" if lines else ""


def _watch_sidecar(child: subprocess.Popen[bytes], folder: Path, header: memoryview, arena: FileArena) -> str:
    def has_ended() -> bool:
        return child.poll() is not None

    if not _wait_until(lambda: directory.is_held(folder / directory.SIDECAR_LOCK) or has_ended(), START_S):
        return f"it did not take its lock within {START_S:.0f} s"
    header[layout.W_FLUSH_REQUESTED] = 1
    if not _wait_until(lambda: header[layout.W_FLUSH_DONE] == 1 or has_ended(), READ_S):
        return f"it did not read within {READ_S:.0f} s"
    if has_ended():
        return f"it ended at once, with status {child.returncode}"
    arena.close()
    if not _wait_until(has_ended, END_S):
        return f"it did not exit within {END_S:.0f} s after the last writer"
    return f"it ended with status {child.returncode}" if child.returncode else ""


def _wait_until(done: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


# ── leftovers ────────────────────────────────────────────────────────────────────────────────────────────────────


def check_leftovers(settings: Config) -> Check:
    """Checks for rings of dead servers, without changing them.

    The next exporting sidecar beside them removes them. It exports what was in flight if it has their destination.
    """
    user_folder = directory.get_user_folder(directory.BASE)
    dead = [
        folder
        for folder in (*_list_folders(user_folder), *_configured_folders(settings))
        if dead_servers.holds_dead_server(folder)
    ]
    if not dead:
        return Check("leftovers", "ok", f"none in {settings.rings or user_folder}")
    rings = [path for folder in dead for path in folder.iterdir() if path.suffix in SUFFIXES]
    size = sum(path.stat().st_size for path in rings) / (1 << 20)
    found = f"rings of {len(dead)} dead server{'s' if len(dead) > 1 else ''} ({size:.1f} MiB)"
    names = ", ".join(map(str, dead[:3]))
    do = f"start that server again: its sidecar exports what was in flight and removes them (a server with another destination only removes them); or remove the files in {names}"
    return Check("leftovers", "warn", found, do)


def _configured_folders(settings: Config) -> list[Path]:
    """Returns the folders that may hold rings if the configuration names a folder, else none."""
    rings = Path(settings.rings)
    return [rings, directory.get_user_folder(rings)] if settings.rings else []


def _list_folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []
