"""Hooks on the real libraries: all fit, come off again, and a part with a target that is no function is left out as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSTRUMENTORS = (
    "asgi", "wsgi", "aiohttp", "tornado", "sanic", "grpc", "gradio", "bentoml", "ray", "celery", "rq", "arq", "dramatiq", "threading",
    "multiprocessing", "waits", "queues",
)  # fmt: skip

LOAD = """
import importlib, sys
from otel_infer.instrumentation import registry
from otel_infer.instrumentation.hooks.target import resolve_target

name = sys.argv[1]
instrumentor = importlib.import_module(f"otel_infer.instrumentation.{registry.BUILTIN[name]}").instrumentor
hooks = []
for part in instrumentor._parts.values():
    for hook in part.hooks:
        try:
            importlib.import_module(hook.module)
            resolve_target(hook.module, hook.path)
            hooks.append(hook)
        except (ImportError, LookupError):
            assert hook.optional or part.name in LACKING, hook.target
targets = [resolve_target(hook.module, hook.path)[2] for hook in hooks]

def list_current():
    return [resolve_target(hook.module, hook.path)[2] for hook in hooks]
"""
RESTORED = """
for _ in range(2):
    instrumentor.install()
    status = instrumentor.status
    assert (status.state, status.drift) == ("active", None), status
    assert all(hook.active for hook in hooks)
    assert all(now is not own for now, own in zip(list_current(), targets))
    instrumentor.remove()
    assert all(now is own for now, own in zip(list_current(), targets))
"""
DRIFTED = """
def find_home(owner, key):
    return next(home for home in getattr(owner, "__mro__", (owner,)) if key in vars(home))

for hook in hooks:
    owner, key, own = resolve_target(hook.module, hook.path)
    home = find_home(owner, key)
    own = vars(home)[key]
    if hook.optional:
        continue
    setattr(home, key, None)
    try:
        instrumentor.install()
        parts = {part.name: part for part in instrumentor.describe_parts()}
        for name, part in parts.items():
            is_hit = name == hook.part
            assert part.state in (("drifted",) if is_hit else ("active", "absent", "waiting")), (hook.target, part)
            assert not is_hit or (part.hooks_active == 0 and hook.target in part.drift), part
        assert instrumentor.status.state == "drifted"
        instrumentor.remove()
    finally:
        setattr(home, key, own)
    assert all(now is original for now, original in zip(list_current(), targets)), hook.target
"""
LACKING = {"asgi": ("hypercorn",)}
"""Parts whose libraries are not in this environment."""


def run(script: str, name: str) -> None:
    """Runs a script with an instrumentor in a process of its own."""
    lacking = f"LACKING = {LACKING.get(name, ())!r}\n"
    completed = subprocess.run(
        [sys.executable, "-c", lacking + LOAD + script, name],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-3000:]


@pytest.mark.parametrize("name", INSTRUMENTORS)
def test_every_hook_fits_and_comes_off_again(name: str) -> None:
    run(RESTORED, name)


@pytest.mark.parametrize("name", INSTRUMENTORS)
def test_a_mismatch_leaves_out_its_part_alone(name: str) -> None:
    run(DRIFTED, name)
