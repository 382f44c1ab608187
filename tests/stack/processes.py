"""A real Prometheus, Alertmanager and Collector, and a webhook that receives alerts, each on a free port."""

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
    """A program with a readiness endpoint."""

    def __init__(self, command: Sequence[str], port: int, log: Path, ready: str = "/-/ready") -> None:
        self.url, self._ready = f"http://127.0.0.1:{port}", ready
        self._log = log.open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        if not until(self._is_ready, 30):
            self.stop()
            raise RuntimeError(log.read_text(errors="replace")[-3000:])

    def _is_ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(self.url + self._ready, timeout=2).status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


class Prometheus(Running):
    """A Prometheus that scrapes a port per job. `rules` are files; `every` is the scrape interval.

    `strategy`: it also receives OTLP, and translates names so.
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, int],
        rules: Sequence[Path] = (),
        alertmanager: str = "",
        every: str = "1s",
        strategy: str = "",
    ) -> None:
        self._scrape_interval, self._strategy = every, strategy
        self._file = folder / "prometheus.yml"
        self._rules, self._alertmanager = [str(rule) for rule in rules], alertmanager
        self._configure(targets)
        port = free_port()
        options = [f"--config.file={self._file}", f"--storage.tsdb.path={folder / 'data'}"]
        options += ["--enable-feature=exemplar-storage", "--web.enable-lifecycle"]
        options += ["--web.enable-otlp-receiver"] if strategy else []
        address = f"--web.listen-address=127.0.0.1:{port}"
        super().__init__([tool("prometheus"), *options, address], port, folder / "prometheus.log")
        self.client = PrometheusClient(self.url)

    def _configure(self, targets: Mapping[str, int]) -> None:
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for job, port in targets.items()
        ]
        config: dict[str, Any] = {
            "global": {"scrape_interval": self._scrape_interval, "evaluation_interval": "1s"},
            "scrape_configs": jobs,
            "rule_files": self._rules,
            "storage": {"exemplars": {"max_exemplars": 100_000}},
        }
        if self._strategy:
            config["otlp"] = {"translation_strategy": self._strategy}
        if self._alertmanager:
            managers = [{"static_configs": [{"targets": [self._alertmanager.removeprefix("http://")]}]}]
            config["alerting"] = {"alertmanagers": managers}
        self._file.write_text(yaml.safe_dump(config))

    def value(self, expr: str, **labels: str) -> float:
        """Returns the value of the only sample with these labels. 0 without a sample, or for NaN."""
        values = [
            float(sample["value"][1])
            for sample in self.client.get("query", query=expr)["result"]
            if labels.items() <= sample["metric"].items()
        ]
        (value,) = values or [0.0]
        return 0.0 if math.isnan(value) else value

    def query_range(self, expr: str, seconds: float, step: float = 1.0) -> list[list[float]]:
        """Returns the values of each series in the last seconds, oldest first."""
        now = time.time()
        response = self.client.get(
            "query_range", query=expr, start=f"{now - seconds}", end=f"{now}", step=f"{step}"
        )
        return [[float(value) for _, value in series["values"]] for series in response["result"]]

    def alerts(self) -> dict[str, str]:
        """Returns each alert's state by name. Firing takes precedence over pending (two windows, several series)."""
        alerts = self.client.get("alerts")["alerts"]
        states = [(alert["labels"]["alertname"], alert["state"]) for alert in alerts]
        return dict(sorted(states, reverse=True))  # pending before firing


class Alertmanager(Running):
    """An Alertmanager that sends every alert to a webhook without delay, and pages to others, too."""

    def __init__(self, folder: Path, hook: str, *page_hooks: str) -> None:
        receivers = [
            {"name": name, "webhook_configs": [{"url": url, "send_resolved": True} for url in urls]}
            for name, urls in (("hook", [hook]), ("pages", page_hooks))
            if urls
        ]
        pages = {"receiver": "pages", "matchers": ['severity = "page"'], "continue": True}
        routes = [*([pages] if page_hooks else []), {"receiver": "hook"}]
        timing = {"group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
        route = {"receiver": "hook", "routes": routes, **timing}
        file = folder / "alertmanager.yml"
        file.write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
        port = free_port()
        options = [
            f"--config.file={file}",
            f"--storage.path={folder / 'alertmanager'}",
            "--cluster.listen-address=",
        ]
        address = f"--web.listen-address=127.0.0.1:{port}"
        super().__init__([tool("alertmanager"), *options, address], port, folder / "alertmanager.log")


class Collector(Running):
    """A Collector with these configuration files, the later ones laid over the earlier ones.

    `overlay`: laid over all of them, for addresses and waits. `port` receives OTLP by gRPC and the next one by HTTP.
    """

    def __init__(self, folder: Path, files: Sequence[Path], overlay: Mapping[str, Any] = {}) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.grpc_port, self.http_port, metrics_port = free_port(), free_port(), free_port()
        protocols = {
            "grpc": {"endpoint": f"127.0.0.1:{self.grpc_port}"},
            "http": {"endpoint": f"127.0.0.1:{self.http_port}"},
        }
        exporter = {"prometheus": {"host": "127.0.0.1", "port": metrics_port}}
        readers = [{"pull": {"exporter": exporter}}]
        addresses = {
            "receivers": {"otlp": {"protocols": protocols}},
            "service": {"telemetry": {"metrics": {"readers": readers}}},
        }
        options = [f"--config={file}" for file in files]
        for name, content in (("addresses", addresses), ("overlay", overlay)):
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(content)))
            options.append(f"--config={folder / name}.yaml")
        super().__init__(
            [tool("otelcol"), *options], metrics_port, folder / "collector.log", ready="/metrics"
        )


class Webhook:
    """A webhook that keeps the received alerts in order."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                webhook.alerts += body["alerts"]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Logs nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def find_alerts(self, name: str, status: str) -> list[dict[str, Any]]:
        """Returns the notifications of an alert with this status."""
        return [
            alert
            for alert in self.alerts
            if (alert["labels"]["alertname"], alert["status"]) == (name, status)
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def until(condition: Callable[[], Any], seconds: float, every: float = 0.2) -> bool:
    """Returns whether a condition becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError):
            if condition():
                return True
        time.sleep(every)
    return False
