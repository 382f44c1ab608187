"""Imports of otel_infer load no engine and no heavy library, checked in a fresh process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import otel_infer

PACKAGE = Path(otel_infer.__path__[0])
ENGINES = {
    "torch",
    "transformers",
    "vllm",
    "sglang",
    "fastapi",
    "starlette",
    "uvicorn",
    "tokenizers",
    "llama_cpp",
}
HEAVY = {"numpy", "pynvml", "grpc", "google.protobuf", "requests", "rich", "opentelemetry.exporter"}
SERVER_SIDE = (
    "_clock",
    "ringbuffer.events",
    "config",
    "ringbuffer.layout",
    "ringbuffer.writer",
    "ringbuffer.batch_writer",
    "tracing",
    "instrumentation",
)


def loaded_by(statement: str) -> set[str]:
    """Returns the modules that `statement` loads in a fresh interpreter."""
    code = f"import sys\n{statement}\nimport json; print(json.dumps(sorted(sys.modules)))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return set(json.loads(completed.stdout))


def find_within(modules: set[str], unwanted: set[str]) -> set[str]:
    """Returns the modules that are in one of the unwanted packages."""
    return {name for name in modules if any(name == bad or name.startswith(bad + ".") for bad in unwanted)}


def list_files(module: str) -> list[Path]:
    path = PACKAGE / module.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def exists(module: str) -> bool:
    return all(path.is_file() for path in list_files(module))


@pytest.mark.parametrize("statement", ["import otel_infer", "import otel_infer; otel_infer.instrument"])
def test_import_loads_no_engine_and_no_heavy_library(statement: str) -> None:
    assert set() == find_within(loaded_by(statement), ENGINES | HEAVY)


def test_import_adds_few_modules_to_opentelemetry(capsys: pytest.CaptureFixture[str]) -> None:
    """The time is printed and not asserted, because it varies on a busy machine."""
    api = loaded_by("import opentelemetry.trace, logging, typing")
    added = (
        loaded_by("import opentelemetry.trace, logging, typing\nimport otel_infer; otel_infer.instrument")
        - api
    )
    with capsys.disabled():
        print(
            f"\nimport otel_infer: {len(added)} modules and {_measure_import_ms():.0f} ms above opentelemetry.trace"
        )
    assert len(added) < 150, sorted(added)


def _measure_import_ms() -> float:
    """Returns the import time in seven fresh interpreters: the median, in ms."""
    code = (
        "import opentelemetry.trace, time\n"
        "before = time.perf_counter()\nimport otel_infer; otel_infer.instrument\n"
        "print((time.perf_counter() - before) * 1e3)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(7)]
    return sorted(float(run.stdout) for run in runs)[3]


@pytest.mark.parametrize("module", [module for module in SERVER_SIDE if exists(module)])
def test_a_server_module_loads_neither_numpy_nor_exporter(module: str) -> None:
    loaded = loaded_by(f"import otel_infer.{module}")
    assert set() == find_within(
        loaded, {"numpy", "opentelemetry.exporter", "grpc", "google.protobuf"} | ENGINES
    )


@pytest.mark.parametrize("module", [module for module in SERVER_SIDE if exists(module)])
def test_a_server_module_imports_no_exporter_lazily(module: str) -> None:
    imported = {name for path in list_files(module) for name in _list_imports(path)}
    assert set() == find_within(imported, {"opentelemetry.exporter"})


def _list_imports(path: Path) -> set[str]:
    """Returns every module that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_server_module_exists() -> None:
    assert [] == [module for module in SERVER_SIDE if not exists(module)]
