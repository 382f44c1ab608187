"""One system on transformers, in a process of its own.

python -m benchmarks.peer SYSTEM ENDPOINT      reads `WORKLOAD` or `WORKLOAD REQUESTS` lines, answers each in JSON
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import continuous, machine

GENERATE, STREAMED, PIPELINE, BATCHING = WORKLOADS = (
    "generate",
    "generate streamed",
    "pipeline",
    "continuous batching",
)
BARE, OURS, OPENLIT, OPENLLMETRY = "uninstrumented", "otel_infer", "OpenLIT", "OpenLLMetry"
PER_STEP, PER_TOKEN = "OpenTelemetry, a span per step", "OpenTelemetry, a span per token"
SYSTEMS = (OURS, OPENLIT, OPENLLMETRY, PER_STEP, PER_TOKEN)

TOKENS = 32
PROMPTS = 4
"""Prompts of one call of `generate`; one where it is streamed, since transformers streams no more."""
AT_ONCE = 8
PATIENCE_S = 60


class Installed(NamedTuple):
    """`flush`: has what is held back exported, as work of this process; `settle`: the same, as work of the other one."""

    flush: Callable[[], Any] = lambda: None
    settle: Callable[[], Any] = lambda: None
    sidecar: int = 0


def main() -> None:
    """Until its standard input ends. Whatever libraries print goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    system, endpoint = sys.argv[1:3]

    def answer(said: dict[str, Any]) -> None:
        print(json.dumps(said), file=answers, flush=True)

    try:
        model = Model()
        installed = INSTALL[system](endpoint, model)
    except ImportError as reason:
        answer({"missing": f"{reason}", "sidecar": 0})
        return
    model.start()
    answer({"missing": "", "sidecar": installed.sidecar})
    try:
        for line in sys.stdin:
            workload, _, requests = line.strip().rpartition(" ")
            answer(_block(model, installed, workload, int(requests)))
    except Exception:
        traceback.print_exc()
        os._exit(1)  # the manager's thread would go on, and whoever asked would wait for good
    os._exit(0)  # everything was flushed; telemetry that waits for nobody at its end is not measured here


def _block(model: Model, installed: Installed, workload: str, requests: int) -> dict[str, int]:
    """ns of this process and of the sidecar, by the clock on the wall, and what was done meanwhile."""
    run = {GENERATE: model.generate, STREAMED: model.stream, PIPELINE: model.pipe, BATCHING: model.batch}[
        workload
    ]
    sidecar = machine.cpu_ns(installed.sidecar) if installed.sidecar else 0
    began, cpu = time.perf_counter_ns(), time.process_time_ns()
    tokens = run(requests)
    wall = time.perf_counter_ns() - began
    installed.flush()
    cpu = time.process_time_ns() - cpu
    installed.settle()
    sidecar = machine.cpu_ns(installed.sidecar) - sidecar if installed.sidecar else 0
    return {"cpu": cpu, "wall": wall, "sidecar": sidecar, "tokens": tokens, "requests": requests}


class Model:
    """The demo's model, and the four ways to have it write."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from otel_infer.cli.demo.model import make_demo_model

        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            make_demo_model(Path(folder), layers=continuous.LAYERS, hidden=continuous.HIDDEN)
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.manager: Any = None
            self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def start(self) -> None:
        """What is made once, after whoever watches has installed itself."""
        import torch
        from transformers import pipeline

        self.ids = torch.tensor([continuous.prompt(number) for number in range(PROMPTS)])
        self.pipeline = pipeline("text-generation", model=self.model, tokenizer=self.tokenizer)
        self.manager = continuous.manager(self.model, AT_ONCE)
        self.manager.start()

    def generate(self, requests: int) -> int:
        """`model.generate`, several prompts a call; returns how many tokens."""
        return sum(self._generated(self.ids) for _ in range(requests))

    def _generated(self, ids: Any, **options: Any) -> int:
        import torch

        mask = torch.ones_like(ids)
        written = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, **options
        )
        return int(written[:, ids.shape[1] :].numel())

    def stream(self, requests: int) -> int:
        """`model.generate` in a thread, its text read in this one."""
        from transformers import TextIteratorStreamer

        tokens = 0
        for _ in range(requests):
            streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, timeout=60)
            done: list[int] = []
            thread = threading.Thread(
                target=lambda done=done, streamer=streamer: done.append(
                    self._generated(self.ids[:1], streamer=streamer)
                )
            )
            thread.start()
            for _ in streamer:
                pass
            thread.join()
            tokens += done[0]
        return tokens

    def pipe(self, requests: int) -> int:
        """The text generation pipeline, which is what the peers instrument."""
        for _ in range(requests):
            self.pipeline("Why is the sky blue?", max_new_tokens=TOKENS, do_sample=False)
        return requests * TOKENS

    def batch(self, requests: int) -> int:
        """Continuous batching, so many at once as fit."""
        numbers, tokens = iter(range(requests)), 0
        for number in itertools.islice(numbers, AT_ONCE):
            self._add(number)
        for _ in range(requests):
            result = self.manager.get_result(timeout=PATIENCE_S)
            if result is None:
                raise RuntimeError(f"a request was not answered within {PATIENCE_S} s")
            if result.error:
                raise RuntimeError(f"a request failed: {result.error}")
            tokens += len(result.generated_tokens)
            if (number := next(numbers, None)) is not None:
                self._add(number)
        return tokens

    def _add(self, number: int) -> None:
        self.manager.add_request(continuous.prompt(number), max_new_tokens=TOKENS)


# ── who watches ──────────────────────────────────────────────────────────────────────────────────────────────────


def _bare(endpoint: str, model: Model) -> Installed:
    return Installed()


def _ours(endpoint: str, model: Model) -> Installed:
    """Every step of every request as a span, through the sidecar."""
    from benchmarks.ours import Exporting

    exporting = Exporting(endpoint, ("transformers",))
    return Installed(settle=exporting.flush, sidecar=exporting.pid)


def _openlit(endpoint: str, model: Model) -> Installed:
    """As its documentation sets it up."""
    import openlit
    from opentelemetry import trace

    openlit.init(otlp_endpoint=endpoint, application_name="benchmark")
    return Installed(trace.get_tracer_provider().force_flush)  # type: ignore[attr-defined]


def _openllmetry(endpoint: str, model: Model) -> Installed:
    """Its instrumentation of transformers with the stock SDK."""
    from opentelemetry.instrumentation.transformers import TransformersInstrumentor

    from benchmarks.stock import Stock

    stock = Stock(endpoint)
    TransformersInstrumentor().instrument(tracer_provider=stock.provider)
    return Installed(stock.flush)


def _plain(per_token: bool) -> Callable[[str, Model], Installed]:
    """What one would write by hand: a span per request, and one per step or per token below it."""

    def install(endpoint: str, model: Model) -> Installed:
        from benchmarks.stock import Stock
        from benchmarks.stock_batching import StockHooks

        stock = Stock(endpoint)
        StockHooks(stock, per_token).put_on()
        ByHand(stock, per_token).put_on(model.model)
        return Installed(stock.flush)

    return install


class ByHand:
    """Spans around `generate` and around each forward inside it."""

    def __init__(self, stock: Any, per_token: bool) -> None:
        self.stock, self.per_token = stock, per_token
        self._contexts: list[Any] = []
        self._step = 0

    def put_on(self, model: Any) -> None:
        """On this model."""
        model.generate, model.forward = self._generating(model.generate), self._forwarding(model.forward)

    def _generating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            ids = args[0] if args else kwargs["input_ids"]
            span, context = self.stock.request()
            self._contexts = [context] * (len(ids) if self.per_token else 1)
            try:
                return original(*args, **kwargs)
            finally:
                self._contexts = []
                span.end()

        return generate

    def _forwarding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import functools

        @functools.wraps(original)  # transformers reads its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            began = time.time_ns()
            output = original(*args, **kwargs)
            if self._contexts:
                self._step += 1
                self.stock.step(self._contexts, self._step, began, time.time_ns())
            return output

        return forward


INSTALL: dict[str, Callable[[str, Model], Installed]] = {
    BARE: _bare,
    OURS: _ours,
    OPENLIT: _openlit,
    OPENLLMETRY: _openllmetry,
    PER_STEP: _plain(per_token=False),
    PER_TOKEN: _plain(per_token=True),
}


if __name__ == "__main__":
    main()
