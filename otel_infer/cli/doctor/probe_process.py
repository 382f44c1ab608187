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
    "from otel_infer.cli.doctor.probe_process import answer; answer(boot)"
)
LONGEST = 200


class Answers(NamedTuple):
    """What was answered before it ended, and what went wrong, if anything did."""

    lines: list[dict[str, Any]]
    trouble: str


def ask(what: str, told: Mapping[str, Any], environ: Mapping[str, str], limit: float) -> Answers:
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
        return Answers(_read(late.stdout or b""), f"took longer than {limit:.0f} s")
    except OSError as refusal:
        return Answers([], f"cannot be started: {refusal.strerror}")
    return Answers(_read(done.stdout), _trouble(done.returncode, done.stderr))


def answer(boot: Mapping[str, Any]) -> None:
    """What the other process does."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        module = importlib.import_module(f"otel_infer.cli.doctor.{boot['what']}")
        for line in module.answers(boot["told"]):
            print(json.dumps(line), file=out, flush=True)
    os._exit(0)  # what an engine does when its process ends is not ours to wait for


def _read(output: bytes) -> list[dict[str, Any]]:
    """The whole lines; a process that was killed may have left half of one."""
    whole, _, _ = output.rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def _trouble(status: int, errors: bytes) -> str:
    if status < 0:
        return f"was ended by signal {-status}"
    said = errors.decode("utf-8", "replace").strip().splitlines()
    return (
        f"ended with status {status}: {said[-1][:LONGEST] if said else 'no reason given'}" if status else ""
    )
