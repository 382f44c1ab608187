"""The ledger of a server: its counts outlive a sidecar, and can be read while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_infer.ringbuffer import directory, events
from otel_infer.ringbuffer.arena import FileArena
from otel_infer.ringbuffer.ledger import open_ledger, read_server_counts
from otel_infer.ringbuffer.writer import RequestWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_later_sidecar_continues_the_counts_and_is_a_restart(folder: Path) -> None:
    first = open_ledger(folder)
    assert not first.add_reader()
    first.add_result("exported", 3)
    first.add_lost("refused", 2)
    second = open_ledger(folder)
    assert second.add_reader()
    assert (second.count_settled(), second.restarts) == (5, 1)


@pytest.mark.parametrize("written", [b"", b"x" * 100, bytes(range(256)) * 32])
def test_a_file_that_is_no_ledger_counts_from_zero(folder: Path, written: bytes) -> None:
    (folder / directory.LEDGER_FILE).write_bytes(written)
    ledger = open_ledger(folder)
    assert (ledger.count_settled(), ledger.closed_counts, ledger.restarts) == (0, (0, 0), 0)


def test_without_room_for_a_file_the_counts_stay_in_the_process(folder: Path) -> None:
    (folder / directory.LEDGER_FILE).mkdir()
    ledger = open_ledger(folder)
    ledger.add_result("exported")
    assert ledger.count_settled() == 1


def test_counts_of_a_running_server_are_read_from_its_folder(folder: Path) -> None:
    ledger = open_ledger(folder)
    ledger.close_ring(1, 10, 1)
    ledger.add_result("exported", 8)
    writer = RequestWriter(FileArena(folder), "1-a", "server")
    writer.open_request(
        events.RequestArrived(1, 1, bytes(16), bytes(8), bytes(8), bytes(8), 0, "", "", "", "")
    )
    counts = read_server_counts(folder)
    assert (counts.offered, counts.results["exported"], counts.lost["not_recorded"], counts.open) == (
        11, 8, 1, 2,
    )  # fmt: skip
