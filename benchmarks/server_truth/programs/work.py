"""The model of all servers, and the delay that is added to one of their stages.

DELAY names the stage: `queue wait`, `batch wait`, `forward` or `postprocess`; DELAY_S is its length.
"""

from __future__ import annotations

import os
import time

import torch

PLACE, DELAY_S = os.environ.get("DELAY", ""), float(os.environ.get("DELAY_S", "0.05"))
MAX_BATCH, WINDOW_S = 8, 0.01
WIDTH, LAYERS = 512, 6
torch.set_num_threads(1)


class Classifier(torch.nn.Module):
    """A network whose call takes some ms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        add_delay("forward")
        return self.layers(rows)


def add_delay(place: str) -> None:
    """Waits, if this is the stage that is delayed."""
    if place == PLACE:
        time.sleep(DELAY_S)


def window() -> float:
    """Returns how long a batcher waits for further items, s."""
    return WINDOW_S + DELAY_S if PLACE == "batch wait" else WINDOW_S


torch.manual_seed(0)
model = Classifier().eval()


def classify(rows: int = 32) -> list[int]:
    """Returns the classes of some rows."""
    with torch.inference_mode():
        found: list[int] = model(torch.ones(rows, WIDTH)).argmax(-1).tolist()
    return found


def classify_batch(inputs: list[torch.Tensor]) -> list[int]:
    """Returns the class of each input."""
    with torch.inference_mode():
        found: list[int] = model(torch.stack(inputs)).argmax(-1).tolist()
    return found


def finish(classes: list[int]) -> dict[str, list[int]]:
    """Returns the answer of a handler."""
    add_delay("postprocess")
    return {"classes": classes}
