"""Time put into one stage from outside shows in that stage, and in no other.

Both requests of a pair are stalled, one for longer: a core that has rested computes more slowly for a while, which is no
time that was put in. A shared machine adds milliseconds of its own, to a stage and to a sleep, so the median counts, of
more pairs where it is restless, and what was slept is taken by the clock.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import BATCHING, RUN, Answered, Server, chat, free_port

pytestmark = pytest.mark.real

STALL_MS = 50
SHORT_MS, LONG_MS = 25, 25 + STALL_MS
TOLERANCE_MS = 5
PAIRS = 5
MOST_PAIRS = 40
STAGES = ("ingress", "tokenize", "queue", "prefill", "decode", "detokenize", "egress")


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path, receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    port = free_port()
    script = str(Path(__file__).parents[1] / "support" / "stalled_server.py")
    options = (
        f"--host 127.0.0.1 --port {port} --device cpu --dtype float32 --attn-implementation sdpa".split()
    )
    command = [*RUN, sys.executable, script, "serve", str(tiny_llama), *options, *BATCHING]
    environ = {**receiver.environ, "OTEL_INFER_STEPS": "all"}
    log = tmp_path_factory.mktemp("logs") / "server.log"
    with Server(command, port, log, environ) as server:
        for _ in range(3):
            chat(port, tiny_llama, tokens=4)
        yield server


def arm(server: Server, place: str, after: int = 0, milliseconds: int = STALL_MS) -> None:
    url = f"http://127.0.0.1:{server.port}/stall/{place}/{milliseconds}/{after}"
    urllib.request.urlopen(url, timeout=5).read()


def last_stall(server: Server) -> float:
    """ms that the server slept when it was last armed, by its clock."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/stalled", timeout=5) as answer:
        return float(json.load(answer)[-1])


def spans_of(receiver: OtlpReceiver, answers: list[Answered]) -> dict[str, list[dict[str, Any]]]:
    """The spans of each request by trace id, once all of them are there."""
    wanted = {answer.trace_id for answer in answers}

    def complete(received: OtlpReceiver) -> bool:
        roots = {span["trace_id"] for span in received.spans if span["kind"] == 2}
        return wanted <= roots

    assert receiver.wait_for(complete, 15), "not every request has arrived"
    time.sleep(0.1)
    by_trace: dict[str, list[dict[str, Any]]] = {trace: [] for trace in wanted}
    for span in receiver.spans:
        if span["trace_id"] in wanted:
            by_trace[span["trace_id"]].append(span)
    return by_trace


def lengths(spans: list[dict[str, Any]]) -> dict[str, float]:
    """ms of every stage; detokenize and egress (time in send) are attributes of postprocess."""
    found = {span["name"]: (span["end"] - span["start"]) / 1e6 for span in spans if span["name"] in STAGES}
    last = next((span for span in spans if span["name"] == "postprocess"), None)
    assert last is not None, f"no postprocess among {[span['name'] for span in spans]}"
    found["postprocess"] = (last["end"] - last["start"]) / 1e6
    found["detokenize"] = last["attributes"].get("infer.detokenize.duration", 0.0) * 1e3
    found["egress"] = last["attributes"]["infer.send.wait"] * 1e3
    return found


# Where a pass through the place lies: the third decode step, the third token, the third chunk.
AFTER = {"decode": 2, "detokenize": 2, "egress": 2}
# Turning tokens into text and sending them are parts of postprocess once the engine is done, and the tiny one soon is.
PART_OF = {"detokenize": "postprocess", "egress": "postprocess"}


@pytest.mark.parametrize("place", STAGES)
def test_time_put_into_one_stage_shows_in_that_stage_alone(
    place: str, server: Server, receiver: OtlpReceiver, tiny_llama: Path
) -> None:
    differences: dict[str, list[float]] = {}
    deltas: dict[str, float] = {}
    for _ in range(0, MOST_PAIRS, PAIRS):
        for stage, values in differences_of_pairs(place, server, receiver, tiny_llama).items():
            differences.setdefault(stage, []).extend(values)
        deltas = {stage: statistics.median(values) for stage, values in differences.items()}
        others = {stage: delta for stage, delta in deltas.items() if stage not in (place, PART_OF.get(place))}
        if abs(deltas[place]) <= TOLERANCE_MS and all(delta < TOLERANCE_MS for delta in others.values()):
            return
    pytest.fail(f"what {STALL_MS} ms more in {place} left unexplained in it, or moved elsewhere: {deltas}")


def differences_of_pairs(
    place: str, server: Server, receiver: OtlpReceiver, model: Path
) -> dict[str, list[float]]:
    """Per stage and pair, ms between the longer stall and the shorter; of `place` less what was slept longer."""
    pairs, slept = [], []
    for _ in range(PAIRS):
        answers, stalls = {}, {}
        for stall in random.sample((SHORT_MS, LONG_MS), 2):
            arm(server, place, AFTER.get(place, 0), stall)
            answers[stall] = chat(server.port, model, tokens=8, words=24)
            stalls[stall] = last_stall(server)
        pairs.append((answers[SHORT_MS], answers[LONG_MS]))
        slept.append(stalls[LONG_MS] - stalls[SHORT_MS])
    trees = spans_of(receiver, [answer for pair in pairs for answer in pair])
    differences: dict[str, list[float]] = {}
    for (shorter, longer), longer_by in zip(pairs, slept, strict=True):
        before, after = lengths(trees[shorter.trace_id]), lengths(trees[longer.trace_id])
        for stage in before:
            difference = after[stage] - before[stage]
            differences.setdefault(stage, []).append(difference - longer_by if stage == place else difference)
    return differences


def test_a_stalled_engine_step_shows_on_exactly_the_requests_that_were_in_it(
    server: Server, receiver: OtlpReceiver, tiny_llama: Path
) -> None:
    answers: list[Answered] = []
    early = [
        threading.Thread(target=lambda: answers.append(chat(server.port, tiny_llama, tokens=40)))
        for _ in range(3)
    ]
    arm(server, "decode", random.randrange(6, 30), milliseconds=80)
    for thread in early:
        thread.start()
    for thread in early:
        thread.join()
    answers.append(chat(server.port, tiny_llama, tokens=10))
    trees = spans_of(receiver, answers)
    steps = {
        trace: {span["attributes"]["infer.step.id"]: (span["end"] - span["start"]) / 1e6 for span in spans}
        for trace, spans in (
            (trace, [span for span in spans if span["name"] == "decode step"])
            for trace, spans in trees.items()
        )
    }
    durations: dict[int, float] = {}
    for by_step in steps.values():
        durations.update(by_step)
    stalled = max(durations, key=lambda step: durations[step])
    assert durations[stalled] >= 80
    members = {trace for trace, by_step in steps.items() if stalled in by_step}
    assert answers[-1].trace_id not in members
    assert 1 <= len(members) <= 3
    for trace in members:
        assert steps[trace][stalled] == durations[stalled]
        assert len([span for span in trees[trace] if span["name"] == "decode step"]) == 39
    for trace in set(steps) - members:
        assert stalled not in steps[trace]


def test_decode_steps_equal_the_tokens_delivered_after_the_first(
    server: Server, receiver: OtlpReceiver, tiny_llama: Path
) -> None:
    answers = [chat(server.port, tiny_llama, tokens=tokens) for tokens in (1, 2, 3, 17)]
    trees = spans_of(receiver, answers)
    counts = [sum(span["name"] == "decode step" for span in trees[answer.trace_id]) for answer in answers]
    assert counts == [0, 1, 2, 16]
    assert [len(answer.chunks) for answer in answers] == [1, 2, 3, 17]
