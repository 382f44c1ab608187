"""Checks what became of the requests of the servers that run now: exported, not sampled, open, or lost."""

from __future__ import annotations

from pathlib import Path

from otel_infer import semconv
from otel_infer.cli.doctor.check import Check
from otel_infer.config.environment import Config
from otel_infer.ringbuffer import directory, ledger
from otel_infer.ringbuffer.ledger import RequestCounts

_REMEDIES = {
    semconv.LOSS_NOT_RECORDED: "more than 4,096 requests were in flight in one process: end requests that hang, or use more processes",
    semconv.LOSS_EVENTS_OVERWRITTEN: "the sidecar was stopped or too slow: give it CPU time, or shared memory if the rings are small",
    semconv.LOSS_SIDECAR_ENDED: "the sidecar was killed: look for the kernel's out-of-memory killer, and raise the memory limit",
    semconv.LOSS_NOT_CONVERTED: "report it as a bug, with the log that OTEL_INFER_LOG names",
    semconv.LOSS_NOT_ENCODED: "report it as a bug, with the log that OTEL_INFER_LOG names",
    semconv.LOSS_QUEUE_FULL: "the destination is too slow: give the collector more CPU, or a collector of its own near the server",
    semconv.LOSS_REFUSED: "the destination refused spans: look at its log, and at the check exporter",
    semconv.LOSS_UNCONFIRMED: "the destination did not answer in time; it may have the spans: look at its load and at OTEL_EXPORTER_OTLP_TIMEOUT",
}


def check_requests(settings: Config) -> list[Check]:
    """Returns one check per running server; none where no server of this user runs."""
    folders = directory.find_served_folders(Path(settings.rings or directory.BASE))
    return [check for check in map(_check_server, folders) if check is not None]


def _check_server(folder: Path) -> Check | None:
    try:
        counts = ledger.read_server_counts(folder)
    except OSError:  # the server has just ended, or its sidecar is of another release
        return None
    lost = {reason: count for reason, count in counts.lost.items() if count}
    do = _REMEDIES[max(lost, key=lambda reason: lost[reason])] if lost else ""
    return Check(f"requests of {folder.name}", "warn" if lost else "ok", describe_counts(counts), do)


def describe_counts(counts: RequestCounts) -> str:
    """Returns the counts as an equation: offered = exported + not sampled + open + lost, by reason."""
    lost = {reason: count for reason, count in counts.lost.items() if count}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in lost.items())
    terms = [
        *(f"{count:,} {result.replace('_', ' ')}" for result, count in counts.results.items()),
        f"{counts.open:,} open",
        f"{sum(lost.values()):,} lost{f' ({reasons})' if reasons else ''}",
    ]
    return f"{counts.offered:,} offered = {' + '.join(terms)}"
