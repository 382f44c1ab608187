"""Check what binds, what does not match, whether the destination accepts data, and how to fix it.

Imports the installed engines in a separate process and sends one span named `otel_infer doctor` to the
configured destination. Allocates shared memory, starts a sidecar on it, and removes both again. Run it with
the Python and the environment of your server. Exits with status 1 if a check failed, else 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from otel_infer.cli.doctor.check import Check
from otel_infer.config.environment import child_environment, from_env_or_defaults
from otel_infer.config.redaction import list_secrets, mask_secrets

CheckFunction = Callable[[], list[Check]]
NAME_WIDTH = 26


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `doctor`."""
    parser.add_argument(
        "--json", action="store_true", help="one JSON object: {checks: [{name, state, found, do}], ok}"
    )
    parser.add_argument(
        "--imports",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="import the installed engines, in a separate process (default: yes)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs all checks and reports them. Returns 1 if a check failed, else 0."""
    report = _JsonReport() if arguments.json else _TerminalReport() if sys.stdout.isatty() else _PlainReport()
    environ = child_environment()
    secrets = list_secrets(environ)
    checks: list[Check] = []
    for topic, check_function in iter_checks(environ, arguments.imports):
        with report.show_progress(topic):
            found = run_check(topic, check_function)
        for check in found:
            masked = check._replace(
                found=mask_secrets(check.found, secrets), do=mask_secrets(check.do, secrets)
            )
            checks.append(masked)
            report.add_check(masked)
    report.finish_report(checks)
    return 0 if is_healthy(checks) else 1


def is_healthy(checks: list[Check]) -> bool:
    """Returns whether no check failed."""
    return all(check.state != "fail" for check in checks)


def iter_checks(environ: dict[str, str], imports: bool) -> Iterator[tuple[str, CheckFunction]]:
    """Yields (topic, check function) in order. The caller runs each function before it takes the next.

    The sidecar check reads the result of the shared memory check.
    """
    from otel_infer.cli.doctor import (
        environment,
        exporter,
        instrumentations,
        requests,
        shared_memory,
        stacks,
    )
    from otel_infer.gpu import nvml

    settings, _ = from_env_or_defaults(environ)
    refused = ""

    def check_shared_memory() -> list[Check]:
        nonlocal refused
        check, refused = shared_memory.check_shared_memory(settings)
        return [check]

    yield "versions", lambda: [environment.check_versions()]
    yield "configuration", lambda: [environment.check_configuration(environ)]
    yield "integrations", lambda: instrumentations.check_instrumentations(settings, imports)
    yield "exporter", lambda: exporter.check_exporter(settings, environ)
    yield "shared memory", check_shared_memory
    yield "sidecar", lambda: [shared_memory.check_sidecar(settings, refused)]
    yield "requests", lambda: requests.check_requests(settings)
    yield "leftovers", lambda: [shared_memory.check_leftovers(settings)]
    yield "stacks", lambda: [stacks.check_stacks(settings)]
    yield "gpu", lambda: [environment.check_gpu(nvml.query_state())]


def run_check(topic: str, check_function: CheckFunction) -> list[Check]:
    """Runs one check. An exception becomes a failed check, so that the other checks still run."""
    try:
        return check_function()
    except Exception as error:
        found = f"this check raised {type(error).__name__}: {error}"
        return [
            Check(
                topic,
                "fail",
                found,
                "report it as a bug, with the line above and the output of `otel-infer --version`",
            )
        ]


def _format_summary(checks: list[Check]) -> str:
    states = Counter(check.state for check in checks)
    failed, warned = states["fail"], states["warn"]
    return f"{states['ok']} ok, {warned} to look at, {failed} failed"


class _DoctorReport(Protocol):
    """Shows the results of checks."""

    def show_progress(self, about: str) -> AbstractContextManager[Any]:
        """Shows which topic is being checked."""

    def add_check(self, check: Check) -> None: ...

    def finish_report(self, checks: list[Check]) -> None: ...


class _JsonReport:
    """Prints all results as one JSON object at the end."""

    def show_progress(self, about: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def add_check(self, check: Check) -> None:
        pass

    def finish_report(self, checks: list[Check]) -> None:
        print(
            json.dumps({"checks": [check._asdict() for check in checks], "ok": is_healthy(checks)}, indent=2)
        )


class _PlainReport:
    """Prints one line per result, and one more if there is a remedy; for a file or a pipe."""

    def show_progress(self, about: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def add_check(self, check: Check) -> None:
        print(f"{check.state:<6}{check.name:<{NAME_WIDTH}}{check.found}", flush=True)
        if check.do:
            print(f"{'':<6}{'':<{NAME_WIDTH}}do: {check.do}", flush=True)

    def finish_report(self, checks: list[Check]) -> None:
        print(_format_summary(checks))


_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class _TerminalReport:
    """Prints coloured, wrapped results and the topic that is being checked; for a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    def show_progress(self, about: str) -> AbstractContextManager[Any]:
        return self._console.status(f"{about} …")

    def add_check(self, check: Check) -> None:
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 2))
        for width in (4, NAME_WIDTH - 2, None):
            row.add_column(width=width, overflow="fold")
        text = Text(check.found)
        if check.do:
            text.append(f"\n→ {check.do}", "bold")
        row.add_row(Text(check.state, _COLOURS[check.state]), check.name, text)
        self._console.print(row)

    def finish_report(self, checks: list[Check]) -> None:
        self._console.print(_format_summary(checks), style="green" if is_healthy(checks) else "bold red")
