"""Libraries that no integration follows are named once they are imported, and where they are installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from otel_infer._bootstrap import startup_message
from otel_infer.cli.doctor.instrumentations import check_unseen_libraries
from otel_infer.config import environment
from otel_infer.instrumentation import unseen_libraries


def test_an_imported_library_is_in_the_startup_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    line = startup_message.format_message(environment.from_env({}), [], False, "")
    assert "not followed: tensorrt (see `otel-infer doctor`)" in line


def test_an_installed_library_is_named_by_doctor_and_not_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inner = (
        unseen_libraries.UnseenLibrary("outer.inner", "x"),
        unseen_libraries.UnseenLibrary("outer.absent", "x"),
    )
    monkeypatch.setattr(unseen_libraries, "UNSEEN_LIBRARIES", (*unseen_libraries.UNSEEN_LIBRARIES, *inner))
    for package in ("tensorrt", "outer"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "outer" / "inner.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {library.module for library in unseen_libraries.find_installed()}
    assert {"tensorrt", "outer.inner"} <= names and "outer.absent" not in names
    (check,) = check_unseen_libraries()
    assert check.state == "ok" and "tensorrt: its models have no stage" in check.found
    assert "tensorrt" not in sys.modules


def test_no_library_is_named_twice() -> None:
    names = [library.module for library in unseen_libraries.UNSEEN_LIBRARIES]
    assert len(set(names)) == len(names)
