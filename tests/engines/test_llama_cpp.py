"""llama-cpp-python: each pass over the model is a step of its completion, whoever asks for the tokens; embeddings; drafts."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otel_infer import semconv
from otel_infer.instrumentation import llama_cpp as hooks
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from tests.engines.conftest import Serve, describe, install
from tests.support.rings import Recording, stages_of

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
PROMPT = "why is the sky blue? because of the air in between us and the sun. " * 3


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with install(hooks.instrumentor):
        yield


def load(gguf_path: Path, **settings: Any) -> Any:
    return llama_cpp.Llama(str(gguf_path), n_ctx=256, n_batch=32, n_threads=1, verbose=False, **settings)


@pytest.fixture
def llama(gguf_path: Path) -> Any:
    return load(gguf_path)


def tokens_of(record: Any) -> tuple[int, int]:
    """Returns the tokens of the prompt and of the completion."""
    return record.input_tokens, record.output_tokens


COMPLETION = ["ingress", "tokenize", "queue", "prefill", "decode"]


def test_a_completion_has_each_pass_as_a_step(llama: Any, recording: Recording, serve: Serve) -> None:
    with serve():
        usage = llama.create_completion(PROMPT, max_tokens=5)["usage"]
    (record,) = recording.records()
    assert describe(record) == ("text_completion", "llama-cpp-python", "tiny-llama")
    assert (stages_of(record), record.finish_reasons) == (COMPLETION, ("length",))
    assert tokens_of(record) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert [step.tokens for step in record.prefill_steps] == [32, 32, usage["prompt_tokens"] - 64]
    assert len(record.steps) == usage["completion_tokens"]  # the last chunk of the prompt brings the first


def test_a_stream_is_followed_into_other_threads(llama: Any, recording: Recording, serve: Serve) -> None:
    items: list[Any] = []
    with serve():
        stream = llama.create_completion(PROMPT, max_tokens=4, stream=True)
        for _ in range(6):
            thread = threading.Thread(target=lambda: items.append(next(stream, None)))
            thread.start()
            thread.join()
    (record,) = [record for record in recording.records() if record.engine]
    assert record.output_tokens == 4
    assert [bool(item) for item in items] == [True] * 5 + [False]


def test_a_stream_that_is_left_is_aborted(llama: Any, recording: Recording) -> None:
    stream = llama.create_completion(PROMPT, max_tokens=50, stream=True)
    next(stream)
    next(stream)
    stream.close()
    (record,) = recording.records()
    assert (record.outcome, record.finish_reasons) == (events.ABORTED, ("abort",))
    assert record.output_tokens >= 2


def test_a_completion_without_a_request_is_one(llama: Any, recording: Recording) -> None:
    llama.create_completion(PROMPT, max_tokens=3)
    (record,) = recording.records()
    assert (record.name, stages_of(record)) == ("text_completion tiny-llama", COMPLETION[1:])


def test_a_chat_is_named_chat(llama: Any, recording: Recording) -> None:
    llama.create_chat_completion([{"role": "user", "content": "why?"}], max_tokens=3)
    (record,) = recording.records()
    assert (record.name, record.output_tokens) == ("chat tiny-llama", 3)


def test_a_chat_of_several_completions_is_one_request(llama: Any, recording: Recording) -> None:
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    llama.chat_format = "chatml-function-calling"
    llama.create_chat_completion(
        [{"role": "user", "content": "why?"}], tools=[tool], tool_choice="auto", max_tokens=3
    )
    (record,) = recording.records()
    assert (record.name, record.outcome) == ("chat tiny-llama", events.OK)


def test_a_chat_begins_with_its_template(llama: Any, recording: Recording) -> None:
    with pytest.raises(Exception) as raised:
        llama.create_chat_completion([{"role": "user"}])
    list(llama.create_chat_completion([{"role": "user", "content": "why?"}], max_tokens=3, stream=True))
    failed, streamed = recording.records()
    assert (failed.outcome, failed.error_type) == (events.ERROR, type(raised.value).__qualname__)
    assert (streamed.outcome, streamed.output_tokens) == (events.OK, 3)
    assert stages_of(streamed) == ["tokenize", "queue", "prefill", "decode"]


def test_the_prompt_of_a_second_completion_is_prefill(llama: Any, recording: Recording, serve: Serve) -> None:
    with serve():
        llama.create_completion("why", max_tokens=3)
        second = llama.create_completion(PROMPT, max_tokens=3)["usage"]
    (record,) = recording.records()
    chunks = list(record.later_prefill_tokens.values())
    assert chunks[:2] == [32, 32]
    assert sum(chunks) >= second["prompt_tokens"] - 3  # all but what both prompts begin with
    assert record.generation_gaps[0].scheduled_at > 0


def test_a_prompt_that_is_known_completely_has_its_first_token(llama: Any, recording: Recording) -> None:
    for most in (1, 1, 4):
        llama.create_completion(PROMPT, max_tokens=most)
    records = recording.records()
    assert [record.output_tokens for record in records] == [1, 1, 4]
    assert records[1].cached_input_tokens == records[2].cached_input_tokens == records[1].input_tokens
    assert [len(record.steps) for record in records] == [1, 1, 4]


def test_tokens_of_an_iterator_are_a_prompt(llama: Any, recording: Recording) -> None:
    prompt = llama.tokenize(b"why is the sky blue?")
    stream = llama.generate(iter(prompt))
    next(stream)
    stream.close()
    (record,) = recording.records()
    assert tokens_of(record) == (len(prompt), 1)


def test_a_model_inside_of_a_generation_is_a_part_of_it(
    gguf_path: Path, llama: Any, recording: Recording
) -> None:
    judge = load(gguf_path)

    def is_enough(tokens: Any, logits: Any) -> bool:
        judge.create_completion("why", max_tokens=1)
        judge.eval([1, 2])
        return False

    criteria = llama_cpp.StoppingCriteriaList([is_enough])
    usage = llama.create_completion(PROMPT, max_tokens=4, stopping_criteria=criteria)["usage"]
    (record,) = recording.records()
    assert tokens_of(record) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (len(record.steps), record.finish_reasons) == (4, ("length",))


def test_a_refused_prompt_of_a_server_is_its_error(llama: Any, recording: Recording, serve: Serve) -> None:
    with pytest.raises(ValueError, match="exceed"), serve():
        llama.create_completion(PROMPT * 20, max_tokens=3)
    (record,) = recording.records()
    assert describe(record) == ("text_completion", "llama-cpp-python", "tiny-llama")
    assert record.error_type == "ValueError"


def test_tokens_that_are_generated_directly_are_steps(llama: Any, recording: Recording) -> None:
    prompt = llama.tokenize(b"why is the sky blue?")
    for number, _ in enumerate(llama.generate(prompt), 1):
        if number == 4:
            break
    (record,) = recording.records()
    assert (record.output_tokens, record.input_tokens, len(record.steps)) == (4, len(prompt), 4)


def test_a_stream_that_is_never_read_is_no_request(llama: Any, recording: Recording) -> None:
    llama.generate([1, 2, 3])
    llama.create_completion(PROMPT, stream=True)
    assert (recording.records(), recording.in_flight) == ([], 0)


def test_a_known_prefix_is_not_computed_again(llama: Any, recording: Recording) -> None:
    llama.create_completion(PROMPT, max_tokens=1)
    llama.create_completion(PROMPT + " and why?", max_tokens=1)
    first, second = recording.records()
    assert (first.cached_tokens, second.prefix_tokens) == (0, second.input_tokens)
    computed = sum(step.tokens for step in second.prefill_steps)
    assert computed == second.input_tokens - second.cached_tokens < 20


def test_drafted_tokens_come_several_in_a_step(gguf_path: Path, recording: Recording) -> None:
    from llama_cpp.llama_speculative import LlamaDraftModel

    plain = load(gguf_path)
    prompt = plain.tokenize(PROMPT.encode())
    known = prompt + list(itertools.islice(plain.generate(prompt, temp=0), 12))
    gc.collect()
    recording.records()

    class Guess(LlamaDraftModel):  # type: ignore[misc]
        """Two tokens that the model chooses, and one that it does not."""

        def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
            right = known[len(input_ids) : len(input_ids) + 2]
            return np.array([*right, 3 if known[-1] != 3 else 4], dtype=np.intc)

    llama = load(gguf_path, draft_model=Guess(), logits_all=True)
    usage = llama.create_completion(PROMPT, max_tokens=12, temperature=0)["usage"]
    (record,) = recording.records()
    assert record.output_tokens == usage["completion_tokens"] == 12
    assert record.drafted_tokens > record.accepted_tokens > 0
    assert len(record.steps) + record.accepted_tokens == 12


def test_embeddings_are_one_stage(gguf_path: Path, recording: Recording, serve: Serve) -> None:
    llama = load(gguf_path, embedding=True)
    with serve():
        llama.create_embedding(["why", "is the sky", "blue"])
    (record,) = recording.records()
    assert describe(record) == ("embeddings", "llama-cpp-python", "tiny-llama")
    assert (stages_of(record), record.stages[1].attributes) == (["ingress", "forward"], {semconv.ITEMS: 3})


def test_a_refused_completion_keeps_its_exception(llama: Any, recording: Recording) -> None:
    with pytest.raises(ValueError, match="exceed context window") as raised:
        llama.create_completion(PROMPT * 9)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, type(raised.value).__qualname__)


def test_a_failed_pass_keeps_its_exception(
    llama: Any, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_cpp import llama_cpp as compiled

    monkeypatch.setattr(compiled, "llama_decode", lambda *args: 1)
    with pytest.raises(RuntimeError, match="llama_decode returned 1"):
        llama.create_completion(PROMPT)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "RuntimeError")


def test_the_load_of_a_model_is_a_phase_of_the_start(gguf_path: Path, recording: Recording) -> None:
    recorder.ensure_rings()
    load(gguf_path)
    (phase,) = [event for event in recording.events() if type(event) is events.PhaseEnded]
    assert phase[2:] == ("weights", "llama-cpp-python", "tiny-llama", "")


def test_a_generation_that_is_dropped_after_its_model_reads_none_of_it(
    llama: Any, recording: Recording
) -> None:
    stream = llama.generate(llama.tokenize(PROMPT.encode()))
    next(stream)
    llama.close()
    del stream
    gc.collect()
    (record,) = recording.records()
    assert (record.outcome, record.output_tokens) == (events.OK, 1)


def test_an_exhausted_stream_keeps_no_model(gguf_path: Path, recording: Recording) -> None:
    llama = load(gguf_path)
    stream = llama.create_completion(PROMPT, max_tokens=2, stream=True)
    chat = llama.create_chat_completion([{"role": "user", "content": "why"}], max_tokens=2, stream=True)
    assert [bool(list(each)) for each in (stream, chat)] == [True, True]
    model = weakref.ref(llama)
    del llama
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("items", [[{"error": "refused"}], ["no", "chunks"], [{"choices": []}]], ids=repr)
def test_a_chat_handlers_own_items_end_no_recording(
    llama: Any, recording: Recording, items: list[Any]
) -> None:
    llama.chat_handler = lambda **_: iter(items)
    message = [{"role": "user", "content": "why"}]
    assert list(llama.create_chat_completion(message, stream=True)) == items
    llama.chat_handler = None
    llama.create_chat_completion(message, max_tokens=1)
    assert hooks.instrumentor.status.hooks_active == hooks.instrumentor.status.hooks_due
    assert [describe(record)[0] for record in recording.records()] == ["chat", "chat"]


def test_a_chat_handler_that_begins_with_its_first_item_is_a_chat(
    llama: Any, recording: Recording, serve: Serve
) -> None:
    def handle(**_: Any) -> Iterator[Any]:
        yield from llama.create_completion(PROMPT, max_tokens=2, stream=True)

    llama.chat_handler = handle
    with serve():
        list(llama.create_chat_completion([{"role": "user", "content": "why"}], stream=True))
    (record,) = recording.records()
    assert describe(record) == ("chat", "llama-cpp-python", "tiny-llama")


def test_a_chat_handlers_own_iterator_is_returned(llama: Any, recording: Recording) -> None:
    class Items:
        usage = 3

        def __iter__(self) -> Items:
            return self

        def __next__(self) -> Any:
            raise StopIteration

    llama.chat_handler = lambda **_: Items()
    assert llama.create_chat_completion([{"role": "user", "content": "why"}], stream=True).usage == 3


def test_a_context_before_the_prompt_is_no_part_of_it(llama: Any, recording: Recording) -> None:
    tokens = llama.tokenize(PROMPT.encode())
    llama.eval(tokens)
    next(llama.generate(tokens[:10], reset=False))
    gc.collect()
    (record,) = recording.records()
    assert (record.input_tokens, record.cached_tokens) == (10, 0)
