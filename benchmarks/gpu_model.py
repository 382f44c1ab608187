"""A small decoder on a GPU for `gpu_verify`. Its step can be captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Step = Callable[[], None]
VOCABULARY, CONTEXT = 32000, 1024


class Decoder:
    """A Llama-like model with random bf16 weights and a KV cache of `batch` rows."""

    def __init__(self, layers: int, batch: int, hidden: int = 2048, heads: int = 16) -> None:
        torch.manual_seed(0)
        self.batch, self.hidden, self.heads = batch, hidden, heads
        inner = 11 * hidden // 4
        self._layers = [
            {
                "qkv": self._make_weights(3 * hidden, hidden),
                "out": self._make_weights(hidden, hidden),
                "up": self._make_weights(2 * inner, hidden),
                "down": self._make_weights(hidden, inner),
                "norm": torch.ones(hidden, device="cuda", dtype=torch.bfloat16),
            }
            for _ in range(layers)
        ]
        self._embedding = self._make_weights(VOCABULARY, hidden)
        shape = (layers, batch, heads, CONTEXT, hidden // heads)
        self._keys, self._values = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._positions = torch.arange(CONTEXT, device="cuda")
        self._next = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
        self._at = torch.tensor([300], device="cuda")

    def _make_weights(self, *shape: int) -> Any:
        return (torch.randn(*shape, device="cuda") * 0.02).to(torch.bfloat16)

    def run_forward(self, ids: Any, at: Any) -> Any:
        """Returns the next token of each row, for `ids` (batch, tokens) at these positions."""
        x, tokens = functional.embedding(ids, self._embedding), ids.shape[1]
        mask = (self._positions[None, :] <= at[:, None])[None, None]
        for number, layer in enumerate(self._layers):
            hidden = functional.rms_norm(x, (self.hidden,), layer["norm"])
            qkv = functional.linear(hidden, layer["qkv"]).view(self.batch, tokens, 3, self.heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            self._keys[number].index_copy_(2, at, key)
            self._values[number].index_copy_(2, at, value)
            attended = functional.scaled_dot_product_attention(
                query, self._keys[number], self._values[number], attn_mask=mask
            )
            joined = attended.transpose(1, 2).reshape(self.batch, tokens, self.hidden)
            x = x + functional.linear(joined, layer["out"])
            up, gate = functional.linear(
                functional.rms_norm(x, (self.hidden,), layer["norm"]), layer["up"]
            ).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        return functional.linear(x[:, -1], self._embedding).argmax(-1)

    def make_prefill(self, tokens: int = 256) -> Step:
        """Returns a step with a prompt of this many tokens."""
        ids = torch.randint(0, VOCABULARY, (self.batch, tokens), device="cuda")
        at = torch.arange(tokens, device="cuda")
        return lambda: self.run_forward(ids, at)

    def make_eager(self) -> Step:
        """Returns a decode step, launched kernel by kernel."""

        def step() -> None:
            self._next.copy_(self.run_forward(self._next, self._at)[:, None])

        return step

    def make_graph(self) -> Step:
        """Returns a decode step as a captured graph."""
        step, side = self.make_eager(), torch.cuda.Stream()
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

    def wait_for_token(self) -> int:
        """Waits for the device and returns a token, as an engine does."""
        return int(self._next[0, 0].item())
