"""A folder of rings that another user has replaced is refused, and no file in its place is read or changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from otel_infer import _clock
from otel_infer.config.private_files import open_folder
from otel_infer.ringbuffer import dead_servers, directory, sidecar_claim
from otel_infer.ringbuffer.arena import FileArena, ForeignFolder, RingUnavailable
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar import launcher
from otel_infer.sidecar.recording import dump_request
from otel_infer.sidecar.service_resource import ServiceResource
from tests.support.other_process import shared_volume

NOBODY = 65534
DUMP = f"{directory.DUMP_PREFIX}{'0' * 16}"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs two users: run as root")


def read_rings(folder: Path) -> None:
    rings = MergedReader()
    rings.discover_rings(folder, _clock.now())
    assert len(rings.processes) == 0


OPERATIONS: dict[str, Callable[[Path], object]] = {
    "take the sidecar's lock": lambda folder: directory.FileLock(folder / directory.SIDECAR_LOCK).acquire(),
    "claim the start": sidecar_claim.claim_sidecar_start,
    "store the service": lambda folder: ServiceResource(folder, {"service.name": "mine"}).save(),
    "store why it ended": lambda folder: launcher.write_end_reason(folder, ValueError("x")),
    "create rings": lambda folder: RequestWriter(FileArena(folder), "2-b", "server"),
    "read rings": read_rings,
    "remove the folder": directory.remove_server_folder,
    "take requests for tapes": lambda folder: list(dump_request.take_dump_requests(folder)),
    "reject a request": lambda folder: dump_request.reject_dump(folder / f"{DUMP}.tape", "no space"),
    "request a tape": lambda folder: dump_request.request_dump(folder, 0.1),
    "tighten its mode": directory.ensure_private_folder,
}


@pytest.fixture
def volume() -> Iterator[Path]:
    """Returns a volume that every user may write to, without the sticky bit."""
    with shared_volume() as folder:
        yield folder


def make_victim(folder: Path) -> Path:
    """Creates files of this user with the names that lie beside rings."""
    folder.mkdir(mode=0o700)
    arena = FileArena(folder)
    RequestWriter(arena, "1-a", "server")
    arena.close()
    for name in (directory.INSTANCE_FILE, directory.SERVICE_FILE, directory.ERROR_FILE, directory.SIDECAR_LOCK,
                 sidecar_claim.STARTING_FILE, f"{DUMP}.requested", f"{DUMP}.part"):  # fmt: skip
        (folder / name).write_text("kept")
    os.utime(folder / sidecar_claim.STARTING_FILE, (1, 1))
    return folder


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", ["link", pytest.param("of another user", marks=needs_root)])
def test_no_operation_follows_a_swapped_folder(volume: Path, kind: str, operation: str) -> None:
    victim, folder = make_victim(volume / "victim"), volume / "rings"
    before = read_all(victim)
    if kind == "link":
        folder.symlink_to(victim)
    else:
        os.chown(victim, NOBODY, NOBODY)
        victim.rename(folder)
        victim = folder
    with contextlib.suppress(OSError, RingUnavailable, dump_request.DumpFailed):
        OPERATIONS[operation](folder)
        assert operation not in ("take the sidecar's lock", "create rings", "tighten its mode")
    assert read_all(victim) == before


@needs_root
def test_a_link_of_another_user_on_the_way_is_refused(volume: Path) -> None:
    victim, link = make_victim(volume / "victim"), volume / "rings"
    link.symlink_to(volume)
    with open_folder(link / "victim"):
        pass
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="link of another user"), open_folder(link / "victim"):
        pass
    assert not directory.FileLock(link / "victim" / directory.OWNER_LOCK).ensure_held()
    with pytest.raises(ForeignFolder):
        directory.resolve_rings_folder(link / "victim")
    assert directory.OWNER_LOCK not in read_all(victim)


def test_links_in_a_circle_end(volume: Path) -> None:
    (volume / "a").symlink_to(volume / "b")
    (volume / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"), open_folder(volume / "a"):
        pass


def test_relative_links_of_this_user_are_followed(volume: Path) -> None:
    (volume / "a" / "b").mkdir(parents=True)
    (volume / "c").symlink_to("a/../a/b")
    with open_folder(volume / "c") as descriptor:
        assert os.path.samestat(os.fstat(descriptor), (volume / "a" / "b").stat())


@needs_root
def test_rings_are_hidden_from_a_planted_folder(volume: Path) -> None:
    """A folder of another user counts neither as a running server nor as a dead one."""
    planted = volume / f"otel_infer-{os.geteuid()}" / "1-a"
    planted.mkdir(parents=True)
    make_victim(planted / "x")
    for folder in (planted.parent, planted):
        os.chown(folder, NOBODY, NOBODY)
    assert not dead_servers.holds_dead_server(planted)
    assert list(dead_servers.claim_dead_servers(planted.parent / "ours")) == []
    with pytest.raises(RingUnavailable, match="another user"):
        directory.create_server_folder(volume)
