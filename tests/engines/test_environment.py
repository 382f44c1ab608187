"""Our wheel beside the engines: no version changes, and none of them is imported before the application imports it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ENGINES = (
    "onnxruntime", "onnxruntime_genai", "openvino", "openvino_genai", "ctranslate2", "faster_whisper", "diffusers",
    "sentence_transformers", "sklearn", "xgboost", "lightgbm", "llama_cpp", "sglang", "torch", "transformers",
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def test_no_engine_is_imported_for_the_user() -> None:
    script = f"import otel_infer, sys; otel_infer.instrument(); print([n for n in {ENGINES!r} if n in sys.modules])"
    environ = {"OTEL_SDK_DISABLED": "false", "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environ, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_our_wheel_changes_no_version(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    plan = tmp_path / "plan.json"
    command = [*pip, "install", "--quiet", "--dry-run", "--report", str(plan), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip("no package index reachable")
    installed = {item["metadata"]["name"] for item in json.loads(plan.read_text())["install"]}
    assert installed == {"otel-infer"}
