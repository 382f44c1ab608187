"""A small decoder on a GPU, whose step can be captured as a CUDA graph: what `gpu_verify` times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Step = Callable[[], None]
VOCABULARY, CONTEXT = 32000, 1024


class Decoder:
    """A Llama-like model of random bf16 weights with a KV cache for `batch` rows."""

    def __init__(self, layers: int, batch: int, hidden: int = 2048, heads: int = 16) -> None:
        torch.manual_seed(0)
        self.batch, self.hidden, self.heads = batch, hidden, heads
        inner = 11 * hidden // 4
        self._layers = [
            {
                "qkv": self._weights(3 * hidden, hidden),
                "out": self._weights(hidden, hidden),
                "up": self._weights(2 * inner, hidden),
                "down": self._weights(hidden, inner),
                "norm": torch.ones(hidden, device="cuda", dtype=torch.bfloat16),
            }
            for _ in range(layers)
        ]
        self._embedding = self._weights(VOCABULARY, hidden)
        shape = (layers, batch, heads, CONTEXT, hidden // heads)
        self._keys, self._values = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._places = torch.arange(CONTEXT, device="cuda")
        self._next = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
        self._at = torch.tensor([300], device="cuda")

    def _weights(self, *shape: int) -> Any:
        return (torch.randn(*shape, device="cuda") * 0.02).to(torch.bfloat16)

    def forward(self, ids: Any, at: Any) -> Any:
        """The next token of each row, for `ids` (batch, tokens) at these places."""
        x, tokens = functional.embedding(ids, self._embedding), ids.shape[1]
        mask = (self._places[None, :] <= at[:, None])[None, None]
        for layer, of in enumerate(self._layers):
            hidden = functional.rms_norm(x, (self.hidden,), of["norm"])
            qkv = functional.linear(hidden, of["qkv"]).view(self.batch, tokens, 3, self.heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            self._keys[layer].index_copy_(2, at, key)
            self._values[layer].index_copy_(2, at, value)
            seen = functional.scaled_dot_product_attention(
                query, self._keys[layer], self._values[layer], attn_mask=mask
            )
            joined = seen.transpose(1, 2).reshape(self.batch, tokens, self.hidden)
            x = x + functional.linear(joined, of["out"])
            up, gate = functional.linear(functional.rms_norm(x, (self.hidden,), of["norm"]), of["up"]).chunk(
                2, -1
            )
            x = x + functional.linear(functional.silu(gate) * up, of["down"])
        return functional.linear(x[:, -1], self._embedding).argmax(-1)

    def prefill(self, tokens: int = 256) -> Step:
        """A prompt of so many tokens."""
        ids = torch.randint(0, VOCABULARY, (self.batch, tokens), device="cuda")
        at = torch.arange(tokens, device="cuda")
        return lambda: self.forward(ids, at)

    def eager(self) -> Step:
        """A decode step, kernel by kernel."""

        def step() -> None:
            self._next.copy_(self.forward(self._next, self._at)[:, None])

        return step

    def graph(self) -> Step:
        """The same as a captured graph."""
        step, side = self.eager(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        return captured.replay

    def token(self) -> int:
        """Waits for the device, as an engine does for its tokens."""
        return int(self._next[0, 0].item())
