"""Where rings lie: private folders, locks that die with their holder, and what is left alone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.ringbuffer import directory, layout
from otel_infer.ringbuffer.writer import FileArena, RequestWriter, RingUnavailable

USER = f"otel_infer-{os.getuid()}"


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on tmpfs that others may use too, as a volume is."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-place-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def another_process(work: Callable[[], Any]) -> Iterator[int]:
    """A process that has done this and lives until the block ends: locks of one's own are not seen."""
    ready, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = work()
            os.write(said, b"1" if kept is not None else b"0")
            signal.pause()
        finally:
            os._exit(1)
    os.close(said)
    try:
        assert os.read(ready, 1) == b"1"
        yield pid
    finally:
        os.close(ready)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def holding(path: Path) -> Callable[[], directory.FileLock]:
    def hold() -> directory.FileLock:
        lock = directory.FileLock(path)
        assert lock.acquire()
        return lock

    return hold


def writing(folder: Path, name: str = "1-a") -> Callable[[], RequestWriter]:
    return lambda: RequestWriter(FileArena(folder), name, "server")


def dead_server(base: Path) -> Path:
    """A server's folder, with rings, whose processes are gone."""
    folder = directory.create_server_folder(base)
    with another_process(writing(folder)):
        pass
    return folder


# ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_server_has_a_private_folder_of_its_own(shm: Path) -> None:
    one, other = directory.create_server_folder(shm), directory.create_server_folder(shm)
    assert one != other
    assert one.parent == other.parent == shm / USER
    assert {path.stat().st_mode & 0o777 for path in (one, one.parent)} == {0o700}


def test_a_folder_that_is_not_on_tmpfs_is_refused(tmp_path: Path) -> None:
    for make in (directory.create_server_folder, directory.resolve_rings_folder):
        with pytest.raises(RingUnavailable, match="not on tmpfs"):
            make(Path("/proc/self"))
    assert not directory.is_tmpfs(Path("/proc"))
    assert directory.is_tmpfs(Path("/dev/shm/what/is/not/there"))


def test_a_link_in_the_place_of_our_folder_is_refused(shm: Path, tmp_path: Path) -> None:
    (shm / USER).symlink_to(tmp_path)
    with pytest.raises(RingUnavailable, match="belongs to somebody else"):
        directory.create_server_folder(shm)


def test_a_folder_of_another_user_is_refused(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shm / "otel_infer-12345").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(RingUnavailable, match="belongs to somebody else"):
        directory.create_server_folder(shm)


def test_a_base_that_is_not_there_is_refused_and_not_made(shm: Path) -> None:
    with pytest.raises(RingUnavailable, match="No such file"):
        directory.create_server_folder(shm / "nowhere")
    assert not (shm / "nowhere").exists()


def test_a_named_folder_that_others_may_use_is_left_as_it_is(shm: Path) -> None:
    (shm / "theirs").touch()
    folder = directory.resolve_rings_folder(shm)
    assert folder == shm / USER
    assert shm.stat().st_mode & 0o777 == 0o777
    assert (
        directory.resolve_rings_folder(shm) == folder
    )  # the same for all processes of a server and for its sidecar


def test_a_named_folder_that_is_private_or_not_there_is_used_itself(shm: Path) -> None:
    assert directory.resolve_rings_folder(shm / "a" / "b") == shm / "a" / "b"
    assert (shm / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert directory.resolve_rings_folder(shm / "a" / "b") == shm / "a" / "b"


# ── locks ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lock_lives_as_long_as_its_holder(shm: Path) -> None:
    path = shm / "a.lock"
    assert not directory.is_held(path)
    with another_process(holding(path)) as pid:
        assert directory.is_held(path)
        assert not directory.FileLock(path).acquire()
        os.kill(pid, signal.SIGKILL)
    assert not directory.is_held(path)
    assert directory.FileLock(path).acquire()


def test_a_forked_child_does_not_hold_its_parents_lock(shm: Path) -> None:
    path = shm / "a.lock"
    lock = directory.FileLock(path)
    assert lock.acquire()
    with another_process(lambda: lock):
        lock.release()
        assert directory.is_held(path) is False


def test_to_ask_keeps_nobody_from_taking(shm: Path) -> None:
    path = shm / "a.lock"
    path.touch()

    def ask_without_end() -> None:
        if os.fork() == 0:
            signal.alarm(10)
            while True:
                directory.is_held(path)

    with another_process(lambda: ask_without_end() or True):
        for _ in range(300):
            lock = directory.FileLock(path)
            assert lock.acquire()
            lock.release()
            time.sleep(0)


def test_taking_a_lock_twice_is_once_and_giving_it_up_frees_it(shm: Path) -> None:
    lock = directory.FileLock(shm / "a.lock")
    assert lock.acquire()
    assert lock.acquire()
    assert lock.ensure_held()
    lock.release()
    assert lock.acquire()


def test_a_lock_whose_folder_was_made_anew_is_taken_there_unless_somebody_has_it(shm: Path) -> None:
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


# ── the dead ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_dead_server_is_found_once(shm: Path) -> None:
    mine, dead = directory.create_server_folder(shm), dead_server(shm)
    with contextlib.ExitStack() as stack:

        def find() -> Any:
            return list(directory.claim_dead_servers(mine)) or None

        stack.enter_context(another_process(find))
        assert [] == list(directory.claim_dead_servers(mine))
    ((found, lock),) = directory.claim_dead_servers(mine)
    assert found == dead
    lock.release()


def test_a_living_server_or_one_that_is_being_started_is_not_taken_for_dead(shm: Path) -> None:
    mine, living, owned, new, being_made = (directory.create_server_folder(shm) for _ in range(5))
    dead_with_owner = dead_server(shm)
    (being_made / "1-a.requests").write_bytes(bytes(4096))  # neither locked nor written yet
    with (
        another_process(writing(living)),
        another_process(holding(owned / directory.OWNER_LOCK)),
        another_process(holding(dead_with_owner / directory.OWNER_LOCK)),
    ):
        assert [] == list(directory.claim_dead_servers(mine))
        assert new.exists()


def test_a_dead_server_whose_own_sidecar_is_on_its_way_is_left_to_it(shm: Path) -> None:
    mine, dead = directory.create_server_folder(shm), dead_server(shm)
    assert directory.claim_sidecar_start(dead)
    assert [] == list(directory.claim_dead_servers(mine))
    long_ago = time.time() - directory.START_TIMEOUT_S - 1
    os.utime(dead / directory.STARTING_FILE, (long_ago, long_ago))
    assert [dead] == [folder for folder, _ in directory.claim_dead_servers(mine)]


def test_an_empty_folder_is_abandoned_after_an_hour(shm: Path) -> None:
    mine, empty = directory.create_server_folder(shm), directory.create_server_folder(shm)
    assert [] == list(directory.claim_dead_servers(mine))
    os.utime(empty, (1, 1))
    assert [empty] == [folder for folder, _ in directory.claim_dead_servers(mine)]


def test_beside_a_named_folder_nobody_is_dead(shm: Path) -> None:
    beside = shm / "etc"
    beside.mkdir()
    (beside / "hosts").write_text("kept")
    os.utime(beside, (1, 1))
    for named in (directory.resolve_rings_folder(shm / "rings"), directory.resolve_rings_folder(shm)):
        assert [] == list(directory.claim_dead_servers(named))
    assert [beside / "hosts"] == list(beside.iterdir())


# ── removal ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_removed_is_ours_by_name_and_nothing_else(shm: Path) -> None:
    named = directory.resolve_rings_folder(shm / "rings")
    ours = [
        "1-a.requests",
        "1-a-1.steps",
        directory.OWNER_LOCK,
        directory.SIDECAR_LOCK,
        directory.INSTANCE_FILE,
    ]
    theirs = ["model.bin", "notes.txt", "other.lock"]
    for name in (*ours, *theirs):
        (named / name).touch()
    directory.remove_server_folder(named)
    assert sorted(theirs) == sorted(path.name for path in named.iterdir())


def test_a_named_folder_stays_and_one_of_ours_goes(shm: Path) -> None:
    named, made = directory.resolve_rings_folder(shm / "rings"), directory.create_server_folder(shm)
    for folder in (named, made):
        (folder / directory.SIDECAR_LOCK).touch()
        directory.remove_server_folder(folder)
    assert named.exists()
    assert not made.exists()
    directory.remove_server_folder(made)  # a second time is nothing


def test_nothing_is_removed_where_a_writer_lives(shm: Path) -> None:
    folder = dead_server(shm)
    with another_process(writing(folder, "2-b")):
        before = sorted(folder.iterdir())
        directory.remove_server_folder(folder)
        assert before == sorted(folder.iterdir())
    directory.remove_server_folder(folder)
    assert not folder.exists()


def test_a_ring_is_written_when_its_header_says_so(shm: Path) -> None:
    path = shm / "1-a.requests"
    path.write_bytes(bytes(16))
    assert not directory._is_written(path)
    RequestWriter(FileArena(shm), "2-b", "server")
    assert directory._is_written(shm / f"2-b{layout.SUFFIX_REQUESTS}")


def test_one_process_starts_the_sidecar_until_it_is_there_or_late(shm: Path) -> None:
    assert directory.claim_sidecar_start(shm)
    assert not directory.claim_sidecar_start(shm)
    os.utime(shm / directory.STARTING_FILE, (1, 1))
    assert directory.claim_sidecar_start(shm)
    assert not directory.claim_sidecar_start(shm)
    (shm / directory.STARTING_FILE).unlink()  # as the sidecar does
    assert directory.claim_sidecar_start(shm)


def test_where_a_sidecar_is_at_work_is_found_from_the_folder_itself_and_from_those_around_it(
    tmp_path: Path,
) -> None:
    user = tmp_path / f"otel_infer-{os.getuid()}"
    mine, idle = user / "12-ab", user / "34-cd"
    for folder in (mine, idle):
        folder.mkdir(parents=True)
    (idle / directory.SIDECAR_LOCK).touch()
    (mine / f"12-ab{layout.SUFFIX_REQUESTS}").touch()
    (mine / f"13-cd{layout.SUFFIX_REQUESTS}").touch()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        directory.FileLock(mine / directory.SIDECAR_LOCK).acquire()
        os.write(writer, b"1")
        signal.pause()
    try:
        os.read(reader, 1)
        assert [directory.find_served_folders(folder) for folder in (mine, user, tmp_path)] == [[mine]] * 3
        assert (
            directory.find_served_folders(idle) == directory.find_served_folders(tmp_path / "nowhere") == []
        )
        assert directory.list_writer_pids(mine) == [12, 13]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_whoever_has_no_more_descriptors_takes_nobody_for_dead_and_starts_nobody(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        assert directory.is_held(shm / directory.SIDECAR_LOCK)
        assert not directory.claim_sidecar_start(shm)
    assert not directory.is_held(shm / directory.SIDECAR_LOCK)
    assert directory.claim_sidecar_start(shm)


def test_where_everybody_may_make_folders_only_ones_own_are_served(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "BASE", shm)
    own, open_to_all, elsewhere = shm / "own", shm / "open", shm / "elsewhere"
    for folder in (own, open_to_all, elsewhere):
        folder.mkdir(mode=0o700)
    open_to_all.chmod(0o777)
    (shm / "link").symlink_to(elsewhere)
    with (
        another_process(holding(own / directory.SIDECAR_LOCK)),
        another_process(holding(open_to_all / directory.SIDECAR_LOCK)),
        another_process(holding(elsewhere / directory.SIDECAR_LOCK)),
    ):
        assert directory.find_served_folders(shm) == [elsewhere, own]
        assert open_to_all in directory.find_served_folders(open_to_all)  # whoever names it trusts it
