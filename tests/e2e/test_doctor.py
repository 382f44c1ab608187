"""`otel-infer doctor` as a process, in five environments: each check has a finding, and a remedy if it is not ok."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from otel_infer.instrumentation import registry
from otel_infer.ringbuffer import directory
from tests.support.otlp_receiver import GRPC, HTTP, OtlpReceiver, partial_success, status

ENGINES = [instrumentor for instrumentor in registry.load_instrumentors() if instrumentor.is_engine]
LEFT_OUT = {
    *("fastapi", "functorch", "hypercorn", "starlette", "tokenizers", "torch", "torchgen", "uvicorn"),
    *(engine.distribution.replace("-", "_") for engine in ENGINES),
    *(module for engine in ENGINES for module in engine.modules),
}
"""Packages and distributions that an environment without an engine and a web server lacks."""
BOXES = re.compile("[\u2500-\u257f]")


class Diagnosis(NamedTuple):
    """The result of a run. `checks`: state, finding and remedy by name."""

    code: int
    checks: dict[str, dict[str, str]]
    ok: bool
    output: str

    def states(self, *names: str) -> dict[str, str]:
        return {name: self.checks[name]["state"] for name in names}


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without OTEL_* variables."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**plain, **variables}


def doctor(*options: str, python: str = sys.executable, **variables: str) -> Diagnosis:
    """Runs the command with JSON output, without imports unless `--imports` is given."""
    imports = () if "--imports" in options else ("--no-imports",)
    command = [python, "-m", "otel_infer", "doctor", "--json", *imports, *options]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=100)
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    checks = {check.pop("name"): check for check in report["checks"]}
    without_remedy = [name for name, check in checks.items() if (check["state"] == "ok") == bool(check["do"])]
    assert [] == without_remedy, "each check that is not ok has a remedy, and no other"
    return Diagnosis(done.returncode, checks, report["ok"], done.stdout + done.stderr)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def engineless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A separate interpreter with the packages of this one, but no engine and no web server."""
    folder = tmp_path_factory.mktemp("engineless")
    venv.create(folder, symlinks=True, with_pip=False)
    python = str(folder / "bin" / "python")
    done = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = Path(done.stdout.strip())
    for entry in (Path(each) for each in sys.path if each.endswith(("site-packages", "dist-packages"))):
        for package in entry.iterdir():
            name = re.split(r"[-.]", package.name)[0].lower()
            if name not in {*LEFT_OUT, "__pycache__"} and not (site / package.name).exists():
                (site / package.name).symlink_to(package)
    return python


# ── healthy ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
def test_healthy_environment_binds_all_hooks_and_exports(receiver: OtlpReceiver) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    found = doctor("--imports", **receiver.environ)
    assert (0, True) == (found.code, found.ok), found.output
    # Other tests may be running servers, or have left dead ones.
    own = [check for name, check in found.checks.items() if not name.startswith(("leftovers", "requests of"))]
    assert {"ok"} == {check["state"] for check in own}, found.output
    bound = re.search(
        r"active, (\d+) of (\d+) hooks bound", found.checks["integration transformers"]["found"]
    )
    assert bound is not None
    assert bound[1] == bound[2]
    (span,) = receiver.spans
    assert ("otel_infer doctor", {"infer.doctor": True}) == (span["name"], span["attributes"])
    assert span["trace_id"] in found.checks["exporter spans"]["found"]
    assert {"traces", "metrics"} == {request.signal for request in receiver.requests}


def test_healthy_environment_exports_over_grpc() -> None:
    with OtlpReceiver(GRPC) as receiver:
        found = doctor(**receiver.environ)
    assert 0 == found.code
    assert {"ok"} == set(found.states("exporter spans", "exporter metrics", "SDK exporter").values())
    assert 1 == len(receiver.spans)


# ── engine missing ───────────────────────────────────────────────────────────────────────────────────────────────


def test_missing_engine_names_supported_engines_and_install_command(
    engineless: str, receiver: OtlpReceiver
) -> None:
    found = doctor("--imports", python=engineless, **receiver.environ)
    assert (0, True) == (found.code, found.ok), found.output
    assert "warn" == found.checks["engine"]["state"]
    assert "supported: transformers" in found.checks["engine"]["found"]
    assert f"{engineless} -m pip install" in found.checks["engine"]["do"]
    assert "transformers is not installed" == found.checks["integration transformers"]["found"]
    assert 1 == len(receiver.spans)


# ── mismatch ─────────────────────────────────────────────────────────────────────────────────────────────────────

MISMATCHED = {
    "transformers/__init__.py": "",
    "transformers/generation/__init__.py": "",
    "transformers/generation/utils.py": """
class GenerationMixin:
    def generate(self, inputs=None, generation_config=None): ...
    def _renamed_sample(self): ...
""",
    "transformers/tokenization_utils_base.py": """
class PreTrainedTokenizerBase:
    def __call__(self): ...
    def apply_chat_template(self): ...
    def encode(self): ...
    def decode(self): ...
    def batch_decode(self): ...
class BatchEncoding:
    def to(self, device): ...
print("a library may be loud")
""",
    "transformers-99.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n",
}


def test_mismatch_names_target_reason_and_missing_data(
    engineless: str, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    for name, text in MISMATCHED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    found = doctor("--imports", python=engineless, PYTHONPATH=str(tmp_path), **receiver.environ)
    assert (1, False) == (found.code, found.ok)
    check = found.checks["integration transformers"]
    assert "fail" == check["state"]
    assert check["found"].startswith("transformers 99.0: mismatch")
    assert re.search(
        r"transformers\.generation\.utils:GenerationMixin\.\w+: (there is|declares) no ", check["found"]
    )
    assert "generate is not recorded; everything else is" in check["found"]
    assert "install another release of transformers" in check["do"]
    assert {"ok"} == set(found.states("engine", "exporter spans", "sidecar").values())


# ── exporter unreachable ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", [HTTP, GRPC])
def test_unreachable_exporter_fails_and_suggests_a_collector(protocol: str, closed_port: int) -> None:
    found = doctor(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{closed_port}",
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_EXPORTER_OTLP_TIMEOUT="1",
    )
    assert (1, False) == (found.code, found.ok)
    for name in ("exporter spans", "exporter metrics"):
        assert found.checks[name]["found"].endswith("connection refused")
        assert "start a collector there" in found.checks[name]["do"]


@pytest.mark.parametrize(
    ("listening", "configured", "hint"),
    [(GRPC, HTTP, "is this the gRPC port 4317?"), (HTTP, GRPC, "is this the HTTP port 4318?")],
)
def test_port_of_the_other_protocol_is_recognised(listening: str, configured: str, hint: str) -> None:
    with OtlpReceiver(listening) as receiver:
        variables = {**receiver.environ, "OTEL_EXPORTER_OTLP_PROTOCOL": configured}
        found = doctor(**variables, OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert 1 == found.code
    assert hint in found.checks["exporter spans"]["do"]
    assert hint in found.checks["exporter metrics"]["do"]


@pytest.mark.parametrize("protocol", [HTTP, GRPC])
def test_rejected_credentials_are_not_printed(protocol: str) -> None:
    with OtlpReceiver(protocol) as receiver:
        receiver.answer(status(401))
        found = doctor(
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint.replace("://", "://user:canary1@"),
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20canary2,x-tenant=canary3",
            OTEL_EXPORTER_OTLP_TIMEOUT="1",
        )
    assert 1 == found.code
    assert "canary" not in found.output
    if protocol == HTTP:
        assert found.checks["exporter spans"]["found"].endswith("HTTP 401")
        assert "OTEL_EXPORTER_OTLP_HEADERS" in found.checks["exporter spans"]["do"]


def test_partial_success_is_a_failure(receiver: OtlpReceiver) -> None:
    receiver.answer(partial_success(1, "no such tenant"))
    found = doctor(**receiver.environ)
    assert 1 == found.code
    assert found.checks["exporter spans"]["found"].endswith("partial success, 1 rejected: no such tenant")


# ── no shared memory ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with given options during the test."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    done = []

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"mounting a tmpfs is not allowed here: {tried.stderr.strip()}")
        done.append(folder)
        return folder

    yield mount
    for each in done:
        subprocess.run(["umount", str(each)], check=True)


def run_without_export(**variables: str) -> Diagnosis:
    return doctor(
        OTEL_INFER_ENABLED="on", OTEL_TRACES_EXPORTER="none", OTEL_METRICS_EXPORTER="none", **variables
    )


def test_folder_on_disk_is_not_shared_memory(tmp_path: Path) -> None:
    if directory.is_tmpfs(tmp_path):
        pytest.skip("the temporary folder is on tmpfs here")
    found = run_without_export(OTEL_INFER_RINGS=str(tmp_path))
    assert (0, True) == (found.code, found.ok)
    assert {"shared memory": "warn", "sidecar": "warn"} == found.states("shared memory", "sidecar")
    assert "not on tmpfs; mode: in-process" in found.checks["shared memory"]["found"]
    assert "/dev/shm" in found.checks["shared memory"]["do"]
    assert [] == list(tmp_path.iterdir())


def test_no_shared_memory_fails_in_sidecar_mode(tmp_path: Path) -> None:
    if directory.is_tmpfs(tmp_path):
        pytest.skip("the temporary folder is on tmpfs here")
    found = run_without_export(OTEL_INFER_RINGS=str(tmp_path), OTEL_INFER_MODE="sidecar")
    assert (1, False) == (found.code, found.ok)
    assert {"shared memory": "fail", "sidecar": "fail"} == found.states("shared memory", "sidecar")


def test_read_only_tmpfs_is_not_shared_memory(mounted: Callable[[str], Path]) -> None:
    found = run_without_export(OTEL_INFER_RINGS=str(mounted("ro") / "rings"))
    assert {"shared memory": "warn", "sidecar": "warn"} == found.states("shared memory", "sidecar")
    assert "Read-only file system" in found.checks["shared memory"]["found"]
    assert "OTEL_INFER_RINGS" in found.checks["shared memory"]["do"]


def test_full_tmpfs_is_not_shared_memory(mounted: Callable[[str], Path]) -> None:
    found = run_without_export(OTEL_INFER_RINGS=str(mounted("size=64k")))
    assert {"shared memory": "warn", "sidecar": "warn"} == found.states("shared memory", "sidecar")
    assert "--shm-size=256m" in found.checks["shared memory"]["do"]


def test_one_megabyte_of_tmpfs_fits_smaller_rings(mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=1m")
    found = run_without_export(OTEL_INFER_RINGS=str(folder))
    assert {"shared memory": "warn", "sidecar": "ok"} == found.states("shared memory", "sidecar"), (
        found.output
    )
    assert "of their size" in found.checks["shared memory"]["found"]
    assert "--shm-size=256m" in found.checks["shared memory"]["do"]
    assert [] == [path for path in folder.rglob("*") if path.is_file()]


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────


def plain(**variables: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "otel_infer", "doctor", "--no-imports"]
    return {"args": command, "env": environment(OTEL_INFER_MODE="in-process", **variables)}


def test_piped_output_is_plain_lines() -> None:
    done = subprocess.run(**plain(), capture_output=True, text=True, timeout=60)
    assert (0, "") == (done.returncode, done.stderr)
    assert not BOXES.search(done.stdout)
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert all(re.match(r"(ok|warn|fail) +\S|\s+do: \S", line) for line in lines[:-1]), done.stdout
    assert any("do: set OTEL_EXPORTER_OTLP_ENDPOINT=" in line for line in lines)


def test_terminal_output_is_coloured() -> None:
    main_end, child_end = pty.openpty()
    with subprocess.Popen(
        **plain(TERM="xterm", COLUMNS="100"), stdout=child_end, stderr=child_end, stdin=child_end
    ) as child:
        os.close(child_end)
        shown = b""
        try:
            while part := os.read(main_end, 4096):
                shown += part
        except OSError:  # the child closed its end
            pass
    os.close(main_end)
    text = shown.decode()
    assert 0 == child.returncode, text
    assert "\x1b[32mok" in text
    assert "→ set OTEL_EXPORTER_OTLP_ENDPOINT=" in text
    assert not BOXES.search(text)
