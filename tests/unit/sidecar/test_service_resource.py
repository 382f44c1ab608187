"""The resource of a server stays the same for every sidecar that reads its rings."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_infer import semconv
from otel_infer.ringbuffer import directory
from otel_infer.sidecar.service_resource import ServiceResource, count_restarts


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


def test_sidecars_after_the_first_are_counted(tmp_path: Path) -> None:
    assert [count_restarts(tmp_path) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("written", [b"\xff", b"", b"-1", b"9" * 4000])
def test_an_unreadable_number_of_sidecars_is_none(tmp_path: Path, written: bytes) -> None:
    (tmp_path / directory.STARTS_FILE).write_bytes(written)
    assert count_restarts(tmp_path) == 0


def test_a_missing_folder_only_prevents_storage(tmp_path: Path) -> None:
    service = ServiceResource(tmp_path / "gone", {})
    service.resource[semconv.SERVICE_NAME] = "vllm"
    service.save()
    assert service.resource[semconv.SERVICE_INSTANCE_ID]
