"""Doctor shows what became of the requests of each server that runs, and what to do about lost ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer.cli.doctor.requests import check_requests, describe_counts
from otel_infer.config.environment import Config
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.ledger import RequestLedger, open_ledger
from tests.support.other_process import another_process, holding


@pytest.fixture
def served_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose sidecar, another process, holds its lock."""
    tmp_path.chmod(0o700)
    with another_process(holding(tmp_path / directory.SIDECAR_LOCK)):
        yield tmp_path


def test_the_counts_are_an_equation() -> None:
    ledger = RequestLedger()
    ledger.add_result("exported", 4_490)
    ledger.add_lost("refused", 7)
    assert describe_counts(ledger.read_counts(4_500, 2)) == (
        "4,500 offered = 4,490 exported + 0 not sampled + 0 redundant + 1 open + 9 lost (2 not_recorded, 7 refused)"
    )


def test_a_server_without_losses_is_ok(served_folder: Path) -> None:
    open_ledger(served_folder).add_result("exported", 3)
    (check,) = check_requests(Config(rings=str(served_folder)))
    assert (check.state, check.found.partition(" = ")[0], check.do) == ("ok", "3 offered", "")


def test_lost_requests_are_a_warning_with_the_remedy_of_most_of_them(served_folder: Path) -> None:
    ledger = open_ledger(served_folder)
    ledger.add_lost("queue_full", 3)
    ledger.add_lost("sidecar_ended", 30)
    (check,) = check_requests(Config(rings=str(served_folder)))
    assert check.state == "warn"
    assert check.do.startswith("the sidecar was killed")


def test_without_a_server_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert check_requests(Config(rings=str(tmp_path))) == []
