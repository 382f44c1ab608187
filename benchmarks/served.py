"""A `transformers serve` with continuous batching, instrumented by `otel-infer run`, with a recording of its events."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli.demo.command import wait_until_healthy
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.cli.demo.model import make_demo_model
from otel_infer.cli.run import Supervisor
from otel_infer.config import environment

READY_S, STOP_S = 180.0, 20.0
VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
OPTIONS = "--device cpu --dtype float32 --attn-implementation sdpa --continuous-batching"
SIZES = "--cb-num-blocks 128 --cb-block-size 32 --cb-max-batch-tokens 256"


class Served:
    """Runs the server, and reads its records afterwards."""

    def __enter__(self) -> Served:
        self.folder = Path(tempfile.mkdtemp(prefix="otel-infer-truth-"))
        self.model = make_demo_model(self.folder / "tiny-llama")
        self.tape = self.folder / "truth.tape"
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            del os.environ[name]
        changes = {"enabled": "on", "tape": str(self.tape)}
        # Nothing is exported, so only server, sidecar and client use the machine.
        no_exporters = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
        os.environ.update(no_exporters)
        self._supervisor = Supervisor(environment.from_env(environment.child_environment(**changes)))
        log = self.folder / "server.log"
        if (
            self._supervisor.start(self._build_command(), changes, log=log, **VARIABLES, **no_exporters)
            is not None
        ):
            raise RuntimeError("the server did not start")
        if not self._is_ready():
            output = log.read_text(errors="replace")[-2000:]
            self.__exit__()
            raise RuntimeError(f"the server was not ready in time: {output}")
        return self

    def __exit__(self, *_: object) -> None:
        self._supervisor.stop(STOP_S)

    def read_records(self) -> list[RequestRecord]:
        """Returns the recorded requests, after the server has ended."""
        from otel_infer.cli import replay

        return list(replay.read_records(self.tape))

    def remove_files(self) -> None:
        """Removes the files of the server."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _build_command(self) -> list[str]:
        script = Path(sys.executable).parent / "transformers"
        program = str(script) if script.exists() else "transformers"
        address = f"--host 127.0.0.1 --port {self.port}"
        return [program, "serve", str(self.model), *f"{address} {OPTIONS} {SIZES}".split()]

    def _is_ready(self) -> bool:
        return wait_until_healthy(self.url, self._supervisor.is_alive, READY_S)
