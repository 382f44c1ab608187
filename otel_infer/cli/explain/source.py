"""The source of an explanation: the server or tape, the period and the number of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config.private_files import read_private_text
from otel_infer.config.redaction import replace_controls
from otel_infer.ringbuffer import directory, events

MAX_PIDS, MAX_ERRORS = 4, 3
"""Processes of a server, and types of errors, in the sentence; JSON has all of them."""
MAX_NAME_BYTES = 4096


class ExplainSource(NamedTuple):
    """The data that an explanation is based on.

    `tape`: file name; "" for a running server. `service`: service name of a running server; "" = not known.
    `pids`: its processes. `began_at`, `ended_at`: the period, unix ns; 0 = no request finished. `requests`:
    successful or aborted requests that generate. The other finished requests are counted by reason. `errors`: types of the
    failed ones, the most frequent first.
    """

    tape: str
    service: str
    pids: tuple[int, ...]
    engines: tuple[str, ...]
    began_at: int
    ended_at: int
    requests: int
    no_engine: int
    failed: int
    not_generating: int
    errors: tuple[tuple[str, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the source for JSON. The period is local time (ISO 8601, s) and None if it is not known."""
        begin, end = _to_local_time(self.began_at), _to_local_time(self.ended_at)
        return {
            "tape": self.tape or None,
            "service": self.service or None,
            "pids": list(self.pids),
            "engines": list(self.engines),
            "begin": begin.isoformat(timespec="seconds") if begin else None,
            "end": end.isoformat(timespec="seconds") if end else None,
            "seconds": (self.ended_at - self.began_at) / 1e9,
            "requests": self.requests,
            "no_engine": self.no_engine,
            "failed": self.failed,
            "not_generating": self.not_generating,
            "errors": dict(self.errors),
        }

    def to_sentence(self) -> str:
        """Returns one line with the server, the period and the counts.

        Example: `vllm (pid 7): 2026-07-30 14:03:12 to 14:05:10 (118 s), 60 requests; left out: 2 failed (TimeoutError 2)`.
        """
        left_out = [
            f"{count:,} {reason}"
            for count, reason in (
                (self.no_engine, "reached no engine"),
                (self.failed, f"failed ({self._describe_errors()})"),
                (self.not_generating, "generated nothing"),
            )
            if count
        ]
        counts = f"{self.requests:,} requests" + (f"; left out: {', '.join(left_out)}" if left_out else "")
        return f"{self._describe_server()}: {self._describe_period()}, {counts}"

    def _describe_errors(self) -> str:
        shown = [f"{replace_controls(name)} {count:,}" for name, count in self.errors[:MAX_ERRORS]]
        return ", ".join(shown) + (", …" if len(self.errors) > MAX_ERRORS else "")

    def _describe_server(self) -> str:
        if self.tape:
            return self.tape
        shown = ", ".join(map(str, self.pids[:MAX_PIDS])) + (", …" if len(self.pids) > MAX_PIDS else "")
        pids = f"{'pids' if len(self.pids) > 1 else 'pid'} {shown}" if shown else "pid unknown"
        if self.service:
            return f"{self.service} ({pids})"
        return f"{pids} ({', '.join(self.engines) or 'no engine'})"

    def _describe_period(self) -> str:
        begin, end = _to_local_time(self.began_at), _to_local_time(self.ended_at)
        if begin is None or end is None:
            return "no period" if not self.ended_at else "unknown period"
        is_same_day = begin.date() == end.date()
        until = f"{end:%H:%M:%S}" if is_same_day else f"{end:%Y-%m-%d %H:%M:%S}"
        seconds = (self.ended_at - self.began_at) / 1e9
        return f"{begin:%Y-%m-%d %H:%M:%S} to {until} ({seconds:,.{0 if seconds >= 10 else 1}f} s)"


def describe_source(
    finished: Sequence[RequestRecord],
    complete_since: int,
    *,
    tape: Path | None = None,
    folder: Path | None = None,
) -> ExplainSource:
    """Returns the source of these finished requests.

    `complete_since`: when the period begins (monotonic ns); 0 = at the first arrival. `tape`: the file, or
    `folder`: the folder of the running server's rings.
    """
    engines = sorted({record.engine for record in finished if record.engine})
    failed = [
        record
        for record in finished
        if record.outcome == events.ERROR and (record.operation or record.failed_in_queue)
    ]
    served = [record for record in finished if record.operation and record.outcome != events.ERROR]
    generating = [record for record in served if record.generative]
    began_at = ended_at = 0
    if finished:
        offset = finished[0].wall_offset
        began_at = offset + (complete_since or min(record.arrived_at for record in finished))
        ended_at = offset + max(record.ended_at for record in finished)
    return ExplainSource(
        tape=tape.name if tape is not None else "",
        service=_read_service_name(folder) if folder is not None else "",
        pids=tuple(sorted(directory.list_writer_pids(folder))) if folder is not None else (),
        engines=tuple(engines),
        began_at=began_at,
        ended_at=ended_at,
        requests=len(generating),
        no_engine=len(finished) - len(failed) - len(served),
        failed=len(failed),
        not_generating=len(served) - len(generating),
        errors=tuple(Counter(record.error_type or semconv.OTHER for record in failed).most_common()),
    )


def _read_service_name(folder: Path) -> str:
    """Returns the service name that the sidecar stored beside the rings; empty if it cannot be read."""
    try:
        return replace_controls(
            read_private_text(folder / directory.SERVICE_FILE, MAX_NAME_BYTES, any_owner=True).strip()
        )
    except (OSError, ValueError):
        return ""


def _to_local_time(unix_ns: int) -> datetime | None:
    """Returns an instant in local time; None for 0 and for an instant out of range."""
    if not unix_ns:
        return None
    try:
        return datetime.fromtimestamp(unix_ns // 1_000_000_000).astimezone()
    except (OverflowError, ValueError, OSError):
        return None
