"""Where records go: OTLP spans, a provider's spans, metrics, the console."""

from __future__ import annotations

from typing import Protocol

from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.sampling import tail_sampler


class RequestExporter(Protocol):
    """Takes finished requests: all of them, or only those that are exported."""

    exported_only: bool

    def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None: ...

    def export_start(self, record: StartRecord) -> None: ...

    def flush(self, now: int) -> None: ...


class RequestListener(Protocol):
    """Is told of every start and every request when it is concluded, exported or not."""

    def on_request(self, record: RequestRecord) -> None: ...

    def on_start(self, record: StartRecord) -> None: ...
