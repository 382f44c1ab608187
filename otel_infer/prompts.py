"""Whose prompts were in which steps of an engine: remembered of the latest steps, in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from otel_infer.records import Prefiller

MOST = 32768
"""Prompts in steps that are remembered, some 7 MB: a step may hold one of them, or hundreds."""


class Prompts:
    """Of each step, who had a part of a prompt in it. Steps come in order."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Prefiller, ...]] = {}
        self._count = 0

    def of(self, step: int) -> tuple[Prefiller, ...]:
        """Whose prompts were in this step; empty if there were none, or if it is too long ago."""
        return self._of.get(step, ())

    def note(self, step: int, whose: Sequence[Prefiller]) -> None:
        """They have prompts in this step, the latest so far."""
        if not whose:
            return
        self._of[step] = tuple(whose)
        self._count += len(whose)
        while self._count > MOST:
            self._count -= len(self._of.pop(next(iter(self._of))))

    def correct(self, step: int, span_id: bytes, tokens: int) -> None:
        """It turned out that this request had so many tokens of its prompt in the step."""
        if step in self._of:
            self._of[step] = tuple(
                who._replace(tokens=tokens) if who.span_id == span_id else who for who in self._of[step]
            )
