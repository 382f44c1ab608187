"""The package keeps the shape that ARCHITECTURE.md describes: few entries, no cycles, small modules, unique names that say what is done."""

from __future__ import annotations

import ast
import configparser
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "otel_infer", ROOT / "benchmarks")
MAX_ENTRIES, MAX_LAYERS = 19, 10
MAX_LINES, MAX_LONG_MODULES = 350, 3
MAX_ONE_WORD_SHARE = 0.30


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules(package: Path) -> dict[str, ast.Module]:
    return {
        module_name(path): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }


def imported(tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[str]:
    """The modules of the package that a module imports, for its types only and inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else node.module


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle; empty where there is none."""
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        stack = [(start, iter(sorted(graph[start])))]
        while stack:
            name, rest = stack[-1]
            if not path or path[-1] != name:
                path.append(name)
            following = next((one for one in rest if one not in done), None)
            if following is None:
                done.add(name)
                path.pop()
                stack.pop()
            elif following in path:
                return path[path.index(following) :]
            else:
                stack.append((following, iter(sorted(graph[following]))))
    return []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_modules_import_each_other_without_cycles(package: Path) -> None:
    known = modules(package)
    graph = {
        name: {one for one in imported(tree, known) if one in known and one != name}
        for name, tree in known.items()
    }
    assert find_cycle(graph) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_package_has_few_entries() -> None:
    entries = [path.name for path in (ROOT / "otel_infer").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_the_layers_are_few_and_exhaustive() -> None:
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    layers = contract["importlinter:contract:layers"]
    assert layers["exhaustive"] == "True"
    assert len(layers["layers"].split("\n")) - 1 <= MAX_LAYERS


def test_modules_are_short_or_their_docstrings_give_the_reason() -> None:
    long = {
        path: path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "otel_infer").rglob("*.py"))
        if path.read_text(encoding="utf-8").count("\n") > MAX_LINES
    }
    assert len(long) <= MAX_LONG_MODULES, [str(path) for path in long]
    for path, text in long.items():
        assert "long" in (ast.get_docstring(ast.parse(text)) or "").lower(), path


def test_each_public_class_name_occurs_once() -> None:
    homes = defaultdict(list)
    for name, tree in modules(ROOT / "otel_infer").items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_most_function_names_have_more_than_one_word() -> None:
    """A verb and its object. Dunders and properties aside."""
    words: Counter[bool] = Counter()
    for tree in modules(ROOT / "otel_infer").values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_exempt(node):
                words["_" not in node.name.strip("_")] += 1
    assert words[True] / words.total() <= MAX_ONE_WORD_SHARE, words


def _is_exempt(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    is_dunder = node.name.startswith("__") and node.name.endswith("__")
    return is_dunder or bool(decorators & {"property", "cached_property", "setter", "getter", "deleter"})
