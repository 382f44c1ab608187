"""Every alert that a CPU can bring about fires on real traffic, and a page becomes a tape of its own server."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from otel_infer.cli import main
from otel_infer.cli.alerts import rules_to_yaml
from otel_infer.config import slo
from otel_infer.monitoring.alerts import burn_rate_rules, slo_spec
from tests.stack.load import Load, post
from tests.stack.loop_server import COLD_PROMPT, HANGING_PROMPT
from tests.stack.processes import Alertmanager, Prometheus, Webhook, until
from tests.stack.running import loop_server, make_environ
from tests.stack.tools import tool
from tests.support.otlp_receiver import OtlpReceiver, ok, status
from tests.support.served import Server, free_port

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(420)]

OBJECTIVES = [
    objective._replace(within=1.28) if objective.of == slo.E2E else objective
    for objective in slo_spec.DEFAULT_SPEC.objectives
]
SPEC = slo_spec.DEFAULT_SPEC._replace(objectives=OBJECTIVES, windows=slo_spec.DEMO_WINDOWS, minimum=10)
NEEDS_A_GPU = {
    "HostBound", "OutOfDeviceMemory", "DeviceMemoryShort", "GpuThrottled", "GpuMemoryErrors", "GpuXid",
}  # fmt: skip
SLOW, PLAIN, MISADDRESSED = "slow", "plain", "interference"
SERVERS: dict[str, dict[str, float]] = {
    SLOW: {"max_batch": 2, "base_ms": 60, "longest_prompt": 3000},
    "interference": {"max_batch": 8, "base_ms": 5, "prompt_ms": 0.2},
    "kv": {"max_batch": 8, "prompt_ms": 0.3, "kv_blocks": 310, "preempted_ms": 20},
    "stall": {"max_batch": 8, "base_ms": 3, "gc_every_ms": 200, "gc_objects": 400_000},
    PLAIN: {"max_batch": 8, "base_ms": 5},
}
"""Each server has the faults of some alerts."""
QUIET_AFTER_S, STOP_AFTER_S = 60, 170


def send_sizes(port: int, *sizes: tuple[int, int], aborted: float = 0.0) -> Callable[[random.Random], None]:
    """Returns a client of requests with these prompt and output tokens. A share of them is aborted."""

    def send(rng: random.Random) -> None:
        prompt, tokens = rng.choice(sizes)
        post(port, "/", {"prompt": prompt, "tokens": tokens}, 2 if rng.random() < aborted else 0)

    return send


class Site(NamedTuple):
    """The running servers, and what watches them. `tapes`: the folder of each server's tapes."""

    prometheus: Prometheus
    receiver: OtlpReceiver
    servers: Mapping[str, Server]
    tapes: Mapping[str, Path]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    tool("alertmanager")
    folder = tmp_path_factory.mktemp("alerts")
    (folder / "rules.yml").write_text(rules_to_yaml(burn_rate_rules.build_rule_groups(SPEC)))
    with OtlpReceiver() as receiver, ExitStack() as running:
        targets, hooks, servers = {}, [], {}
        tapes = {name: folder / "tapes" / name for name in SERVERS}
        for name, faults in SERVERS.items():
            dump_port = free_port()
            more = {"OTEL_INFER_DUMP_PORT": f"{dump_port}", "OTEL_INFER_DUMP_ON_SLO": str(tapes[name])}
            targets[name], environ = make_environ(receiver, OTEL_INFER_GPU_METRICS="off", **more)
            environ["PYTHONPATH"] += os.pathsep + str(_make_drifted_library(folder))
            servers[name] = loop_server(folder / f"{name}.log", environ, **faults)
            running.callback(kill_server, servers[name])
            servers[name].start()
            job = "another" if name == MISADDRESSED else name
            hooks.append(f"http://127.0.0.1:{dump_port}/dump?job={job}")
        webhook = Webhook()
        running.callback(webhook.close)
        alertmanager = Alertmanager(folder, webhook.url, *hooks)
        running.callback(alertmanager.stop)
        prometheus = Prometheus(folder, targets, [folder / "rules.yml"], alertmanager.url)
        running.callback(prometheus.stop)
        yield Site(prometheus, receiver, servers, tapes)


def _make_drifted_library(folder: Path) -> Path:
    """Returns a folder with a release of an ASGI server whose functions have other names."""
    package = folder / "drifted" / "hypercorn"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "app_wrappers.py").write_text("class RenamedWrapper:\n    pass\n")
    return package.parent


def list_children(pid: int, name: bytes = b"") -> list[int]:
    """Returns the children of a process, or those with this name."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if name in Path(f"/proc/{child}/cmdline").read_bytes()]


def kill_server(server: Server) -> None:
    """Kills `otel-infer run`, the server and the sidecar at once."""
    if server.process is None or server.process.poll() is not None:
        return
    children = list_children(server.process.pid)
    for pid in (server.process.pid, *children):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()


def find_tapes(site: Site, name: str) -> list[Path]:
    return sorted(site.tapes[name].glob("*-webhook-*.tape"))


def test_every_alert_fires_and_a_page_becomes_a_tape(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        rule["alert"]
        for group in burn_rate_rules.build_rule_groups(SPEC)["groups"]
        for rule in group["rules"]
        if "alert" in rule and rule["alert"].removeprefix("OtelInfer") not in NEEDS_A_GPU
    }
    expected.remove("OtelInferServerGone")
    assert expected - _run_faults(site, expected) == set()

    assert find_tapes(site, MISADDRESSED) == []  # every page reached it, and none was about it
    assert main(["explain", str(find_tapes(site, SLOW)[0])]) == 0
    assert "queue" in capsys.readouterr().out

    kill_server(site.servers[PLAIN])
    assert until(lambda: site.prometheus.alerts().get("OtelInferServerGone") == "firing", 90, 1)


def _run_faults(site: Site, expected: set[str]) -> set[str]:
    """Runs the load and the events of each server. Returns the alerts that fired."""
    ports = {name: server.port for name, server in site.servers.items()}
    fired: dict[str, float] = {}
    events = _list_events(site)
    with ExitStack() as loads:
        for send, threads, pause_s in (
            (send_sizes(ports["interference"], (20, 60)), 6, 0.1),
            (send_sizes(ports["interference"], (600, 2)), 2, 0.1),
            (send_sizes(ports["kv"], (1200, 80)), 12, 0.2),
            (send_sizes(ports["stall"], (1, 200)), 4, 0.1),
        ):
            loads.callback(Load(send, threads, pause_s).stop)
        plain = Load(send_sizes(ports[PLAIN], (20, 10)), 2, 0.3)
        loads.callback(plain.stop)
        slow = send_sizes(ports[SLOW], (30, 20), (30, 20), (30, 20), (4000, 1), aborted=0.3)
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < STOP_AFTER_S and expected - fired.keys():
            for name, state in site.prometheus.alerts().items():
                if state == "firing" and name not in fired:
                    fired[name] = elapsed
                    print(f"{elapsed:6.1f} s {name}", file=sys.stderr)
            while events and events[0][0] <= elapsed:
                events.pop(0)[1]()
            if elapsed < QUIET_AFTER_S:
                loads.callback(Load(slow, 2, 0.1).stop)
            else:
                plain.stop()
            time.sleep(2)
        until(lambda: find_tapes(site, SLOW), 20)
        kill_server(site.servers[SLOW])  # its queue would take long
    return set(fired)


def _post_unattended(port: int, path: str, **body: int) -> None:
    """Sends a request whose response takes long, or never comes."""

    def send() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            post(port, path, body)

    threading.Thread(target=send, daemon=True).start()


def _list_events(site: Site) -> list[tuple[float, Callable[[], object]]]:
    """Returns (s, event): losses, an exception of a hook, compilations, a killed sidecar, and an engine that hangs."""
    plain = site.servers[PLAIN]
    assert plain.process is not None
    supervisor = plain.process.pid
    events: list[tuple[float, Callable[[], object]]] = [
        (4, lambda: site.receiver.answer(status(400))),
        (12, lambda: site.receiver.answer(ok())),
        (16, lambda: _post_unattended(plain.port, "/odd")),
        (
            24,
            lambda: [
                os.kill(pid, signal.SIGKILL) for pid in list_children(supervisor, b"otel_infer-sidecar")
            ],
        ),
    ]
    # The first compilation imports the compiler.
    events += [
        (at, lambda: _post_unattended(plain.port, "/", prompt=COLD_PROMPT, tokens=3))
        for at in (1, 36, 42, 48)
    ]
    # A minute later, the server hangs.
    events.append(
        (
            QUIET_AFTER_S + 4,
            lambda: _post_unattended(plain.port, "/", prompt=HANGING_PROMPT, tokens=3),
        )
    )
    return sorted(events, key=lambda event: event[0])
