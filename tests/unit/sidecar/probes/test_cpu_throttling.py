"""What control groups say of throttling, from files as the kernel writes them, and what may be concluded from it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from otel_infer import _clock
from otel_infer.config.environment import Config
from otel_infer.ringbuffer import directory, events
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.writer import MemoryArena, RequestWriter
from otel_infer.sidecar.main import Sidecar
from otel_infer.sidecar.pipeline import Pipeline
from otel_infer.sidecar.probes.cpu_throttling import (
    SAMPLE_INTERVAL_NS,
    CpuThrottlingProbe,
    find_stat_files,
    parse_throttled_ns,
)
from otel_infer.sidecar.recording import file as tape
from tests.support.story import COUNTED

MS = 1_000_000
V2 = (
    "usage_usec 9\nuser_usec 6\nsystem_usec 3\nnr_periods 7\nnr_throttled 2\nthrottled_usec {}\nnr_bursts 0\n"
)
V1 = "nr_periods 7\nnr_throttled 2\nthrottled_time {}\n"


class Machine:
    """/proc and /sys/fs/cgroup in a folder, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mount, self.at = folder / "proc", folder / "cgroup", 1_000 * MS
        self.mount.mkdir()
        self.process("self", "0::/\n")
        self.looks = CpuThrottlingProbe(self.proc, self.mount, lambda: self.at)

    def process(self, pid: str, memberships: str) -> None:
        (self.proc / pid).mkdir(parents=True, exist_ok=True)
        (self.proc / pid / "cgroup").write_text(memberships)

    def group(self, path: str, stat: str) -> Path:
        (self.mount / path).mkdir(parents=True, exist_ok=True)
        file = self.mount / path / "cpu.stat"
        file.write_text(stat)
        return file

    def look(self, at_ms: int, *processes: tuple[int, int]) -> list[tuple[int, float, float]]:
        """(ring, since, until), ms."""
        self.at = at_ms * MS
        said = self.looks.read_events(lambda: processes)
        assert all(one.event.cause == "throttled" and one.handle == 0 for one in said)
        return [(one.ring, one.event.started_at / MS, one.event.at / MS) for one in said]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ── what the files say ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("stat", "ns"),
    [
        (V2.format(1500), 1_500_000),
        (V1.format(1500), 1500),
        ("usage_usec 9\n", None),
        ("", None),
        ("throttled_usec\n", None),
        ("throttled_usec many\n", None),
        ("throttled_usec -5\n", None),
    ],
)
def test_throttled_time_is_read_in_the_unit_of_its_version(stat: str, ns: int | None) -> None:
    assert parse_throttled_ns(stat) == ns


def test_a_group_and_those_above_it_are_asked_its_own_first(machine: Machine) -> None:
    for path in ("kube/pod/box", "kube/pod", "kube"):
        machine.group(path, V2.format(0))
    machine.group("", "usage_usec 9\n")  # the root says nothing of throttling
    files = find_stat_files("0::/kube/pod/box\n", "0::/\n", machine.mount)
    assert files == tuple(machine.mount / p / "cpu.stat" for p in ("kube/pod/box", "kube/pod", "kube"))


def test_the_group_of_version_1_is_that_of_the_cpu_controller(machine: Machine) -> None:
    file = machine.group("cpu/box", V1.format(0))
    machine.group("memory/box", V1.format(0))
    memberships = "5:memory:/box\n4:cpuacct,cpu:/box\n1:name=systemd:/box\n0::/\n"
    assert find_stat_files(memberships, "", machine.mount) == (file,)


def test_in_a_container_that_sees_only_itself_the_path_of_the_host_is_not_needed(machine: Machine) -> None:
    file = machine.group("cpu", V1.format(0))
    memberships = "4:cpu:/docker/0123abcd\n"
    assert find_stat_files(memberships, memberships, machine.mount) == (file,)
    assert find_stat_files(memberships, "4:cpu:/docker/another\n", machine.mount) == ()


def test_a_process_in_a_group_that_cannot_be_seen_from_here_is_not_taken_for_one_of_ours(
    machine: Machine,
) -> None:
    machine.group("", V2.format(0))
    assert find_stat_files("0::/../box\n", "0::/\n", machine.mount) == ()


@pytest.mark.parametrize("memberships", ["", "\n", "nonsense", "0::", "0::relative", "::::"])
def test_memberships_that_make_no_sense_are_none(memberships: str, machine: Machine) -> None:
    machine.group("", V2.format(0))
    assert find_stat_files(memberships, "", machine.mount) == ()


# ── what follows from it ─────────────────────────────────────────────────────────────────────────────────────────


def test_time_that_was_added_is_stated_up_to_the_look(machine: Machine) -> None:
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(5_000_000))
    assert machine.look(1000, (1, 7)) == [], "what was before we came is nobody's"
    machine.group("box", V2.format(5_040_000))
    assert machine.look(1150, (1, 7)) == [(1, 1110, 1150)]
    assert machine.look(1300, (1, 7)) == []


def test_it_is_never_longer_than_the_time_since_the_last_look(machine: Machine) -> None:
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(0))
    machine.look(1000, (1, 7))
    machine.group("box", V2.format(640_000))  # eight CPUs for 80 ms
    assert machine.look(1100, (1, 7)) == [(1, 1000, 1100)]


def test_of_quotas_above_one_another_the_largest_is_what_is_known(machine: Machine) -> None:
    machine.process("7", "0::/pod/box\n")
    machine.group("pod", V2.format(0))
    machine.group("pod/box", V2.format(0))
    machine.look(1000, (1, 7))
    machine.group("pod", V2.format(30_000))
    machine.group("pod/box", V2.format(20_000))
    assert machine.look(1100, (1, 7)) == [(1, 1070, 1100)]


def test_every_process_of_a_group_was_held_up(machine: Machine) -> None:
    for pid in ("7", "8"):
        machine.process(pid, "0::/box\n")
    machine.process("9", "0::/other\n")
    machine.group("box", V2.format(0))
    machine.group("other", V2.format(0))
    here = ((1, 7), (2, 8), (3, 9))
    machine.look(1000, *here)
    machine.group("box", V2.format(10_000))
    assert sorted(machine.look(1100, *here)) == [(1, 1090, 1100), (2, 1090, 1100)]


def test_a_wake_that_comes_a_little_too_soon_looks_all_the_same(machine: Machine) -> None:
    """The sidecar wakes every 100 ms, and does other things before it looks, now more and now less."""
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(0))
    machine.look(1000, (1, 7))
    machine.group("box", V2.format(10_000))
    assert machine.look(1097, (1, 7)) == [(1, 1087, 1097)]


def test_it_looks_ten_times_a_second_and_asks_four_times_who_there_is(machine: Machine) -> None:
    machine.process("7", "0::/box\n")
    asked: list[int] = []
    said = []
    for at in range(1000, 2000, 10):
        machine.group("box", V2.format(at * 100))
        machine.at = at * MS
        said += machine.looks.read_events(lambda: asked.append(1) or [(1, 7)])  # type: ignore[func-returns-value]
    assert len(said) == 1_000 * MS // SAMPLE_INTERVAL_NS - 1, "the first look has nothing to compare with"
    assert len(asked) == 4


def test_files_do_not_stay_open(machine: Machine) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    machine.process("7", "0::/pod/box\n")
    machine.group("pod/box", V2.format(0))
    before = opened()
    machine.look(1000, (1, 7))
    assert opened() > before
    machine.look(2000)
    assert opened() == before, "of a process that has ended"
    machine.look(3000, (1, 7))
    machine.looks.close()
    assert opened() == before


def test_without_control_groups_it_is_silent_and_looks_for_them_once(machine: Machine) -> None:
    assert machine.look(1000, (1, 7)) == []
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(0))
    assert machine.look(1200, (1, 7)) == []
    machine.group("box", V2.format(50_000))
    assert machine.look(1400, (1, 7)) == []


def test_a_group_that_cannot_be_read_for_a_while_is_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(0))
    machine.look(1000, (1, 7))
    with monkeypatch.context() as broken:

        def gone(*_: object) -> bytes:
            raise OSError(errno.ENODEV, "its group was removed")

        broken.setattr(os, "pread", gone)
        assert machine.look(1100, (1, 7)) == []
    machine.group("box", V2.format(20_000))
    assert machine.look(1200, (1, 7)) == [(1, 1180, 1200)]


def test_a_counter_that_went_back_is_no_time(machine: Machine) -> None:
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(50_000))
    machine.look(1000, (1, 7))
    machine.group("box", V2.format(10_000))
    assert machine.look(1100, (1, 7)) == []


def test_a_process_that_is_gone_is_forgotten(machine: Machine) -> None:
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(0))
    machine.look(1000, (1, 7))
    machine.group("box", V2.format(50_000))
    assert machine.look(1300) == []
    assert machine.look(1600, (2, 7)) == [], "another one, whose time begins now"


def test_what_was_seen_is_on_the_tape_and_counted(tmp_path: Path) -> None:
    rings, arena = MergedReader(), MemoryArena()
    RequestWriter(arena, "1-a", "server")
    pipeline = Pipeline(
        Config(tape=str(tmp_path / "a.tape")), rings, [], None, {}, COUNTED, _clock.read_clocks()[1]
    )
    at = _clock.now()
    rings.add_ring(*arena.buffers[0], at)
    rings.add_event(events.RecordedEvent(1, 0, events.PauseSeen(at, at - 40 * MS, "throttled")))
    pipeline.run_cycle(at)
    pipeline.run_cycle(at + 50 * MS)
    pipeline.run_cycle(at + 600 * MS, final=True)
    pipeline.close(1)
    said = [
        one.event for passage in tape.read_batches(tmp_path / "a.tape") for one in passage.recorded_events
    ]
    assert events.PauseSeen(at, at - 40 * MS, "throttled") in said
    (metrics,) = pipeline.metrics.collect(0).resource_metrics[0].scope_metrics
    (paused,) = [metric for metric in metrics.metrics if metric.name == "infer.pause.duration"]
    (point,) = paused.data.data_points
    assert dict(point.attributes or {}) == {"infer.pause.cause": "throttled"}
    assert point.sum == pytest.approx(0.040)  # type: ignore[union-attr]


def test_the_sidecar_looks_at_every_wake_and_the_request_that_waited_knows(tmp_path: Path) -> None:
    lock = directory.FileLock(tmp_path / directory.SIDECAR_LOCK)
    assert lock.acquire()
    sidecar = Sidecar(lock, Config(), {})
    asked: list[bool] = []

    def look(processes: object) -> list[events.RecordedEvent]:
        asked.append(processes == sidecar._rings.list_writers)
        return [events.RecordedEvent(1, 0, events.PauseSeen(1_000 * MS, 960 * MS, "throttled"))][
            : len(asked) == 1
        ]

    sidecar._throttling_probe.read_events = look  # type: ignore[assignment, method-assign]
    sidecar._run_cycle(1_050 * MS)
    sidecar._run_cycle(1_100 * MS)
    sidecar._run_cycle(1_600 * MS)
    assert asked == [True, True, True], "also where the rings are left for later"
    (pauses,) = sidecar._pipeline.assembler._pauses._pauses[1].values()
    assert [pause.cause for pause in pauses] == ["throttled"]
    lock.release()
