"""Interfaces of the destinations of records: OTLP spans, spans of a provider, metrics, the console."""

from __future__ import annotations

from typing import Protocol

from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.sampling import tail_sampler


class RequestExporter(Protocol):
    """A destination of finished requests: all requests, or with `exported_only` the exported ones.

    `taken`: how many requests to be exported it took so far. It counts in the server's ledger what becomes of
    each.
    """

    exported_only: bool
    taken: int

    def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None: ...

    def export_start(self, record: StartRecord) -> None: ...

    def flush(self, now: int) -> None: ...


class RequestListener(Protocol):
    """A listener for every start and every finished request, exported or not."""

    def on_request(self, record: RequestRecord) -> None: ...

    def on_start(self, record: StartRecord) -> None: ...
