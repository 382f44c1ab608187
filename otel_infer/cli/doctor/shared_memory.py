"""Shared memory, the sidecar that reads it, and what dead servers left in it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from otel_infer._bootstrap.install import detect_resource
from otel_infer.cli.doctor.check import Check, State
from otel_infer.cli.doctor.probe_process import MAX_REASON_CHARS
from otel_infer.config.environment import Config
from otel_infer.ringbuffer import directory, layout
from otel_infer.ringbuffer.layout import RingSizes
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import FileArena, RequestWriter, RingUnavailable, choose_sizes
from otel_infer.sidecar import launcher

RINGS = "OTEL_INFER_RINGS"
MORE_MEMORY_HINT = f"give it more: Docker --shm-size=256m; Kubernetes an emptyDir with medium: Memory, a folder of it as {RINGS}"
SUFFIXES = (layout.SUFFIX_REQUESTS, layout.SUFFIX_STEPS)
START_S, READ_S, END_S, POLL_S = 20.0, 10.0, 15.0, 0.05


def check_shared_memory(settings: Config) -> tuple[Check, str]:
    """Allocates what one server needs, and gives it back. The second answer: why there is none, or nothing."""
    base = Path(settings.rings or directory.BASE)
    try:
        with scratch_folder(settings) as folder:
            shrunk, free = _allocate_rings(folder)
    except (RingUnavailable, OSError) as refusal:
        return _report_no_memory(settings, base, str(refusal)), str(refusal)
    found = f"{base} on tmpfs, {free >> 20} MiB free; mode: {describe_fallback(settings, '') or 'sidecar'}"
    if shrunk > 1:
        return Check(
            "shared memory", "warn", f"{found}; rings fit only at 1/{shrunk} of their size", MORE_MEMORY_HINT
        ), ""
    return Check("shared memory", "ok", f"{found}; rings fit at full size"), ""


def describe_fallback(settings: Config, refused: str) -> str:
    """What is done instead of a sidecar, and why; empty where there is one. `refused`: why there is no memory."""
    if settings.mode == "in-process":
        return "in-process, since OTEL_INFER_MODE=in-process"
    if not sys.executable or getattr(sys, "frozen", False):
        return "in-process, since the interpreter is frozen or embedded"
    if not refused:
        return ""
    return (
        "off, since OTEL_INFER_MODE=sidecar" if settings.mode == "sidecar" else "in-process, which costs more"
    )


@contextlib.contextmanager
def scratch_folder(settings: Config) -> Iterator[Path]:
    """A server's folder where servers have theirs, gone afterwards; raises `RingRefused`.

    It has a parent of its own, since a sidecar takes over what dead servers left beside its folder.
    """
    base = directory.BASE
    with contextlib.ExitStack() as undo:
        if settings.rings:
            given = Path(settings.rings)
            for path in reversed([path for path in (given, *given.parents) if not path.exists()]):
                undo.callback(_remove_if_empty, path)
            base = directory.resolve_rings_folder(given)
            undo.callback(_remove_if_empty, _user_folder(base))
        outer = directory.create_server_folder(base)
        undo.callback(directory.remove_server_folder, outer)
        folder = directory.ensure_private_folder(outer / "server")
        undo.callback(directory.remove_server_folder, folder)
        yield folder


def _user_folder(base: Path) -> Path:
    """This user's folder, whether it is there or not."""
    return base / f"otel_infer-{os.getuid()}"


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _allocate_rings(folder: Path) -> tuple[int, int]:
    """(how much smaller than they should be the rings are, bytes free before)."""
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


def _report_no_memory(settings: Config, base: Path, reason: str) -> Check:
    found = f"none: {reason}; mode: {describe_fallback(settings, reason)}"
    if settings.mode == "in-process":
        return Check("shared memory", "ok", found)
    return Check(
        "shared memory", "fail" if settings.mode == "sidecar" else "warn", found, _find_remedy(reason, base)
    )


def _find_remedy(reason: str, base: Path) -> str:
    if "not on tmpfs" in reason:
        return f"unset {RINGS}, or set it to a folder on tmpfs, such as /dev/shm/NAME"
    if "belongs to somebody else" in reason:
        return f"have its owner remove it, or set {RINGS} to a folder on tmpfs that is yours"
    if "are used up" in reason:
        return f"give some of the server's processes another folder on tmpfs: {RINGS}"
    if "is free" in reason or "No space" in reason:
        return MORE_MEMORY_HINT
    return f"let user {os.getuid()} write to {base}, or set {RINGS} to a folder on tmpfs where it may"


# ── the sidecar ──────────────────────────────────────────────────────────────────────────────────────────────────


def check_sidecar(settings: Config, refused: str) -> Check:
    """Starts a real one on rings of its own, and sees it take them, read them and leave. It exports nothing."""
    instead = describe_fallback(settings, refused)
    if instead:
        lacking = refused and settings.mode != "in-process"
        state: State = "ok" if not lacking else "fail" if settings.mode == "sidecar" else "warn"
        return Check(
            "sidecar", state, f"not started: {instead}", "first do what shared memory says" if lacking else ""
        )
    for folder in _configured_folders(settings):
        if any(directory.is_held(folder / lock) for lock in (directory.SIDECAR_LOCK, directory.OWNER_LOCK)):
            return Check("sidecar", "ok", f"one reads {folder} already")
    began = time.monotonic()
    try:
        with scratch_folder(settings) as folder:
            trouble = _try_sidecar(folder, settings)
    except launcher.SidecarStartError as reason:
        found = f"it cannot be started: {reason}; mode: {describe_fallback(settings, str(reason))}"
        do = "let this user start processes, or set OTEL_INFER_MODE=in-process"
        return Check("sidecar", "fail" if settings.mode == "sidecar" else "warn", found, do)
    if not trouble:
        return Check("sidecar", "ok", f"starts, reads and leaves ({time.monotonic() - began:.1f} s)")
    do = f"run `{sys.executable} -c 'import otel_infer.sidecar.main'` to see why; meanwhile set OTEL_INFER_MODE=in-process"
    return Check("sidecar", "fail", trouble, do)


def _try_sidecar(folder: Path, settings: Config) -> str:
    """What went wrong with a sidecar here; nothing if nothing did. Raises `launch.CannotStart`."""
    diary = folder.parent / "log"
    nowhere = dataclasses.replace(
        settings, traces_exporter="none", metrics_exporter="none", console=False, request_log="", tape="",
        dump_port="", metrics_port="", dump_on_slo="",
    )  # fmt: skip
    arena = FileArena(folder)
    words = RequestWriter(arena, "doctor", "doctor").words
    try:
        child = launcher.start_sidecar(
            folder, dataclasses.replace(nowhere, log=str(diary)), detect_resource()
        )
        try:
            trouble = _watch_sidecar(child, folder, words, arena)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        return trouble and f"{trouble}{_read_last_line(diary)}"
    finally:
        arena.close()
        diary.unlink(missing_ok=True)


def _read_last_line(diary: Path) -> str:
    """What it said last, if it came so far as to say something."""
    lines = diary.read_text("utf-8", "replace").strip().splitlines() if diary.exists() else []
    return f": {lines[-1][:MAX_REASON_CHARS]}" if lines else ""


def _watch_sidecar(child: subprocess.Popen[bytes], folder: Path, words: memoryview, arena: FileArena) -> str:
    def has_ended() -> bool:
        return child.poll() is not None

    if not _wait_until(lambda: directory.is_held(folder / directory.SIDECAR_LOCK) or has_ended(), START_S):
        return f"it did not take its lock within {START_S:.0f} s"
    words[layout.W_FLUSH_REQUESTED] = 1
    if not _wait_until(lambda: words[layout.W_FLUSH_DONE] == 1 or has_ended(), READ_S):
        return f"it did not read within {READ_S:.0f} s"
    if has_ended():
        return f"it ended at once, with status {child.returncode}"
    arena.close()
    if not _wait_until(has_ended, END_S):
        return f"it did not leave within {END_S:.0f} s of the last writer"
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
    """Rings of dead servers. Only looked at: the next sidecar beside them that sends tells what was in flight."""
    home = _user_folder(directory.BASE)
    dead = [folder for folder in (*_list_folders(home), *_configured_folders(settings)) if _is_dead(folder)]
    if not dead:
        return Check("leftovers", "ok", f"none in {settings.rings or home}")
    rings = [path for folder in dead for path in folder.iterdir() if path.suffix in SUFFIXES]
    size = sum(path.stat().st_size for path in rings) / (1 << 20)
    found = f"rings of {len(dead)} dead server{'s' if len(dead) > 1 else ''} ({size:.1f} MiB)"
    names = ", ".join(map(str, dead[:3]))
    do = f"start a server that exports: what was in flight is told under the names it had, and they go; or remove the files in {names}"
    return Check("leftovers", "warn", found, do)


def _configured_folders(settings: Config) -> list[Path]:
    """Where the rings of a server may lie for which the configuration names a folder."""
    given = Path(settings.rings)
    return [given, _user_folder(given)] if settings.rings else []


def _list_folders(home: Path) -> list[Path]:
    try:
        return sorted(path for path in home.iterdir() if path.is_dir())
    except OSError:
        return []


def _is_dead(folder: Path) -> bool:
    """As `place.dead_servers` sees it, but without making a lock file there. The living are known by their rings."""
    rings = list(folder.glob(f"*{layout.SUFFIX_REQUESTS}"))
    locks = (*rings, folder / directory.OWNER_LOCK, folder / directory.SIDECAR_LOCK)
    return bool(rings) and not directory.is_starting(folder) and not any(map(directory.is_held, locks))
