"""What a dead server left is told under its own name, and then it is gone."""

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
from otel_infer.ringbuffer.events import Value
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.writer import FileArena, RequestWriter
from otel_infer.sidecar.crash_recovery import CrashRecovery
from otel_infer.sidecar.main import _make_recovery
from otel_infer.sidecar.pipeline import Pipeline
from otel_infer.sidecar.service_resource import ServiceResource

OURS = {semconv.SERVICE_NAME: "embeddings", semconv.SERVICE_INSTANCE_ID: "ours", "host.name": "here"}


class Told:
    """A sink that remembers, beside the resource of its pipeline."""

    exported_only = True

    def __init__(self, resource: dict[str, Value], broken: bool = False) -> None:
        self.resource, self.broken, self.errors = resource, broken, list[str]()

    def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        self.errors.append(record.error_type)

    def export_start(self, record: StartRecord) -> None:
        """Nobody asks for it."""

    def flush(self, now: int) -> None:
        if self.broken:
            raise ValueError


@pytest.fixture
def servers() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-recovery-"))
    yield directory.ensure_private_folder(base / f"otel_infer-{os.getuid()}")
    shutil.rmtree(base)


def left_behind(servers: Path, folder: str, **said: str) -> str:
    """A server that died with a request in flight; the id of its instance."""
    dead = directory.ensure_private_folder(servers / folder)
    service = ServiceResource(dead, said)
    service.save()
    arena = FileArena(dead)
    at, wall = _clock.read_clocks()
    RequestWriter(arena, "1-a", "server").open_request(
        events.RequestArrived(at, wall, bytes([1] * 16), bytes([2] * 8), bytes(8), bytes(8), 1, "chat", "toy", "m", "n")
    )  # fmt: skip
    arena.close()
    return str(service.resource[semconv.SERVICE_INSTANCE_ID])


def recovered(servers: Path, broken: bool = False) -> list[Told]:
    told: list[Told] = []

    def pipeline(resource: dict[str, Value], rings: MergedReader) -> Pipeline:
        told.append(Told(resource, broken))
        return Pipeline(Config(), rings, [told[-1]], None, resource, None, 0)

    CrashRecovery(directory.ensure_private_folder(servers / "ours"), OURS, pipeline).run()
    return told


def test_what_died_beside_us_is_told_under_its_own_name_and_then_it_is_gone(servers: Path) -> None:
    instance = left_behind(servers, "chat", **{semconv.SERVICE_NAME: "chat"})
    (told,) = recovered(servers)
    assert told.errors == ["process_died"]
    assert told.resource == {
        semconv.SERVICE_NAME: "chat", semconv.SERVICE_INSTANCE_ID: instance, "host.name": "here"
    }  # fmt: skip
    assert [path.name for path in servers.iterdir()] == ["ours"]


def test_two_dead_servers_are_two(servers: Path) -> None:
    instances = {left_behind(servers, name, **{semconv.SERVICE_NAME: name}) for name in ("a", "b")}
    told = recovered(servers)
    assert {one.resource[semconv.SERVICE_NAME] for one in told} == {"a", "b"}
    assert {one.resource[semconv.SERVICE_INSTANCE_ID] for one in told} == instances
    assert [one.errors for one in told] == [["process_died"]] * 2


def test_one_that_cannot_be_told_costs_no_other(servers: Path) -> None:
    for name in "ab":
        left_behind(servers, name)
    assert len(recovered(servers, broken=True)) == 2
    assert [path.name for path in servers.iterdir()] == ["ours"]


def test_a_server_that_sends_nothing_leaves_the_dead_to_one_that_does(servers: Path) -> None:
    resource: dict[str, Any] = dict(OURS)
    assert _make_recovery(servers / "ours", Config(), resource) is None
    assert _make_recovery(servers / "ours", Config(endpoint="http://localhost:4318"), resource) is not None
