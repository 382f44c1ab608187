"""SGLang on a CPU, its kernels replaced: a request is one tree over API server and scheduler, with every batch as a step."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from otel_infer import semconv
from tests.engines.sglang_on_cpu.torchvision_operators import declare_operators
from tests.instrumentation.sglang.releases import LIBRARY
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import Answer, make_ids, send
from tests.servers.serving import start_command, stop_module
from tests.support import releases
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.toy_server import RUN as LAUNCHER
from tests.support.toy_server import wait_until
from tests.support.trees import tree

if importlib.util.find_spec("sglang") is None:  # its import needs the replacements
    pytest.skip("sglang is not installed", allow_module_level=True)
declare_operators()
pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ENVIRON = {
    "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{HERE / 'sglang_on_cpu'}{os.pathsep}{ROOT}",
}  # fmt: skip
TEXT, CHAT, NATIVE, EMBED = "/v1/completions", "/v1/chat/completions", "/generate", "/v1/embeddings"
PROMPT = "why is the sky blue?"
TOKENS, RUNNING = 5, 2
"""Tokens of a completion, and requests that run at once."""


class Served(NamedTuple):
    server: Server
    receiver: OtlpReceiver

    def ask(self, path: str = TEXT, tokens: int = TOKENS, prompt: str = PROMPT, **fields: Any) -> Answer:
        question: dict[str, Any] = {"model": "tiny-llama", "max_tokens": tokens, "prompt": prompt}
        if path == CHAT:
            question = {
                "model": "tiny-llama",
                "max_tokens": tokens,
                "messages": [{"role": "user", "content": prompt}],
            }
        elif path == NATIVE:
            question = {"text": prompt, "sampling_params": {"max_new_tokens": tokens}}
        elif path == EMBED:
            question = {"model": "tiny-llama", "input": prompt}
        return send(self.server.port, "POST", path, json.dumps({**question, **fields}).encode())

    def spans(self, answer: Answer) -> list[dict[str, Any]]:
        return spans_of(self.receiver, answer.trace_id, "prefill")

    def lines(self, answer: Answer) -> list[str]:
        return tree(self.spans(answer), answer.parent_id)


def command(model: Path, *options: str) -> tuple[str, ...]:
    return (
        "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", "tiny-llama", "--device", "cpu",
        "--host", "127.0.0.1", "--port", "{port}", "--mem-fraction-static", "0.1", "--attention-backend", "torch_native",
        "--sampling-backend", "pytorch", "--max-total-tokens", "2048", "--context-length", "512", "--max-running-requests",
        str(RUNNING), *options,
    )  # fmt: skip


def serve(model: Path, folder: Path, *options: str, **variables: str) -> Iterator[Served]:
    with OtlpReceiver() as receiver:
        started = start_command(
            command(model, *options), receiver, folder / "log", "/health", **ENVIRON, **variables
        )
        yield Served(started, receiver)
        stop_module(started)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Served]:
    yield from serve(tiny_llama, tmp_path_factory.mktemp("sglang"))


def draw(path: str, request: str, steps: int = TOKENS - 1) -> list[str]:
    return [
        f"POST {path}", f"  {request}", "    ingress", "    tokenize", "    queue", "    prefill", "    decode",
        f"      decode step ×{steps}", "    postprocess",
    ]  # fmt: skip


def find(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (span,) = [span for span in spans if span["name"] == name]
    return span


@pytest.mark.parametrize(("path", "operation"), [(TEXT, "text_completion"), (NATIVE, "text_completion")])
def test_a_completion_is_a_child_of_its_caller(served: Served, path: str, operation: str) -> None:
    answer = served.ask(path)
    assert served.lines(answer) == draw(path, f"{operation} tiny-llama")


def test_a_chat_is_named_chat_and_its_template_is_tokenized(served: Served) -> None:
    lines = served.lines(served.ask(CHAT))
    assert [line for line in lines if line != "    tokenize"] == [
        line for line in draw(CHAT, "chat tiny-llama") if line != "    tokenize"
    ]


def test_tokens_are_those_that_the_server_reports(served: Served) -> None:
    answer = served.ask(prompt="one two three four", tokens=9)
    usage = json.loads(answer.body)["usage"]
    request = find(served.spans(answer), "text_completion tiny-llama")["attributes"]
    assert request[semconv.USAGE_INPUT_TOKENS] == usage["prompt_tokens"]
    assert request[semconv.USAGE_OUTPUT_TOKENS] == usage["completion_tokens"] == 9


def test_a_stream_has_its_steps_and_its_first_token(served: Served) -> None:
    answer = served.ask(stream=True)
    assert answer.body.rstrip().endswith(b"data: [DONE]")
    assert served.lines(answer) == draw(TEXT, "text_completion tiny-llama")
    assert semconv.TTFT in find(served.spans(answer), "text_completion tiny-llama")["attributes"]


def test_a_known_prefix_is_read_from_the_radix_cache(served: Served) -> None:
    long = "the air and the sun and the sea and the sky " * 8
    served.ask(prompt=long)
    request = find(served.spans(served.ask(prompt=long)), "text_completion tiny-llama")["attributes"]
    assert 0 < request[semconv.USAGE_CACHE_READ] < request[semconv.USAGE_INPUT_TOKENS]


def test_requests_that_do_not_run_wait_in_the_queue_and_share_batches(served: Served) -> None:
    before = counted(served.receiver)
    answers = ask_together(served, 3 * RUNNING, 60)
    waits, sizes = [], []
    for answer in answers:
        spans = served.spans(answer)
        waits.append(find(spans, "queue")["attributes"][semconv.QUEUE_SCHEDULER])
        sizes.append(find(spans, "decode")["attributes"][semconv.BATCH_SIZE_MAX])
    assert max(waits) > 0.05 and max(sizes) == RUNNING
    assert served.receiver.wait_for(lambda it: counted(it) == before + len(answers), 10)


def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    trace_id, _, header = make_ids()
    connection = http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=30)
    body = json.dumps({"model": "tiny-llama", "prompt": PROMPT, "max_tokens": 400, "stream": True}).encode()
    connection.request("POST", TEXT, body, {"traceparent": header, "content-type": "application/json"})
    connection.getresponse().read(200)
    connection.close()
    spans = spans_of(served.receiver, trace_id, "prefill")
    request = find(spans, "text_completion tiny-llama")["attributes"]
    assert request[semconv.ERROR_TYPE] == semconv.ERROR_CLIENT_DISCONNECT
    assert 0 < request[semconv.USAGE_OUTPUT_TOKENS] < 400


def test_a_prompt_that_is_refused_is_no_inference_of_the_engine(served: Served) -> None:
    answer = served.ask(prompt="word " * 2000)
    assert answer.status == 400
    lines = tree(spans_of(served.receiver, answer.trace_id), answer.parent_id)
    assert not any("decode" in line for line in lines)


def test_a_prompt_that_is_refused_in_a_stream_is_no_inference(served: Served) -> None:
    answer = served.ask(NATIVE, prompt="word " * 2000, stream=True)
    assert answer.status == 200
    lines = tree(spans_of(served.receiver, answer.trace_id), answer.parent_id)
    assert not any("text_completion" in line for line in lines)


def test_several_answers_to_a_prompt_are_its_sequences(served: Served) -> None:
    answer = served.ask(NATIVE, tokens=6, sampling_params={"n": 3, "max_new_tokens": 6, "temperature": 0})
    answers = json.loads(answer.body)
    reported = sum(each["meta_info"]["completion_tokens"] for each in answers)
    request = find(served.spans(answer), "text_completion tiny-llama")["attributes"]
    assert (request[semconv.USAGE_OUTPUT_TOKENS], request[semconv.SEQUENCES]) == (reported, 3)
    assert request[semconv.USAGE_INPUT_TOKENS] == answers[0]["meta_info"]["prompt_tokens"]
    assert len(request[semconv.RESPONSE_FINISH_REASONS]) == 3


def test_a_prompt_without_an_answer_has_no_token(served: Served) -> None:
    answer = served.ask(NATIVE, sampling_params={"max_new_tokens": 0})
    request = find(served.spans(answer), "text_completion tiny-llama")["attributes"]
    assert not request.get(semconv.USAGE_OUTPUT_TOKENS)


def ask_together(served: Served, count: int, tokens: int) -> list[Answer]:
    """Returns the answers to requests that are sent at once."""
    answers: list[Answer] = []

    def ask(number: int) -> None:
        answers.append(served.ask(tokens=tokens, prompt=f"{number} {PROMPT}"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_a_retracted_request_is_preempted(tmp_path: Path, tiny_llama: Path) -> None:
    retracting = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    for served in serve(tiny_llama, tmp_path, **retracting):
        spans = [served.spans(answer) for answer in ask_together(served, RUNNING, 40)]
        requests = [find(each, "text_completion tiny-llama")["attributes"] for each in spans]
        assert max(request.get(semconv.PREEMPTIONS, 0) for request in requests) >= 1
        assert [request[semconv.USAGE_OUTPUT_TOKENS] for request in requests] == [40] * RUNNING


def test_a_stalled_step_is_one_of_exactly_its_members(tmp_path: Path, tiny_llama: Path) -> None:
    stall = tmp_path / "stall"
    stalling = {"DELAY": "batch", "DELAY_S": "0.5", "DELAY_FILE": str(stall)}
    for served in serve(tiny_llama, tmp_path, **stalling):
        before = served.ask(tokens=20)
        stalls = threading.Timer(
            0.4, stall.touch
        )  # the next decode batch removes it: those that run are in the middle
        stalls.start()
        answers = ask_together(served, RUNNING + 1, 200)
        after = served.ask(tokens=20)
        lengths = sorted(longest_step(served.spans(answer)) for answer in (before, after, *answers))
        assert not stall.exists() and lengths[-RUNNING] >= 500
        assert lengths[-RUNNING - 1] < 400


def longest_step(spans: list[dict[str, Any]]) -> float:
    """Returns the length of the longest decode step, ms."""
    return max((span["end"] - span["start"]) / 1e6 for span in spans if span["name"] == "decode step")


def test_an_embedding_is_one_pass(tmp_path: Path, tiny_llama: Path) -> None:
    for served in serve(tiny_llama, tmp_path, "--is-embedding"):
        answer = served.ask(EMBED)
        assert answer.status == 200
        lines = served.lines(answer)
        assert lines[:2] == [f"POST {EMBED}", "  embeddings tiny-llama"]
        assert "    prefill" in lines and not any("decode" in line for line in lines)
        attributes = find(served.spans(answer), "embeddings tiny-llama")["attributes"]
        assert not attributes.get(semconv.USAGE_OUTPUT_TOKENS)
        assert semconv.TTFT not in attributes


OFFLINE = """
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path={model!r}, served_model_name="tiny-llama", device="cpu", mem_fraction_static=0.1,
        attention_backend="torch_native", sampling_backend="pytorch", max_total_tokens=2048, context_length=512,
    )
    engine.generate(["why?", "because"], {{"max_new_tokens": 4}})
    engine.generate("why is the sky blue?", {{"max_new_tokens": 5, "n": 3}})
    for number in (1, 2):
        try:
            engine.generate("word " * 2000, {{"max_new_tokens": 4, "n": number}})
        except ValueError:
            print("refused")
    engine.shutdown()
"""


def completions_of(receiver: OtlpReceiver) -> list[dict[str, Any]]:
    return [span for span in receiver.spans if span["name"] == "text_completion tiny-llama"]


def test_installed_hooks_bind_as_the_sources_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    assert releases.bound(LIBRARY) == releases.installed_binds(LIBRARY)


@pytest.mark.parametrize("launcher", [(), LAUNCHER], ids=["one-line", "otel-infer-run"])
def test_a_prompt_without_a_server_is_a_request(
    tmp_path: Path, tiny_llama: Path, launcher: tuple[str, ...]
) -> None:
    """With the line in the program, its sidecar is one of the children that the engine kills when it shuts down."""
    script = tmp_path / "offline.py"
    line = "" if launcher else "import otel_infer\notel_infer.instrument()\n"
    script.write_text(line + OFFLINE.format(model=str(tiny_llama)))
    with OtlpReceiver() as receiver:
        ended = subprocess.run(
            [*launcher, sys.executable, str(script)],
            env={**os.environ, **ENVIRON, **receiver.environ}, check=True, timeout=200, capture_output=True,
        )  # fmt: skip
        wait_until(lambda: len(completions_of(receiver)) >= 8)
        time.sleep(1)  # for spans that must not come
        spans = completions_of(receiver)
    assert b"refused" in ended.stdout
    requests = [span["attributes"] for span in spans]
    refused = [request for request in requests if semconv.ERROR_TYPE in request]
    assert [request[semconv.ERROR_TYPE] for request in refused] == [
        "ValueError"
    ] * 3  # offline each answer is one
    tokens = sorted(
        request[semconv.USAGE_OUTPUT_TOKENS] for request in requests if semconv.ERROR_TYPE not in request
    )
    assert tokens == [4, 4, 5, 5, 5]
