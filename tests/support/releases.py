"""Published releases of a library, read without importing them, to check which hooks bind.

    python -m tests.support.releases LIBRARY FOLDER      downloads missing releases, writes docs/engines/LIBRARY.md

Downloads are kept in the folder set by OTEL_INFER_TEST_RELEASES.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.patch import FunctionPatch, HotPathPatch

FOLDER = "OTEL_INFER_TEST_RELEASES"
BEGIN, END = "<!-- from here on written by tests/support/releases.py -->", "<!-- to here -->"

Read = Callable[[str], "str | None"]
"""Returns the source of a module by its name; None if there is no such module."""

BINDS, LACKS = "✓", "–"
"""BINDS: a hook finds its target. LACKS: an optional hook finds none. Any other text describes the drift."""


@dataclass(frozen=True)
class Library:
    """The supported releases of a library: the oldest, the last of each minor release, and the newest.

    `relies`: attributes that hooks read from the library's objects, by class; two names in one string are alternatives.
    `obtain` downloads the file of a release into a folder; None without a package index.
    `shortened`: how the page abbreviates a target.
    """

    name: str
    instrumentor: Instrumentor
    releases: tuple[str, ...]
    relies: Mapping[str, tuple[str, ...]]
    obtain: Callable[[Library, str, Path], Path | None]
    shortened: Mapping[str, str]

    @property
    def page(self) -> Path:
        return Path(__file__).parents[2] / "docs" / "engines" / f"{self.name}.md"

    @property
    def hooks(self) -> list[FunctionPatch | HotPathPatch]:
        """Returns every hook, one for each target."""
        found = [hook for part in self.instrumentor._parts.values() for hook in part.hooks]
        return list({(hook.part, hook.target): hook for hook in found}.values())

    def short(self, target: str) -> str:
        """Returns a target as the page names it."""
        for before, after in self.shortened.items():
            target = target.replace(before, after)
        return target

    def read(self, path: Path) -> Read:
        """Returns a reader of the modules of a downloaded release."""
        if path.suffix == ".whl":
            return of_wheel(path)
        return of_sdist(path, self.modules)

    @property
    def modules(self) -> set[str]:
        """Returns the modules with hooks, or with attributes that hooks read."""
        return {hook.module for hook in self.hooks} | {target.partition(":")[0] for target in self.relies}


# ── sources ──────────────────────────────────────────────────────────────────────────────────────────────────────


def wheel(library: Library, release: str, folder: Path) -> Path | None:
    """Returns the pure wheel of this release, downloaded if missing in `folder`; None without a package index."""
    name = library.name
    path = folder / f"{name}-{release}-py3-none-any.whl"
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        download = [*command, "--disable-pip-version-check", "--dest", str(folder), f"{name}=={release}"]
        try:
            subprocess.run(download, check=True, capture_output=True, timeout=90)
        except (subprocess.SubprocessError, OSError):
            return None
    return path if path.exists() else None


def sdist(library: Library, release: str, folder: Path) -> Path | None:
    """Returns the source distribution, downloaded from the index directly, because pip would build it."""
    name = library.name
    path = folder / f"{name}-{release}.tar.gz"
    if not path.exists():
        try:
            url, sha256 = _files(name)[path.name]
            with urllib.request.urlopen(url, timeout=90) as answer:
                content = answer.read()
        except (OSError, KeyError, ValueError):
            return None
        if hashlib.sha256(content).hexdigest() != sha256:
            return None
        path.write_bytes(content)
    return path


class _RemoteFile(io.RawIOBase):
    """A file at an address, of which only what is read is downloaded."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        last = min(self._at + len(buffer), self._size) - 1
        if last < self._at:
            return 0
        wanted = urllib.request.Request(self._url, headers={"Range": f"bytes={self._at}-{last}"})
        with urllib.request.urlopen(wanted, timeout=90) as answer:
            content = answer.read()
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def part_of_wheel(library: Library, release: str, folder: Path) -> Path | None:
    """Returns an archive of the modules with hooks of a wheel for Linux, whose other files, compiled ones, are not downloaded."""
    name = library.name
    path = folder / f"{name}-{release}.part.whl"
    if path.exists():
        return path
    begin, end = f"{name.replace('-', '_')}-{release}-", "_x86_64.whl"
    files = {
        f"{module.replace('.', '/')}{end}" for module in library.modules for end in (".py", "/__init__.py")
    }
    try:
        urls = [
            url for file, (url, _) in _files(name).items() if file.startswith(begin) and file.endswith(end)
        ]
        with io.BufferedReader(_RemoteFile(urls[0]), 1 << 16) as remote, zipfile.ZipFile(remote) as archive:
            found = {file: archive.read(file) for file in sorted(files & set(archive.namelist()))}
    except (OSError, IndexError, ValueError, zipfile.BadZipFile):
        return None
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as part:
        for file, content in found.items():
            part.writestr(file, content)
    return path


@functools.cache
def _files(name: str) -> dict[str, tuple[str, str]]:
    """Returns the project's files from the index: file → address and checksum (the simple API's JSON, PEP 691)."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{index}/{name}/", headers=accept), timeout=30
    ) as answer:
        files = json.load(answer)["files"]
    return {file["filename"]: (file["url"], file["hashes"]["sha256"]) for file in files}


def of_wheel(path: Path) -> Read:
    """Returns a reader of the modules of a wheel."""
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())

    @functools.cache
    def read(module: str) -> str | None:
        base = module.replace(".", "/")
        found = next((name for name in (f"{base}.py", f"{base}/__init__.py") if name in names), None)
        return archive.read(found).decode() if found else None

    return read


def of_sdist(path: Path, modules: Iterable[str]) -> Read:
    """Returns a reader of these modules of a source distribution; the archive is read once."""
    bases = {module.replace(".", "/"): module for module in modules}
    files = {f"{base}{end}": module for base, module in bases.items() for end in (".py", "/__init__.py")}
    found: dict[str, str] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            module = files.get(member.name.partition("/")[2])
            content = archive.extractfile(member) if module is not None else None
            if module is not None and content is not None:
                found[module] = content.read().decode()
    return found.get


def of_folder(site: Path) -> Read:
    """Returns a reader of the modules below a folder of packages."""

    @functools.cache
    def read(module: str) -> str | None:
        base = site.joinpath(*module.split("."))
        found = next(
            (path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None
        )
        return found.read_text(encoding="utf-8") if found else None

    return read


def installed(name: str) -> Path | None:
    """Returns the folder in which a library is installed."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parents[1] if spec is not None and spec.origin else None


def changed(name: str, folder: str, before: str, after: str, into: Path) -> Path:
    """Creates a copy of the installed release below `into`, with `before` replaced in one folder; other files are links."""
    site, path = installed(name), into
    assert site is not None
    for part in folder.split("/"):
        for entry in (site / path.relative_to(into)).iterdir() if path != into else ():
            if entry.name != part:
                (path / entry.name).symlink_to(entry)
        path = path / part
        path.mkdir()
    for entry in (site / folder).iterdir():
        source = entry.read_text(encoding="utf-8") if entry.suffix == ".py" else ""
        if before in source:
            (path / entry.name).write_text(source.replace(before, after), encoding="utf-8")
        elif entry.name != "__pycache__":
            (path / entry.name).symlink_to(entry)
    return into


def sources(library: Library, folder: Path, releases: Iterable[str]) -> dict[str, Read]:
    """Returns readers by release, for the releases that could be obtained."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {release: library.obtain(library, release, folder) for release in releases}
    return {release: library.read(path) for release, path in files.items() if path is not None}


# ── binding ──────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _statements(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


def _body(read: Read, target: str) -> list[ast.stmt] | None:
    module, _, path = target.partition(":")
    source = read(module)
    body = _statements(source) if source is not None else None
    for name in path.split("."):
        if body is None:
            return None
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
        body = found[0].body if found else None
    return body


def binds(hook: FunctionPatch | HotPathPatch, read: Read) -> str:
    """Returns BINDS, LACKS, or the reason."""
    path, _, name = hook.target.rpartition(".")
    body = _body(read, path)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in body or () if isinstance(node, kinds) and node.name == name]
    if not found:
        return LACKS if hook.optional else f"there is no {name if body is not None else path}"
    declared = found[-1].args
    names = {argument.arg for argument in (*declared.posonlyargs, *declared.args, *declared.kwonlyargs)}
    missing = [name for name in hook.reads if name not in names]
    return f"declares no parameter {', '.join(missing)}" if missing else BINDS


def relies(library: Library, read: Read) -> list[str]:
    """Returns the attributes that hooks read and the library lacks."""
    missing = []
    for target, wanted in library.relies.items():
        body = _body(read, target)
        if body is None:
            missing.append(target)
            continue
        names = set(_attributes(body))
        missing += [f"{target}.{name}" for name in wanted if not names & set(name.split())]
    return missing


def _attributes(body: list[ast.stmt]) -> Iterable[str]:
    """Yields the attributes of a class's objects: fields, methods, slots, and assignments to `self`."""
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


Matrix = dict[str, dict[str, str]]
"""By release and target: the result of `binds`."""


def matrix(library: Library, reads: dict[str, Read]) -> Matrix:
    """Checks every hook against every release."""
    return {
        release: {hook.target: binds(hook, read) for hook in library.hooks} for release, read in reads.items()
    }


BOUND = """
import importlib, json
from tests.instrumentation.{name}.releases import LIBRARY
LIBRARY.instrumentor.install()
for hook in LIBRARY.hooks:
    try: importlib.import_module(hook.module)
    except ModuleNotFoundError: pass
print(json.dumps({{hook.target: hook.active for hook in LIBRARY.hooks}}))
"""


def bound(library: Library) -> dict[str, bool]:
    """Returns by target whether a hook binds to the installed release; installs them in a subprocess."""
    done = subprocess.run(
        [sys.executable, "-c", BOUND.format(name=library.name)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    return found


def installed_binds(library: Library) -> dict[str, bool]:
    """Returns the same, predicted from the installed sources."""
    site = installed(library.name)
    assert site is not None
    return {hook.target: binds(hook, of_folder(site)) == BINDS for hook in library.hooks}


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────


def tables(library: Library, found: Matrix) -> str:
    """Returns two Markdown tables: parts by release, then the releases of each hook."""
    parts = list(dict.fromkeys(hook.part for hook in library.hooks))
    lines = ["", f"| release | {' | '.join(parts)} |", f"|---|{'---|' * len(parts)}"]
    for release, marks in found.items():
        cells = [_part(marks, [hook for hook in library.hooks if hook.part == part]) for part in parts]
        lines.append(f"| {release} | {' | '.join(cells)} |")
    lines += ["", "| part | hook | releases |", "|---|---|---|"]
    for hook in sorted(library.hooks, key=lambda hook: parts.index(hook.part)):
        binding = [release for release, marks in found.items() if marks[hook.target] == BINDS]
        lines.append(f"| {hook.part} | `{library.short(hook.target)}` | {_runs(binding, list(found))} |")
    return "\n".join([*lines, ""])


def _part(marks: dict[str, str], hooks: list[FunctionPatch | HotPathPatch]) -> str:
    result = [marks[hook.target] for hook in hooks]
    if set(result) - {BINDS, LACKS}:
        return "drifted"
    return f"{result.count(BINDS)} of {len(result)}" if LACKS in result else f"{len(result)}"


def _runs(binding: list[str], every: list[str]) -> str:
    """Returns `all`, or the first and last release of each contiguous run."""
    if binding == every:
        return "all"
    runs: list[list[str]] = []
    for release in binding:
        if runs and every.index(release) == every.index(runs[-1][-1]) + 1:
            runs[-1].append(release)
        else:
            runs.append([release])
    return ", ".join(f"{run[0]} to {run[-1]}" for run in runs) or "none"


def written(page: str) -> tuple[str, str, str]:
    """Returns the text before the generated tables, the tables, and the text after."""
    before, _, rest = page.partition(BEGIN)
    middle, _, after = rest.partition(END)
    return before, middle, after


def binding(page: str) -> dict[str, set[str]]:
    """Returns the documented bindings: by release, the targets as the page names them."""
    rows = [line.strip("| ").split(" | ") for line in written(page)[1].splitlines() if line.startswith("| ")]
    found: dict[str, set[str]] = {row[0]: set() for row in rows if row[0][0].isdigit()}
    every = list(found)
    for _, target, releases in rows[rows.index(["part", "hook", "releases"]) + 1 :]:
        for run in releases.replace("all", f"{every[0]} to {every[-1]}").replace("none", "").split(", "):
            first, _, last = run.partition(" to ")
            for release in every[every.index(first) : every.index(last) + 1] if run else ():
                found[release].add(target.strip("`"))
    return found


def main(name: str, folder: Path) -> None:
    """Writes the page from all releases."""
    library: Library = importlib.import_module(f"tests.instrumentation.{name}.releases").LIBRARY
    reads = sources(library, folder, library.releases)
    missing = [release for release in library.releases if release not in reads]
    if missing:
        sys.exit(f"cannot be downloaded: {', '.join(missing)}")
    result = tables(library, matrix(library, reads))
    print(result)
    before, _, after = written(library.page.read_text(encoding="utf-8"))
    library.page.write_text(f"{before}{BEGIN}\n{result}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
