"""A real Prometheus and a real Alertmanager on ports of their own, and somebody whom alerts are sent to."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import yaml

from otel_infer.cli.prometheus_check import PrometheusClient
from tests.stack.tools import tool
from tests.support.served import free_port


class Running:
    """A program that answers at `/-/ready`."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log.open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        if not until(self._is_ready, 30):
            self.stop()
            raise RuntimeError(log.read_text(errors="replace")[-3000:])

    def _is_ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/-/ready", timeout=2).status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


class Prometheus(Running):
    """Scrapes these ports, by job; rules are files. `every`: so often, and for so long at most."""

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, int],
        rules: Sequence[Path] = (),
        alertmanager: str = "",
        every: str = "1s",
    ) -> None:
        self._every = every
        self._file = folder / "prometheus.yml"
        self._rules, self._alertmanager = [str(rule) for rule in rules], alertmanager
        self._configure(targets)
        port = free_port()
        options = [f"--config.file={self._file}", f"--storage.tsdb.path={folder / 'data'}"]
        options += ["--enable-feature=exemplar-storage", "--web.enable-lifecycle"]
        address = f"--web.listen-address=127.0.0.1:{port}"
        super().__init__([tool("prometheus"), *options, address], port, folder / "prometheus.log")
        self.ask = PrometheusClient(self.url)

    def _configure(self, targets: Mapping[str, int]) -> None:
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for job, port in targets.items()
        ]
        said: dict[str, Any] = {
            "global": {"scrape_interval": self._every, "evaluation_interval": "1s"},
            "scrape_configs": jobs,
            "rule_files": self._rules,
            "storage": {"exemplars": {"max_exemplars": 100_000}},
        }
        if self._alertmanager:
            there = [{"static_configs": [{"targets": [self._alertmanager.removeprefix("http://")]}]}]
            said["alerting"] = {"alertmanagers": there}
        self._file.write_text(yaml.safe_dump(said))

    def value(self, expr: str, **labels: str) -> float:
        """Of the only sample with these labels; 0 where there is none, or no number."""
        found = [
            float(one["value"][1])
            for one in self.ask.get("query", query=expr)["result"]
            if labels.items() <= one["metric"].items()
        ]
        (value,) = found or [0.0]
        return 0.0 if math.isnan(value) else value

    def course(self, expr: str, seconds: float, step: float = 1.0) -> list[list[float]]:
        """The values of each series, oldest first."""
        now = time.time()
        found = self.ask.get(
            "query_range", query=expr, start=f"{now - seconds}", end=f"{now}", step=f"{step}"
        )
        return [[float(value) for _, value in series["values"]] for series in found["result"]]

    def alerts(self) -> dict[str, str]:
        """State by name: of several of a name (two windows, several series) the furthest."""
        found = [(one["labels"]["alertname"], one["state"]) for one in self.ask.get("alerts")["alerts"]]
        return dict(sorted(found, reverse=True))  # pending before firing


class Alertmanager(Running):
    """Sends every alert to one address, at once."""

    def __init__(self, folder: Path, hook: str) -> None:
        receiver = {"name": "hook", "webhook_configs": [{"url": hook, "send_resolved": True}]}
        route = {"receiver": "hook", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
        file = folder / "alertmanager.yml"
        file.write_text(yaml.safe_dump({"route": route, "receivers": [receiver]}))
        port = free_port()
        options = [
            f"--config.file={file}",
            f"--storage.path={folder / 'alertmanager'}",
            "--cluster.listen-address=",
        ]
        address = f"--web.listen-address=127.0.0.1:{port}"
        super().__init__([tool("alertmanager"), *options, address], port, folder / "alertmanager.log")


class Hook:
    """Whom alerts are sent to: what came, in order."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                hook.alerts += said["alerts"]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Silent."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def told(self, name: str, status: str) -> list[dict[str, Any]]:
        """What it was told of this alert."""
        return [one for one in self.alerts if (one["labels"]["alertname"], one["status"]) == (name, status)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def until(holds: Callable[[], Any], seconds: float, every: float = 0.2) -> bool:
    """Whether it holds within so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError):
            if holds():
                return True
        time.sleep(every)
    return False
