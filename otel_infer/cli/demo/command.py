"""Make a tiny model, serve it with instrumentation, load it, and show where the time goes.

Nothing is downloaded. The server is an ordinary `transformers serve` with continuous batching, started as
`otel-infer run` starts it. The load client shares no code with otel_infer. If OTEL_EXPORTER_OTLP_ENDPOINT is
set, the traces and metrics are exported too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.cli.run import Supervisor
from otel_infer.config import environment

READY_S = 180.0
STOP_S = 20.0
INSTALL_HINT = 'the demo needs torch and transformers: pip install "otel-infer[demo]"'
PROGRAM = "otel-infer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `demo`."""
    parser.add_argument("--requests", type=int, default=60, help="number of requests (60)")
    parser.add_argument("--concurrency", type=int, default=6, help="concurrent requests (6)")
    parser.add_argument("--seconds", type=float, help="load the server for this long instead")
    parser.add_argument("--serve", action="store_true", help="keep serving after the load, until Ctrl-C")
    parser.add_argument("--tape", metavar="FILE", default="otel-infer-demo.tape", help="the tape to write")
    parser.add_argument("--json", action="store_true", help="print the requests as JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo.

    Returns 0 if every request succeeded and was recorded, 2 if a package is missing, else 1.
    """
    for module in ("torch", "transformers", "tokenizers", "fastapi", "uvicorn"):
        if not _is_installed(module):
            print(f"otel-infer demo: {module} is missing; {INSTALL_HINT}", file=sys.stderr)
            return 2
    tape = os.path.abspath(arguments.tape)
    with tempfile.TemporaryDirectory(prefix="otel-infer-demo-") as folder:
        return Demo(arguments, Path(folder), tape).run()


class Demo:
    """One run of the demo."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, tape: str) -> None:
        from otel_infer.cli import terminal

        self.arguments, self.folder, self.tape = arguments, folder, tape
        self.console = terminal.make_console()
        if arguments.json:
            self.console.file = sys.stderr
        self.port = find_free_port()
        self.model = folder / "tiny-llama"
        self.supervisor: Supervisor | None = None

    def run(self) -> int:
        """Makes the model, starts the server, loads it and prints the results. Returns the exit status."""
        from otel_infer.cli.demo.model import make_demo_model

        began = time.monotonic()
        self.print_progress("making a tiny Llama (random weights, nothing is downloaded) …")
        make_demo_model(self.model)
        with contextlib.suppress(OSError):
            os.unlink(self.tape)
        changes = {"enabled": "on", "tape": self.tape, "response_headers": "on"}
        self.supervisor = Supervisor(environment.from_env(environment.child_environment(**changes)))
        self.print_progress(
            f"starting transformers serve with continuous batching on 127.0.0.1:{self.port} …"
        )
        log = self.folder / "server.log"
        status = self.supervisor.start(self.server_command(), changes, log=log, **SERVER_VARIABLES)
        if status is not None:
            return status
        try:
            if not self.wait_until_ready():
                self.print_progress(f"the server did not get ready; the end of its log:\n{_read_tail(log)}")
                return 1
            self.print_progress(f"ready after {time.monotonic() - began:.0f} s")
            observed = self.apply_load()
            if self.arguments.serve:
                self.serve_until_interrupted()
        finally:
            self.supervisor.stop(STOP_S)
        return self.print_results(observed)

    def server_command(self) -> list[str]:
        """Returns the command line of `transformers serve`."""
        sibling = Path(sys.executable).parent / "transformers"
        program = str(sibling) if sibling.exists() else shutil.which("transformers") or "transformers"
        device = "cuda" if _has_gpu() else "cpu"
        options = f"--device {device} --dtype float32 --attn-implementation sdpa --continuous-batching"
        sizes = "--cb-num-blocks 128 --cb-block-size 32 --cb-max-batch-tokens 256"
        address = f"--host 127.0.0.1 --port {self.port}"
        return [program, "serve", str(self.model), *f"{address} {options} {sizes}".split()]

    def wait_until_ready(self) -> bool:
        """Waits until the server is healthy. Returns False if it died or took more than `READY_S` s."""
        assert self.supervisor is not None
        return wait_until_healthy(f"http://127.0.0.1:{self.port}", self.supervisor.is_alive, READY_S)

    def apply_load(self) -> list[Any]:
        """Warms the server up, then sends concurrent streaming requests of mixed lengths.

        Returns their results.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from otel_infer.cli.demo.load_client import run_load

        base, model = f"http://127.0.0.1:{self.port}", str(self.model)
        self.print_progress("warming up …")
        run_load(base, model, requests=2, concurrency=2, output_lengths=(8,), seed=1)
        total = None if self.arguments.seconds else self.arguments.requests
        columns = (TextColumn("loading"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            task = progress.add_task("", total=total)
            return run_load(
                base,
                model,
                requests=total,
                seconds=self.arguments.seconds,
                concurrency=self.arguments.concurrency,
                on_done=lambda _: progress.advance(task),
            )

    def serve_until_interrupted(self) -> None:
        """Keeps the server running until Ctrl-C."""
        self.print_progress(
            f"serving on http://127.0.0.1:{self.port}/v1 (model {self.model}); stop with Ctrl-C"
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while self.supervisor is not None and self.supervisor.is_alive():
                time.sleep(0.5)
        except KeyboardInterrupt:
            pass

    def print_results(self, results: list[Any]) -> int:
        """Prints the tables, the slowest request and the next steps.

        Returns 1 if a request failed or was not recorded, else 0.
        """
        from otel_infer.cli import replay, terminal

        sent_ids = {result.trace_id for result in results}
        records = [
            record for record in replay.read_records(Path(self.tape)) if record.trace_id.hex() in sent_ids
        ]
        failed = [result for result in results if result.error]
        for result in failed[:3]:
            self.print_progress(f"a request failed: {result.error}")
        if not records:
            self.print_progress("no request was recorded; run `otel-infer doctor` to see why")
            return 1
        if self.arguments.json:
            print(json.dumps([replay.record_to_dict(record) for record in records]))
        else:
            self.console.print(terminal.make_stages_table(records), terminal.format_device_line(records), "")
            self.console.print(terminal.make_latency_table(records), "")
            slowest = max(records, key=lambda record: record.duration_ns)
            self.console.print("[bold]the slowest request")
            for line in terminal.render_waterfall(slowest):
                self.console.print(line)
            self.print_next_steps(records)
        missing = len(sent_ids) - len(records)
        if missing:
            self.print_progress(f"{missing} of {len(sent_ids)} requests have no trace")
        return 1 if failed or missing else 0

    def print_next_steps(self, records: list[RequestRecord]) -> None:
        """Prints the commands to try next."""
        steps = sum(len(record.steps) - 1 for record in records if record.steps is not None)
        program = find_program()
        self.console.print(f"\n{len(records)} requests and {steps} decode steps, recorded on {self.tape}")
        self.console.print(
            f"what to change first:       {program} explain {self.tape}\n"
            f"the same for your server:   {program} run --show -- <your command>\n"
            "with Grafana (first `docker compose up` in a clone of our repository):\n"
            f"  OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 {program} demo",
            markup=False,
        )

    def print_progress(self, text: str) -> None:
        """Prints a line about the progress."""
        self.console.print(text, markup=False)


SERVER_VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def wait_until_healthy(url: str, alive: Callable[[], bool], timeout: float) -> bool:
    """Waits until the server at `url` is healthy. Returns False if it died or took more than `timeout` s."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and alive():
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return True
        except OSError:
            time.sleep(0.2)
    return False


def find_program() -> str:
    """Returns how to call this program: its name if PATH finds it, else its relative path."""
    sibling, found = Path(sys.executable).with_name(PROGRAM), shutil.which(PROGRAM)
    if not sibling.exists() or (found is not None and sibling.samefile(found)):
        return PROGRAM
    return os.path.relpath(sibling)


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _is_installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _read_tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(nothing)"
