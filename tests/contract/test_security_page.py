"""Each promise of the page on security names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PROMISES = [
    row
    for table in re.findall(r"^\| promise \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for row in table.splitlines()
]
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))


def list_tests(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[2:60])
def test_each_promise_names_a_test(row: str) -> None:
    _, promise, tests, _ = (cell.strip() for cell in row.split("|"))
    assert promise
    assert re.fullmatch(r"`tests/[^`]+`(, `tests/[^`]+`)*", tests)


@pytest.mark.parametrize("name", NAMED)
def test_each_named_test_exists(name: str) -> None:
    path, _, test = name.partition("::")
    assert (ROOT / path).is_file()
    assert test in list_tests(ROOT / path) if test else path.startswith("tests/fuzz/")


def test_each_section_of_promises_is_read() -> None:
    assert len(PROMISES) == PAGE.count("`tests/") - sum(row.count("`tests/") - 1 for row in PROMISES)
    assert len(PROMISES) >= 25
