"""The state of the senders: whether everything was tried, and what the receivers refused."""

from __future__ import annotations

from otel_infer import _clock, semconv
from otel_infer.export.metrics.sender import MetricsSender
from otel_infer.export.spans.batch_sender import BatchSender


class Delivery:
    """The senders of one pipeline. None: this signal is not sent."""

    def __init__(self, sender: BatchSender | None, metrics_sender: MetricsSender | None) -> None:
        self._sender, self._metrics_sender = sender, metrics_sender

    def is_sent(self, timeout: float) -> bool:
        """Returns whether everything queued was tried, now or within `timeout` s."""
        deadline = _clock.now() + int(timeout * 1e9)
        if self._sender is not None and not self._sender.flush(timeout):
            return False
        return self._metrics_sender is None or self._metrics_sender.wait(
            max(deadline - _clock.now(), 0) / 1e9
        )

    def count_refused(self) -> int:
        """Returns what was handed over and lost so far: spans, and deltas of metrics."""
        deltas = self._metrics_sender.lost_collections if self._metrics_sender is not None else 0
        return deltas + (self._sender.lost.total() if self._sender is not None else 0)

    def is_accepted(self, refused_before: int) -> bool:
        """Returns whether all that was tried since `count_refused` returned `refused_before` was accepted.

        Cumulative metrics that were refused are in the next collection, so only the last one matters.
        """
        is_refused = self._metrics_sender is not None and self._metrics_sender.is_refused
        return not is_refused and self.count_refused() <= refused_before

    def describe_refusals(self) -> dict[str, str]:
        """Returns a line for the operator for each signal of which something was refused.

        It has no text of the receiver's own. Why metrics were refused is in the SDK's log only.
        """
        refused: dict[str, str] = {}
        if self._sender is not None and self._sender.lost[semconv.LOSS_REFUSED]:
            refused["spans"] = f"spans ({self._sender.last_refusal.partition(':')[0] or 'not sent'})"
        if self._metrics_sender is not None and self._metrics_sender.failed_exports:
            refused["metrics"] = "metrics"
        return {
            signal: f"the destination refused {what}; run `otel-infer doctor` to see why"
            for signal, what in refused.items()
        }
