"""The installed release of transformers, and a changed copy of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.instrumentation.transformers.releases import LIBRARY
from tests.support import releases

pytestmark = pytest.mark.real


def test_installed_hooks_bind_as_the_sources_predict() -> None:
    """Checks that reading sources gives the same result as installing the hooks."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert releases.bound(LIBRARY) == releases.installed_binds(LIBRARY)


# ── a release that has changed ───────────────────────────────────────────────────────────────────────────────────

FOLDER = "transformers/generation/continuous_batching"
CHANGES = {
    # name before, name after, drift reported
    "a function": ("finish_request", "end_request", "Scheduler.finish_request: there is no finish_request"),
    "a parameter": (
        "def add_waiting_request(self, state: RequestState):\n",
        "def add_waiting_request(self, request: RequestState):\n        state = request\n",
        "Scheduler.add_waiting_request: declares no parameter state",
    ),
}


def changed(kind: str, tmp_path: Path) -> tuple[Path, str]:
    """Returns a copy of the installed release with one name changed, and the drift to report."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    before, after, drift = CHANGES[kind]
    return releases.changed(LIBRARY.name, FOLDER, before, after, tmp_path), drift


def test_doctor_reports_the_changed_function(tmp_path: Path) -> None:
    site, drift = changed("a function", tmp_path)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ |= {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "OTEL_TRACES_EXPORTER": "none"}
    command = [sys.executable, "-m", "otel_infer", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=site)
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    check = checks["integration transformers"]
    assert check["state"] == "fail" and drift in check["found"], check
    assert "continuous batching is not recorded" in check["found"]


SERVES = """
import logging, sys, torch, transformers
from otel_infer.instrumentation.transformers import instrumentor
logging.basicConfig()
instrumentor.install()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sdpa", dtype=torch.float32)
options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
expected = model.generate(torch.tensor([[100, 101, 102]]), **{**options, "eos_token_id": None})[0, 3:].tolist()
from tests.instrumentation.transformers.engine import settings
config = transformers.GenerationConfig(**options)
(batched,) = model.generate_batch([[100, 101, 102]], config, settings()).values()
assert batched.generated_tokens == expected, (batched, expected)
print(instrumentor.status.drift, instrumentor.parts, transformers.__file__)
"""


def test_a_changed_release_still_serves(tiny_llama: Path, tmp_path: Path) -> None:
    site, drift = changed("a parameter", tmp_path)
    root = Path(releases.__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{root}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SERVES, str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=site)
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout, "another transformers was imported"
    assert drift in done.stdout and drift in done.stderr
    assert "'continuous batching': 'drifted'" in done.stdout and "'generate': 'active'" in done.stdout
