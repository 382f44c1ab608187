"""Real servers under load: stalls are named by their function, and signals harm no request."""

from __future__ import annotations

import http.client
import os
import random
import sys
from pathlib import Path

import pytest

from benchmarks.stalls.__main__ import inject_stalls
from benchmarks.stalls.signals import send_signals_under_load
from otel_infer.ringbuffer.native import native

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        native is None or not hasattr(os, "pidfd_open"), reason="no compiled module, or no pidfd"
    ),
]
SIGNALS = 2000
APP = """
import hashlib, threading, time
from fastapi import FastAPI
import uvicorn, sys
app = FastAPI()
@app.get("/health")
async def health():
    return {}
@app.post("/async")
async def on_loop(body: dict):
    return {"digest": hashlib.sha256(str(body).encode() * 5000).hexdigest()}
@app.post("/pool")
def in_pool(body: dict):
    time.sleep(0.005)
    return {"digest": [hashlib.sha256(str(i).encode()).hexdigest() for i in range(2000)][-1]}
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_stalls_are_named_by_their_function(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert inject_stalls(tmp_path, random.Random(11), 9) == 0, capfd.readouterr().out


def test_signals_under_load_harm_no_request(tmp_path: Path) -> None:
    """`python -m benchmarks.stalls.signals` sends 10,000 into each server of the battery."""
    (tmp_path / "app.py").write_text(APP)

    def send(port: int) -> list[str]:
        return [post(port, path) for path in ("/async", "/pool") * 10]

    outcome = send_signals_under_load(
        tmp_path, [sys.executable, str(tmp_path / "app.py"), "{port}"], send, SIGNALS
    )
    assert outcome.failed == [] and outcome.requests > 100
    assert outcome.signals >= SIGNALS and outcome.dumps > SIGNALS / 2


def post(port: int, path: str) -> str:
    """Sends a request; returns "" if it was answered well."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", path, "{}", {"Content-Type": "application/json"})
        status = connection.getresponse().status
        return "" if status == 200 else f"status {status}"
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    finally:
        connection.close()
