"""Runs a probe in a separate process, because it is loud, heavy or may never return.

The probe writes its results as lines of JSON to the original standard output. Output that libraries print goes
to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from otel_infer.config import environment

_BOOT = (
    "import sys, json; boot = json.load(sys.stdin); sys.path[:] = boot['path']; "
    "from otel_infer.cli.doctor.probe_process import run_child_probe; run_child_probe(boot)"
)
MAX_REASON_CHARS = 200


class ProbeResult(NamedTuple):
    """The results of a probe until it ended, and its error; the error is empty on success."""

    lines: list[dict[str, Any]]
    error: str


def run_in_subprocess(
    probe: str, options: Mapping[str, Any], environ: Mapping[str, str], limit: float
) -> ProbeResult:
    """Runs `run_probe(options)` of the sibling module `probe` in a child process, for at most `limit` s."""
    boot = {"probe": probe, "options": dict(options), "path": [os.path.abspath(entry) for entry in sys.path]}
    guarded = {**environ, environment.SIDECAR_GUARD: "1"}  # keeps our `sitecustomize` from instrumenting it
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _BOOT],
            input=json.dumps(boot).encode(),
            capture_output=True,
            env=guarded,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return ProbeResult(_parse_lines(late.stdout or b""), f"took longer than {limit:.0f} s")
    except OSError as refusal:
        return ProbeResult([], f"cannot be started: {refusal.strerror}")
    return ProbeResult(_parse_lines(done.stdout), _describe_failure(done.returncode, done.stderr))


def run_child_probe(boot: Mapping[str, Any]) -> None:
    """Runs the probe in the child process and exits."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        module = importlib.import_module(f"otel_infer.cli.doctor.{boot['probe']}")
        for line in module.run_probe(boot["options"]):
            print(json.dumps(line), file=out, flush=True)
    os._exit(0)  # skips exit handlers of imported engines, which may be slow


def _parse_lines(output: bytes) -> list[dict[str, Any]]:
    """Parses the complete lines. The last line of a killed process may be cut off."""
    whole, _, _ = output.rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def _describe_failure(status: int, errors: bytes) -> str:
    if status < 0:
        return f"was ended by signal {-status}"
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return (
        f"ended with status {status}: {lines[-1][:MAX_REASON_CHARS] if lines else 'no reason given'}"
        if status
        else ""
    )
