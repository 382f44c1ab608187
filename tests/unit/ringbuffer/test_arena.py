"""How the memory of one server is shared out among its processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.arena import MAX_TOTAL_BYTES, FileArena, RingUnavailable, choose_sizes
from otel_infer.ringbuffer.layout import RingSizes

KINDS: dict[str, Callable[[RingSizes], int]] = {
    layout.SUFFIX_REQUESTS: lambda sizes: sizes.requests_bytes,
    layout.SUFFIX_STEPS: lambda sizes: sizes.steps_bytes,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where there is more memory than anybody wants, whatever this machine has."""
    found = os.statvfs(tmp_path)
    plenty = os.statvfs_result((*found[:4], (1 << 40) // found.f_frsize, *found[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: plenty)
    return tmp_path


def make(folder: Path, name: str, suffix: str) -> RingSizes:
    """A ring of the size that this process may have."""
    size_of = KINDS[suffix]
    sizes = choose_sizes(FileArena(folder), size_of)
    with (folder / f"{name}{suffix}").open("wb") as file:
        os.truncate(file.fileno(), size_of(sizes))
    return sizes


def in_turn(processes: int) -> Iterator[tuple[str, str]]:
    for number in range(processes):
        yield from ((str(number), suffix) for suffix in KINDS)


def requests_first(processes: int) -> Iterator[tuple[str, str]]:
    for suffix in KINDS:
        yield from ((str(number), suffix) for number in range(processes))


@pytest.mark.parametrize("come", [in_turn, requests_first])
def test_each_of_32_processes_gets_a_ring_of_requests_and_one_of_steps(
    folder: Path, come: Callable[[int], Iterator[tuple[str, str]]]
) -> None:
    made = [make(folder, *who) for who in come(32)]
    assert len(made) == 64
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_TOTAL_BYTES
    assert sorted(made, reverse=True) == made, "who comes later gets no more than who came before"


def test_a_process_by_itself_has_rings_of_full_size(folder: Path) -> None:
    assert [RingSizes(), RingSizes()] == [make(folder, *who) for who in in_turn(1)]


def test_no_ring_takes_more_than_a_quarter_of_what_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(folder)
    little = os.statvfs_result((*found[:4], (1 << 20) // found.f_frsize, *found[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: little)
    assert choose_sizes(FileArena(folder), KINDS[layout.SUFFIX_REQUESTS]).requests_bytes <= 1 << 18


@pytest.mark.parametrize("suffix", KINDS)
def test_when_our_own_share_is_used_up_the_machine_is_not_said_to_be_short(folder: Path, suffix: str) -> None:
    with pytest.raises(RingUnavailable, match="are used up") as refused:
        for number in range(1000):
            make(folder, str(number), suffix)
    assert "OTEL_INFER_RINGS" in str(refused.value)
    assert "is free" not in str(refused.value)


def test_what_is_no_ring_takes_no_room_from_the_rings(folder: Path) -> None:
    (folder / "dump-0123456789abcdef.tape").write_bytes(bytes(MAX_TOTAL_BYTES))
    assert make(folder, "1", layout.SUFFIX_REQUESTS) == RingSizes()


def test_a_ring_that_its_reader_removes_meanwhile_stops_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Removed:
        name = f"1{layout.SUFFIX_STEPS}"

        def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
            raise FileNotFoundError

    class Entries(list[Removed]):
        def __enter__(self) -> Entries:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", lambda path: Entries([Removed()]))
    assert choose_sizes(FileArena(folder), KINDS[layout.SUFFIX_STEPS]) == RingSizes()
