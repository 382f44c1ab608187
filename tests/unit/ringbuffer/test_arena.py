"""Ring sizes: the memory limit of one server, shared by its processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.arena import MAX_TOTAL_BYTES, FileArena, RingUnavailable, choose_sizes
from otel_infer.ringbuffer.layout import RingSizes

SIZE_BY_SUFFIX: dict[str, Callable[[RingSizes], int]] = {
    layout.SUFFIX_REQUESTS: lambda sizes: sizes.requests_bytes,
    layout.SUFFIX_STEPS: lambda sizes: sizes.steps_bytes,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder whose file system reports 1 TiB of free space."""
    real = os.statvfs(tmp_path)
    ample_space = os.statvfs_result((*real[:4], (1 << 40) // real.f_frsize, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: ample_space)
    return tmp_path


def create_ring(folder: Path, name: str, suffix: str) -> RingSizes:
    """Creates a ring of the size that this process gets."""
    size_of = SIZE_BY_SUFFIX[suffix]
    sizes = choose_sizes(FileArena(folder), size_of)
    with (folder / f"{name}{suffix}").open("wb") as file:
        os.truncate(file.fileno(), size_of(sizes))
    return sizes


def in_turn(processes: int) -> Iterator[tuple[str, str]]:
    for number in range(processes):
        yield from ((str(number), suffix) for suffix in SIZE_BY_SUFFIX)


def requests_first(processes: int) -> Iterator[tuple[str, str]]:
    for suffix in SIZE_BY_SUFFIX:
        yield from ((str(number), suffix) for number in range(processes))


@pytest.mark.parametrize("order", [in_turn, requests_first])
def test_32_processes_each_get_request_and_step_rings(
    folder: Path, order: Callable[[int], Iterator[tuple[str, str]]]
) -> None:
    rings = list(order(32))
    sizes = [create_ring(folder, *ring) for ring in rings]
    assert len(sizes) == 64
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_TOTAL_BYTES
    for kind in SIZE_BY_SUFFIX:
        of_kind = [size for (_, suffix), size in zip(rings, sizes) if suffix == kind]
        assert sorted(of_kind, reverse=True) == of_kind, "a later ring is not larger than an earlier one"


def test_a_single_process_gets_full_size_rings(folder: Path) -> None:
    assert [RingSizes(), RingSizes()] == [create_ring(folder, *ring) for ring in in_turn(1)]


def test_a_ring_takes_at_most_quarter_free_space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(folder)
    low_space = os.statvfs_result((*real[:4], (1 << 20) // real.f_frsize, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: low_space)
    assert choose_sizes(FileArena(folder), SIZE_BY_SUFFIX[layout.SUFFIX_REQUESTS]).requests_bytes <= 1 << 18


@pytest.mark.parametrize("suffix", SIZE_BY_SUFFIX)
def test_an_exhausted_limit_is_reported_not_low_memory(folder: Path, suffix: str) -> None:
    with pytest.raises(RingUnavailable, match="are used up") as rejected:
        for number in range(1000):
            create_ring(folder, str(number), suffix)
    assert "OTEL_INFER_RINGS" in str(rejected.value)
    assert "is free" not in str(rejected.value)


def test_other_files_do_not_reduce_ring_sizes(folder: Path) -> None:
    (folder / "dump-0123456789abcdef.tape").write_bytes(bytes(MAX_TOTAL_BYTES))
    assert create_ring(folder, "1", layout.SUFFIX_REQUESTS) == RingSizes()


def test_a_ring_removed_during_the_scan_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Removed:
        name = f"1{layout.SUFFIX_STEPS}"

        def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
            raise FileNotFoundError

    class Entries(list[Removed]):
        def __enter__(self) -> Entries:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", lambda path: Entries([Removed()]))
    assert choose_sizes(FileArena(folder), SIZE_BY_SUFFIX[layout.SUFFIX_STEPS]) == RingSizes()
