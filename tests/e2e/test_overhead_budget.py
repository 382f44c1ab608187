"""A sidecar over its overhead budget drops decode steps, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.toy_server import RUN, Toy


@pytest.mark.slow
def test_sidecar_over_budget_drops_steps_but_no_requests(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        environ = {**receiver.environ, "OTEL_INFER_STEPS": "all", "OTEL_INFER_BUDGET": "cpu=1%"}
        with Toy(tmp_path / "log", {**environ, "TOY_STEP_S": "0.002"}, RUN) as toy:
            with toy.load(threads=8, tokens=30) as replies:
                time.sleep(14)
            toy.stop()
        traces = {reply.trace_id for reply in replies if reply.status == 200}
        steps = sum(span["name"] == semconv.SPAN_DECODE_STEP for span in receiver.spans)
        exported = {span["trace_id"] for span in receiver.spans if semconv.KEEP_REASON in span["attributes"]}
        shares = [
            point["value"]
            for metric in receiver.metrics
            for point in metric["points"]
            if metric["name"] == "infer.self.steps.share"
        ]
    assert traces <= exported
    assert shares[0] == 1 and min(shares) < 1
    assert 0 < steps < 29 * len(traces)
