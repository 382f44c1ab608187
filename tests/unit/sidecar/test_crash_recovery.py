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
from otel_infer.config.environment import Config, from_env
from otel_infer.export.sampling import tail_sampler
from otel_infer.ringbuffer import dead_servers, directory, events
from otel_infer.ringbuffer.arena import FileArena
from otel_infer.ringbuffer.events import Value
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar.crash_recovery import CrashRecovery, make_recovery, take_over_rings
from otel_infer.sidecar.destination import Destination
from otel_infer.sidecar.main import make_pipeline
from otel_infer.sidecar.pipeline import Pipeline
from otel_infer.sidecar.service_resource import ServiceResource

OWN_RESOURCE = {semconv.SERVICE_NAME: "embeddings", semconv.SERVICE_INSTANCE_ID: "ours", "host.name": "here"}


SAME = Destination(Config(), {"host.name": "here"})
COUNTING = MergedReader()


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
    SAME.record(dead)
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

    ours = directory.ensure_private_folder(servers / "ours")
    CrashRecovery(ours, OWN_RESOURCE, make_pipeline, SAME, COUNTING).run()
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
    exporting = Config(endpoint="http://localhost:4318")
    assert make_recovery(servers / "ours", Config(), resource, make_pipeline, SAME, COUNTING) is None
    assert make_recovery(servers / "ours", exporting, resource, make_pipeline, SAME, COUNTING) is not None


# ── another destination ──────────────────────────────────────────────────────────────────────────────────────────

OTLP = "OTEL_EXPORTER_OTLP_"
OURS = {
    f"{OTLP}ENDPOINT": "https://a:4317",
    f"{OTLP}HEADERS": "authorization=secret-of-a",
    f"{OTLP}PROTOCOL": "http/protobuf",
}


def make_destination(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], **resource: str
) -> Destination:
    with monkeypatch.context() as patched:
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            patched.delenv(name)
        for name, value in environ.items():
            patched.setenv(name, value)
        return Destination(from_env(), resource)


@pytest.mark.parametrize(
    ("changes", "resource"),
    [
        ({f"{OTLP}ENDPOINT": "https://b:4317"}, {}),
        ({f"{OTLP}TRACES_ENDPOINT": "https://b:4317"}, {}),
        ({f"{OTLP}HEADERS": "authorization=secret-of-b"}, {}),
        ({f"{OTLP}METRICS_HEADERS": "authorization=secret-of-b"}, {}),
        ({f"{OTLP}PROTOCOL": "grpc"}, {}),
        ({f"{OTLP}CLIENT_CERTIFICATE": "/b.pem"}, {}),
        ({"OTEL_METRICS_EXPORTER": "none"}, {}),
        ({}, {"deployment.environment": "staging"}),
        ({}, {"service.namespace": "b"}),
    ],
    ids=str,
)
def test_rings_of_another_destination_are_removed_and_counted(
    servers: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], resource: dict[str, str]
) -> None:
    make_dead_server(servers, "other", **{semconv.SERVICE_NAME: "chat"})
    make_destination(monkeypatch, {**OURS, **changes}, **resource).record(servers / "other")
    rings, exported = MergedReader(), list[Any]()
    ours = directory.ensure_private_folder(servers / "ours")
    CrashRecovery(
        ours, OWN_RESOURCE, lambda *_: exported.append(1), make_destination(monkeypatch, OURS), rings
    ).run()
    assert exported == []
    assert [path.name for path in servers.iterdir()] == ["ours"]
    pipeline = Pipeline(Config(), rings, [], None, {}, None, 0)
    assert pipeline.count_losses()[semconv.LOSS_OTHER_DESTINATION] == 1


def test_a_restarted_server_has_the_same_destination(servers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process attributes, the instance id and the release of the SDK differ between restarts."""
    folder = directory.ensure_private_folder(servers / "other")
    before = make_destination(
        monkeypatch, OURS, **{"process.pid": "1", semconv.SERVICE_INSTANCE_ID: "x", "host.name": "h"}
    )
    after = make_destination(
        monkeypatch, OURS, **{"process.pid": "2", "telemetry.sdk.version": "9", "host.name": "h"}
    )
    assert not after.is_recorded(folder)
    before.record(folder)
    assert after.is_recorded(folder)


def test_the_stored_destination_holds_no_secret(servers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The salt differs, so that equal destinations are not equal files."""
    texts = []
    for name in ("a", "b"):
        folder = directory.ensure_private_folder(servers / name)
        make_destination(monkeypatch, OURS).record(folder)
        path = folder / directory.DESTINATION_FILE
        assert path.stat().st_mode & 0o777 == 0o600
        texts.append(path.read_text())
    assert texts[0] != texts[1]
    assert not any(secret in "".join(texts) for secret in ("secret", "https", "4317"))


def test_rings_without_a_destination_are_not_exported(servers: Path) -> None:
    make_dead_server(servers, "other")
    (servers / "other" / directory.DESTINATION_FILE).unlink()
    assert run_recovery(servers) == []
    assert [path.name for path in servers.iterdir()] == ["ours"]


def test_dead_rings_in_a_reused_folder_keep_their_destination(
    servers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that the operator named may have belonged to a server with another collector."""
    make_dead_server(servers, "rings")
    folder, rings = servers / "rings", MergedReader()
    take_over_rings(folder, SAME, rings)
    assert len(dead_servers.list_dead_writers(folder)) == 1
    live = FileArena(folder)
    RequestWriter(live, "2-b", "server")
    monkeypatch.setattr(directory, "is_held", lambda path: path.name.startswith("2-b"))
    other = make_destination(monkeypatch, OURS)
    take_over_rings(folder, other, rings)
    assert [path.name for path in folder.glob("*.requests")] == ["2-b.requests"]
    assert rings.read_counts()["discarded"] == 1
    assert other.is_recorded(folder)
    live.close()


def test_the_first_sidecar_of_a_folder_decides_its_destination(servers: Path) -> None:
    """`otel-infer sidecar --rings` may start after the server has died."""
    make_dead_server(servers, "rings")
    (servers / "rings" / directory.DESTINATION_FILE).unlink()
    take_over_rings(servers / "rings", SAME, MergedReader())
    assert len(dead_servers.list_dead_writers(servers / "rings")) == 1
    assert SAME.is_recorded(servers / "rings")
