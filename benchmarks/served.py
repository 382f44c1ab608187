"""A `transformers serve` of our own with continuous batching, instrumented by `otel-infer run`, its facts on a tape."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli.demo.command import wait_until_healthy
from otel_infer.cli.demo.model import make_demo_model
from otel_infer.cli.run import Supervisor
from otel_infer.config import environment

READY_S, STOP_S = 180.0, 20.0
VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
OPTIONS = "--device cpu --dtype float32 --attn-implementation sdpa --continuous-batching"
SIZES = "--cb-num-blocks 128 --cb-block-size 32 --cb-max-batch-tokens 256"


class Served:
    """The server while `with` lasts; its records afterwards."""

    def __enter__(self) -> Served:
        self.folder = Path(tempfile.mkdtemp(prefix="otel-infer-truth-"))
        self.model = make_demo_model(self.folder / "tiny-llama")
        self.tape = self.folder / "truth.tape"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            del os.environ[name]
        changes = {"enabled": "on", "tape": str(self.tape)}
        # Nothing is exported, so that the machine has but server, sidecar and client to run.
        nothing = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
        os.environ.update(nothing)
        self._supervisor = Supervisor(environment.from_env(environment.child_environment(**changes)))
        log = self.folder / "server.log"
        if self._supervisor.start(self._command(), changes, log=log, **VARIABLES, **nothing) is not None:
            raise RuntimeError("the server could not be started")
        if not self._is_ready():
            words = log.read_text(errors="replace")[-2000:]
            self.__exit__()
            raise RuntimeError(f"the server did not get ready: {words}")
        return self

    def __exit__(self, *_: object) -> None:
        self._supervisor.stop(STOP_S)

    def records(self) -> list[RequestRecord]:
        """What was recorded, once the server is gone."""
        from otel_infer.cli import replay

        return list(replay.read_records(self.tape))

    def remove(self) -> None:
        """Its files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _command(self) -> list[str]:
        beside = Path(sys.executable).parent / "transformers"
        program = str(beside) if beside.exists() else "transformers"
        where = f"--host 127.0.0.1 --port {self.port}"
        return [program, "serve", str(self.model), *f"{where} {OPTIONS} {SIZES}".split()]

    def _is_ready(self) -> bool:
        return wait_until_healthy(self.url, self._supervisor.is_alive, READY_S)
