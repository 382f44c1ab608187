"""Reads the requests to explain, from a tape or from a running server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from otel_infer.assembly.records.missed_objectives import list_missed_objectives
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli import running_server
from otel_infer.cli.errors import CommandError
from otel_infer.cli.explain import period
from otel_infer.cli.explain.source import ExplainSource, describe_source
from otel_infer.config.slo import Objectives
from otel_infer.ringbuffer.events import CpuSeen
from otel_infer.sidecar.recording import file

if TYPE_CHECKING:
    from otel_infer.analysis.diagnosis.rules import Diagnosis


class ExplainInput(NamedTuple):
    """The requests to explain. Requests that reached no engine (e.g. health checks) are excluded, unless one of them is
    asked for by its id, or `unfollowed` is about them.

    `complete_since`: from when on the tape has all events (monotonic ns). `running_since`: when each
    unfinished request was scheduled, or else arrived. `cpu_usage`: of the server's cores. `abandoned_share`:
    of the engines' time, what they spent on clients that had left. `hang`: the stacks of a server that hung.
    `objectives`: those of the server. `unfollowed`: which HTTP requests lack their model calls.
    """

    source: ExplainSource
    records: list[RequestRecord]
    complete_since: int
    running_since: list[int]
    cpu_usage: Sequence[CpuSeen] = ()
    abandoned_share: float = 0.0
    hang: Sequence[str] = ()
    objectives: Objectives = Objectives()
    unfollowed: str = ""

    def diagnose(self) -> Diagnosis:
        """Returns the symptom that these requests show."""
        from otel_infer.analysis.diagnosis.failed_waits import add_failed_waits
        from otel_infer.analysis.diagnosis.rules import diagnose_requests
        from otel_infer.analysis.diagnosis.unfollowed import replace_by_unfollowed

        diagnosis = diagnose_requests(
            self.records,
            self.complete_since,
            self.running_since,
            self.cpu_usage,
            self.abandoned_share,
            list_missed_objectives(self.records, self.objectives),
        )
        return replace_by_unfollowed(add_failed_waits(diagnosis, self.records), self.unfollowed)


def read_input(arguments: argparse.Namespace) -> ExplainInput:
    if arguments.tape is None:
        folder = running_server.find_server_folder(arguments.rings, arguments.server)
        with running_server.open_dump(folder) as tape:
            return read_inferences(tape, arguments.request, folder, period.read_period(arguments))
    if arguments.rings or arguments.server:
        raise CommandError("give a tape, or a running server by --rings and --server, not both")
    return read_inferences(Path(arguments.tape), arguments.request, arrived=period.read_period(arguments))


def read_inferences(
    path: Path,
    request_id: str | None = None,
    folder: Path | None = None,
    arrived: period.Period = period.ALWAYS,
) -> ExplainInput:
    """Reads a tape. With a request id, it includes the requests that ended before the period of the tape.

    `folder`: the folder of the rings if the tape is a dump of a running server.
    """
    from otel_infer.analysis.diagnosis.unfollowed import describe_unfollowed, select_explained
    from otel_infer.assembly.assembler import Assembler
    from otel_infer.cli.explain.hang import describe_hang
    from otel_infer.cli.replay import (
        find_running_since,
        measure_abandoned_share,
        read_recent_records,
        read_records,
    )

    assembler = Assembler()
    read = read_records if request_id else read_recent_records
    finished = period.select_requests(list(read(path, assembler)), arrived)
    complete_since = file.read_began_at(path)
    if arrived.since is not None and finished:
        complete_since = max(complete_since, min(record.arrived_at for record in finished))
    source = describe_source(finished, complete_since, tape=None if folder else path, folder=folder)
    unfollowed = "" if request_id else describe_unfollowed(finished)
    running_since = find_running_since(assembler)
    return ExplainInput(
        source,
        finished if request_id else select_explained(finished, unfollowed),
        complete_since,
        running_since,
        assembler.processes.cpu_usage,
        measure_abandoned_share(assembler),
        describe_hang(assembler),
        file.read_objectives(path),
        unfollowed,
    )
