"""The resource of a server stays the same for every sidecar that reads its rings."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from otel_infer import semconv
from otel_infer.ringbuffer import directory
from otel_infer.sidecar import instance_claim
from otel_infer.sidecar.instance_claim import InstanceClaim
from otel_infer.sidecar.service_resource import ServiceResource


def test_an_empty_instance_file_gets_a_new_id(tmp_path: Path) -> None:
    (tmp_path / directory.INSTANCE_FILE).touch()
    first, second = (ServiceResource(tmp_path, {}).resource[semconv.SERVICE_INSTANCE_ID] for _ in range(2))
    assert first and first == second


def test_a_later_sidecar_uses_the_same_resource(tmp_path: Path) -> None:
    before = ServiceResource(tmp_path, {})
    before.save()
    assert semconv.SERVICE_NAME not in ServiceResource(tmp_path, {}).resource
    before.resource[semconv.SERVICE_NAME] = "vllm"  # the pipeline sets the name of the engine
    before.save()
    assert ServiceResource(tmp_path, {}).resource == before.resource
    assert (tmp_path / directory.SERVICE_FILE).stat().st_mode & 0o777 == 0o600


def test_a_configured_name_replaces_the_stored_name(
    tmp_path: Path,
) -> None:
    (tmp_path / directory.SERVICE_FILE).write_text("vllm")
    given = ServiceResource(tmp_path, {semconv.SERVICE_NAME: "chat"})
    assert given.resource[semconv.SERVICE_NAME] == "chat"
    given.save()
    assert ServiceResource(tmp_path, {}).resource[semconv.SERVICE_NAME] == "chat"


@pytest.mark.parametrize("written", [b"\xff", b""])
def test_an_unreadable_stored_name_is_ignored(tmp_path: Path, written: bytes) -> None:
    (tmp_path / directory.SERVICE_FILE).write_bytes(written)
    assert semconv.SERVICE_NAME not in ServiceResource(tmp_path, {}).resource


def test_a_missing_folder_only_prevents_storage(tmp_path: Path) -> None:
    service = ServiceResource(tmp_path / "gone", {})
    service.resource[semconv.SERVICE_NAME] = "vllm"
    service.save()
    assert service.resource[semconv.SERVICE_INSTANCE_ID]


def test_each_writer_of_a_given_id_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that are started on their own get one id from their environment."""
    monkeypatch.setattr(directory, "BASE", tmp_path)
    given = {semconv.SERVICE_INSTANCE_ID: "pod-1"}
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir(mode=0o700)
    first, second = (ServiceResource(folder, given) for folder in folders[:2])
    assert [read_id(service) for service in (first, second)] == ["pod-1", "pod-1.2"]
    second.release()  # its sidecar was killed, and another one takes over
    assert read_id(ServiceResource(folders[1], given)) == "pod-1.2"
    first.release()
    assert read_id(ServiceResource(folders[2], given)) == "pod-1"


def test_a_recovered_server_does_not_share_the_id_of_a_living_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restarted server has the given id again, while the rings of the dead one are exported."""
    monkeypatch.setattr(directory, "BASE", tmp_path)
    dead, living = tmp_path / "dead", tmp_path / "living"
    for folder in (dead, living):
        folder.mkdir(mode=0o700)
    ServiceResource(dead, {semconv.SERVICE_INSTANCE_ID: "pod-1"}).release()
    restarted = ServiceResource(living, {semconv.SERVICE_INSTANCE_ID: "pod-1"})
    recovered = ServiceResource(dead, {})
    assert [read_id(service) for service in (restarted, recovered)] == ["pod-1", "pod-1.2"]


def test_a_generated_id_is_not_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK generates a UUID for each process, which no other process has."""
    monkeypatch.setattr(directory, "BASE", tmp_path / "none")
    generated = {semconv.SERVICE_INSTANCE_ID: str(uuid.uuid4())}
    service = ServiceResource(tmp_path, generated)
    assert (
        read_id(service) == read_id(ServiceResource(tmp_path, {})) == generated[semconv.SERVICE_INSTANCE_ID]
    )
    assert {path.name for path in tmp_path.iterdir()} == {directory.INSTANCE_FILE}


def test_a_configured_uuid_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = str(uuid.uuid4())
    monkeypatch.setattr(directory, "BASE", tmp_path)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"service.instance.id={given}")
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(mode=0o700)
    services = [ServiceResource(folder, {semconv.SERVICE_INSTANCE_ID: given}) for folder in folders]
    assert [read_id(service) for service in services] == [given, f"{given}.2"]


def test_an_id_that_cannot_be_locked_is_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder can be written to."""

    def fail() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(directory, "BASE", tmp_path / "none" / "none")
    monkeypatch.setattr(instance_claim.tempfile, "gettempdir", fail)
    first, second = (InstanceClaim("pod-1").id for _ in range(2))
    assert first != second
    assert first.startswith("pod-1.")


def read_id(service: ServiceResource) -> str:
    return str(service.resource[semconv.SERVICE_INSTANCE_ID])
