"""sentence-transformers: `encode` serves embeddings and `predict` reranks, with the tokenizer and each batch as stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from otel_infer import semconv
from otel_infer.instrumentation import sentence_transformers as hooks
from otel_infer.instrumentation import transformers as transformers_hooks
from otel_infer.instrumentation.torch import forward as torch_hooks
from otel_infer.ringbuffer import events
from tests.engines.conftest import Serve, describe, install
from tests.support.rings import Recording, stages_of

library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
TEXTS = ["why is the sky blue", "because of the air", "the sea is green"]
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[0], TEXTS[2])]
INSTRUMENTORS = torch_hooks.instrumentor, transformers_hooks.instrumentor, hooks.instrumentor


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with install(*INSTRUMENTORS):
        yield


@pytest.fixture
def encoder(tiny_encoder: Path) -> Any:
    return library.SentenceTransformer(str(tiny_encoder), device="cpu")


@pytest.fixture
def reranker(tiny_encoder: Path) -> Any:
    return library.CrossEncoder(str(tiny_encoder), num_labels=1, device="cpu")


def test_encode_tokenizes_and_computes_each_batch(encoder: Any, recording: Recording, serve: Serve) -> None:
    with serve():
        encoder.encode(TEXTS, batch_size=2)
    (record,) = recording.records()
    assert describe(record) == ("embeddings", "sentence-transformers", "tiny-encoder")
    assert stages_of(record) == ["ingress", "tokenize", "forward", "tokenize", "forward"]
    batches = [stage.attributes[semconv.ITEMS] for stage in record.stages if stage.name == "forward"]
    assert batches == [2, 1]


def test_encode_without_a_request_is_one(encoder: Any, recording: Recording) -> None:
    encoder.encode(TEXTS)
    (record,) = recording.records()
    assert record.name == "embeddings tiny-encoder"
    assert stages_of(record) == ["tokenize", "forward"]


def test_a_query_is_one_request(encoder: Any, recording: Recording) -> None:
    encoder.encode_query(TEXTS[0])
    assert [stages_of(record) for record in recording.records()] == [["tokenize", "forward"]]


@pytest.mark.parametrize("way", ["predict", "rank"])
def test_a_cross_encoder_reranks(reranker: Any, recording: Recording, way: str) -> None:
    if way == "predict":
        reranker.predict(PAIRS)
    else:
        reranker.rank(TEXTS[0], TEXTS[1:])
    (record,) = recording.records()
    assert describe(record) == ("rerank", "sentence-transformers", "tiny-encoder")
    *tokenized, computed = stages_of(record)  # the tokenizer is called for the parts of pairs as well
    assert (set(tokenized), computed) == ({"tokenize"}, "forward")


def test_a_forward_that_is_called_as_a_method_is_a_stage(encoder: Any, recording: Recording) -> None:
    features = encoder.preprocess(TEXTS)
    recording.records()
    with torch.no_grad():
        encoder.forward(features)
    (record,) = recording.records()
    assert (describe(record), stages_of(record)) == (
        ("inference", "sentence-transformers", "tiny-encoder"),
        ["forward"],
    )


def test_a_step_of_a_training_is_no_inference(encoder: Any, recording: Recording, serve: Serve) -> None:
    features = encoder.preprocess(TEXTS)
    recording.records()
    encoder.train()(features)["sentence_embedding"].sum().backward()
    assert recording.records() == []
    with serve():
        encoder.forward(features)
    assert [stages_of(record) for record in recording.records()] == [["ingress", "forward"]]


def test_a_failed_encode_keeps_its_exception(encoder: Any, recording: Recording) -> None:
    with pytest.raises(ValueError) as raised:
        encoder.encode(TEXTS, precision="int3")
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, type(raised.value).__qualname__)
