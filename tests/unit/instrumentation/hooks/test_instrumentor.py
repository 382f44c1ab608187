"""Installation of an instrumentor on packages that are written to disk and imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from otel_infer.instrumentation.hooks import distribution, instrumentor
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor, InstrumentorStatus
from otel_infer.instrumentation.hooks.probe import Call, Hook

_numbers = count()

ENGINE = """
class Engine:
    def generate(self, prompt): return prompt
    def step(self, batch): return batch
"""


class Library:
    """A package on disk with its instrumentor and the hooks that ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"library_{next(_numbers)}"
        self.seen: list[str] = []
        self.write("__init__")
        self.integration = Instrumentor(self.name, self.distribution, (self.name,))

    @property
    def distribution(self) -> str:
        return self.name.replace("_", "-")

    def write(self, module: str, text: str = "") -> None:
        path = self.folder.joinpath(self.name, *module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("LIBRARY", self.name))
        importlib.invalidate_caches()

    def release(self, version: str) -> None:
        info = self.folder / f"{self.name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: {version}\n"
        )
        distribution.find_version.cache_clear()

    def load(self, module: str = "") -> Any:
        return importlib.import_module(f"{self.name}.{module}".rstrip("."))

    def target(self, path: str) -> str:
        return f"{self.name}.{path}"

    def probe(self, path: str, **options: Any) -> None:
        @self.integration.patch_function(self.target(path), **options)
        def probe(call: Call) -> Generator[None, Any, None]:
            self.seen.append(path)
            yield

    def step(self, path: str, **options: Any) -> None:
        @self.integration.patch_hot_path(self.target(path), **options)
        def make(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
            def step(*args: Any) -> Any:
                if hook.alive:
                    self.seen.append(path)
                return original(*args)

            return step

    @property
    def status(self) -> InstrumentorStatus:
        return self.integration.status


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.syspath_prepend(tmp_path)
    library = Library(tmp_path)
    library.release("1.2.3")
    library.write("engine", ENGINE)
    yield library
    library.integration.remove()
    for name in [name for name in sys.modules if name.split(".")[0] == library.name]:
        del sys.modules[name]


def test_install_imports_nothing(library: Library) -> None:
    library.write("deep.__init__")
    library.write("deep.er", "def f(): pass")
    library.probe("deep.er:f")
    library.integration.install()
    assert library.status.state == "waiting"
    library.load()
    assert library.status.state == "waiting"
    assert [name for name in sys.modules if name.startswith(library.name)] == [library.name]


def test_hooks_are_installed_when_their_module_is_imported(library: Library) -> None:
    library.probe("engine:Engine.generate", reads=("prompt",))
    library.step("engine:Engine.step", reads=("batch",))
    library.integration.install()
    expected = InstrumentorStatus(library.name, library.distribution, "1.2.3", "waiting", 0, 2, None)
    assert library.status == expected
    engine = library.load("engine").Engine()
    assert (engine.generate("p"), engine.step("b")) == ("p", "b")
    assert library.seen == ["engine:Engine.generate", "engine:Engine.step"]
    assert library.status == InstrumentorStatus(
        library.name, library.distribution, "1.2.3", "active", 2, 2, None, 2
    )


def test_hooks_are_installed_immediately_on_imported_modules(library: Library) -> None:
    module = library.load("engine")
    library.probe("engine:Engine.generate")
    library.integration.install()
    assert library.status.state == "active"
    module.Engine().generate("p")
    assert library.seen == ["engine:Engine.generate"]


def test_second_install_is_ignored(library: Library) -> None:
    library.probe("engine:Engine.generate")
    library.integration.install()
    library.integration.install()
    engine = library.load("engine").Engine()
    library.integration.install()
    engine.generate("p")
    assert library.seen == ["engine:Engine.generate"]


def test_decorators_return_the_decorated_function(library: Library) -> None:
    def probe(call: Call) -> Generator[None, Any, None]:
        yield

    def make(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        return original

    assert library.integration.patch_function(library.target("engine:Engine.step"))(probe) is probe
    assert library.integration.patch_hot_path(library.target("engine:Engine.step"))(make) is make


def test_part_waits_only_for_its_own_modules(library: Library) -> None:
    library.write("batching", "def admit(): pass")
    library.write("serving", "def serve(): pass")
    library.probe("engine:Engine.generate", part="decode")
    library.probe("batching:admit", part="decode")
    library.probe("serving:serve", part="serving")
    library.integration.install()
    library.load("engine")
    assert library.integration.parts == {"decode": "waiting", "serving": "waiting"}
    library.load("serving")
    assert library.integration.parts == {"decode": "waiting", "serving": "active"}
    assert (library.status.state, library.status.hooks_active, library.status.hooks_total) == ("active", 1, 3)
    library.load("batching")
    assert library.integration.parts == {"decode": "active", "serving": "active"}


def test_part_installs_all_hooks_or_none(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    library.probe("engine:Engine.generate")
    library.step("engine:Engine.step", reads=("tokens",))
    library.integration.install()
    module = library.load("engine")
    before = dict(vars(module.Engine))
    assert before["generate"].__class__ is type(lambda: None) and not hasattr(
        before["generate"], "__wrapped__"
    )
    target = library.target("engine:Engine.step")
    reason = f"{target}: declares no parameter tokens"
    assert library.status == InstrumentorStatus(
        library.name, library.distribution, "1.2.3", "drifted", 0, 2, reason, 2
    )
    assert caplog.messages == [f"{library.name} is not instrumented: {reason}"]
    assert module.Engine().generate("p") == "p"
    assert library.seen == []


def test_failing_hook_rolls_back_the_installed_hooks(library: Library) -> None:
    library.probe("engine:Engine.generate")

    @library.integration.patch_hot_path(library.target("engine:Engine.step"))
    def make(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        raise LookupError("secret")

    library.integration.install()
    engine = library.load("engine").Engine
    assert not hasattr(vars(engine)["generate"], "__wrapped__")
    assert library.status.state == "drifted"
    assert library.status.drift is not None
    assert "LookupError" in library.status.drift and "secret" not in library.status.drift


def test_drifted_part_leaves_other_parts_installed(library: Library) -> None:
    library.probe("engine:Engine.generate")
    library.probe("engine:Engine.absent", part="feature")
    library.integration.install()
    library.load("engine").Engine().generate("p")
    assert library.seen == ["engine:Engine.generate"]
    assert library.integration.parts == {"": "active", "feature": "drifted"}
    assert (library.status.state, library.status.hooks_active, library.status.hooks_total) == (
        "drifted",
        1,
        2,
    )
    assert library.status.drift == f"{library.target('engine:Engine.absent')}: there is no absent"


def test_feature_missing_in_this_release_is_absent(library: Library) -> None:
    library.probe("engine:Engine.generate")
    library.probe("batching.continuous:admit", part="batching")
    library.integration.install()
    assert library.integration.parts == {"": "waiting", "batching": "waiting"}
    library.load("engine")
    assert library.integration.parts == {"": "active", "batching": "absent"}
    assert library.status == InstrumentorStatus(
        library.name, library.distribution, "1.2.3", "active", 1, 1, None, 1
    )


def test_feature_with_a_missing_module_is_drift(library: Library) -> None:
    library.probe("engine:Engine.generate", part="feature")
    library.probe("gone:f", part="feature")
    library.integration.install()
    library.load("engine")
    assert library.status.state == "drifted"
    assert library.status.drift == f"{library.name}.gone: there is no such module"


def test_library_without_its_main_module_has_drifted(library: Library) -> None:
    library.probe("gone:f")
    library.integration.install()
    assert library.status.state == "waiting"
    library.load()
    assert library.status.state == "drifted"


def test_folder_without_code_is_not_a_module(library: Library) -> None:
    (library.folder / library.name / "left" / "__pycache__").mkdir(parents=True)
    library.probe("left:f", part="feature")
    library.integration.install()
    library.load()
    assert library.integration.parts == {"feature": "absent"}
    assert library.status.state == "absent"


def test_optional_hook_may_be_missing(library: Library) -> None:
    library.write("late", "def f(): pass")
    library.probe("engine:Engine.generate")
    library.probe("engine:Engine.absent", optional=True)
    library.probe("gone:f", optional=True)
    library.probe("late:f", optional=True)
    library.integration.install()
    library.load("engine")
    assert library.status.state == "waiting"
    library.load("late").f()
    assert library.seen == ["late:f"]
    assert library.status == InstrumentorStatus(
        library.name, library.distribution, "1.2.3", "active", 2, 2, None, 2
    )


def test_part_of_only_optional_hooks_may_be_absent(library: Library) -> None:
    library.probe("gone:f", optional=True)
    library.integration.install()
    library.load()
    assert library.status.state == "absent"


def test_uninstalled_library_is_absent() -> None:
    integration = Instrumentor("no_such_library", "no-such-library", ("no_such_library",))
    integration.patch_function("no_such_library.engine:f")(lambda call: (yield))
    assert integration.status == InstrumentorStatus(
        "no_such_library", "no-such-library", None, "absent", 0, 1, None
    )
    integration.install()
    assert integration.status.state == "absent"
    assert "no_such_library" not in sys.modules


def test_importable_library_without_metadata_waits(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    library = Library(tmp_path)
    assert (library.status.version, library.status.state) == (None, "waiting")


def test_renamed_distribution_is_found_by_its_package(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    library = Library(tmp_path)
    info = tmp_path / f"{library.name}_cpu-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library.distribution}-cpu\nVersion: 1.2\n")
    (info / "RECORD").write_text(f"{library.name}/__init__.py,,\n")
    assert (library.status.version, library.status.state) == ("1.2", "waiting")


def test_unreadable_metadata_gives_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> str:
        raise OSError

    monkeypatch.setattr(importlib.metadata, "version", refuse)
    assert Instrumentor("x", "unreadable", "unreadable").status.version is None


def test_single_module_may_be_given_as_a_string() -> None:
    assert Instrumentor("x", "x", "vllm").modules == ("vllm",)


def test_partially_imported_module_is_not_checked(library: Library) -> None:
    library.write("scheduler", "import LIBRARY.engine\ndef schedule(): pass\n")
    library.probe("scheduler:schedule")
    library.probe("engine:Engine.generate")
    library.integration.install()
    library.load("scheduler").schedule()
    assert library.status.state == "active"
    assert library.seen == ["scheduler:schedule"]


def test_install_during_an_import_waits_for_its_end(library: Library) -> None:
    library.write("half", "import LIBRARY\nLIBRARY.go()\ndef f(): pass\nimport LIBRARY.engine\n")
    library.load().go = library.integration.install
    library.probe("half:f")
    half = library.load("half")
    assert library.status.state == "waiting"
    library.integration.install()
    half.f()
    assert library.seen == ["half:f"]


def test_failed_import_can_be_retried(library: Library) -> None:
    library.write("engine", "raise RuntimeError('not yet')")
    library.probe("engine:Engine.generate")
    library.integration.install()
    with pytest.raises(RuntimeError, match="not yet"):
        library.load("engine")
    assert library.status.state == "waiting"
    library.write("engine", ENGINE + "# another size\n")
    library.load("engine").Engine().generate("p")
    assert library.seen == ["engine:Engine.generate"]


def test_instrumentor_error_does_not_reach_the_import(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.probe("engine:Engine.generate")
    library.integration.install()

    def refuse() -> None:
        raise LookupError("secret")

    monkeypatch.setattr(library.integration, "_install_due_parts", refuse)
    assert library.load("engine").Engine().generate("p") == "p"
    assert "LookupError" in caplog.text and "secret" not in caplog.text


def test_disabled_hook_is_not_counted_as_active(library: Library) -> None:
    library.step("engine:Engine.step")

    @library.integration.patch_function(library.target("engine:Engine.generate"))
    def broken(call: Call) -> Generator[None, Any, None]:
        raise LookupError
        yield

    library.integration.install()
    engine = library.load("engine").Engine()
    assert library.status.hooks_active == 2
    engine.generate("p")
    assert (library.status.state, library.status.hooks_active, library.status.hooks_total) == ("active", 1, 2)


def test_removal_restores_originals_and_reinstall_patches_again(library: Library) -> None:
    library.probe("engine:Engine.generate")
    library.probe("engine:Engine.generate")
    library.step("engine:Engine.generate")
    module = library.load("engine")
    before = vars(module.Engine)["generate"]
    library.integration.install()
    library.integration.remove()
    library.integration.remove()
    assert vars(module.Engine)["generate"] is before
    assert library.status == InstrumentorStatus(
        library.name, library.distribution, "1.2.3", "removed", 0, 3, None
    )
    library.integration.install()
    module.Engine().generate("p")
    assert len(library.seen) == 3
    assert library.status.state == "active"


def test_import_after_removal_installs_nothing(library: Library) -> None:
    library.probe("engine:Engine.generate")
    library.integration.install()
    library.integration.remove()
    module = library.load("engine")
    assert not hasattr(vars(module.Engine)["generate"], "__wrapped__")
    assert library.status.state == "removed"
    library.integration.install()
    module.Engine().generate("p")
    assert library.seen == ["engine:Engine.generate"]


def test_drift_is_rechecked_after_removal(library: Library) -> None:
    library.probe("engine:Engine.later")
    library.integration.install()
    module = library.load("engine")
    assert library.status.state == "drifted"
    library.integration.remove()
    assert library.status.drift is None
    module.Engine.later = lambda self: None
    library.integration.install()
    assert library.status.state == "active"


def test_imports_in_many_threads_install_once(library: Library) -> None:
    for number in range(8):
        library.write(f"module_{number}", "def f(): pass")
        library.probe(f"module_{number}:f")
    threads = [threading.Thread(target=library.load, args=(f"module_{number}",)) for number in range(8)]
    threads += [threading.Thread(target=library.integration.install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library.integration.install()
    for number in range(8):
        library.load(f"module_{number}").f()
    assert len(library.seen) == 8
    assert library.status.state == "active"


def test_module_blocked_in_sys_modules_is_not_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "forbidden_library", None)
    assert not distribution.is_importable("forbidden_library")
    assert not distribution.is_importable("forbidden_library.engine")
    assert distribution.is_importable("logging.handlers")
    assert not distribution.is_importable("os.nothing")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_does_not_inherit_a_held_lock() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with instrumentor._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if instrumentor._lock.acquire(timeout=5) else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_module_imports_no_numpy_torch_or_opentelemetry() -> None:
    code = """
        import sys
        import otel_infer.instrumentation.hooks.instrumentor
        print(sorted({"numpy", "torch", "opentelemetry"} & set(sys.modules)))
    """
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PATH": os.environ["PATH"],
    }
    command = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_drift_is_logged_as_one_warning(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    library.probe("engine:absent")
    library.integration.install()
    library.load("engine")
    library.integration.install()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# ── callbacks ────────────────────────────────────────────────────────────────────────────────────────────────────


def add_callback(library: Library) -> Any:
    library.write("events", "callbacks = []\ndef fire(): [callback() for callback in callbacks]\nname = 'n'")

    @library.integration.add_callback(library.target("events:callbacks"))
    def make_callback(hook: Hook) -> Callable[[], None]:
        return lambda: library.seen.append("event")

    library.integration.install()
    return library.load("events")


def test_callback_runs_from_import_until_removal(library: Library) -> None:
    events = add_callback(library)
    library.integration.install()
    events.fire()
    assert library.seen == ["event"]
    assert (library.status.state, library.status.hooks_active, library.status.hooks_total) == ("active", 1, 1)
    library.integration.remove()
    events.fire()
    assert library.seen == ["event"]
    assert events.callbacks == []
    library.integration.install()
    assert len(events.callbacks) == 1


def test_removal_leaves_a_cleared_callback_list_unchanged(library: Library) -> None:
    events = add_callback(library)
    events.callbacks[:] = [print]
    assert library.status.hooks_active == 0
    library.integration.remove()
    assert events.callbacks == [print]


@pytest.mark.parametrize("path", ["events:missing", "events:name"])
def test_callback_without_its_list_is_drift(library: Library, path: str) -> None:
    library.write("events", "name = 'n'")

    @library.integration.add_callback(library.target(path))
    def make_callback(hook: Hook) -> Callable[[], None]:
        return lambda: None

    library.integration.install()
    library.load("events")
    assert library.status.state == "drifted"
