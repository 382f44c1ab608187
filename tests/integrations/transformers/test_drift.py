"""What of ours binds to which release of transformers: read from their sources, and the page that says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.transformers import releases
from tests.integrations.transformers.releases import BINDS, LACKS, RELEASES, Read

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    """By release: all where a folder for their wheels is named, else the oldest and the newest that are claimed."""
    named = os.environ.get(releases.FOLDER)
    folder = Path(named) if named else tmp_path_factory.mktemp("releases")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = RELEASES if named else (RELEASES[0], RELEASES[-1])
    wheels = {release: releases.wheel(release, folder) for release in wanted}
    found = {release: releases.of_wheel(path) for release, path in wheels.items() if path is not None}
    if not found:
        pytest.skip("no index of packages to be reached, and no wheels in " + releases.FOLDER)
    return found


def test_every_release_that_is_claimed_binds(sources: dict[str, Read], capsys: pytest.CaptureFixture[str]) -> None:
    found = releases.matrix(sources)
    with capsys.disabled():
        print(releases.tables(found))
    drifts = [
        f"{release} {target}: {mark}"
        for release, marks in found.items()
        for target, mark in marks.items()
        if mark not in (BINDS, LACKS)
    ]
    assert drifts == []


def test_what_hooks_read_of_its_objects_is_in_every_release(sources: dict[str, Read]) -> None:
    assert {release: missing for release, read in sources.items() if (missing := releases.relies(read))} == {}


def test_every_optional_hook_binds_to_some_release(sources: dict[str, Read]) -> None:
    if set(sources) != set(RELEASES):
        page = releases.columns(releases.PAGE.read_text(encoding="utf-8"))
    else:
        page = releases.matrix(sources)
    targets = {target for marks in page.values() for target in marks}
    assert [target for target in sorted(targets) if all(marks[target] != BINDS for marks in page.values())] == []


def test_the_page_says_what_is_so(sources: dict[str, Read]) -> None:
    page = releases.columns(releases.PAGE.read_text(encoding="utf-8"))
    assert tuple(page) == RELEASES
    for release, marks in releases.matrix(sources).items():
        assert page[release] == {releases._short(target): mark for target, mark in marks.items()}
    if set(sources) == set(RELEASES):
        assert releases.tables(releases.matrix(sources)).strip() in releases.PAGE.read_text(encoding="utf-8")


def test_what_is_installed_binds_as_its_sources_say() -> None:
    """The reading above is only as good as its agreement with the real thing."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    site = releases.installed()
    assert site is not None
    code = (
        "import importlib, json\n"
        "from tests.integrations.transformers.releases import hooks, integration\n"
        "integration.install()\n"
        "for hook in hooks():\n"
        "    try: importlib.import_module(hook.module)\n"
        "    except ModuleNotFoundError: pass\n"
        "print(json.dumps({hook.target: hook.active for hook in hooks()}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(releases.__file__).parents[3])
    assert done.returncode == 0, done.stderr
    read = releases.of_folder(site)
    assert json.loads(done.stdout.splitlines()[-1]) == {
        hook.target: releases.binds(hook, read) == BINDS for hook in releases.hooks()
    }


# ── a release that has changed ───────────────────────────────────────────────────────────────────────────────────

CHANGES = {
    # what is renamed where, and what is said of it
    "a function": ("scheduler.py", "def finish_request(", "def end_request(", "there is no finish_request"),
    "a parameter": ("continuous_api.py", "        input_ids: list[int],", "        prompt: list[int],", "input_ids"),
}


@pytest.fixture(params=CHANGES)
def changed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A copy of the installed release with one name changed, and what is to be said of it."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    site = releases.installed()
    assert site is not None
    file, before, after, said = CHANGES[request.param]
    folder = "transformers/generation/continuous_batching"
    path = tmp_path
    for part in folder.split("/"):  # everything but what leads to the file is a link
        origin = site / path.relative_to(tmp_path)
        for entry in origin.iterdir() if path != tmp_path else ():
            if entry.name != part:
                (path / entry.name).symlink_to(entry)
        path = path / part
        path.mkdir()
    for entry in (site / folder).iterdir():
        if entry.name not in (file, "__pycache__"):
            (path / entry.name).symlink_to(entry)
    source = (site / folder / file).read_text(encoding="utf-8")
    assert source.count(before) >= 1
    (path / file).write_text(source.replace(before, after), encoding="utf-8")
    yield tmp_path, said


def test_doctor_names_what_has_changed_and_the_rest_still_binds(changed: tuple[Path, str]) -> None:
    site, said = changed
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ |= {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "OTEL_TRACES_EXPORTER": "none"}
    done = subprocess.run(
        [sys.executable, "-m", "otel_infer", "doctor", "--json"], capture_output=True, text=True, env=environ, cwd=site
    )
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    check = checks["integration transformers"]
    assert check["state"] == "fail" and said in check["found"], check
    assert "continuous batching is not recorded; everything else is" in check["found"]
    bound, total = (int(word) for word in check["found"].partition(" hooks bound")[0].split()[-3::2])
    assert 0 < bound < total


def test_a_changed_release_serves_on(changed: tuple[Path, str]) -> None:
    """With one part drifted the others record, and a batch is what it was."""
    site, said = changed
    root = Path(releases.__file__).parents[3]
    environ = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{root}", "HF_HUB_OFFLINE": "1"}
    code = (
        "import logging; logging.basicConfig()\n"
        "from otel_infer.integrations.transformers import integration\n"
        "integration.install()\n"
        "import transformers, transformers.generation.continuous_batching, transformers.generation.utils\n"
        f"assert transformers.__file__.startswith({str(site)!r}), transformers.__file__\n"
        "print(integration.status.drift); print(integration.parts)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=site)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout and said in done.stderr
    assert "'continuous batching': 'drifted'" in done.stdout and "'generate': 'active'" in done.stdout
