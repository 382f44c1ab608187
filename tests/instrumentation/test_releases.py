"""Checks which hooks bind to which release of a library, from its sources, and the docs page that lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.instrumentation.lmdeploy.releases import LIBRARY as LMDEPLOY
from tests.instrumentation.sglang.releases import LIBRARY as SGLANG
from tests.instrumentation.transformers.releases import LIBRARY as TRANSFORMERS
from tests.instrumentation.vllm.releases import LIBRARY as VLLM
from tests.support import releases
from tests.support.releases import BINDS, LACKS, Library, Read

pytestmark = pytest.mark.real

LIBRARIES = (TRANSFORMERS, VLLM, SGLANG, LMDEPLOY)


@pytest.fixture(scope="module", params=LIBRARIES, ids=[library.name for library in LIBRARIES])
def library(request: pytest.FixtureRequest) -> Library:
    found: Library = request.param
    return found


@pytest.fixture(scope="module")
def sources(library: Library, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    """Returns sources by release: all releases if a folder is set, else the oldest and the newest supported."""
    named = os.environ.get(releases.FOLDER)
    folder = Path(named) if named else tmp_path_factory.mktemp("releases")
    wanted = library.releases if named else (library.releases[0], library.releases[-1])
    found = releases.sources(library, folder, wanted)
    if not found:
        pytest.skip("no package index reachable, and no files in " + releases.FOLDER)
    return found


def test_every_supported_release_binds(
    library: Library, sources: dict[str, Read], capsys: pytest.CaptureFixture[str]
) -> None:
    found = releases.matrix(library, sources)
    with capsys.disabled():
        print(releases.tables(library, found).partition("\n\n")[0])
    drifts = [
        f"{release} {target}: {mark}"
        for release, marks in found.items()
        for target, mark in marks.items()
        if mark not in (BINDS, LACKS)
    ]
    assert drifts == []


def test_object_attributes_read_by_hooks_exist_in_every_release(
    library: Library, sources: dict[str, Read]
) -> None:
    lacking = {release: releases.relies(library, read) for release, read in sources.items()}
    assert {release: missing for release, missing in lacking.items() if missing} == {}


def test_every_hook_binds_to_some_release(library: Library) -> None:
    documented = releases.binding(library.page.read_text(encoding="utf-8"))
    bound = set().union(*documented.values())
    assert [hook.target for hook in library.hooks if library.short(hook.target) not in bound] == []


def test_the_docs_page_matches_the_sources(library: Library, sources: dict[str, Read]) -> None:
    page = library.page.read_text(encoding="utf-8")
    documented = releases.binding(page)
    assert tuple(documented) == library.releases
    found = releases.matrix(library, sources)
    for release, marks in found.items():
        assert documented[release] == {
            library.short(target) for target, mark in marks.items() if mark == BINDS
        }
    if tuple(found) == library.releases:
        assert releases.tables(library, found).strip() == releases.written(page)[1].strip()
