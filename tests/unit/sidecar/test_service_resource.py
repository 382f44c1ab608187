"""What a server is called stays what it is, whoever reads its rings."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_infer import semconv
from otel_infer.ringbuffer import directory
from otel_infer.sidecar.service_resource import ServiceResource


def test_an_instance_that_a_full_disk_left_empty_is_none(tmp_path: Path) -> None:
    (tmp_path / directory.INSTANCE_FILE).touch()
    first, second = (ServiceResource(tmp_path, {}).resource[semconv.SERVICE_INSTANCE_ID] for _ in range(2))
    assert first and first == second


def test_a_sidecar_that_takes_over_calls_the_server_what_the_one_before_did(tmp_path: Path) -> None:
    before = ServiceResource(tmp_path, {})
    before.save()
    assert semconv.SERVICE_NAME not in ServiceResource(tmp_path, {}).resource
    before.resource[semconv.SERVICE_NAME] = "vllm"  # the pipeline knows the engine
    before.save()
    assert ServiceResource(tmp_path, {}).resource == before.resource
    assert (tmp_path / directory.SERVICE_FILE).stat().st_mode & 0o777 == 0o600


def test_a_name_that_was_given_goes_before_a_remembered_one_and_is_remembered_in_its_place(
    tmp_path: Path,
) -> None:
    (tmp_path / directory.SERVICE_FILE).write_text("vllm")
    given = ServiceResource(tmp_path, {semconv.SERVICE_NAME: "chat"})
    assert given.resource[semconv.SERVICE_NAME] == "chat"
    given.save()
    assert ServiceResource(tmp_path, {}).resource[semconv.SERVICE_NAME] == "chat"


@pytest.mark.parametrize("written", [b"\xff", b""])
def test_what_cannot_be_read_is_no_name(tmp_path: Path, written: bytes) -> None:
    (tmp_path / directory.SERVICE_FILE).write_bytes(written)
    assert semconv.SERVICE_NAME not in ServiceResource(tmp_path, {}).resource


def test_a_folder_that_is_gone_costs_no_more_than_the_memory(tmp_path: Path) -> None:
    service = ServiceResource(tmp_path / "gone", {})
    service.resource[semconv.SERVICE_NAME] = "vllm"
    service.save()
    assert service.resource[semconv.SERVICE_INSTANCE_ID]
