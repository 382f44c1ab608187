"""The transformers integration installed for one test, and what it recorded."""

from __future__ import annotations

import importlib
from typing import Any

from otel_infer.assembly.engine.types import StepRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.instrumentation.hooks import probe
from otel_infer.instrumentation.transformers import instrumentor
from otel_infer.tracing import request_span, start
from tests.support.rings import Recording, stages_of

MODULES = (
    "transformers.generation.continuous_batching",
    "transformers.generation.streamers",
    "transformers.generation.utils",
    "transformers.processing_utils",
    "transformers.tokenization_utils_base",
)


class Recorded(Recording):
    """Installs the integration at its making, removes it at `stop`."""

    def __init__(self) -> None:
        for module in MODULES:
            importlib.import_module(module)
        super().__init__()
        self._failures = probe.count_errors()
        instrumentor.install()
        assert instrumentor.status.state == "active", instrumentor.status.drift

    def stop(self) -> None:
        super().stop()
        instrumentor.remove()

    @property
    def raised(self) -> list[str]:
        """What hooks of ours that raised sat on."""
        return probe._failures[self._failures :]

    def one(self) -> RequestRecord:
        """The only request that ended since the last look."""
        (record,) = self.records()
        return record

    def steps(self) -> list[StepRecord]:
        """The engine's steps that were done since the last call, as of the last `records`."""
        return self._assembler.drain_steps()

    def by_id(self) -> dict[str, RequestRecord]:
        """The requests that ended since the last look, by the engine's id."""
        return {str(record.attributes["infer.request.id"]): record for record in self.records()}


def served(name: str = "POST /generate") -> request_span.RequestSpan:
    """A request as the HTTP side opens one; the test attaches and closes it."""
    request = start.open_request(name, owner="asgi", server=True)
    assert request is not None
    return request


def sizes(record: RequestRecord) -> list[int]:
    """Own tokens of every step that delivered some."""
    return [] if record.steps is None else [int(tokens) for tokens in record.steps.tokens]


def prefilled(record: RequestRecord) -> list[int]:
    """Own prompt tokens of every prefill step."""
    return [step.tokens for step in record.prefill_steps]


def check_stages(record: RequestRecord, *names: str) -> None:
    """These stages in this order, inside the request, none before the one before it."""
    assert stages_of(record) == list(names)
    began: Any = record.arrived_at
    for stage in sorted(record.stages, key=lambda stage: stage.started_at):
        assert began <= stage.started_at < stage.ended_at <= record.ended_at
        began = stage.started_at
