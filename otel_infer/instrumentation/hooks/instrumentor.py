"""The hooks of one library, grouped in parts, and their installation.

A *part* is installed completely or not at all, because half of its hooks would record wrong data.
It is installed once the application has imported every module that its hooks name. We import none of them.
The unnamed part is the library itself. A named part is a feature that other releases may lack.

A part names only modules that one process imports: a part that spans two processes would wait in both
forever.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Literal, NamedTuple, Union

import wrapt

from otel_infer import _clock
from otel_infer.instrumentation.hooks.callback import CallbackFactory, CallbackPatch
from otel_infer.instrumentation.hooks.distribution import find_version, is_importable
from otel_infer.instrumentation.hooks.import_starts import estimate_past_import, import_starts
from otel_infer.instrumentation.hooks.patch import FunctionPatch, HotPathPatch, OnDemandPatch
from otel_infer.instrumentation.hooks.probe import Probe, WrapperFactory
from otel_infer.instrumentation.hooks.target import TargetMismatch
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.forks import call_in_child
from otel_infer.ringbuffer.recorder import recorder

log = logging.getLogger(__name__)

State = Literal["absent", "waiting", "active", "drifted", "removed"]
AnyPatch = Union[FunctionPatch, HotPathPatch, CallbackPatch]

# Shared by all instrumentors. It is not held while an import is logged, because logging may import modules.
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


call_in_child(_renew_lock)  # the thread that held the lock does not exist in the child


@dataclass(frozen=True)
class InstrumentorStatus:
    """The state of one instrumentor, for `doctor`, the startup message and the hooks self-metric.

    `state` has five values. `absent`: the library is not installed. `waiting`: it is not imported yet.
    `active`: a part is installed and none is drifted. `drifted`: a part does not fit this release, see
    `drift`.
    `removed`: `remove` was called.
    `hooks_total` counts the hooks whose target exists in this release, as far as that is known yet.
    `hooks_active` counts the installed hooks that have not failed.
    `hooks_due` counts the hooks of parts whose modules this process has imported; they should be active.
    """

    name: str
    distribution: str
    version: str | None
    state: State
    hooks_active: int
    hooks_total: int
    drift: str | None
    hooks_due: int = 0


class PartStatus(NamedTuple):
    """The state of one part. `modules`: those that its hooks name, one per hook. `hooks_*`: as above."""

    name: str
    state: State
    drift: str | None
    modules: tuple[str, ...]
    hooks_active: int
    hooks_total: int


@dataclass
class _Part:
    name: str
    hooks: list[AnyPatch] = field(default_factory=list)
    state: State = "waiting"
    drift: str | None = None

    def required_modules(self) -> set[str]:
        """Returns the modules that must exist: of the required hooks, or of all hooks if none is required."""
        required = [hook for hook in self.hooks if not hook.optional]
        return {hook.module for hook in required or self.hooks}

    def install(self) -> str | None:
        """Installs all hooks, or none. Returns None, or the mismatch that prevented it."""
        installed: list[AnyPatch] = []
        try:
            for hook in self.hooks:
                hook.check_target()
            for hook in self.hooks:
                hook.install()
                installed.append(hook)
        except Exception as exc:
            for hook in reversed(installed):
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
        """Returns how many hooks should work: all of them, or in an active part the installed ones."""
        return sum(hook.installed or self.state != "active" for hook in self.hooks)


class Instrumentor:
    """The hooks of one library. Decorators register them at import; nothing is patched before `install`."""

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
        """Describes the library.

        `name`: the name of the instrumentor. `distribution`: the installed package.
        `modules`: modules whose import shows that the library is in use.
        `is_engine`: the library runs models, so rings and the sidecar are prepared at its import.
        `processes`: prefix of a `multiprocessing` process name of the library → its role. Such a process
        starts no sidecar.
        `where`: part → the process of the library that the part belongs to.
        `helpers`: modules that the library runs as separate programs (`python -m …`, or by their paths) and that
        serve no requests.
        `plugins`: the environment variable that lists the plugins the library may load, if it loads us as a
        plugin.
        """
        self.name = name
        self.is_engine = is_engine
        self.processes, self.where, self.helpers, self.plugins = processes, where, helpers, plugins
        self.on_change: Callable[[Instrumentor], None] = lambda instrumentor: None
        self.distribution = distribution
        self.modules = (modules,) if isinstance(modules, str) else tuple(modules)
        self._parts: dict[str, _Part] = {}
        self._watched_modules: set[str] = set()
        # Reported by the import hook. `__spec__._initializing` stays set a moment longer.
        self._finished_imports: set[str] = set()
        self._install_requested = False
        self._removed = False

    def patch_function(
        self, target: str, reads: Sequence[str] = (), optional: bool = False, part: str = ""
    ) -> Callable[[Probe], Probe]:
        """Returns a decorator that registers a probe around every call of `target`."""

        def register_probe(probe: Probe) -> Probe:
            self._add_patch(FunctionPatch(target, probe, reads, optional, part))
            return probe

        return register_probe

    def patch_hot_path(
        self, target: str, reads: Sequence[str] = (), optional: bool = False, part: str = ""
    ) -> Callable[[WrapperFactory], WrapperFactory]:
        """Returns a decorator for a factory. The result of `make(original, hook)` replaces `target`."""

        def register_factory(make: WrapperFactory) -> WrapperFactory:
            self._add_patch(HotPathPatch(target, make, reads, optional, part))
            return make

        return register_factory

    def patch_on_demand(
        self,
        target: str,
        make: WrapperFactory,
        reads: Sequence[str] = (),
        optional: bool = False,
        part: str = "",
    ) -> OnDemandPatch:
        """Registers a hot-path patch that replaces its target once its `demand` is called, and returns it."""
        patch = OnDemandPatch(target, make, reads, optional, part)
        self._add_patch(patch)
        return patch

    def add_callback(self, target: str) -> Callable[[CallbackFactory], CallbackFactory]:
        """Returns a decorator for a factory. The result of `make(hook)` joins the callback list `target`."""

        def register_factory(make: CallbackFactory) -> CallbackFactory:
            self._add_patch(CallbackPatch(target, make))
            return make

        return register_factory

    def install(self) -> None:
        """Installs each part as soon as its modules are imported. Mismatches are reported in `status`."""
        self._install_requested, self._removed = True, False
        target_modules = {hook.module for part in self._parts.values() for hook in part.hooks}
        for module in sorted({*self.modules, *target_modules} - self._watched_modules):
            self._watched_modules.add(module)
            self._watch_import(module)
        self._install_due_parts()

    def remove(self) -> None:
        """Removes all hooks that are still ours. Later imports install nothing."""
        with _lock:
            self._install_requested, self._removed = False, True
            for part in reversed(self._parts.values()):
                part.remove()

    @property
    def status(self) -> InstrumentorStatus:
        """The current state. Reads modules and metadata from disk, so it is not for a hot path."""
        version = find_version(self.distribution)
        part_states = [(part, *self._resolve_part_state(part)) for part in self._parts.values()]
        return InstrumentorStatus(
            self.name,
            self.distribution,
            version,
            self._merge_states([state for _, state, _ in part_states], version),
            sum(hook.active for part, _, _ in part_states for hook in part.hooks),
            sum(part.count_expected() for part, state, _ in part_states if state != "absent"),
            "; ".join(drift for _, _, drift in part_states if drift) or None,
            sum(part.count_expected() for part, state, _ in part_states if state in ("active", "drifted")),
        )

    def describe_parts(self) -> list[PartStatus]:
        """Returns the states of all parts; like `status`, it is not for a hot path."""
        descriptions = []
        for part in self._parts.values():
            state, drift = self._resolve_part_state(part)
            modules = tuple(hook.module for hook in part.hooks)
            active = sum(hook.active for hook in part.hooks)
            total = 0 if state == "absent" else part.count_expected()
            descriptions.append(PartStatus(part.name, state, drift, modules, active, total))
        return descriptions

    @property
    def parts(self) -> dict[str, State]:
        """Part name → its state."""
        return {part.name: self._resolve_part_state(part)[0] for part in self._parts.values()}

    def _merge_states(self, parts: list[State], version: str | None) -> State:
        if self._removed:
            return "removed"
        if "drifted" in parts:
            return "drifted"
        if "active" in parts:
            return "active"
        if version is None and not any(is_importable(module) for module in self.modules):
            return "absent"
        return "absent" if parts and set(parts) == {"absent"} else "waiting"

    def _resolve_part_state(self, part: _Part) -> tuple[State, str | None]:
        """Returns the state and the mismatch of a part.

        For a waiting part it checks whether its modules exist, because no import hook reports a missing
        module.
        """
        if part.state != "waiting" or not any(module in sys.modules for module in self.modules):
            return part.state, part.drift
        modules = part.required_modules()
        missing = sorted(module for module in modules if not is_importable(module))
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
                    self._record_import(name, *estimate_past_import())
                return  # already in sys.modules, initialised or not: `_install_due_parts` checks that itself
            try:
                self._finished_imports.add(name)
                self._install_due_parts()
                self._record_import(name, import_starts.started_at(name), _clock.now())
            except Exception as exc:  # an exception would fail the application's import
                log.warning("%s: %s while handling the import of %s", self.name, type(exc).__name__, name)

        import_starts.watch_module(name)
        wrapt.register_post_import_hook(on_import, name)
        registering = None

    def _record_import(self, name: str, started_at: int, at: int) -> None:
        """Records the import of an engine's module, or of one that shows that another library is in use.

        Python's own modules are skipped, because they add no startup time. So are the rest of a server's, which
        it may import late.
        """
        if self.distribution != "python" and (self.is_engine or name in self.modules):
            recorder.record_startup(events.ModuleImported(at, name, started_at))

    def _install_due_parts(self) -> None:
        """Installs the parts that have become due, logs mismatches and calls `on_change`."""
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
        return all(hook.optional and not is_importable(hook.module) for hook in pending)

    def _is_imported(self, name: str) -> bool:
        module = sys.modules.get(name)
        if module is None or name in self._finished_imports:
            return module is not None
        return not getattr(getattr(module, "__spec__", None), "_initializing", False)
