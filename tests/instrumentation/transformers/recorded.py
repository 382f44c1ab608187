"""Installs the transformers integration for one test and returns its records."""

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
    """Installs the integration on creation, removes it at `stop`."""

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
        """Returns the errors that hooks raised and the probe caught."""
        return probe._failures[self._failures :]

    def only_record(self) -> RequestRecord:
        """Returns the only request that ended since the last call."""
        (record,) = self.records()
        return record

    def steps(self) -> list[StepRecord]:
        """Returns the engine steps done since the last call, as of the last `records`."""
        return self._assembler.drain_steps()

    def by_id(self) -> dict[str, RequestRecord]:
        """Returns the requests that ended since the last call, by the engine's id."""
        return {str(record.attributes["infer.request.id"]): record for record in self.records()}


def open_server_request(name: str = "POST /generate") -> request_span.RequestSpan:
    """Opens a request as the HTTP integration does; the test attaches and closes it."""
    request = start.open_request(name, owner="asgi", server=True)
    assert request is not None
    return request


def sizes(record: RequestRecord) -> list[int]:
    """Returns the own tokens of every step that delivered some."""
    return [] if record.steps is None else [int(tokens) for tokens in record.steps.tokens]


def prefilled(record: RequestRecord) -> list[int]:
    """Returns the own prompt tokens of every prefill step."""
    return [step.tokens for step in record.prefill_steps]


def check_stages(record: RequestRecord, *names: str) -> None:
    """Checks that the request has these stages in this order, without overlap."""
    assert stages_of(record) == list(names)
    began: Any = record.arrived_at
    for stage in sorted(record.stages, key=lambda stage: stage.started_at):
        assert began <= stage.started_at < stage.ended_at <= record.ended_at
        began = stage.started_at
