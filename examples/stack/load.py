"""Loads the demo's server for ever, as a day in ten minutes: quiet, busy, more than it can take, and quiet again."""

from __future__ import annotations

import sys
import time
from itertools import count, cycle
from typing import NamedTuple

from otel_infer.cli.demo.load_client import run_load

MODEL = "/models/tiny-llama"


class Hour(NamedTuple):
    """`clients` at once for `seconds`; their prompts have so many words."""

    clients: int
    seconds: float
    words: tuple[int, ...]


DAY = (
    Hour(1, 150, (16, 64)),
    Hour(6, 150, (16, 64, 256)),
    Hour(64, 120, (16, 64, 256)),
    Hour(4, 180, (16, 64, 1024)),  # few, but one of them writes long prompts, and the others stutter
)


def main() -> None:
    """Until it is killed."""
    for hour, seed in zip(cycle(DAY), count()):
        asked = run_load(
            sys.argv[1],
            MODEL,
            requests=None,
            seconds=hour.seconds,
            concurrency=hour.clients,
            prompt_lengths=hour.words,
            seed=seed,
            traceparent=False,  # the client exports no spans, so the server's spans are the roots
        )
        failed = sum(one.error is not None for one in asked)
        print(f"{hour.clients} at once: {len(asked)} requests, {failed} failed", flush=True)
        if failed == len(asked):
            time.sleep(5)


if __name__ == "__main__":
    main()
