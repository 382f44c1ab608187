"""Asynchronous batching without an accelerator: transformers' two pairs args inputs and outputs, on streams without work.

The library's own code schedules, carries over and discards.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import input_outputs

from tests.support.fake_device import FakeStream

MODULES = ("continuous_api", "input_outputs", "model_runner", "offloading_manager")


class Stream(FakeStream):
    """A stream, or an event on one, that is done at once except for the fake device's work."""

    def record_event(self, event: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


def pairs_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """Lets `ContinuousBatchingAsyncIOs` run on the CPU."""
    ios, pair = input_outputs.ContinuousBatchingIOs, input_outputs.HostDeviceIOPair

    def make_pair(self: Any, *args: Any, **more: Any) -> None:
        self.host_io, self.device_io = ios(*args, **more), ios(*args, **more)
        self.h2d_over = self.compute_over = self.d2h_over = Stream()

    def make(self: Any, *args: Any, **more: Any) -> None:
        self.current_pair, self.io_pairs = 0, [pair(*args, **more), pair(*args, **more)]
        self.h2d_stream = self.d2h_stream = self.compute_stream = Stream()
        self.max_batch_tokens = (more.get("cache") or args[0]).max_batch_tokens

    patch.setattr(pair, "__init__", make_pair)
    patch.setattr(input_outputs.ContinuousBatchingAsyncIOs, "__init__", make)
    package = input_outputs.__name__.rpartition(".")[0]
    for name in MODULES:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"{package}.{name}")
            if hasattr(module, "stream_context"):
                patch.setattr(module, "stream_context", lambda stream: contextlib.nullcontext())
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
