"""Say what binds here, what has drifted, what the destination answers, and what to do about it.

Imports the installed engines in a process of its own, sends one span named `otel_infer doctor` where the configuration
says, allocates shared memory, starts a sidecar on it, and removes all of it again. Run it with the Python and the
environment of your server. Ends with status 1 if something failed, else 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from otel_infer.cli.doctor.check import Check, mask_secrets
from otel_infer.config.environment import child_environment, from_env_or_defaults

CheckFunction = Callable[[], list[Check]]
NAME_WIDTH = 26


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `doctor`."""
    parser.add_argument(
        "--json", action="store_true", help="one JSON object: {checks: [{name, state, found, do}], ok}"
    )
    parser.add_argument(
        "--imports",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="import the installed engines, in a process of its own (default: yes)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Looks at everything; 1 if something failed."""
    page = _JsonReport() if arguments.json else _TerminalReport() if sys.stdout.isatty() else _PlainReport()
    environ = child_environment()
    checks: list[Check] = []
    for about, look in iter_checks(environ, arguments.imports):
        with page.show_progress(about):
            found = run_check(about, look)
        for check in found:
            shown = check._replace(
                found=mask_secrets(check.found, environ), do=mask_secrets(check.do, environ)
            )
            checks.append(shown)
            page.add_check(shown)
    page.finish_report(checks)
    return 0 if is_healthy(checks) else 1


def is_healthy(checks: list[Check]) -> bool:
    """Whether nothing failed."""
    return all(check.state != "fail" for check in checks)


def iter_checks(environ: dict[str, str], imports: bool) -> Iterator[tuple[str, CheckFunction]]:
    """(what it is about, what looks at it), in order; each is done before the next is asked for."""
    from otel_infer.cli.doctor import environment, exporter, instrumentations
    from otel_infer.cli.doctor import shared_memory as memory
    from otel_infer.gpu import nvml

    settings, _ = from_env_or_defaults(environ)
    refused = ""

    def check_shared_memory() -> list[Check]:
        nonlocal refused
        check, refused = memory.check_shared_memory(settings)
        return [check]

    yield "versions", lambda: [environment.check_versions()]
    yield "configuration", lambda: [environment.check_configuration(environ)]
    yield "integrations", lambda: instrumentations.check_instrumentations(settings, imports)
    yield "exporter", lambda: exporter.check_exporter(settings, environ)
    yield "shared memory", check_shared_memory
    yield "sidecar", lambda: [memory.check_sidecar(settings, refused)]
    yield "leftovers", lambda: [memory.check_leftovers(settings)]
    yield "gpu", lambda: [environment.check_gpu(nvml.query_state())]


def run_check(about: str, look: CheckFunction) -> list[Check]:
    """What `look` found; a check that breaks is a finding, and the others go on."""
    try:
        return look()
    except Exception as broken:
        found = f"this check broke: {type(broken).__name__}: {broken}"
        return [Check(about, "fail", found, "tell us, with the line above and `otel-infer --version`")]


def _format_summary(checks: list[Check]) -> str:
    states = Counter(check.state for check in checks)
    failed, warned = states["fail"], states["warn"]
    return f"{states['ok']} ok, {warned} to look at, {failed} failed"


class _DoctorReport(Protocol):
    """Where findings are shown."""

    def show_progress(self, about: str) -> AbstractContextManager[Any]:
        """Shows what is being looked at."""

    def add_check(self, check: Check) -> None: ...

    def finish_report(self, checks: list[Check]) -> None: ...


class _JsonReport:
    """All at once, when all is known."""

    def show_progress(self, about: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def add_check(self, check: Check) -> None:
        pass

    def finish_report(self, checks: list[Check]) -> None:
        print(
            json.dumps({"checks": [check._asdict() for check in checks], "ok": is_healthy(checks)}, indent=2)
        )


class _PlainReport:
    """For a file or a pipe: a line for each finding, one more where there is something to do."""

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
    """For a person: coloured, wrapped, and saying what is being looked at."""

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
        said = Text(check.found)
        if check.do:
            said.append(f"\n→ {check.do}", "bold")
        row.add_row(Text(check.state, _COLOURS[check.state]), check.name, said)
        self._console.print(row)

    def finish_report(self, checks: list[Check]) -> None:
        self._console.print(_format_summary(checks), style="green" if is_healthy(checks) else "bold red")
