"""A hand-written batching loop: a queue, a thread that runs the model for whoever is there, and a database before it.

    python server.py                   serves POST /v1/generate on PORT (8000)
    python server.py --requests 20     without a web server: that many requests at once, then it ends

What is about telemetry are the lines with `otel_infer` and those that call a `request`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

import otel_infer

otel_infer.instrument()

WORDS = "the quick brown fox jumps over a lazy dog while it rains in summer and nobody knows why".split()
MODEL = "toy"
MAX_BATCH = 8
STEP_S = 0.004


class Toy:
    """A recurrent network with random weights, in numpy. One call is one step for the whole batch."""

    def __init__(self, width: int = 256) -> None:
        numbers = np.random.default_rng(0)
        self.words = numbers.normal(size=(len(WORDS), width)).astype(np.float32)
        self.layers = numbers.normal(size=(4, width, width)).astype(np.float32) / np.sqrt(width)
        self.start = np.zeros(width, np.float32)

    def step(self, tokens: list[int], states: np.ndarray) -> np.ndarray:
        states = np.tanh(states + self.words[tokens])
        for layer in self.layers:
            states = np.tanh(states @ layer)
        return states

    def choose(self, states: np.ndarray) -> list[int]:
        time.sleep(STEP_S)  # as long as a device would take
        return (states @ self.words.T).argmax(1).tolist()


class Sequence:
    """One answer in the making. Its tokens go to the task that waits for them; None is the end."""

    def __init__(self, request: otel_infer.request, prompt: list[int], max_tokens: int) -> None:
        self.request, self.prompt, self.left = request, prompt, max_tokens
        self.last, self.state = -1, np.zeros(0)
        self.cancelled = False
        self.tokens: asyncio.Queue[int | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def deliver(self, token: int | None) -> None:
        self._loop.call_soon_threadsafe(self.tokens.put_nowait, token)


class Batcher(threading.Thread):
    """Runs the model, step after step, for all sequences that are there; new ones join between two steps."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.inbox: queue.Queue[Sequence] = queue.Queue()
        self.running: list[Sequence] = []
        self.model = Toy()

    def run(self) -> None:
        while True:
            self.take_up()
            prompts = {s.request: len(s.prompt) for s in self.running if s.last < 0}
            batch = [s.request for s in self.running]
            with otel_infer.step(batch, prompt_tokens=prompts, waiting=self.inbox.qsize()):
                self.compute()
            for sequence in self.running:
                sequence.deliver(sequence.last)
            self.drop_finished()

    def take_up(self) -> None:
        """Waits for work if there is none, and fills the batch."""
        while not self.running or (len(self.running) < MAX_BATCH and not self.inbox.empty()):
            sequence = self.inbox.get()
            sequence.request.received()
            self.running.append(sequence)

    def compute(self) -> None:
        for sequence in self.running:
            if sequence.last < 0:
                sequence.state = self.model.start
                for token in sequence.prompt:
                    sequence.state = self.model.step([token], sequence.state[None])[0]
        states = np.stack([s.state for s in self.running])
        tokens = [s.last if s.last >= 0 else s.prompt[-1] for s in self.running]
        states = self.model.step(tokens, states)
        for sequence, state, token in zip(self.running, states, self.model.choose(states)):
            sequence.state, sequence.last = state, token
            sequence.left -= 1

    def drop_finished(self) -> None:
        for sequence in self.running:
            if sequence.cancelled:
                sequence.request.finished("abort")
            elif sequence.left == 0:
                sequence.request.finished("length")
                sequence.deliver(None)
        self.running = [s for s in self.running if s.left and not s.cancelled]


async def database(user: str) -> float:
    """Stands for a look-up over the network; the same time for the same user, 20 to 250 ms."""
    seconds = random.Random(user).uniform(0.020, 0.250)
    await asyncio.sleep(seconds)
    return seconds


async def answer(
    batcher: Batcher, prompt: str, user: str, max_tokens: int
) -> AsyncIterator[dict[str, object]]:
    async with otel_infer.request("text_completion", model=MODEL) as request:
        async with otel_infer.stage("database"):
            yield {"database_s": await database(user)}
        with otel_infer.stage("tokenize"):
            tokens = [len(word) % len(WORDS) for word in prompt.split()] or [0]
        sequence = Sequence(request, tokens, max_tokens)
        request.submitted(input_tokens=len(tokens), max_tokens=max_tokens)
        batcher.inbox.put(sequence)
        try:
            while (token := await sequence.tokens.get()) is not None:
                yield {"text": WORDS[token] + " "}
        finally:
            sequence.cancelled = True  # the client may have gone in the middle of it


class Prompt(BaseModel):
    prompt: str
    user: str = "somebody"
    max_tokens: int = 32


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.batcher = Batcher()
    app.state.batcher.start()
    yield


app = FastAPI(lifespan=lifespan)


@app.get("/health")
def health() -> str:
    return "ok"


@app.post("/v1/generate")
async def generate(body: Prompt) -> StreamingResponse:
    async def events() -> AsyncIterator[str]:
        async for part in answer(app.state.batcher, body.prompt, body.user, max(body.max_tokens, 1)):
            yield f"data: {json.dumps(part)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def script(requests: int) -> None:
    """The same loop without a web server: each `otel_infer.request` is then the root of a trace."""
    batcher = Batcher()
    batcher.start()

    async def one(number: int) -> int:
        prompt = "tell me something about foxes " * (1 + number % 3)
        parts = [part async for part in answer(batcher, prompt, f"user {number}", 16 + number)]
        return len(parts) - 1

    counts = await asyncio.gather(*(one(number) for number in range(requests)))
    print(f"{len(counts)} answers, {sum(counts)} tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=0, help="run so many at once instead of serving")
    arguments = parser.parse_args()
    if arguments.requests:
        asyncio.run(script(arguments.requests))
    else:
        uvicorn.run(app, port=int(os.environ.get("PORT", "8000")), log_level="warning")
