"""Workers with one given `service.instance.id` and no common parent are separate writers of metrics."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.support.otlp_receiver import HTTP, OtlpReceiver

PROGRAM = """
import sys
import otel_infer
otel_infer.instrument()
for line in sys.stdin:
    with otel_infer.request("chat", model="toy"):
        pass
    print(otel_infer.flush(20), flush=True)
"""
METRIC = "gen_ai.server.request.duration"


def start_worker(receiver: OtlpReceiver, mode: str, instance: str) -> subprocess.Popen[str]:
    variables = {"OTEL_RESOURCE_ATTRIBUTES": f"service.instance.id={instance}", "OTEL_INFER_MODE": mode}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **receiver.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_counts(receiver: OtlpReceiver) -> dict[str, list[int]]:
    """Returns the counts of requests of each instance, export by export."""
    counts: defaultdict[str, list[int]] = defaultdict(list)
    for metric in receiver.metrics:
        if metric["name"] == METRIC:
            counts[metric["resource"]["service.instance.id"]] += [
                point["count"] for point in metric["points"]
            ]
    return counts


@pytest.mark.parametrize("mode", ["sidecar", "in-process"])
def test_two_workers_with_a_given_id_are_two_instances(mode: str) -> None:
    """In one series of both, each switch to the worker with the smaller count would look like a restart."""
    instance = f"pod-{secrets.token_hex(4)}"
    with OtlpReceiver(HTTP) as receiver:
        workers = [start_worker(receiver, mode, instance) for _ in range(2)]
        try:
            for worker in (0, 1, 1, 0, 1, 0, 1, 1):
                process = workers[worker]
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("request\n")
                process.stdin.flush()
                assert process.stdout.readline() == "True\n"
        finally:
            for process in workers:
                process.communicate(timeout=30)
        counts = read_counts(receiver)
    assert counts.keys() == {instance, f"{instance}.2"}
    assert {key: max(series) for key, series in counts.items()} == {instance: 3, f"{instance}.2": 5}
    assert all(series == sorted(series) for series in counts.values())
