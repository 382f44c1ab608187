"""The server of `benchmarks.complaint_server` on a fake GPU, which otel_infer's own code reads.

otel-infer run -- python tests/stack/loop_server.py PORT '{"max_batch": 8, …}'

A prompt of `COLD_PROMPT` tokens compiles a function, and after one of `HANGING_PROMPT` tokens no step ends. POST /odd sends a malformed ASGI message.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import uvicorn

import otel_infer
from benchmarks import complaint_server
from otel_infer.gpu.timing import timing
from tests.support.fake_device import OnHostClock

DEVICE = OnHostClock()
DEVICE.kind = "cuda"
LAUNCH_NS = 400_000
COLD_PROMPT, HANGING_PROMPT = 77, 78
HANG_S = 600
REAL_CUDA = torch.cuda


class Cuda(ModuleType):
    """The part of `torch.cuda` that otel_infer reads: memory that varies, with retries and OOMs at times."""

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        retries = int(time.time() / 10)
        used = {"allocated_bytes": 30, "reserved_bytes": 60, "active_bytes": 32, "inactive_split_bytes": 2}
        wave = time.time() % 10
        return {
            **{kind: {"all": {"current": int((gb + wave) * 1e9)}} for kind, gb in used.items()},
            "reserved_bytes_by_private_pools": {(0, 1): {"all": {"current": int((2 + wave / 10) * 1e9)}}},
            "num_alloc_retries": retries,
            "num_ooms": retries // 3,
        }

    def host_memory_stats_as_nested_dict(self) -> dict[str, Any]:
        return {"allocated_bytes": {"current": int((1 + time.time() % 10 / 10) * 1e9)}}

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return int((20 - time.time() % 10) * 1e9), 80 * 10**9

    def get_device_properties(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(uuid="0")


def compile_function() -> None:
    """Compiles a function anew, for which torch must see its own `torch.cuda`."""
    fake, torch.cuda = torch.cuda, REAL_CUDA
    sys.modules["torch.cuda"] = REAL_CUDA
    try:
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    finally:
        sys.modules["torch.cuda"] = torch.cuda = fake  # type: ignore[assignment]


class OnDevice(complaint_server.Engine):
    """An engine that launches a step on the fake device and waits for it."""

    def __init__(self, faults: complaint_server.Faults) -> None:
        super().__init__(faults)
        self.on_gpu = True

    def run_forward(self, prompt_tokens: int, step: otel_infer.step) -> None:
        prompts = {s.prompt for s in self.running if s.left == s.all}  # a resumed sequence's prompt has grown
        if COLD_PROMPT in prompts:
            compile_function()
        if HANGING_PROMPT in prompts:
            time.sleep(HANG_S)
        time.sleep(LAUNCH_NS / 1e9)
        _, done_at = DEVICE.launch(round(self.compute_step_ms(prompt_tokens) * 1e6))
        step.launched()
        time.sleep(max(done_at - DEVICE.now(), 0) / 1e9)


class App(complaint_server.App):
    """An application that is malformed at one path."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/odd":  # a tensor is neither true nor false
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": torch.ones(2)})
        await super().__call__(scope, receive, send)


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import hypercorn.app_wrappers  # noqa: F401 - a test may put one there that has no hooks
    sys.modules["torch.cuda"] = torch.cuda = Cuda("torch.cuda")  # type: ignore[assignment]
    timing._find_device = lambda: DEVICE  # replaces the lookup of CUDA's current device
    complaint_server.Engine = OnDevice  # type: ignore[misc]
    app = App(complaint_server.Faults(**json.loads(sys.argv[2])))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", lifespan="off")
