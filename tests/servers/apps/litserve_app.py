"""LitServe: a classifier without and with batching. `python -m tests.servers.apps.litserve_app PORT`."""

import sys
from typing import Any

import litserve
import torch

from tests.servers.apps.scorer import Scorer


class ScorerAPI(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = Scorer().eval()

    def decode_request(self, request: dict) -> torch.Tensor:
        return torch.ones(16) * request["value"]

    def predict(self, x: Any) -> Any:
        with torch.inference_mode():
            return self.model(x.reshape(-1, 16)).sum(dim=1)

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(inputs)

    def unbatch(self, output: torch.Tensor) -> list[torch.Tensor]:
        return list(output)

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"output": float(output.sum())}


class StreamAPI(ScorerAPI):
    def predict(self, x: Any) -> Any:
        for _ in range(3):
            yield super().predict(x)

    def encode_response(self, output: Any) -> Any:
        for each in output:
            yield super().encode_response(each)


if __name__ == "__main__":
    apis = [
        ScorerAPI(api_path="/single"),
        ScorerAPI(api_path="/batched", max_batch_size=4, batch_timeout=0.05),
        StreamAPI(api_path="/stream", stream=True),
    ]
    litserve.LitServer(apis, accelerator="cpu", workers_per_device=1).run(
        port=int(sys.argv[1]), generate_client_file=False, num_api_servers=1
    )
