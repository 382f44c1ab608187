"""What importing us loads, seen from a process of its own."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import otel_infer

HOUSE = Path(otel_infer.__path__[0])
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
    """The modules that `statement` loads in a fresh interpreter."""
    code = f"import sys\n{statement}\nimport json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def among(modules: set[str], unwanted: set[str]) -> set[str]:
    """Those of `modules` that are one of `unwanted` or lie in one."""
    return {name for name in modules if any(name == bad or name.startswith(bad + ".") for bad in unwanted)}


def files_of(room: str) -> list[Path]:
    path = HOUSE / room.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def exists(room: str) -> bool:
    return all(path.is_file() for path in files_of(room))


@pytest.mark.parametrize("statement", ["import otel_infer", "import otel_infer; otel_infer.instrument"])
def test_importing_us_loads_no_engine_and_nothing_heavy(statement: str) -> None:
    assert set() == among(loaded_by(statement), ENGINES | HEAVY)


def test_importing_us_adds_few_modules_above_opentelemetry(capsys: pytest.CaptureFixture[str]) -> None:
    """The time is printed and not asserted: a busy machine would make it a lie."""
    api = loaded_by("import opentelemetry.trace, logging, typing")
    added = (
        loaded_by("import opentelemetry.trace, logging, typing\nimport otel_infer; otel_infer.instrument")
        - api
    )
    with capsys.disabled():
        print(
            f"\nimport otel_infer: {len(added)} modules and {_milliseconds():.0f} ms above opentelemetry.trace"
        )
    assert len(added) < 150, sorted(added)


def _milliseconds() -> float:
    """The median of seven fresh interpreters."""
    code = (
        "import opentelemetry.trace, time\n"
        "before = time.perf_counter()\nimport otel_infer; otel_infer.instrument\n"
        "print((time.perf_counter() - before) * 1e3)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(7)]
    return sorted(float(run.stdout) for run in runs)[3]


@pytest.mark.parametrize("room", [room for room in SERVER_SIDE if exists(room)])
def test_a_room_of_the_server_loads_no_numpy_and_no_exporter(room: str) -> None:
    loaded = loaded_by(f"import otel_infer.{room}")
    assert set() == among(loaded, {"numpy", "opentelemetry.exporter", "grpc", "google.protobuf"} | ENGINES)


@pytest.mark.parametrize("room", [room for room in SERVER_SIDE if exists(room)])
def test_a_room_of_the_server_names_no_exporter_even_lazily(room: str) -> None:
    named = {name for path in files_of(room) for name in _imports(path)}
    assert set() == among(named, {"opentelemetry.exporter"})


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_room_that_is_to_exist_exists() -> None:
    assert [] == [room for room in SERVER_SIDE if not exists(room)]
