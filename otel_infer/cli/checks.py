"""What `doctor` looks at in its own process: versions, configuration, shared memory, sidecar, GPU, leftovers.

Each check says what it found and, unless that is fine, what to do. Nothing here changes what it looks at: what is made
for a trial is made apart from everybody's rings, and removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote

from otel_infer import config, launch
from otel_infer._wiring import resource
from otel_infer.config import Config
from otel_infer.gpu.nvml import NvmlState
from otel_infer.ring import layout, place
from otel_infer.ring.layout import Sizes
from otel_infer.ring.write import FileArena, RequestWriter, RingRefused, StepWriter, fitting
from otel_infer.version import VERSION

State = Literal["ok", "warn", "fail"]

NEEDED = (
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-http",
    "wrapt",
    "numpy",
    "protobuf",
)
SHOWN = (*NEEDED, "opentelemetry-exporter-otlp-proto-grpc")
START_S, READ_S, END_S = 20.0, 10.0, 15.0
MORE_MEMORY = "give it more: Docker --shm-size=256m; Kubernetes: an emptyDir with medium: Memory, named by OTEL_INFER_RINGS"


class Check(NamedTuple):
    """One thing looked at. `do` says what to do about it, and is empty where all is well."""

    name: str
    state: State
    found: str
    do: str = ""


def versions(installed: Callable[[str], str | None] | None = None) -> Check:
    """What is installed for this interpreter."""
    found = {name: (installed or _installed)(name) for name in SHOWN}
    said = [f"otel-infer {VERSION}", f"Python {platform.python_version()} ({sys.executable})"]
    said += [f"{name} {version}" for name, version in found.items() if version]
    missing = [name for name in NEEDED if not found[name]]
    if not missing:
        return Check("versions", "ok", ", ".join(said))
    said.append(f"not installed: {', '.join(missing)}")
    return Check("versions", "fail", ", ".join(said), f"{sys.executable} -m pip install {' '.join(missing)}")


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────


def configuration(environ: Mapping[str, str]) -> Check:
    """Bad values, variables of ours that do not exist, and where things go."""
    settings, complaints = config.from_env_leniently(environ)
    found, do = list(complaints), [f"set {said.partition('=')[0]} to a value it accepts" for said in complaints]
    for name, meant in _mistyped(environ):
        found.append(f"{name} is no setting")
        do.append(f"set {meant} instead" if meant else f"unset {name}")
    state: State = "fail" if complaints else "warn" if found else "ok"
    if settings.switched_off:
        found.append(f"switched off by {_who_said_no(settings, environ)}")
        do.append(f"unset {_who_said_no(settings, environ)}")
    elif not settings.exports:
        found.append("nothing is exported")
        do.append("set OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:4318, or start the server with `otel-infer run`")
    else:
        found.append(_destinations(settings, environ))
    if state == "ok" and do:
        state = "warn"
    return Check("configuration", state, "; ".join(found), "; ".join(do))


def destination(signal: str, protocol: str, environ: Mapping[str, str]) -> str:
    """The URL that `traces` or `metrics` are sent to, by the rules of the exporters."""
    own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    if protocol == "grpc":
        return own or base or "http://localhost:4317"
    return own or f"{(base or 'http://localhost:4318').rstrip('/')}/v1/{signal}"


def _destinations(settings: Config, environ: Mapping[str, str]) -> str:
    said = []
    for signal, sends, protocol in (
        ("traces", settings.sends_spans, settings.traces_protocol),
        ("metrics", settings.sends_metrics, settings.metrics_protocol),
    ):
        where = f"to {destination(signal, protocol, environ)} ({protocol})" if sends else "not sent"
        said.append(f"{'spans' if signal == 'traces' else signal} {where}")
    said += ["a line for each request"] if settings.console else []
    said += [f"tape {settings.tape}"] if settings.tape else []
    return ", ".join(said)


def _mistyped(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(variable, the one that was probably meant)."""
    known = [setting.variable for setting in config.SETTINGS.values()]
    for name in sorted(environ):
        if name.startswith("OTEL_INFER_") and name not in (*known, config.SIDECAR_GUARD):
            yield name, next(iter(difflib.get_close_matches(name, known, 1)), "")


def _who_said_no(settings: Config, environ: Mapping[str, str]) -> str:
    if settings.sdk_disabled:
        return "OTEL_SDK_DISABLED"
    if settings.enabled in ("off", "0", "false"):
        return config.SETTINGS["enabled"].variable
    return "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"


def masked(text: str, environ: Mapping[str, str]) -> str:
    """The text without credentials in URLs, without queries, and without the values of configured headers."""
    for name, headers in environ.items():
        if name.startswith("OTEL_") and name.endswith("_HEADERS"):
            for pair in headers.split(","):
                value = pair.partition("=")[2].strip()
                for secret in {value, unquote(value), unquote(value).rpartition(" ")[2]} - {""}:
                    text = text.replace(secret, "***") if len(secret) > 3 else text
    text = re.sub(r"(?<=://)[^/\s]+@", "***@", text)
    return re.sub(r"(://[^\s?]*)\?[^\s,)]+", r"\1?***", text)


# ── shared memory and the sidecar ────────────────────────────────────────────────────────────────────────────────


def shared_memory(settings: Config) -> tuple[Check, str]:
    """Allocates what one server needs, and gives it back. The second answer: why there is none, or nothing."""
    base = Path(settings.rings) if settings.rings else place.BASE
    unused = settings.mode == "in-process"
    try:
        with scratch(base, owned=bool(settings.rings)) as folder:
            if not place.is_tmpfs(folder):
                raise RingRefused(f"{base} is not on tmpfs")
            shrunk, free = _allocate(folder)
    except (RingRefused, OSError) as refusal:
        reason = str(refusal)
        found = f"none: {reason}; mode: {in_process(settings, reason)}"
        state: State = "ok" if unused else "fail" if settings.mode == "sidecar" else "warn"
        return Check("shared memory", state, found, "" if unused else _remedy(reason, base)), reason
    why = in_process(settings, "")
    found = f"{base} on tmpfs, {free >> 20} MiB free; mode: {why or 'sidecar'}"
    if settings.rings and base.is_dir() and base.stat().st_mode & 0o1000:
        do = f"name a folder of its own: OTEL_INFER_RINGS={base / 'NAME'}; the server makes it 0700"
        return Check("shared memory", "warn", f"{found}; {base} is everybody's", do), ""
    if shrunk > 1:
        return Check("shared memory", "warn", f"{found}; rings only 1/{shrunk} of their size fit", MORE_MEMORY), ""
    return Check("shared memory", "ok", f"{found}; rings of full size fit"), ""


def in_process(settings: Config, refused: str) -> str:
    """What is done instead of a sidecar, and why; empty where there is one."""
    if settings.mode == "in-process":
        return "in-process, since OTEL_INFER_MODE=in-process"
    if not sys.executable or getattr(sys, "frozen", False):
        return "in-process, since the interpreter is frozen or embedded"
    if refused and settings.mode == "sidecar":
        return "off, since OTEL_INFER_MODE=sidecar"
    return "in-process, the costlier way" if refused else ""


@contextlib.contextmanager
def scratch(base: Path, owned: bool = False) -> Iterator[Path]:
    """A server's folder, gone afterwards; raises `RingRefused`. `owned`: `base` itself has to be ours.

    It has a parent of its own, for a sidecar takes over what dead servers left beside its folder.
    """
    if owned and base.exists() and (not base.is_dir() or base.lstat().st_uid != os.getuid()):
        raise RingRefused(f"{base}: belongs to somebody else")
    home = base / f"otel_infer-{os.getuid()}"
    made = [path for path in (home, *home.parents) if not path.exists()]
    outer = folder = home
    try:
        outer = place.new_server_folder(base)
        folder = place.private_folder(outer / "server")
        yield folder
    finally:
        if folder != home:
            place.remove(folder)
            place.remove(outer)
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def _allocate(folder: Path) -> tuple[int, int]:
    """(how much smaller than they should be, bytes free before)."""
    arena = FileArena(folder)
    free = os.statvfs(folder)
    try:
        cells = Sizes().cells // fitting(arena, lambda sizes: sizes.requests_bytes).cells
        RequestWriter(arena, "doctor", "doctor")
        steps = Sizes().step_cells // fitting(arena, lambda sizes: sizes.steps_bytes).step_cells
        StepWriter(arena, "doctor-1", "doctor")
    finally:
        arena.close()
    return max(cells, steps), free.f_bavail * free.f_frsize


def _remedy(reason: str, base: Path) -> str:
    name = "OTEL_INFER_RINGS"
    if "not on tmpfs" in reason:
        return f"unset {name}, or set it to a folder on tmpfs, such as /dev/shm/NAME"
    if "belongs to somebody else" in reason:
        return f"have its owner remove it, or set {name} to a folder on tmpfs that is yours"
    if "is free" in reason or "No space" in reason:
        return MORE_MEMORY
    return f"let user {os.getuid()} write to {base}, or set {name} to a folder on tmpfs where it may"


def sidecar(settings: Config, refused: str) -> Check:
    """Starts a real one on rings of its own, and sees it take them, read them and leave. It exports nothing."""
    instead = in_process(settings, refused)
    if instead:
        needed = refused and settings.mode != "in-process"
        state: State = "ok" if not needed else "fail" if settings.mode == "sidecar" else "warn"
        return Check("sidecar", state, f"not started: {instead}", "see shared memory" if needed else "")
    base = Path(settings.rings) if settings.rings else place.BASE
    for lock in (place.SIDECAR_LOCK, place.OWNER_LOCK):
        if settings.rings and place.is_held(base / lock):
            return Check("sidecar", "ok", f"one reads {base} already")
    began = time.monotonic()
    with scratch(base, owned=bool(settings.rings)) as folder:
        trouble = _lived(folder, settings)
    if not trouble:
        return Check("sidecar", "ok", f"starts, reads and leaves ({time.monotonic() - began:.1f} s)")
    do = f"run `{sys.executable} -c 'import otel_infer.sidecar'` to see why; meanwhile set OTEL_INFER_MODE=in-process"
    return Check("sidecar", "fail", trouble, do)


def _lived(folder: Path, settings: Config) -> str:
    """What went wrong in the life of a sidecar; nothing if nothing did."""
    quiet = dataclasses.replace(
        settings, traces_exporter="none", metrics_exporter="none", console=False, tape="", log=""
    )
    arena = FileArena(folder)
    words = RequestWriter(arena, "doctor", "doctor").words
    try:
        child = launch.sidecar(folder, quiet, resource())
    except launch.CannotStart as reason:
        arena.close()
        return f"cannot be started: {reason}"
    try:
        for does, within, done in (
            ("take its lock", START_S, lambda: place.is_held(folder / place.SIDECAR_LOCK)),
            ("read", READ_S, lambda: bool(words[layout.W_FLUSH_DONE])),
        ):
            words[layout.W_FLUSH_ASKED] = 1
            if not _until(lambda: done() or child.poll() is not None, within):
                return f"it started, but did not {does} within {within:.0f} s"
            if child.poll() is not None:
                return f"it ended at once, with status {child.returncode}"
        arena.close()
        left = _until(lambda: child.poll() is not None, END_S)
        return "" if left and not child.returncode else f"it did not leave in order (status {child.returncode})"
    finally:
        arena.close()
        if child.poll() is None:
            child.kill()
        child.wait()


def _until(done: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────


def gpu(nvml: NvmlState) -> Check:
    """What NVML answers. That nobody has an NVIDIA GPU is no fault."""
    timing = "GPU timing: unverified"
    match nvml.status:
        case "ready":
            devices = ", ".join(nvml.devices) or "no device"
            return Check("gpu", "ok", f"NVIDIA driver {nvml.driver}: {devices}; {timing}")
        case "no driver":
            return Check("gpu", "ok", f"no NVIDIA driver: GPU metrics are absent; {timing}")
        case "no library":
            found = "the kernel has an NVIDIA driver, but libnvidia-ml is not found here"
            do = "start the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        case "no permission":
            found, do = "NVML refuses this user", "give the user access to /dev/nvidiactl and /dev/nvidia*"
        case "no package":
            found, do = "nvidia-ml-py is not installed", f"{sys.executable} -m pip install nvidia-ml-py"
        case _:
            found, do = f"NVML does not answer: {nvml.reason}", "run nvidia-smi: it says what is wrong with the driver"
    return Check("gpu", "warn", f"{found}: GPU metrics are absent; {timing}", do)


def leftovers(home: Path) -> Check:
    """Rings that dead servers left in `home`. Only looked at: the next sidecar there reports what was in flight."""
    dead = [folder for folder in _folders(home) if _is_dead(folder)]
    if not dead:
        return Check("leftovers", "ok", f"none in {home}")
    size = sum(path.stat().st_size for folder in dead for path in folder.iterdir())
    found = f"rings of {len(dead)} dead server{'s' * (len(dead) > 1)} in {home} ({size / (1 << 20):.1f} MiB)"
    names = " ".join(str(folder) for folder in dead[:3])
    do = f"start a server: its sidecar reports what was in flight and removes them; or run rm -r {names}"
    return Check("leftovers", "warn", found, do)


def _folders(home: Path) -> list[Path]:
    try:
        return sorted(path for path in home.iterdir() if path.is_dir())
    except OSError:
        return []


def _is_dead(folder: Path) -> bool:
    rings = list(folder.glob(f"*{layout.SUFFIX_REQUESTS}"))
    locks = (folder / place.OWNER_LOCK, folder / place.SIDECAR_LOCK, *rings)
    return bool(rings) and not any(map(place.is_held, locks))
