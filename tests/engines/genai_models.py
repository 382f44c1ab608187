"""A tiny Llama for onnxruntime-genai, made by its own builder from a local model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def make_genai(folder: Path, source: Path) -> Path:
    """Writes the model; returns its folder."""
    target = folder / "genai-llama"
    options = ("-i", str(source), "-o", str(target), "-p", "fp32", "-e", "cpu")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", "tiny", *options]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return target
