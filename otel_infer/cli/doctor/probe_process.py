"""Asks a process of its own: for what is loud, heavy or may never return.

Its answers come as lines of JSON on its first standard output; what anybody prints there goes nowhere.
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
    """What was answered before it ended, and what went wrong, if anything did."""

    lines: list[dict[str, Any]]
    error: str


def run_in_subprocess(
    what: str, told: Mapping[str, Any], environ: Mapping[str, str], limit: float
) -> ProbeResult:
    """Runs `answers(told)` of the module `what` beside this one, for at most `limit` s."""
    boot = {"what": what, "told": dict(told), "path": [os.path.abspath(entry) for entry in sys.path]}
    guarded = {**environ, environment.SIDECAR_GUARD: "1"}  # nothing instruments it at its start
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
    """What the other process does."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        module = importlib.import_module(f"otel_infer.cli.doctor.{boot['what']}")
        for line in module.answers(boot["told"]):
            print(json.dumps(line), file=out, flush=True)
    os._exit(0)  # what an engine does when its process ends is not ours to wait for


def _parse_lines(output: bytes) -> list[dict[str, Any]]:
    """The whole lines; a process that was killed may have left half of one."""
    whole, _, _ = output.rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def _describe_failure(status: int, errors: bytes) -> str:
    if status < 0:
        return f"was ended by signal {-status}"
    said = errors.decode("utf-8", "replace").strip().splitlines()
    return (
        f"ended with status {status}: {said[-1][:MAX_REASON_CHARS] if said else 'no reason given'}"
        if status
        else ""
    )
