"""One instrumented system on transformers, in a separate process.

python -m benchmarks.peer SYSTEM ENDPOINT reads `WORKLOAD REQUESTS` lines, answers each in JSON
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
"""Prompts per call of `generate`; one if it is streamed, because transformers cannot stream more."""
AT_ONCE = 8
MAX_WAIT_S = 60


class Installed(NamedTuple):
    """`flush` exports what this process holds, `settle` what the sidecar holds."""

    flush: Callable[[], Any] = lambda: None
    settle: Callable[[], Any] = lambda: None
    sidecar: int = 0


def main() -> None:
    """Runs until standard input ends. Output of libraries goes to standard error."""
    output, sys.stdout = sys.stdout, sys.stderr
    system, endpoint = sys.argv[1:3]

    def write_answer(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=output, flush=True)

    try:
        model = Model()
        installed = INSTALL[system](endpoint, model)
    except ImportError as reason:
        write_answer({"missing": f"{reason}", "sidecar": 0})
        return
    model.build_workloads()
    write_answer({"missing": "", "sidecar": installed.sidecar})
    try:
        for line in sys.stdin:
            workload, _, requests = line.strip().rpartition(" ")
            write_answer(_measure_block(model, installed, workload, int(requests)))
    except Exception:
        traceback.print_exc()
        os._exit(1)  # the manager's thread would keep the process alive
    os._exit(0)  # everything was flushed


def _measure_block(model: Model, installed: Installed, workload: str, requests: int) -> dict[str, int]:
    """Returns the CPU ns of this process and of the sidecar, wall ns, tokens and requests."""
    run = {
        GENERATE: model.run_generate,
        STREAMED: model.run_streamed,
        PIPELINE: model.run_pipeline,
        BATCHING: model.run_batching,
    }[workload]
    sidecar = machine.read_cpu_ns(installed.sidecar) if installed.sidecar else 0
    began, cpu = time.perf_counter_ns(), time.process_time_ns()
    tokens = run(requests)
    wall = time.perf_counter_ns() - began
    installed.flush()
    cpu = time.process_time_ns() - cpu
    installed.settle()
    sidecar = machine.read_cpu_ns(installed.sidecar) - sidecar if installed.sidecar else 0
    return {"cpu": cpu, "wall": wall, "sidecar": sidecar, "tokens": tokens, "requests": requests}


class Model:
    """The demo's model, and the four workloads."""

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

    def build_workloads(self) -> None:
        """Builds the pipeline and the manager, after the instrumentation was installed."""
        import torch
        from transformers import pipeline

        self.ids = torch.tensor([continuous.make_prompt(number) for number in range(PROMPTS)])
        self.pipeline = pipeline("text-generation", model=self.model, tokenizer=self.tokenizer)
        self.manager = continuous.make_manager(self.model, AT_ONCE)
        self.manager.start()

    def run_generate(self, requests: int) -> int:
        """Calls `model.generate` with several prompts. Returns the number of tokens."""
        return sum(self._generate_tokens(self.ids) for _ in range(requests))

    def _generate_tokens(self, ids: Any, **options: Any) -> int:
        import torch

        mask = torch.ones_like(ids)
        output_ids = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, **options
        )
        return int(output_ids[:, ids.shape[1] :].numel())

    def run_streamed(self, requests: int) -> int:
        """Calls `model.generate` in a thread, and reads its text in this one. Returns the number of tokens."""
        from transformers import TextIteratorStreamer

        tokens = 0
        for _ in range(requests):
            streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, timeout=60)
            counts: list[int] = []
            thread = threading.Thread(
                target=lambda counts=counts, streamer=streamer: counts.append(
                    self._generate_tokens(self.ids[:1], streamer=streamer)
                )
            )
            thread.start()
            for _ in streamer:
                pass
            thread.join()
            tokens += counts[0]
        return tokens

    def run_pipeline(self, requests: int) -> int:
        """Runs the text generation pipeline, which the peers instrument. Returns the number of tokens."""
        for _ in range(requests):
            self.pipeline("Why is the sky blue?", max_new_tokens=TOKENS, do_sample=False)
        return requests * TOKENS

    def run_batching(self, requests: int) -> int:
        """Runs continuous batching with at most `AT_ONCE` requests in flight. Returns the number of tokens."""
        numbers, tokens = iter(range(requests)), 0
        for number in itertools.islice(numbers, AT_ONCE):
            self._add_request(number)
        for _ in range(requests):
            result = self.manager.get_result(timeout=MAX_WAIT_S)
            if result is None:
                raise RuntimeError(f"a request was not answered within {MAX_WAIT_S} s")
            if result.error:
                raise RuntimeError(f"a request failed: {result.error}")
            tokens += len(result.generated_tokens)
            if (number := next(numbers, None)) is not None:
                self._add_request(number)
        return tokens

    def _add_request(self, number: int) -> None:
        self.manager.add_request(continuous.make_prompt(number), max_new_tokens=TOKENS)


# ── the systems ──────────────────────────────────────────────────────────────────────────────────────────────────


def _install_nothing(endpoint: str, model: Model) -> Installed:
    return Installed()


def _install_otel_infer(endpoint: str, model: Model) -> Installed:
    """Exports every step of every request through the sidecar."""
    from benchmarks.ours import Exporting

    exporting = Exporting(endpoint, ("transformers",))
    return Installed(settle=exporting.flush, sidecar=exporting.pid)


def _install_openlit(endpoint: str, model: Model) -> Installed:
    """Sets up OpenLIT as in its documentation."""
    import openlit
    from opentelemetry import trace

    openlit.init(otlp_endpoint=endpoint, application_name="benchmark")
    return Installed(trace.get_tracer_provider().force_flush)  # type: ignore[attr-defined]


def _install_openllmetry(endpoint: str, model: Model) -> Installed:
    """Sets up OpenLLMetry's instrumentation of transformers with the stock SDK."""
    from opentelemetry.instrumentation.transformers import TransformersInstrumentor

    from benchmarks.stock import Stock

    stock = Stock(endpoint)
    TransformersInstrumentor().instrument(tracer_provider=stock.provider)
    return Installed(stock.flush)


def _install_by_hand(per_token: bool) -> Callable[[str, Model], Installed]:
    """Returns manual instrumentation: a span per request, and one per step or per token below it."""

    def install(endpoint: str, model: Model) -> Installed:
        from benchmarks.stock import Stock
        from benchmarks.stock_batching import StockHooks

        stock = Stock(endpoint)
        StockHooks(stock, per_token).switch_on()
        ManualSpans(stock, per_token).hook_model(model.model)
        return Installed(stock.flush)

    return install


class ManualSpans:
    """Spans of `generate` and of each forward inside it."""

    def __init__(self, stock: Any, per_token: bool) -> None:
        self.stock, self.per_token = stock, per_token
        self._contexts: list[Any] = []
        self._step = 0

    def hook_model(self, model: Any) -> None:
        """Hooks this model."""
        model.generate, model.forward = self._hook_generate(model.generate), self._hook_forward(model.forward)

    def _hook_generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            ids = args[0] if args else kwargs["input_ids"]
            span, context = self.stock.start_request()
            self._contexts = [context] * (len(ids) if self.per_token else 1)
            try:
                return original(*args, **kwargs)
            finally:
                self._contexts = []
                span.end()

        return generate

    def _hook_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import functools

        @functools.wraps(original)  # transformers reads its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            began = time.time_ns()
            output = original(*args, **kwargs)
            if self._contexts:
                self._step += 1
                self.stock.make_step_spans(self._contexts, self._step, began, time.time_ns())
            return output

        return forward


INSTALL: dict[str, Callable[[str, Model], Installed]] = {
    BARE: _install_nothing,
    OURS: _install_otel_infer,
    OPENLIT: _install_openlit,
    OPENLLMETRY: _install_openllmetry,
    PER_STEP: _install_by_hand(per_token=False),
    PER_TOKEN: _install_by_hand(per_token=True),
}


if __name__ == "__main__":
    main()
