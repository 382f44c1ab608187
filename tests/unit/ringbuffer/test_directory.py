"""Ring folders: private folders, locks that end with their process, and files that are never removed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.ringbuffer import dead_servers, directory, layout, sidecar_claim
from otel_infer.ringbuffer.arena import FileArena, RingUnavailable
from otel_infer.ringbuffer.writer import RequestWriter
from tests.support.other_process import another_process, holding, shared_volume

USER = f"otel_infer-{os.getuid()}"


@pytest.fixture
def shm() -> Iterator[Path]:
    """Returns a folder on tmpfs that other users can write to, like a volume."""
    with shared_volume() as folder:
        yield folder


@pytest.fixture
def own(shm: Path) -> Path:
    """Returns a folder on tmpfs that only this user can use."""
    return directory.ensure_private_folder(shm / "own")


def writing(folder: Path, name: str = "1-a") -> Callable[[], RequestWriter]:
    return lambda: RequestWriter(FileArena(folder), name, "server")


def dead_server(base: Path) -> Path:
    """Creates a server's folder with rings whose processes have ended."""
    folder = directory.create_server_folder(base)
    with another_process(writing(folder)):
        pass
    return folder


# ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_server_gets_its_own_private_folder(shm: Path) -> None:
    first, second = directory.create_server_folder(shm), directory.create_server_folder(shm)
    assert first != second
    assert first.parent == second.parent == shm / USER
    assert {path.stat().st_mode & 0o777 for path in (first, first.parent)} == {0o700}


def test_a_folder_outside_tmpfs_is_rejected(tmp_path: Path) -> None:
    for create in (directory.create_server_folder, directory.resolve_rings_folder):
        with pytest.raises(RingUnavailable, match="not on tmpfs"):
            create(Path("/proc/self"))
    assert not directory.is_tmpfs(Path("/proc"))
    assert directory.is_tmpfs(Path("/dev/shm/what/is/not/there"))


def test_a_link_instead_of_the_folder_is_rejected(shm: Path, tmp_path: Path) -> None:
    (shm / USER).symlink_to(tmp_path)
    with pytest.raises(RingUnavailable, match="another user"):
        directory.create_server_folder(shm)


def test_a_folder_of_another_user_is_rejected(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shm / "otel_infer-12345").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(RingUnavailable, match="another user"):
        directory.create_server_folder(shm)


def test_a_missing_base_is_rejected_and_not_created(shm: Path) -> None:
    with pytest.raises(RingUnavailable, match="No such file"):
        directory.create_server_folder(shm / "nowhere")
    assert not (shm / "nowhere").exists()


def test_a_shared_configured_folder_is_not_changed(shm: Path) -> None:
    (shm / "other-file").touch()
    folder = directory.resolve_rings_folder(shm)
    assert folder == shm / USER
    assert shm.stat().st_mode & 0o777 == 0o777
    # All processes of a server, and its sidecar, resolve the same folder.
    assert directory.resolve_rings_folder(shm) == folder


def test_a_private_or_missing_configured_folder_is_used(shm: Path) -> None:
    assert directory.resolve_rings_folder(shm / "a" / "b") == shm / "a" / "b"
    assert (shm / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert directory.resolve_rings_folder(shm / "a" / "b") == shm / "a" / "b"


# ── locks ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lock_is_held_until_its_process_ends(own: Path) -> None:
    path = own / "a.lock"
    assert not directory.is_held(path)
    with another_process(holding(path)) as pid:
        assert directory.is_held(path)
        assert not directory.FileLock(path).acquire()
        os.kill(pid, signal.SIGKILL)
    assert not directory.is_held(path)
    assert directory.FileLock(path).acquire()


def test_a_forked_child_does_not_hold_parent_lock(own: Path) -> None:
    path = own / "a.lock"
    lock = directory.FileLock(path)
    assert lock.acquire()
    with another_process(lambda: lock):
        lock.release()
        assert directory.is_held(path) is False


def test_checking_a_lock_does_not_block_its_acquisition(own: Path) -> None:
    path = own / "a.lock"
    path.touch()

    def check_forever() -> None:
        if os.fork() == 0:
            signal.signal(
                signal.SIGALRM, signal.SIG_DFL
            )  # not the handler of the test run, which may not end it
            signal.alarm(10)
            while True:
                directory.is_held(path)

    with another_process(lambda: check_forever() or True):
        for _ in range(300):
            lock = directory.FileLock(path)
            assert lock.acquire()
            lock.release()
            time.sleep(0)


def test_a_lock_acquired_twice_needs_one_release(own: Path) -> None:
    lock = directory.FileLock(own / "a.lock")
    assert lock.acquire()
    assert lock.acquire()
    assert lock.ensure_held()
    lock.release()
    assert lock.acquire()


def test_a_lock_is_reacquired_in_a_recreated_folder(shm: Path) -> None:
    """`ensure_held` fails while the folder is missing or another process holds the lock."""
    folder = shm / "server"
    folder.mkdir()
    lock = directory.FileLock(folder / directory.SIDECAR_LOCK)
    assert lock.acquire()
    shutil.rmtree(folder)
    assert not lock.ensure_held()
    folder.mkdir()
    assert lock.ensure_held()
    shutil.rmtree(folder)
    folder.mkdir()
    with another_process(holding(folder / directory.SIDECAR_LOCK)):
        assert not lock.ensure_held()
    assert lock.ensure_held()


# ── dead servers ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_dead_server_is_claimed_once(shm: Path) -> None:
    mine, dead = directory.create_server_folder(shm), dead_server(shm)
    with contextlib.ExitStack() as stack:

        def find() -> Any:
            return list(dead_servers.claim_dead_servers(mine)) or None

        stack.enter_context(another_process(find))
        assert [] == list(dead_servers.claim_dead_servers(mine))
    ((found, lock),) = dead_servers.claim_dead_servers(mine)
    assert found == dead
    lock.release()


def test_a_live_or_starting_server_is_not_claimed(shm: Path) -> None:
    mine, live, owned, new, starting = (directory.create_server_folder(shm) for _ in range(5))
    dead_with_owner = dead_server(shm)
    (starting / "1-a.requests").write_bytes(bytes(4096))  # not yet locked or written
    with (
        another_process(writing(live)),
        another_process(holding(owned / directory.OWNER_LOCK)),
        another_process(holding(dead_with_owner / directory.OWNER_LOCK)),
    ):
        assert [] == list(dead_servers.claim_dead_servers(mine))
        assert new.exists()


def test_a_dead_server_with_starting_sidecar_is_skipped(shm: Path) -> None:
    mine, dead = directory.create_server_folder(shm), dead_server(shm)
    claim = sidecar_claim.claim_sidecar_start(dead)
    assert claim is not None
    assert [] == list(dead_servers.claim_dead_servers(mine))
    os.close(claim)
    assert [dead] == [folder for folder, _ in dead_servers.claim_dead_servers(mine)]


def test_an_empty_folder_is_claimed_after_an_hour(shm: Path) -> None:
    mine, empty = directory.create_server_folder(shm), directory.create_server_folder(shm)
    assert [] == list(dead_servers.claim_dead_servers(mine))
    os.utime(empty, (1, 1))
    assert [empty] == [folder for folder, _ in dead_servers.claim_dead_servers(mine)]


def test_nothing_is_claimed_beside_a_configured_folder(shm: Path) -> None:
    sibling = shm / "etc"
    sibling.mkdir()
    (sibling / "hosts").write_text("kept")
    os.utime(sibling, (1, 1))
    for configured in (directory.resolve_rings_folder(shm / "rings"), directory.resolve_rings_folder(shm)):
        assert [] == list(dead_servers.claim_dead_servers(configured))
    assert [sibling / "hosts"] == list(sibling.iterdir())


# ── removal ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_files_with_known_names_are_removed(shm: Path) -> None:
    configured = directory.resolve_rings_folder(shm / "rings")
    known = [
        "1-a.requests",
        "1-a-1.steps",
        directory.OWNER_LOCK,
        directory.SIDECAR_LOCK,
        directory.INSTANCE_FILE,
    ]
    others = ["model.bin", "notes.txt", "other.lock"]
    for name in (*known, *others):
        (configured / name).touch()
    directory.remove_server_folder(configured)
    assert sorted(others) == sorted(path.name for path in configured.iterdir())


def test_only_a_created_folder_is_removed_with_files(shm: Path) -> None:
    configured, created = directory.resolve_rings_folder(shm / "rings"), directory.create_server_folder(shm)
    for folder in (configured, created):
        (folder / directory.SIDECAR_LOCK).touch()
        directory.remove_server_folder(folder)
    assert configured.exists()
    assert not created.exists()
    directory.remove_server_folder(created)  # a second call does nothing


def test_nothing_is_removed_while_a_writer_is_live(shm: Path) -> None:
    folder = dead_server(shm)
    with another_process(writing(folder, "2-b")):
        before = sorted(folder.iterdir())
        directory.remove_server_folder(folder)
        assert before == sorted(folder.iterdir())
    directory.remove_server_folder(folder)
    assert not folder.exists()


def test_a_ring_counts_as_written_by_its_header(own: Path) -> None:
    path = own / "1-a.requests"
    path.write_bytes(bytes(16))
    assert not dead_servers._is_written(path)
    RequestWriter(FileArena(own), "2-b", "server")
    assert dead_servers._is_written(own / f"2-b{layout.SUFFIX_REQUESTS}")


def test_served_folders_are_found_from_folder_and_parents(
    tmp_path: Path,
) -> None:
    user = tmp_path / f"otel_infer-{os.getuid()}"
    mine, idle = user / "12-ab", user / "34-cd"
    for folder in (mine, idle):
        folder.mkdir(parents=True)
    (idle / directory.SIDECAR_LOCK).touch()
    (mine / f"12-ab{layout.SUFFIX_REQUESTS}").touch()
    (mine / f"13-cd{layout.SUFFIX_REQUESTS}").touch()
    with another_process(holding(mine / directory.SIDECAR_LOCK)):
        assert [directory.find_served_folders(folder) for folder in (mine, user, tmp_path)] == [[mine]] * 3
        assert (
            directory.find_served_folders(idle) == directory.find_served_folders(tmp_path / "nowhere") == []
        )
        assert directory.list_writer_pids(mine) == [12, 13]


def test_without_descriptors_locks_count_as_held(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the start of a sidecar claimed."""

    def fail_open(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail_open)
        assert directory.is_held(own / directory.SIDECAR_LOCK)
        assert sidecar_claim.claim_sidecar_start(own) is None
    assert not directory.is_held(own / directory.SIDECAR_LOCK)
    assert sidecar_claim.claim_sidecar_start(own) is not None


def test_a_folder_writable_by_others_is_not_served(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "BASE", shm)
    own, open_to_all, elsewhere = shm / "own", shm / "open", shm / "elsewhere"
    for folder in (own, open_to_all, elsewhere):
        folder.mkdir(mode=0o700)
    (shm / "link").symlink_to(elsewhere)
    with (
        another_process(holding(own / directory.SIDECAR_LOCK)),
        another_process(holding(open_to_all / directory.SIDECAR_LOCK)),
        another_process(holding(elsewhere / directory.SIDECAR_LOCK)),
    ):
        open_to_all.chmod(0o777)
        assert directory.find_served_folders(shm) == [elsewhere, own]
        assert directory.find_served_folders(open_to_all) == []


def test_folder_of_an_ended_server_holds_dead_rings(tmp_path: Path) -> None:
    arena = FileArena(tmp_path)
    RequestWriter(arena, "1-a", "toy")
    arena.close()
    assert dead_servers.holds_dead_server(tmp_path)
    claim = sidecar_claim.claim_sidecar_start(tmp_path)
    assert claim is not None
    assert not dead_servers.holds_dead_server(tmp_path)
    os.close(claim)
    assert dead_servers.holds_dead_server(tmp_path)


def test_incomplete_rings_and_missing_folders_are_no_dead_server(tmp_path: Path) -> None:
    (tmp_path / "1-a.requests").write_bytes(bytes(4096))
    assert not dead_servers.holds_dead_server(tmp_path)
    assert not dead_servers.holds_dead_server(tmp_path / "missing")
