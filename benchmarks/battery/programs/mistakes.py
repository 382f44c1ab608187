"""The mistakes of a server, as production has them. A server without arguments has none."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import logging
import random
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Mistakes:
    """The faults of the server; none by default. Times in ms, shares of the requests.

    `lock` and `semaphore`: how many `generate` calls run at a time. `workers`: threads of the pool in which requests run.
    `loop_ms`: a blocking call on the event loop; with `off_loop` in a thread. `database_port`: a slow database, queried in a thread. `after_ms`: work
    after the last token. `busy_threads`: threads that compute all the time. `gc_objects`: objects of a heap that is
    collected every `gc_every_ms`. `fresh_mb`: memory that a request maps anew, again and again. `log_bytes`: of a line that
    is logged for each request. `window_ms`: how long a batcher waits for further items; 0 = as it should.
    """

    lock: bool = False
    semaphore: int = 0
    workers: int = 0
    loop_ms: float = 0.0
    loop_share: float = 0.0
    off_loop: bool = False
    database_port: int = 0
    after_ms: float = 0.0
    after_share: float = 0.0
    busy_threads: int = 0
    gc_objects: int = 0
    gc_every_ms: float = 0.0
    fresh_mb: int = 0
    fresh_share: float = 0.0
    log_bytes: int = 0
    window_ms: float = 0.0


def read_mistakes() -> Mistakes:
    """Returns the mistakes of the command line, and starts threads that compute all the time."""
    mistakes = Mistakes(**json.loads(sys.argv[3])) if len(sys.argv) > 3 else Mistakes()
    for _ in range(mistakes.busy_threads):
        threading.Thread(target=aggregate_usage, daemon=True).start()
    return mistakes


def finish_start(mistakes: Mistakes) -> None:
    """Keeps what was loaded out of later garbage collections, as well-kept servers do; others collect a large heap."""
    gc.collect()
    gc.freeze()
    if mistakes.gc_objects:
        threading.Thread(target=refresh_cache, args=(mistakes,), daemon=True).start()


def aggregate_usage() -> None:
    """Computes all the time, without the GIL."""
    block = bytes(1 << 20)
    while True:
        hashlib.sha256(block).hexdigest()


def refresh_cache(mistakes: Mistakes) -> None:
    """Collects a heap of many small objects periodically."""
    cache: list[Any] = []
    for key in range(mistakes.gc_objects):
        entry: list[Any] = [key]
        entry.append(entry)
        cache.append(entry)
    while True:
        time.sleep(mistakes.gc_every_ms / 1000)
        gc.collect()


def happens(share: float) -> bool:
    """Returns whether this request is among the share."""
    return random.random() < share


def look_up_customer(mistakes: Mistakes) -> None:
    """Asks the database, and waits for its answer."""
    if mistakes.database_port:
        with socket.create_connection(("127.0.0.1", mistakes.database_port)) as connection:
            connection.sendall(b"select quota from customers\n")
            connection.recv(64)


async def limit_request(mistakes: Mistakes) -> None:
    """Checks the rate limit before a request."""
    if mistakes.off_loop:
        await asyncio.to_thread(check_rate_limit, mistakes)
    else:
        check_rate_limit(mistakes)


def check_rate_limit(mistakes: Mistakes) -> None:
    """Calls a service that blocks its thread."""
    if happens(mistakes.loop_share):
        time.sleep(mistakes.loop_ms / 1000)


def save_transcript(mistakes: Mistakes) -> None:
    """Writes what was generated to a slow store."""
    if happens(mistakes.after_share):
        time.sleep(mistakes.after_ms / 1000)


def build_history(mistakes: Mistakes) -> None:
    """Maps much memory anew."""
    if mistakes.fresh_mb and happens(mistakes.fresh_share):
        for _ in range(8):
            np.ones(mistakes.fresh_mb << 17)


def make_guard(mistakes: Mistakes) -> Any:
    """Returns what a thread enters before it generates."""
    if mistakes.lock:
        return threading.Lock()
    return threading.Semaphore(mistakes.semaphore) if mistakes.semaphore else contextlib.nullcontext()


def log_request(mistakes: Mistakes, text: str) -> None:
    """Logs the request."""
    if mistakes.log_bytes:
        logging.getLogger("server").warning("%s %s", text, "x" * mistakes.log_bytes)
