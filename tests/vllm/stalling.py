"""Schedulers whose steps can be held up from outside: `--scheduler-cls tests.vllm.stalling.Asynchronous`.

What is written into the file that STALL names is done once: `prefill 300`: the next step with a new prompt takes 300 ms
longer; `decode 80`: the next one without; `execution 80`: that one's model, and not its results. Then the file says when it was over (monotonic ns) and in which step of whom.
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
        """As a model would that takes longer: what arrives meanwhile is taken up before its tokens are."""
        scheduled = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if scheduled.num_scheduled_tokens and not scheduled.scheduled_new_reqs:
            _stall(scheduled, "execution")
        return scheduled

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As a step would that takes longer: the engine's thread waits for it."""
        if scheduler_output.num_scheduled_tokens:
            _stall(scheduler_output, "prefill" if scheduler_output.scheduled_new_reqs else "decode")
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


def _stall(output: Any, now: str) -> None:
    path = Path(os.environ[STALL])
    try:
        kind, _, length = path.read_text().partition(" ")
    except FileNotFoundError:
        return
    if kind == now:
        time.sleep(int(length) / 1e3)
        done = {"at": time.monotonic_ns(), "members": list(output.num_scheduled_tokens)}
        path.with_suffix(".done").write_text(json.dumps(done))
        path.unlink()


class Asynchronous(_Stalling, AsyncScheduler):
    """vLLM's default, held up."""


class Synchronous(_Stalling, Scheduler):
    """For `--no-async-scheduling`."""
