"""LitServe and a small classifier, which is called for batches. LitServe reads annotations, so they must not be strings."""

import sys
from typing import Any

import litserve

from benchmarks.whole.programs.bert import classify_texts

MAX_ITEMS, WAIT_S = 16, 0.010


class Classifier(litserve.LitAPI):  # type: ignore[misc]
    """Classifies texts."""

    def setup(self, device: str) -> None:
        """Needs no device."""

    def decode_request(self, request: dict[str, Any]) -> str:
        """Returns the text of a request."""
        return str(request["text"])

    def batch(self, inputs: list[str]) -> list[str]:
        """Returns the batch as `predict` takes it."""
        return inputs

    def predict(self, texts: list[str]) -> list[int]:
        """Returns the classes of a batch."""
        return classify_texts(texts)

    def unbatch(self, output: list[int]) -> list[int]:
        """Returns the class of each request."""
        return output

    def encode_response(self, output: int) -> dict[str, int]:
        """Returns the answer."""
        return {"label": output}


if __name__ == "__main__":
    server = litserve.LitServer(
        Classifier(max_batch_size=MAX_ITEMS, batch_timeout=WAIT_S, api_path="/classify"),
        accelerator="cpu",
    )
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
