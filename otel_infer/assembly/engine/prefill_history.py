"""Stores the prompts in each step of an engine, for requests that they delayed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from otel_infer.assembly.engine.types import PrefillInStep

MAX_PREFILLS = 32768
"""Prompts in steps that are remembered, about 7 MB: a step may hold one of them, or hundreds."""


class PrefillHistory:
    """The prompts, or parts of prompts, in each step. Steps are added in order."""

    def __init__(self) -> None:
        self._by_step: dict[int, tuple[PrefillInStep, ...]] = {}
        self._count = 0
        self._frozen: Mapping[int, Sequence[PrefillInStep]] | None = None

    def freeze(self) -> Mapping[int, Sequence[PrefillInStep]]:
        """Returns the prompts in each step that had any, as a view that is shared until the next change."""
        if self._frozen is None:
            self._frozen = MappingProxyType(dict(self._by_step))
        return self._frozen

    def add_prefills(self, step: int, prefills: Sequence[PrefillInStep]) -> None:
        """Adds the prompts in `step`, the latest so far."""
        if not prefills:
            return
        self._frozen = None
        self._by_step[step] = tuple(prefills)
        self._count += len(prefills)
        while self._count > MAX_PREFILLS:
            self._count -= len(self._by_step.pop(next(iter(self._by_step))))

    def correct_tokens(self, step: int, span_id: bytes, tokens: int) -> None:
        """Corrects how many prompt tokens this request had in a step."""
        if step in self._by_step:
            self._frozen = None
            self._by_step[step] = tuple(
                old._replace(tokens=tokens) if old.span_id == span_id else old for old in self._by_step[step]
            )
