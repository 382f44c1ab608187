"""Throttling of control groups: parsing the kernel's files and deriving pauses."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest

from otel_infer import _clock
from otel_infer.config.environment import Config
from otel_infer.ringbuffer import directory, events
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar.main import Sidecar
from otel_infer.sidecar.pipeline import Pipeline
from otel_infer.sidecar.probes.cpu_throttling import (
    SAMPLE_INTERVAL_NS,
    CpuThrottlingProbe,
    find_stat_files,
    parse_throttled_ns,
)
from otel_infer.sidecar.recording import file as tape
from tests.support.story import CLOSED_METRICS_OUTLET

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
        self.probe = CpuThrottlingProbe(self.proc, self.mount, lambda: self.at)

    def process(self, pid: str, memberships: str) -> None:
        (self.proc / pid).mkdir(parents=True, exist_ok=True)
        (self.proc / pid / "cgroup").write_text(memberships)

    def group(self, path: str, stat: str) -> Path:
        (self.mount / path).mkdir(parents=True, exist_ok=True)
        file = self.mount / path / "cpu.stat"
        file.write_text(stat)
        return file

    def sample(self, at_ms: int, *processes: tuple[int, int]) -> list[tuple[int, float, float]]:
        """Samples at `at_ms`; returns the pauses as (ring, start, end), times in ms."""
        self.at = at_ms * MS
        pauses = self.probe.read_events(lambda: processes)
        assert all(pause.event.cause == "throttled" and pause.handle == 0 for pause in pauses)
        return [(pause.ring, pause.event.started_at / MS, pause.event.at / MS) for pause in pauses]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ── parsing of the files ─────────────────────────────────────────────────────────────────────────────────────────


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
def test_throttled_time_is_parsed_for_both_versions(stat: str, ns: int | None) -> None:
    assert parse_throttled_ns(stat) == ns


def test_stat_files_run_from_group_to_ancestors(machine: Machine) -> None:
    for path in ("kube/pod/box", "kube/pod", "kube"):
        machine.group(path, V2.format(0))
    machine.group("", "usage_usec 9\n")  # the root group has no throttling counters
    files = find_stat_files("0::/kube/pod/box\n", "0::/\n", machine.mount)
    assert files == tuple(machine.mount / p / "cpu.stat" for p in ("kube/pod/box", "kube/pod", "kube"))


def test_version_1_uses_the_cpu_controller_group(machine: Machine) -> None:
    file = machine.group("cpu/box", V1.format(0))
    machine.group("memory/box", V1.format(0))
    memberships = "5:memory:/box\n4:cpuacct,cpu:/box\n1:name=systemd:/box\n0::/\n"
    assert find_stat_files(memberships, "", machine.mount) == (file,)


def test_a_container_group_is_found_without_host_path(machine: Machine) -> None:
    file = machine.group("cpu", V1.format(0))
    memberships = "4:cpu:/docker/0123abcd\n"
    assert find_stat_files(memberships, memberships, machine.mount) == (file,)
    assert find_stat_files(memberships, "4:cpu:/docker/another\n", machine.mount) == ()


def test_a_process_in_an_invisible_group_is_skipped(
    machine: Machine,
) -> None:
    machine.group("", V2.format(0))
    assert find_stat_files("0::/../box\n", "0::/\n", machine.mount) == ()


@pytest.mark.parametrize("memberships", ["", "\n", "nonsense", "0::", "0::relative", "::::"])
def test_invalid_memberships_yield_no_files(memberships: str, machine: Machine) -> None:
    machine.group("", V2.format(0))
    assert find_stat_files(memberships, "", machine.mount) == ()


# ── pauses ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_added_throttled_time_ends_at_the_sample(machine: Machine) -> None:
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(5_000_000))
    assert machine.sample(1000, (1, 7)) == [], "time before the first sample is not attributed"
    machine.group("box", V2.format(5_040_000))
    assert machine.sample(1150, (1, 7)) == [(1, 1110, 1150)]
    assert machine.sample(1300, (1, 7)) == []


def test_a_pause_never_exceeds_the_sample_interval(machine: Machine) -> None:
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(0))
    machine.sample(1000, (1, 7))
    machine.group("box", V2.format(640_000))  # eight CPUs for 80 ms
    assert machine.sample(1100, (1, 7)) == [(1, 1000, 1100)]


def test_nested_quotas_yield_the_largest_throttled_time(machine: Machine) -> None:
    machine.process("7", "0::/pod/box\n")
    machine.group("pod", V2.format(0))
    machine.group("pod/box", V2.format(0))
    machine.sample(1000, (1, 7))
    machine.group("pod", V2.format(30_000))
    machine.group("pod/box", V2.format(20_000))
    assert machine.sample(1100, (1, 7)) == [(1, 1070, 1100)]


def test_every_process_of_a_group_is_throttled(machine: Machine) -> None:
    for pid in ("7", "8"):
        machine.process(pid, "0::/box\n")
    machine.process("9", "0::/other\n")
    machine.group("box", V2.format(0))
    machine.group("other", V2.format(0))
    here = ((1, 7), (2, 8), (3, 9))
    machine.sample(1000, *here)
    machine.group("box", V2.format(10_000))
    assert sorted(machine.sample(1100, *here)) == [(1, 1090, 1100), (2, 1090, 1100)]


def test_a_slightly_early_cycle_still_samples(machine: Machine) -> None:
    """The sidecar runs a cycle every 100 ms, but its work before the sample varies."""
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(0))
    machine.sample(1000, (1, 7))
    machine.group("box", V2.format(10_000))
    assert machine.sample(1097, (1, 7)) == [(1, 1087, 1097)]


def test_samples_are_taken_ten_times_a_second(machine: Machine) -> None:
    machine.process("7", "0::/box\n")
    listings: list[int] = []
    pauses = []
    for at in range(1000, 2000, 10):
        machine.group("box", V2.format(at * 100))
        machine.at = at * MS
        pauses += machine.probe.read_events(lambda: listings.append(1) or [(1, 7)])  # type: ignore[func-returns-value]
    assert len(pauses) == 1_000 * MS // SAMPLE_INTERVAL_NS - 1, "the first sample has no predecessor"
    assert len(listings) == 4, "processes are listed four times a second"


def test_files_of_ended_processes_are_closed(machine: Machine) -> None:
    def count_open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    machine.process("7", "0::/pod/box\n")
    machine.group("pod/box", V2.format(0))
    gc.collect()  # closes files that earlier tests have left
    before = count_open_files()
    machine.sample(1000, (1, 7))
    assert count_open_files() > before
    machine.sample(2000)
    assert count_open_files() == before, "files of an ended process are closed"
    machine.sample(3000, (1, 7))
    machine.probe.close()
    assert count_open_files() == before


def test_control_groups_are_searched_once_per_process(machine: Machine) -> None:
    assert machine.sample(1000, (1, 7)) == []
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(0))
    assert machine.sample(1200, (1, 7)) == []
    machine.group("box", V2.format(50_000))
    assert machine.sample(1400, (1, 7)) == []


def test_an_unreadable_group_is_retried(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(0))
    machine.sample(1000, (1, 7))
    with monkeypatch.context() as broken:

        def fail_pread(*_: object) -> bytes:
            raise OSError(errno.ENODEV, "no such device")

        broken.setattr(os, "pread", fail_pread)
        assert machine.sample(1100, (1, 7)) == []
    machine.group("box", V2.format(20_000))
    assert machine.sample(1200, (1, 7)) == [(1, 1180, 1200)]


def test_a_decreased_counter_yields_no_pause(machine: Machine) -> None:
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(50_000))
    machine.sample(1000, (1, 7))
    machine.group("box", V2.format(10_000))
    assert machine.sample(1100, (1, 7)) == []


@pytest.mark.parametrize(
    ("name", "unlimited", "limited"),
    [("cpu.max", "max 100000\n", "50000 100000\n"), ("cpu.cfs_quota_us", "-1\n", "50000\n")],
)
def test_a_group_is_read_while_it_has_a_quota(
    machine: Machine, name: str, unlimited: str, limited: str
) -> None:
    """A quota may be set while the process runs, for a moment only."""
    machine.process("7", "0::/box\n")
    quota = machine.group("box", V2.format(0)).with_name(name)
    quota.write_text(unlimited)
    for at in (1000, 1300, 1600):
        assert machine.sample(at, (1, 7)) == []
    quota.write_text(limited)
    machine.group("box", V2.format(100_000))
    assert machine.sample(1900, (1, 7)) == [(1, 1800, 1900)], "set since the last look"
    quota.write_text(unlimited)
    machine.group("box", V2.format(150_000))
    assert machine.sample(2200, (1, 7)) == [(1, 2150, 2200)], "removed since the last look"
    machine.group("box", V2.format(200_000))
    assert machine.sample(2500, (1, 7)) == [], "impossible, and not read"


def test_an_ended_process_is_forgotten(machine: Machine) -> None:
    machine.process("7", "0::/box\n")
    machine.group("box", V2.format(0))
    machine.sample(1000, (1, 7))
    machine.group("box", V2.format(50_000))
    assert machine.sample(1300) == []
    assert machine.sample(1600, (2, 7)) == [], "another process, which starts with this sample"


def test_throttling_is_recorded_on_tape_and_in_metrics(tmp_path: Path) -> None:
    rings, arena = MergedReader(), MemoryArena()
    RequestWriter(arena, "1-a", "server")
    pipeline = Pipeline(
        Config(tape=str(tmp_path / "a.tape")),
        rings,
        [],
        None,
        {},
        CLOSED_METRICS_OUTLET,
        _clock.read_clocks()[1],
    )
    at = _clock.now()
    rings.add_ring(*arena.buffers[0], at)
    rings.add_event(events.RecordedEvent(1, 0, events.PauseSeen(at, at - 40 * MS, "throttled")))
    pipeline.run_cycle(at)
    pipeline.run_cycle(at + 50 * MS)
    pipeline.run_cycle(at + 600 * MS, final=True)
    pipeline.close(1)
    taped = [
        recorded.event
        for batch in tape.read_batches(tmp_path / "a.tape")
        for recorded in batch.recorded_events
    ]
    assert events.PauseSeen(at, at - 40 * MS, "throttled") in taped
    (metrics,) = pipeline.metrics.collect(0).resource_metrics[0].scope_metrics
    (paused,) = [metric for metric in metrics.metrics if metric.name == "infer.pause.duration"]
    (point,) = paused.data.data_points
    assert dict(point.attributes or {}) == {"infer.pause.cause": "throttled"}
    assert point.sum == pytest.approx(0.040)  # type: ignore[union-attr]


def test_the_sidecar_samples_throttling_in_every_cycle(tmp_path: Path) -> None:
    """And passes the pauses to the assembler."""
    lock = directory.FileLock(tmp_path / directory.SIDECAR_LOCK)
    assert lock.acquire()
    sidecar = Sidecar(lock, Config(), {})
    samples: list[bool] = []

    def read_events(processes: object, is_idle: bool) -> list[events.RecordedEvent]:
        samples.append(processes == sidecar._rings.list_writers)
        return [events.RecordedEvent(1, 0, events.PauseSeen(1_000 * MS, 960 * MS, "throttled"))][
            : len(samples) == 1
        ]

    sidecar._throttling_probe.read_events = read_events  # type: ignore[assignment, method-assign]
    sidecar._run_cycle(1_050 * MS)
    sidecar._run_cycle(1_100 * MS)
    sidecar._run_cycle(3_100 * MS)
    assert samples == [True, True, True], "also in cycles that do not read the rings"
    (pauses,) = sidecar._pipeline.assembler.pauses._pauses[1].values()
    assert [pause.cause for pause in pauses] == ["throttled"]
    lock.release()
