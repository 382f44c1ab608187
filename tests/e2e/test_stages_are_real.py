"""Time added to one stage appears in that stage, and in no other.

Both requests of a pair are stalled, one for longer, because a core is slower for a while after an idle period. A shared
machine adds milliseconds to stages and sleeps. The test therefore compares medians, runs more pairs if they vary, and
measures each sleep by the clock.
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
from tests.support.served import BATCHING, RUN, ChatResponse, Server, chat, free_port

pytestmark = pytest.mark.real

STALL_MS = 50
SHORT_MS, LONG_MS = 25, 25 + STALL_MS
TOLERANCE_MS = 5
PAIRS = 5
MAX_PAIRS = 40
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
    """Returns the last sleep of the server in ms, by its clock."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/stalled", timeout=5) as answer:
        return float(json.load(answer)[-1])


def spans_of(receiver: OtlpReceiver, answers: list[ChatResponse]) -> dict[str, list[dict[str, Any]]]:
    """Returns the spans of each request by trace id, once all requests have arrived."""
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


def stage_durations(spans: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the ms of each stage. Detokenize and egress (time in send) are attributes of postprocess."""
    found = {span["name"]: (span["end"] - span["start"]) / 1e6 for span in spans if span["name"] in STAGES}
    last = next((span for span in spans if span["name"] == "postprocess"), None)
    assert last is not None, f"no postprocess among {[span['name'] for span in spans]}"
    found["postprocess"] = (last["end"] - last["start"]) / 1e6
    found["detokenize"] = last["attributes"].get("infer.detokenize.duration", 0.0) * 1e3
    found["egress"] = last["attributes"]["infer.send.wait"] * 1e3
    return found


# Passes before the stall: it hits the third decode step, token or chunk.
PASSES = {"decode": 2, "detokenize": 2, "egress": 2}
# Once the engine is done, detokenization and sending are part of postprocess; the tiny engine is done early.
PART_OF = {"detokenize": "postprocess", "egress": "postprocess"}


@pytest.mark.parametrize("place", STAGES)
def test_added_time_appears_only_in_its_stage(
    place: str, server: Server, receiver: OtlpReceiver, tiny_llama: Path
) -> None:
    differences: dict[str, list[float]] = {}
    deltas: dict[str, float] = {}
    for _ in range(0, MAX_PAIRS, PAIRS):
        for stage, values in differences_of_pairs(place, server, receiver, tiny_llama).items():
            differences.setdefault(stage, []).extend(values)
        deltas = {stage: statistics.median(values) for stage, values in differences.items()}
        others = {stage: delta for stage, delta in deltas.items() if stage not in (place, PART_OF.get(place))}
        if abs(deltas[place]) <= TOLERANCE_MS and all(delta < TOLERANCE_MS for delta in others.values()):
            return
    pytest.fail(f"{STALL_MS} ms added to {place} are missing there, or appear in another stage: {deltas}")


def differences_of_pairs(
    place: str, server: Server, receiver: OtlpReceiver, model: Path
) -> dict[str, list[float]]:
    """Returns the difference of long and short stall in ms, by stage and pair; for `place`, minus the difference of the sleeps."""
    pairs, slept = [], []
    for _ in range(PAIRS):
        answers, stalls = {}, {}
        for stall in random.sample((SHORT_MS, LONG_MS), 2):
            arm(server, place, PASSES.get(place, 0), stall)
            answers[stall] = chat(server.port, model, tokens=8, words=24)
            stalls[stall] = last_stall(server)
        pairs.append((answers[SHORT_MS], answers[LONG_MS]))
        slept.append(stalls[LONG_MS] - stalls[SHORT_MS])
    trees = spans_of(receiver, [answer for pair in pairs for answer in pair])
    differences: dict[str, list[float]] = {}
    for (shorter, longer), longer_by in zip(pairs, slept, strict=True):
        before, after = stage_durations(trees[shorter.trace_id]), stage_durations(trees[longer.trace_id])
        for stage in before:
            difference = after[stage] - before[stage]
            differences.setdefault(stage, []).append(difference - longer_by if stage == place else difference)
    return differences


def test_stalled_step_appears_only_in_its_requests(
    server: Server, receiver: OtlpReceiver, tiny_llama: Path
) -> None:
    answers: list[ChatResponse] = []
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


def test_decode_steps_equal_tokens_after_the_first(
    server: Server, receiver: OtlpReceiver, tiny_llama: Path
) -> None:
    answers = [chat(server.port, tiny_llama, tokens=tokens) for tokens in (1, 2, 3, 17)]
    trees = spans_of(receiver, answers)
    counts = [sum(span["name"] == "decode step" for span in trees[answer.trace_id]) for answer in answers]
    assert counts == [0, 1, 2, 16]
    assert [len(answer.chunks) for answer in answers] == [1, 2, 3, 17]
