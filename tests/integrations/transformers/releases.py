"""Releases of transformers as their wheels are: read without importing, to see what of ours would bind to them.

    python -m tests.integrations.transformers.releases FOLDER      downloads what is missing there, writes the page

Wheels are kept in the folder that OTEL_INFER_TEST_RELEASES names.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from otel_infer.integrations.transformers import integration
from otel_infer.patching import Patch, StepHook

FOLDER = "OTEL_INFER_TEST_RELEASES"
PAGE = Path(__file__).parents[3] / "docs" / "support-transformers.md"
BEGIN, END = (
    "<!-- from here on written by tests/integrations/transformers/releases.py -->",
    "<!-- to here -->",
)

RELEASES = (
    "5.5.0", "5.5.4", "5.6.2", "5.7.0", "5.8.1", "5.9.0", "5.10.4", "5.11.0", "5.12.1", "5.13.1", "5.14.1",
    "5.15.1", "5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0",
)  # fmt: skip
"""The oldest that is claimed, the last of each minor release, the newest."""

Read = Callable[[str], "str | None"]
"""The source of a module by its name; None if there is no such module."""

BINDS, LACKS = "✓", "–"
"""A hook finds its target; an optional one finds none. Anything else is the drift."""

_CB = "transformers.generation.continuous_batching"
RELIES: dict[str, tuple[str, ...]] = {
    f"{_CB}.scheduler:Scheduler": (
        "active_requests", "waiting_requests", "_requests_to_cancel", "_requests_to_fork", "cache",
    ),
    f"{_CB}.requests:RequestState": (
        "request_id", "initial_tokens", "generated_tokens", "tokens_to_process", "num_children", "status",
        "_eos_token_ids", "_true_initial_tokens",
    ),
    f"{_CB}.requests:FutureRequestState": ("state", "has_new_token"),
    f"{_CB}.cache:PagedAttentionCache": ("num_blocks", "compute_free_capacity get_num_free_blocks"),
    f"{_CB}.continuous_api:ContinuousBatchProcessor": ("scheduler",),
    f"{_CB}.continuous_api:ContinuousBatchingManager": ("model", "generation_config", "num_return_sequences"),
    f"{_CB}.input_outputs:ContinuousBatchingIOs": ("requests_in_batch", "total_seqlen_q", "cumulative_seqlens_q"),
    f"{_CB}.input_outputs:HostDeviceIOPair": ("host_io",),
    "transformers.cli.serving.utils:DirectStreamer": ("total_tokens",),
    "transformers.cli.serving.utils:CBStreamer": ("total_tokens",),
}  # fmt: skip
"""What hooks read of the library's objects, by class; two names in one are alternatives."""


# ── where the sources are ────────────────────────────────────────────────────────────────────────────────────────


def wheel(release: str, folder: Path) -> Path | None:
    """The wheel of this release, downloaded if it is not in `folder`; None where no index is to be reached."""
    path = folder / f"transformers-{release}-py3-none-any.whl"
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        asked = [*command, "--disable-pip-version-check", "--dest", str(folder), f"transformers=={release}"]
        try:
            subprocess.run(asked, check=True, capture_output=True, timeout=90)
        except (subprocess.SubprocessError, OSError):
            return None
    return path if path.exists() else None


def of_wheel(path: Path) -> Read:
    """Reads modules of a wheel."""
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())

    @functools.cache
    def read(module: str) -> str | None:
        base = module.replace(".", "/")
        found = next((name for name in (f"{base}.py", f"{base}/__init__.py") if name in names), None)
        return archive.read(found).decode() if found else None

    return read


def of_folder(site: Path) -> Read:
    """Reads modules below a folder of packages."""

    @functools.cache
    def read(module: str) -> str | None:
        base = site.joinpath(*module.split("."))
        found = next(
            (path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None
        )
        return found.read_text(encoding="utf-8") if found else None

    return read


def installed() -> Path | None:
    """The folder in which transformers is installed here."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parents[1] if spec is not None and spec.origin else None


# ── what binds ───────────────────────────────────────────────────────────────────────────────────────────────────


def hooks() -> list[Patch | StepHook]:
    """Every hook, one for each target."""
    found = [hook for part in integration._parts.values() for hook in part.hooks]
    return list({(hook.part, hook.target): hook for hook in found}.values())


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


def binds(hook: Patch | StepHook, read: Read) -> str:
    """BINDS, LACKS, or why not."""
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


def relies(read: Read) -> list[str]:
    """What hooks read of the library's objects and is not there."""
    missing = []
    for target, wanted in RELIES.items():
        body = _body(read, target)
        if body is None:
            missing.append(target)
            continue
        names = set(_attributes(body))
        missing += [f"{target}.{name}" for name in wanted if not names & set(name.split())]
    return missing


def _attributes(body: list[ast.stmt]) -> Iterable[str]:
    """Everything that a class gives its objects: fields, methods, slots, and what methods assign to `self`."""
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
"""By release and target: what `binds` says."""


def matrix(reads: dict[str, Read]) -> Matrix:
    """Every hook against every release."""
    return {release: {hook.target: binds(hook, read) for hook in hooks()} for release, read in reads.items()}


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────


def tables(found: Matrix) -> str:
    """Releases and parts, then hooks and the releases that have them, as Markdown."""
    parts = list(dict.fromkeys(hook.part for hook in hooks()))
    lines = ["", f"| release | {' | '.join(parts)} |", f"|---|{'---|' * len(parts)}"]
    for release, marks in found.items():
        cells = [_part(marks, [hook for hook in hooks() if hook.part == part]) for part in parts]
        lines.append(f"| {release} | {' | '.join(cells)} |")
    lines += ["", "| part | hook | releases |", "|---|---|---|"]
    for hook in sorted(hooks(), key=lambda hook: parts.index(hook.part)):
        binding = [release for release, marks in found.items() if marks[hook.target] == BINDS]
        lines.append(f"| {hook.part} | `{short(hook.target)}` | {_runs(binding, list(found))} |")
    return "\n".join([*lines, ""])


def _part(marks: dict[str, str], of: list[Patch | StepHook]) -> str:
    said = [marks[hook.target] for hook in of]
    if set(said) - {BINDS, LACKS}:
        return "drifted"
    return f"{said.count(BINDS)} of {len(said)}" if LACKS in said else f"{len(said)}"


def _runs(some: list[str], every: list[str]) -> str:
    """`all`, or the first and the last of each run of releases in a row."""
    if some == every:
        return "all"
    runs: list[list[str]] = []
    for release in some:
        if runs and every.index(release) == every.index(runs[-1][-1]) + 1:
            runs[-1].append(release)
        else:
            runs.append([release])
    return ", ".join(f"{run[0]} to {run[-1]}" for run in runs) or "none"


def short(target: str) -> str:
    """A target as the page names it."""
    return target.removeprefix("transformers.").replace("generation.continuous_batching", "…")


def written(page: str) -> tuple[str, str, str]:
    """Before, the written tables, after."""
    before, _, rest = page.partition(BEGIN)
    middle, _, after = rest.partition(END)
    return before, middle, after


def binding(page: str) -> dict[str, set[str]]:
    """What the page says binds: by release, targets as they are shown."""
    rows = [line.strip("| ").split(" | ") for line in written(page)[1].splitlines() if line.startswith("| ")]
    found: dict[str, set[str]] = {row[0]: set() for row in rows if row[0][0].isdigit()}
    every = list(found)
    for _, target, releases in rows[rows.index(["part", "hook", "releases"]) + 1 :]:
        for run in releases.replace("all", f"{every[0]} to {every[-1]}").replace("none", "").split(", "):
            first, _, last = run.partition(" to ")
            for release in every[every.index(first) : every.index(last) + 1] if run else ():
                found[release].add(target.strip("`"))
    return found


def main(folder: Path) -> None:
    """Writes the page from all releases."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels = {release: wheel(release, folder) for release in RELEASES}
    missing = [release for release, path in wheels.items() if path is None]
    if missing:
        sys.exit(f"cannot be downloaded: {', '.join(missing)}")
    found = matrix({release: of_wheel(path) for release, path in wheels.items() if path is not None})
    print(tables(found))
    before, _, after = written(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{BEGIN}\n{tables(found)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
