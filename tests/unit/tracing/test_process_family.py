"""Which of the processes that one process forks report the start of their server."""

from __future__ import annotations

import os
import sys

import pytest

from otel_infer.tracing.process_family import ForkFamily, ProcessFamily

IDS = bytes(range(16)), bytes(range(8)), bytes(8)


def claims_in_child(family: ForkFamily, joins: bool = True) -> bool:
    """Returns whether a forked child, which then ends, may report the start."""
    answers, answer = os.pipe()
    child = os.fork()
    if not child:
        os.write(answer, b"1" if family.claim_start(joins) else b"0")
        os._exit(0)
    os.close(answer)
    claimed = os.read(answers, 1) == b"1"
    os.waitpid(child, 0)
    os.close(answers)
    return claimed


def test_a_child_after_the_first_one_has_ended_reports_no_start() -> None:
    family = ForkFamily(IDS)
    assert [claims_in_child(family) for _ in range(3)] == [True, False, False]


def test_children_beside_the_first_one_join_its_start() -> None:
    """Unless each has a reader of its own, which would report the same start again."""
    family = ForkFamily(IDS)
    assert family.claim_start()
    assert claims_in_child(family)
    assert not claims_in_child(family, joins=False)


def test_the_parent_always_reports_its_start() -> None:
    """A helper process that it forked earlier may have claimed it, and ended."""
    family = ForkFamily(IDS)
    assert claims_in_child(family)
    assert family.claim_start()
    assert claims_in_child(family)


def test_a_child_of_another_user_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has rings and a sidecar of its own, which would report the same start and instance again."""
    family = ForkFamily(IDS)
    assert family.is_shared
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    assert not family.is_shared and not family.claim_start()


def test_a_family_has_one_folder_and_one_instance() -> None:
    first, second = ForkFamily(IDS), ForkFamily(IDS)
    assert first.folder_token != second.folder_token and first.instance_id != second.instance_id
    assert first.folder_token.startswith(f"{os.getpid()}-")


SPAWNED = ["python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"]
FORKSERVER = ["python", "-c", "from multiprocessing.forkserver import main; main(3)"]


RAY = ["python", "-u", "/lib/ray/_private/workers/default_worker.py", "--node-ip-address=127.0.0.1"]
BENTOML = ["python", "-m", "_bentoml_impl.worker.service", "service:Scores"]


@pytest.mark.parametrize(
    "arguments", [SPAWNED, FORKSERVER, RAY, BENTOML], ids=["spawn", "forkserver", "ray", "bentoml"]
)
def test_a_spawned_process_is_of_the_family_of_its_environment(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", arguments)
    founder = ForkFamily(IDS)
    family = ProcessFamily.from_environment(founder.exported)
    assert family is not None and family.is_spawned and not founder.is_spawned
    assert (family.start_ids, family.instance_id) == (IDS, founder.instance_id)
    assert family.is_shared and family.claim_start() and not family.claim_start(joins=False)


def test_a_spawned_process_of_a_server_without_an_instance_id_takes_that_of_the_sidecar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "orig_argv", SPAWNED)
    family = ProcessFamily.from_environment(ProcessFamily(IDS).exported)
    assert family is not None and (family.start_ids, family.instance_id) == (IDS, "")


@pytest.mark.parametrize("exported", ["", "no hex", "ab", "ab" * 25])
def test_a_spawned_process_without_valid_ids_has_no_family(
    monkeypatch: pytest.MonkeyPatch, exported: str
) -> None:
    monkeypatch.setattr(sys, "orig_argv", SPAWNED)
    assert ProcessFamily.from_environment(exported) is None


def test_a_server_that_another_one_has_started_has_no_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "server.py"])
    assert ProcessFamily.from_environment(ForkFamily(IDS).exported) is None
