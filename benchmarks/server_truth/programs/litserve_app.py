"""LitServe with batching. It reads annotations at run time, so they must not be strings."""

import sys
from typing import Any

import litserve
import torch

from benchmarks.server_truth.programs import work


class API(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.model = work.model

    def decode_request(self, request: dict[str, Any]) -> torch.Tensor:
        return torch.ones(work.WIDTH)

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(inputs)

    def predict(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(rows).argmax(-1)

    def unbatch(self, output: torch.Tensor) -> list[int]:
        return output.tolist()

    def encode_response(self, output: int) -> dict[str, Any]:
        return work.finish([output])


if __name__ == "__main__":
    api = API(api_path="/classify", max_batch_size=work.MAX_BATCH, batch_timeout=work.window())
    server = litserve.LitServer([api], accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[1]), generate_client_file=False, num_api_servers=1)
