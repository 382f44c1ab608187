"""Receiver, Ray Serve and client, in one network namespace: Ray opens ports on every address.

    unshare --net --map-root-user … python -m tests.servers.ray_check FOLDER [own]

`own`: Ray's own tracing is on, and one line in the application instruments it, instead of `otel-infer run`. What was
received is written to FOLDER as JSON.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.servers.leftovers import MARKER
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import Answer, make_ids, send
from tests.servers.serving import start_module, stop_module
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port

UNSHARE = ("unshare", "--net", "--map-root-user", "sh", "-ec", 'ip link set lo up; exec "$@"', "sh")
RESULT, ROUTES = "result.json", "/-/routes"
SIZE = 6
OWN_TRACING = {
    "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "tests.servers.apps.ray_app:export_spans",
    "RAY_SERVE_TRACING_SAMPLING_RATIO": "1.0",
}


def can_unshare() -> bool:
    """Returns whether this machine permits network namespaces, and has what sets one up."""
    found = shutil.which("unshare") and shutil.which("ip")
    return bool(found) and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


def run_check(folder: Path, *more: str) -> dict[str, Any]:
    """Runs this module in a namespace of its own, and returns what it has written."""
    command = [*UNSHARE, sys.executable, "-m", __name__, str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    result = folder / RESULT
    assert result.exists(), done.stdout + done.stderr
    return json.loads(result.read_text())  # type: ignore[no-any-return]


def leave_stream(port: int) -> Answer:
    """Sends a request whose client leaves after the first part of a slow stream."""
    trace_id, parent_id, header = make_ids()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/app/stream?pause_s=1.0", headers={"traceparent": header})
    response = connection.getresponse()
    body = response.read(2)
    response.close()
    connection.close()
    return Answer(response.status, body, trace_id, parent_id)


def send_all(port: int) -> dict[str, Answer]:
    """Sends each kind of request, and returns the answers by name."""
    answers = {
        "single": send(port, "POST", "/batched", b'{"value": 1.0}'),
        "composed": send(port, "POST", "/app/compose/a"),
        "got": send(port, "GET", "/app/score/a"),
        "failed": send(port, "POST", "/app/compose/a?rows=-1"),
        "stream": send(port, "POST", "/app/stream"),
    }
    with ThreadPoolExecutor(SIZE) as pool:
        batched = pool.map(lambda _: send(port, "POST", "/batched", b'{"value": 1.0}'), range(SIZE))
        answers.update({f"batched {number}": answer for number, answer in enumerate(batched)})
    answers["left"] = leave_stream(port)
    return answers


def check(folder: Path, own_tracing: bool) -> None:
    with OtlpReceiver() as receiver:
        server = start_ray(receiver, folder / "log", own_tracing)
        try:
            while b"/batched" not in read_routes(server.port):
                time.sleep(0.2)
            answers = send_all(server.port)
            for answer in answers.values():
                spans_of(receiver, answer.trace_id)
            receiver.wait_for(lambda it: counted(it) >= len(answers) - 1, 5)
        finally:
            stop_module(server)
        time.sleep(2)  # the sidecar reports what died, and ends
        found = {
            "answers": {name: [answer.status, answer.trace_id, answer.parent_id] for name, answer in answers.items()},
            "spans": receiver.spans, "counted": counted(receiver),
        }  # fmt: skip
        partial = folder / "partial"
        partial.write_text(json.dumps(found))
        os.replace(partial, folder / RESULT)


def start_ray(receiver: OtlpReceiver, log: Path, own_tracing: bool) -> Server:
    variables = {"RAY_USAGE_STATS_ENABLED": "0"}
    if not own_tracing:
        return start_module("ray_app", receiver, log, ROUTES, **variables)
    port = free_port()
    variables.update(receiver.environ, OTEL_METRIC_EXPORT_INTERVAL="1000", PYTHONPATH=str(Path.cwd()))
    variables.update(OWN_TRACING)
    variables[MARKER] = str(port)
    command = [sys.executable, "-m", "tests.servers.apps.ray_app", str(port), "instrument"]
    return Server(command, port, log, variables, ROUTES).start()


def read_routes(port: int) -> bytes:
    """Returns the routes that are served, which come one after the other."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", ROUTES)
    routes = connection.getresponse().read()
    connection.close()
    return routes if b"/app" in routes else b""


if __name__ == "__main__":
    check(Path(sys.argv[1]), "own" in sys.argv)
