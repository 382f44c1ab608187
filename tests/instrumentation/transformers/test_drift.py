"""A release of transformers that is installed, and one that has changed."""

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


def test_what_is_installed_binds_as_its_sources_say() -> None:
    """The reading of sources is only as good as its agreement with the real thing."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert releases.bound(LIBRARY) == releases.installed_binds(LIBRARY)


# ── a release that has changed ───────────────────────────────────────────────────────────────────────────────────

FOLDER = "transformers/generation/continuous_batching"
CHANGES = {
    # what is written in the place of what, and what is to be said of it
    "a function": ("finish_request", "end_request", "Scheduler.finish_request: there is no finish_request"),
    "a parameter": (
        "def add_waiting_request(self, state: RequestState):\n",
        "def add_waiting_request(self, request: RequestState):\n        state = request\n",
        "Scheduler.add_waiting_request: declares no parameter state",
    ),
}


def changed(what: str, tmp_path: Path) -> tuple[Path, str]:
    """A copy of the installed release with one name changed wherever it is used, and what is to be said of it."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    before, after, said = CHANGES[what]
    return releases.changed(LIBRARY.name, FOLDER, before, after, tmp_path), said


def test_doctor_names_what_has_changed_and_the_rest_still_binds(tmp_path: Path) -> None:
    site, said = changed("a function", tmp_path)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ |= {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "OTEL_TRACES_EXPORTER": "none"}
    command = [sys.executable, "-m", "otel_infer", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=site)
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    check = checks["integration transformers"]
    assert check["state"] == "fail" and said in check["found"], check
    assert "continuous batching is not recorded; everything else is" in check["found"]


SERVES = """
import logging, sys, torch, transformers
from otel_infer.instrumentation.transformers import instrumentor
logging.basicConfig()
instrumentor.install()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sdpa", dtype=torch.float32)
asked = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
one = model.generate(torch.tensor([[100, 101, 102]]), **{**asked, "eos_token_id": None})[0, 3:].tolist()
from tests.instrumentation.transformers.engine import settings
config = transformers.GenerationConfig(**asked)
(batched,) = model.generate_batch([[100, 101, 102]], config, settings()).values()
assert batched.generated_tokens == one, (batched, one)
print(instrumentor.status.drift, instrumentor.parts, transformers.__file__)
"""


def test_a_changed_release_serves_on(tiny_llama: Path, tmp_path: Path) -> None:
    site, said = changed("a parameter", tmp_path)
    root = Path(releases.__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{root}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SERVES, str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=site)
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout, "another transformers was imported"
    assert said in done.stdout and said in done.stderr
    assert "'continuous batching': 'drifted'" in done.stdout and "'generate': 'active'" in done.stdout
