"""Crash recovery: requests of a dead server are exported under its resource, then its folder is removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer import _clock, semconv
from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config.environment import Config
from otel_infer.export.sampling import tail_sampler
from otel_infer.ringbuffer import directory, events
from otel_infer.ringbuffer.arena import FileArena
from otel_infer.ringbuffer.events import Value
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar.crash_recovery import CrashRecovery
from otel_infer.sidecar.main import _make_recovery
from otel_infer.sidecar.pipeline import Pipeline
from otel_infer.sidecar.service_resource import ServiceResource

OWN_RESOURCE = {semconv.SERVICE_NAME: "embeddings", semconv.SERVICE_INSTANCE_ID: "ours", "host.name": "here"}


class RecoveryExporter:
    """Collects the error types, and the resource of its pipeline."""

    exported_only = True
    taken = 0

    def __init__(self, resource: dict[str, Value], broken: bool = False) -> None:
        self.resource, self.broken, self.errors = resource, broken, list[str]()

    def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        self.errors.append(record.error_type)

    def export_start(self, record: StartRecord) -> None:
        """Ignored."""

    def flush(self, now: int) -> None:
        if self.broken:
            raise ValueError


@pytest.fixture
def servers() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-recovery-"))
    yield directory.ensure_private_folder(base / f"otel_infer-{os.getuid()}")
    shutil.rmtree(base)


def make_dead_server(servers: Path, folder: str, **resource: str) -> str:
    """Creates a server that died with a request in flight; returns its instance id."""
    dead = directory.ensure_private_folder(servers / folder)
    service = ServiceResource(dead, resource)
    service.save()
    arena = FileArena(dead)
    at, wall = _clock.read_clocks()
    RequestWriter(arena, "1-a", "server").open_request(
        events.RequestArrived(at, wall, bytes([1] * 16), bytes([2] * 8), bytes(8), bytes(8), 1, "chat", "toy", "m", "n")
    )  # fmt: skip
    arena.close()
    return str(service.resource[semconv.SERVICE_INSTANCE_ID])


def run_recovery(servers: Path, broken: bool = False) -> list[RecoveryExporter]:
    exporters: list[RecoveryExporter] = []

    def make_pipeline(resource: dict[str, Value], rings: MergedReader) -> Pipeline:
        exporters.append(RecoveryExporter(resource, broken))
        return Pipeline(Config(), rings, [exporters[-1]], None, resource, None, 0)

    CrashRecovery(directory.ensure_private_folder(servers / "ours"), OWN_RESOURCE, make_pipeline).run()
    return exporters


def test_a_dead_server_is_exported_and_then_removed(servers: Path) -> None:
    instance = make_dead_server(servers, "chat", **{semconv.SERVICE_NAME: "chat"})
    (exporter,) = run_recovery(servers)
    assert exporter.errors == ["process_died"]
    assert exporter.resource == {
        semconv.SERVICE_NAME: "chat", semconv.SERVICE_INSTANCE_ID: instance, "host.name": "here"
    }  # fmt: skip
    assert [path.name for path in servers.iterdir()] == ["ours"]


def test_two_dead_servers_are_exported_separately(servers: Path) -> None:
    instances = {make_dead_server(servers, name, **{semconv.SERVICE_NAME: name}) for name in ("a", "b")}
    exporters = run_recovery(servers)
    assert {exporter.resource[semconv.SERVICE_NAME] for exporter in exporters} == {"a", "b"}
    assert {exporter.resource[semconv.SERVICE_INSTANCE_ID] for exporter in exporters} == instances
    assert [exporter.errors for exporter in exporters] == [["process_died"]] * 2


def test_a_failed_recovery_does_not_stop_the_next(servers: Path) -> None:
    for name in "ab":
        make_dead_server(servers, name)
    assert len(run_recovery(servers, broken=True)) == 2
    assert [path.name for path in servers.iterdir()] == ["ours"]


def test_a_sidecar_without_exporters_recovers_nothing(servers: Path) -> None:
    resource: dict[str, Any] = dict(OWN_RESOURCE)
    assert _make_recovery(servers / "ours", Config(), resource) is None
    assert _make_recovery(servers / "ours", Config(endpoint="http://localhost:4318"), resource) is not None
