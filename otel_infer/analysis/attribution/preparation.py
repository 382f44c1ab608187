"""Finds the part of a request in which its application prepares the call of the engine. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from otel_infer import semconv
from otel_infer.assembly.records.request import Stage

ENGINE_STAGES = frozenset(
    (semconv.SPAN_QUEUE, semconv.SPAN_H2D, semconv.SPAN_FORWARD, semconv.SPAN_PREFILL, semconv.SPAN_DECODE)
)
"""Stages of which the first ends the preparation."""


def find_preparation(stages: Sequence[Stage]) -> tuple[int, int]:
    """Returns the interval from the first stage to the engine's first one; an empty one without an engine's stage.

    The application's code runs between the stages in it.
    """
    engine = [stage.started_at for stage in stages if stage.name in ENGINE_STAGES]
    return (min(stage.started_at for stage in stages), min(engine)) if engine else (0, 0)
