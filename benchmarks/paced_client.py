"""An HTTP client in a process of its own, over one connection that stays open, at a fixed rate.

python -m benchmarks.paced_client      reads `PORT PATH REQUESTS RATE` lines, answers each with how many came back right
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time

BODY = json.dumps({"id": 7, "question": "Why is the sky blue? " * 8}).encode()
HEADERS = {
    "content-type": "application/json",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}


class Client:
    """The parent's side."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.paced_client"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self._process.pid

    def ask(self, port: int, path: str, requests: int, rate: float) -> None:
        """So many requests, so many a second; returns when the last one was answered. Raises if one was not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{port} {path} {requests} {rate}\n")
        answered = self._process.stdout.readline().strip()
        if answered != str(requests):
            raise RuntimeError(f"{answered or 'none'} of {requests} requests came back right")

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def _asked(port: int, path: str, requests: int, rate: float) -> int:
    connection, right = http.client.HTTPConnection("127.0.0.1", port, timeout=30), 0
    due = time.perf_counter()
    for _ in range(requests):
        connection.request("POST", path, BODY, HEADERS)
        response = connection.getresponse()
        right += bool(response.read()) and response.status == 200
        due += 1 / rate
        time.sleep(max(due - time.perf_counter(), 0))
    connection.close()
    return right


def main() -> None:
    """Until its standard input ends."""
    os.nice(5)
    for line in sys.stdin:
        port, path, requests, rate = line.split()
        print(_asked(int(port), path, int(requests), float(rate)), flush=True)


if __name__ == "__main__":
    main()
