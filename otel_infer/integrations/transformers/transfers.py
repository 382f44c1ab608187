"""Asynchronous batching moves inputs and outputs in calls of their own: the stages `h2d` and `d2h`, host time.

They are said of a request whose prompt is in the batch, not of every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import clock
from otel_infer.integrations.transformers._integration import integration
from otel_infer.integrations.transformers.batching import CB
from otel_infer.patching import Hook


def _transfer(stage: str) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    def make(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def transfer(self: Any, stream: Any) -> Any:
            started_at = clock.now()
            result = original(self, stream)
            if hook.alive:
                try:
                    _transferred(self.host_io, stage, started_at)
                except Exception as exc:
                    hook.fail(exc)
            return result

        return transfer

    return make


def _transferred(host: Any, stage: str, started_at: int) -> None:
    futures = host.requests_in_batch
    if host.total_seqlen_q <= len(futures):  # one token each
        return
    at = clock.now()
    edges = host.cumulative_seqlens_q[: len(futures) + 1].tolist()
    for future, start, end in zip(futures, edges, edges[1:]):
        sequences = getattr(future.state, "otel_infer", None)
        if sequences is not None and end - start > 1:
            sequences.request.stage(stage, started_at, at=at)


for _name, _stage in (("transfer_inputs_h2d", "h2d"), ("transfer_outputs_d2h", "d2h")):
    integration.step_hook(
        f"{CB}.input_outputs:HostDeviceIOPair.{_name}", reads=("stream",), part="transfers"
    )(_transfer(_stage))
