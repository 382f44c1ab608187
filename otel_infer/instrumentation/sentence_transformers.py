"""Records calls of sentence-transformers' models: `encode` serves embeddings, `predict` and `rank` rerank.

    SentenceTransformer.encode ─▶ preprocess ─ forward, for each batch ─▶ stages `tokenize`, `forward`

The tokenizer is transformers', and the forward pass torch's: their instrumentations record the stages. Other backends run
below `forward` as well. Read and run: 6.2.
"""

from __future__ import annotations

import sys
from typing import Any

from otel_infer.instrumentation.hooks.engines import read_model_name
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.model_calls import ModelLibrary, count_rows, wrap_call
from otel_infer.ringbuffer import events
from otel_infer.tracing import start

PROVIDER = events.SENTENCE_TRANSFORMERS

instrumentor = Instrumentor(
    "sentence_transformers", "sentence-transformers", ("sentence_transformers",), is_engine=True
)


def read_model(model: Any) -> str:
    """Returns the served name: of the transformer inside, else the class of the model."""
    first = next(iter(model.children()), model)
    inner = getattr(first, "auto_model", None) or getattr(first, "model", None)
    return read_model_name(model if inner is None else inner)


EMBEDDINGS = ModelLibrary(PROVIDER, read_model, events.OPERATION_EMBEDDINGS, has_stages=True)
RERANK = ModelLibrary(PROVIDER, read_model, events.OPERATION_RERANK, has_stages=True)
_FORWARD = ModelLibrary(PROVIDER, read_model)


def _find_forward(_: Any) -> ModelLibrary | None:
    """Returns None for a step of a training: with gradients and outside of requests, as for models of torch."""
    is_training = sys.modules["torch"].is_grad_enabled() and start.current_request() is None
    return None if is_training else _FORWARD


for _library, _target in (
    (EMBEDDINGS, "sentence_transformer.model:SentenceTransformer.encode"),
    (EMBEDDINGS, "sparse_encoder.model:SparseEncoder.encode"),
    (EMBEDDINGS, "multi_vector_encoder.model:MultiVectorEncoder.encode"),
    (RERANK, "cross_encoder.model:CrossEncoder.predict"),
    (RERANK, "cross_encoder.model:CrossEncoder.rank"),
    (_find_forward, "base.model:BaseModel.forward"),
):
    instrumentor.patch_hot_path(f"sentence_transformers.{_target}", optional=True)(
        wrap_call(_library, count_rows)
    )
