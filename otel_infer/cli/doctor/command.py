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

from otel_infer.cli.doctor.check import Check, masked
from otel_infer.config.environment import child_environment, from_env_leniently

Look = Callable[[], list[Check]]
WIDTH = 26


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
    page = _Json() if arguments.json else _Terminal() if sys.stdout.isatty() else _Lines()
    environ = child_environment()
    checks: list[Check] = []
    for about, look in looks(environ, arguments.imports):
        with page.watching(about):
            found = looked(about, look)
        for check in found:
            shown = check._replace(found=masked(check.found, environ), do=masked(check.do, environ))
            checks.append(shown)
            page.show(shown)
    page.end(checks)
    return 0 if is_well(checks) else 1


def is_well(checks: list[Check]) -> bool:
    """Whether nothing failed."""
    return all(check.state != "fail" for check in checks)


def looks(environ: dict[str, str], imports: bool) -> Iterator[tuple[str, Look]]:
    """(what it is about, what looks at it), in order; each is done before the next is asked for."""
    from otel_infer.cli.doctor import environment, exporter, instrumentations
    from otel_infer.cli.doctor import shared_memory as memory
    from otel_infer.gpu import nvml

    settings, _ = from_env_leniently(environ)
    refused = ""

    def shared_memory() -> list[Check]:
        nonlocal refused
        check, refused = memory.shared_memory(settings)
        return [check]

    yield "versions", lambda: [environment.versions()]
    yield "configuration", lambda: [environment.configuration(environ)]
    yield "integrations", lambda: instrumentations.integrations(settings, imports)
    yield "exporter", lambda: exporter.exporter(settings, environ)
    yield "shared memory", shared_memory
    yield "sidecar", lambda: [memory.sidecar(settings, refused)]
    yield "leftovers", lambda: [memory.leftovers(settings)]
    yield "gpu", lambda: [environment.gpu(nvml.state())]


def looked(about: str, look: Look) -> list[Check]:
    """What `look` found; a check that breaks is a finding, and the others go on."""
    try:
        return look()
    except Exception as broken:
        found = f"this check broke: {type(broken).__name__}: {broken}"
        return [Check(about, "fail", found, "tell us, with the line above and `otel-infer --version`")]


def _summary(checks: list[Check]) -> str:
    states = Counter(check.state for check in checks)
    failed, warned = states["fail"], states["warn"]
    return f"{states['ok']} ok, {warned} to look at, {failed} failed"


class _Page(Protocol):
    """Where findings are shown."""

    def watching(self, about: str) -> AbstractContextManager[Any]:
        """Shows what is being looked at."""

    def show(self, check: Check) -> None: ...

    def end(self, checks: list[Check]) -> None: ...


class _Json:
    """All at once, when all is known."""

    def watching(self, about: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def show(self, check: Check) -> None:
        pass

    def end(self, checks: list[Check]) -> None:
        print(json.dumps({"checks": [check._asdict() for check in checks], "ok": is_well(checks)}, indent=2))


class _Lines:
    """For a file or a pipe: a line for each finding, one more where there is something to do."""

    def watching(self, about: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def show(self, check: Check) -> None:
        print(f"{check.state:<6}{check.name:<{WIDTH}}{check.found}", flush=True)
        if check.do:
            print(f"{'':<6}{'':<{WIDTH}}do: {check.do}", flush=True)

    def end(self, checks: list[Check]) -> None:
        print(_summary(checks))


_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class _Terminal:
    """For a person: coloured, wrapped, and saying what is being looked at."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    def watching(self, about: str) -> AbstractContextManager[Any]:
        return self._console.status(f"{about} …")

    def show(self, check: Check) -> None:
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 2))
        for width in (4, WIDTH - 2, None):
            row.add_column(width=width, overflow="fold")
        said = Text(check.found)
        if check.do:
            said.append(f"\n→ {check.do}", "bold")
        row.add_row(Text(check.state, _COLOURS[check.state]), check.name, said)
        self._console.print(row)

    def end(self, checks: list[Check]) -> None:
        self._console.print(_summary(checks), style="green" if is_well(checks) else "bold red")
