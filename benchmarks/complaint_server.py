"""A server with a hand-written batching loop, whose faults are arguments. So the symptom that its operator reports is
known.

    otel-infer run --tape FILE -- python benchmarks/complaint_server.py PORT '{"max_batch": 4, "lookup_ms": 0, …}'

A step takes `base_ms + each_ms × sequences + prompt_ms × prompt tokens` without the GIL, as on a device. With `spin` it
takes that time on a CPU.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import otel_infer

otel_infer.instrument()


@dataclass
class Faults:
    """The engine's parameters and the faults of the server; times in ms.

    A request with `preempted_prompt` prompt tokens is preempted after `preempted_after` tokens for `preempted_ms`,
    and computed again. One with `blocking_prompt` tokens blocks the event loop first. During one with
    `struck_prompt` tokens another process uses the engine's core for `hog_ms`, or the control group (`quota_group`,
    version 1) is limited to `QUOTA` of a core for `throttled_ms`. There are `kv_blocks` blocks of `BLOCK_TOKENS`
    tokens (0 = no limit); if they are full, the last sequence is preempted. A longer prompt than `longest_prompt`
    is refused (0 = no limit).
    """

    base_ms: float = 8.0
    each_ms: float = 0.1
    prompt_ms: float = 0.02
    max_batch: int = 16
    batch_delay_ms: float = 0.0
    lookup_ms: float = 0.0
    heavy_apart: bool = False
    gc_every_ms: float = 0.0
    gc_objects: int = 0
    preempted_prompt: int = 0
    preempted_after: int = 0
    preempted_ms: float = 0.0
    spin: bool = False
    struck_prompt: int = 0
    hog_ms: float = 0.0
    quota_group: str = ""
    throttled_ms: float = 0.0
    blocking_prompt: int = 0
    blocking_ms: float = 0.0
    kv_blocks: int = 0
    longest_prompt: int = 0


HEAVY_TOKENS = 60
ALL_CORES = os.sched_getaffinity(0)
CORE = max(ALL_CORES)
"""The core of an engine that spins, without any other thread of the server."""
QUOTA, PERIOD_US = 0.4, 100_000
BLOCK = bytes(1 << 14)
BLOCK_TOKENS = 16
HOG = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[2])})
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    pass
"""


class Sequence:
    """One running answer; the token None is its end."""

    def __init__(self, request: otel_infer.request, prompt: int, tokens: int) -> None:
        self.request, self.prompt, self.left, self.all = request, prompt, tokens, tokens
        self.is_new = True
        self.came_at = time.perf_counter()
        self.tokens: asyncio.Queue[int | None] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()

    def send_token(self, token: int | None) -> None:
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, token)


class Engine(threading.Thread):
    """Runs steps over the running sequences. New ones join between two steps."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(daemon=True)
        self.faults = faults
        self.inbox: queue.Queue[Sequence] = queue.Queue()
        self.running: list[Sequence] = []
        self.preempted: list[tuple[float, Sequence]] = []
        self.on_gpu = False

    def run(self) -> None:
        if self.faults.spin:
            os.sched_setaffinity(0, {CORE})  # of this thread
        while True:
            self.admit_sequences()
            while (
                self.faults.kv_blocks
                and len(self.running) > 1
                and self.count_blocks() > self.faults.kv_blocks
            ):
                self.preempt_sequence(self.running[-1])
            if not self.running:
                continue
            prompts = {s.request: s.prompt for s in self.running if s.is_new}
            with otel_infer.step(
                [s.request for s in self.running],
                prompt_tokens=prompts,
                waiting=self.inbox.qsize(),
                kv_used=self.count_blocks(),
                kv_total=self.faults.kv_blocks,
                gpu=self.on_gpu,
            ) as step:
                self.run_forward(sum(prompts.values()), step)
            for sequence in self.running:
                sequence.is_new = False
                sequence.left -= 1
                sequence.send_token(1)
                if sequence.left == 0:
                    sequence.request.finished("length")
                    sequence.send_token(None)
            self.running = [s for s in self.running if s.left]
            self.preempt_matching()

    def count_blocks(self) -> int:
        """Returns the KV blocks of the running sequences."""
        return sum(-(-(s.prompt + s.all - s.left) // BLOCK_TOKENS) for s in self.running)

    def preempt_sequence(self, sequence: Sequence) -> None:
        sequence.request.preempted()
        self.running.remove(sequence)
        self.preempted.append((time.perf_counter() + self.faults.preempted_ms / 1000, sequence))

    def preempt_matching(self) -> None:
        for sequence in [s for s in self.running if s.prompt == self.faults.preempted_prompt]:
            if sequence.all - sequence.left == self.faults.preempted_after:
                self.preempt_sequence(sequence)

    def resume_sequences(self) -> None:
        """Resumes preempted sequences. Their KV is gone, so prompt and output are a prompt again."""
        for due, sequence in list(self.preempted):
            needed = -(-(sequence.prompt + sequence.all - sequence.left + BLOCK_TOKENS) // BLOCK_TOKENS)
            full = self.running and (
                len(self.running) >= self.faults.max_batch
                or 0 < self.faults.kv_blocks < self.count_blocks() + needed
            )
            if time.perf_counter() >= due and not full:
                self.preempted.remove((due, sequence))
                sequence.prompt += sequence.all - sequence.left
                sequence.is_new = True
                self.running.append(sequence)

    def compute_step_ms(self, prompt_tokens: int) -> float:
        """Returns the duration of a step, ms."""
        faults = self.faults
        return faults.base_ms + faults.each_ms * len(self.running) + faults.prompt_ms * prompt_tokens

    def run_forward(self, prompt_tokens: int, step: otel_infer.step) -> None:
        step_ms = self.compute_step_ms(prompt_tokens)
        if not self.faults.spin:
            time.sleep(step_ms / 1000)
            return
        until = time.thread_time() + step_ms / 1000
        while time.thread_time() < until:
            hashlib.sha256(BLOCK)

    def admit_sequences(self) -> None:
        delay = self.faults.batch_delay_ms / 1000
        if delay and self.running:
            return  # the batch is closed
        self.resume_sequences()
        if not self.running and not self.preempted:
            self._admit(self.inbox.get())
        elif not self.running:
            time.sleep(0.001)
        if delay and self.running:
            until = self.running[0].came_at + delay
            while len(self.running) < self.faults.max_batch and (left := until - time.perf_counter()) > 0:
                try:
                    self._admit(self.inbox.get(timeout=left))
                except queue.Empty:
                    break
        while len(self.running) < self.faults.max_batch and not self.inbox.empty():
            self._admit(self.inbox.get())

    def _admit(self, sequence: Sequence) -> None:
        sequence.request.received()
        self.running.append(sequence)


class Garbage(threading.Thread):
    """Collects a heap of cycles periodically, as in a server that caches objects."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(daemon=True)
        self.faults = faults
        self.heap: list[Any] = []
        gc.disable()
        for _ in range(faults.gc_objects):  # before the first request, because it takes the GIL
            cycle: list[Any] = []
            cycle.append(cycle)
            self.heap.append(cycle)

    def run(self) -> None:
        while True:
            time.sleep(self.faults.gc_every_ms / 1000)
            gc.collect()


class ExternalFaults:
    """External faults during one request."""

    def __init__(self, faults: Faults) -> None:
        self.faults, self.group = faults, Path(faults.quota_group)
        if faults.spin:
            os.sched_setaffinity(0, ALL_CORES - {CORE} or ALL_CORES)
        if faults.quota_group:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def begin_faults(self) -> None:
        if self.faults.hog_ms:
            seconds, core = str(self.faults.hog_ms / 1000), str(CORE)
            subprocess.Popen([sys.executable, "-I", "-c", HOG, seconds, core])
        if self.faults.throttled_ms:
            self.set_quota(int(QUOTA * PERIOD_US))
            threading.Timer(self.faults.throttled_ms / 1000, self.set_quota, [-1]).start()

    def set_quota(self, quota_us: int) -> None:
        (self.group / "cpu.cfs_quota_us").write_text(str(quota_us))


class App:
    """POST {"prompt": tokens, "tokens": n} streams n lines; any other request returns 200."""

    def __init__(self, faults: Faults) -> None:
        self.faults, self.external = faults, ExternalFaults(faults)
        self.engine, self.heavy = Engine(faults), Engine(faults)
        self.engine.start()
        if faults.heavy_apart:
            self.heavy.start()
        if faults.gc_every_ms:
            Garbage(faults).start()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = json.loads((await receive()).get("body") or b"{}") if scope["method"] == "POST" else {}
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-server", b"toy")]})
        if body:
            async for _ in self.stream_answer(body["prompt"], body["tokens"]):
                await send({"type": "http.response.body", "body": b"data: x\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def stream_answer(self, prompt: int, tokens: int) -> AsyncIterator[int]:
        async with otel_infer.request("text_completion", model="toy") as request:
            if prompt == self.faults.blocking_prompt:
                time.sleep(self.faults.blocking_ms / 1000)
            if 0 < self.faults.longest_prompt < prompt:
                raise ValueError("the prompt is too long")
            if self.faults.lookup_ms:
                async with otel_infer.stage("lookup"):
                    await asyncio.sleep(self.faults.lookup_ms / 1000)
            if prompt == self.faults.struck_prompt:
                self.external.begin_faults()
            sequence = Sequence(request, prompt, tokens)
            request.submitted(input_tokens=prompt, max_tokens=tokens)
            is_heavy = self.faults.heavy_apart and tokens >= HEAVY_TOKENS
            (self.heavy if is_heavy else self.engine).inbox.put(sequence)
            while (token := await sequence.tokens.get()) is not None:
                yield token


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(
        App(Faults(**json.loads(sys.argv[2]))),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="error",
        lifespan="off",
    )
