"""Shared fixtures: tiny models, and a summary of skipped tests at the end of a session."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.stack.tools import list_used_tools

if TYPE_CHECKING:
    from tests.support.rings import Recording

# Models are created locally. Access to the hub by mistake fails at once instead of waiting for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shared machine allows no deadline per example.
# In CI the examples are the same in every run; locally they are new in each run.
settings.register_profile("shared-machine", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("shared-machine")

NO_REASON = {"", "unconditional skip", "<Skipped instance>"}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a tiny causal language model."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.support.tiny import make_model

    return make_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a tiny encoder."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.support.tiny import make_encoder

    return make_encoder(tmp_path_factory.mktemp("models") / "tiny-encoder")


@pytest.fixture
def recording() -> Iterator[Recording]:
    """Records the events of this process."""
    from tests.support.rings import Recording

    recording = Recording()
    yield recording
    recording.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skips-to", metavar="FILE", help="write the skipped tests to FILE, for a later run")
    parser.addoption(
        "--skips-from", metavar="FILE", help="include the tests skipped by an earlier run in the summary"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wants_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not wants_gpu:
        return
    reason = _why_no_gpu()
    for item in wants_gpu:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    """Returns why gpu tests are skipped. Called only when one was collected, because importing torch takes seconds."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no CUDA device"


def _skipped(reporter: pytest.TerminalReporter) -> list[tuple[str, str]]:
    """Returns (test, reason) of everything skipped, including a module skipped at import."""
    found = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        found.append((report.nodeid, re.sub(r"^Skipped:?\s*", "", reason).strip()))
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the session if a skip has no reason."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and any(reason in NO_REASON for _, reason in _skipped(reporter)):
        session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds the programs of the stack that a passed test's module has used to the test's report."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call" and report.passed:
        report.user_properties += [("program", path) for path in sorted(list_used_tools(item.nodeid))]


def _write_programs(reporter: pytest.TerminalReporter) -> None:
    """Writes how many tests passed with each program of the stack."""
    programs = Counter(
        path
        for report in reporter.stats.get("passed", [])
        for name, path in report.user_properties
        if name == "program"
    )
    for path, count in sorted(programs.items()):
        reporter.write_line(f"{count} tests with {path}")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    _write_programs(terminalreporter)
    skipped = _skipped(terminalreporter)
    before, after = (terminalreporter.config.getoption(name) for name in ("--skips-from", "--skips-to"))
    if after:
        Path(after).write_text(json.dumps(skipped), encoding="utf-8")
    if before:
        skipped = [*map(tuple, json.loads(Path(before).read_text(encoding="utf-8"))), *skipped]
    terminalreporter.write_line("")
    terminalreporter.write_line(f"skipped: {len(skipped)}", yellow=bool(skipped))
    for test, reason in skipped:
        if reason in NO_REASON:
            terminalreporter.write_line(f"  {test} — NO REASON GIVEN, which fails the session", red=True)
        else:
            terminalreporter.write_line(f"  {test} — {reason}")
