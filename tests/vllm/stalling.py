"""Schedulers whose steps can be held up from outside: `--scheduler-cls tests.vllm.stalling.Asynchronous`.

What is written into the file that STALL names is done once: `prefill 300 1`: the next step with a new prompt, of 1 member
at least, takes 300 ms longer; `decode 80 3`: the next one without, of 3 at least; `execution 80 1`: that one's model, and
not its results. Meanwhile the file is called `.stalling`; then `.done`, which says when it was over (monotonic ns) and in
which step of whom.
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
    """vLLM's default, held up."""


class Synchronous(_Stalling, Scheduler):
    """For `--no-async-scheduling`."""
