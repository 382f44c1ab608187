"""An HTTP client in a separate process: one open connection, a fixed rate.

python -m benchmarks.paced_client reads `PORT PATH REQUESTS RATE` lines, answers each with the number of successful
requests
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
    """Starts the process and sends commands to it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.paced_client"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self._process.pid

    def send_requests(self, port: int, path: str, requests: int, rate: float) -> None:
        """Sends this many requests per second. Returns after the last response, and raises if one failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{port} {path} {requests} {rate}\n")
        succeeded = self._process.stdout.readline().strip()
        if succeeded != str(requests):
            raise RuntimeError(f"{succeeded or 'none'} of {requests} requests succeeded")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def _send_requests(port: int, path: str, requests: int, rate: float) -> int:
    connection, succeeded = http.client.HTTPConnection("127.0.0.1", port, timeout=30), 0
    due = time.perf_counter()
    for _ in range(requests):
        connection.request("POST", path, BODY, HEADERS)
        response = connection.getresponse()
        succeeded += bool(response.read()) and response.status == 200
        due += 1 / rate
        time.sleep(max(due - time.perf_counter(), 0))
    connection.close()
    return succeeded


def main() -> None:
    """Runs until standard input ends."""
    os.nice(5)
    for line in sys.stdin:
        port, path, requests, rate = line.split()
        print(_send_requests(int(port), path, int(requests), float(rate)), flush=True)


if __name__ == "__main__":
    main()
