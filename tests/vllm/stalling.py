"""Schedulers whose steps a test can delay: `--scheduler-cls tests.vllm.stalling.Asynchronous`.

The environment variable STALL names a file with one command, which is done once:
`prefill 300 1` delays the next step with a new prompt and at least 1 member by 300 ms;
`decode 80 3` delays the next step without a new prompt and with at least 3 members by 80 ms;
`execution 80 1` delays the model of such a step, but not its results.

During the delay the file is called `.stalling`, then `.done`, with the end (monotonic ns) and the members of the step.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.vllm.serving import STALL


class _Stalling:
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Delays like a slow model: requests that arrive meanwhile are scheduled before its tokens arrive."""
        scheduled = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if scheduled.num_scheduled_tokens and not scheduled.scheduled_new_reqs:
            _stall(scheduled, "execution")
        return scheduled

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Delays like a slow step: the engine's thread waits for it."""
        if scheduler_output.num_scheduled_tokens:
            _stall(scheduler_output, "prefill" if scheduler_output.scheduled_new_reqs else "decode")
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


def _stall(output: Any, now: str) -> None:
    path = Path(os.environ[STALL])
    try:
        kind, length, members = path.read_text().split()
    except FileNotFoundError:
        return
    if kind == now and len(output.num_scheduled_tokens) >= int(members):
        during = path.rename(path.with_suffix(".stalling"))
        time.sleep(int(length) / 1e3)
        done = {"at": time.monotonic_ns(), "members": list(output.num_scheduled_tokens)}
        during.write_text(json.dumps(done))
        during.rename(path.with_suffix(".done"))


class Asynchronous(_Stalling, AsyncScheduler):
    """vLLM's default scheduler, with delays."""


class Synchronous(_Stalling, Scheduler):
    """The scheduler for `--no-async-scheduling`, with delays."""
