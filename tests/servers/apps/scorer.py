"""A small classifier, as all applications here call it, and what they answer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

CHUNKS = 3
PAUSE_S = 0.3
"""Between the chunks of `/slow`."""
WAIT_S = 1.0
"""Before the answer of `/wait`."""


class Scorer(torch.nn.Module):
    """A layer. `eval` is called as applications do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)


scorer = Scorer().eval()


def score(rows: int = 2) -> list[list[float]]:
    """Returns scores of some rows."""
    with torch.inference_mode():
        return scorer(torch.ones(rows, 16)).tolist()  # type: ignore[no-any-return]


def stream(pause_s: float = 0.0) -> Iterator[bytes]:
    """Yields chunks, each after a call of the model."""
    for number in range(CHUNKS):
        score(1)
        time.sleep(pause_s)
        yield f"{number}\n".encode()
