"""The `otel-infer` command. One module per subcommand, each with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from otel_infer._version import VERSION
from otel_infer.config.settings import SETTINGS, InvalidSetting

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
"""As a shell says of a command that nobody listened to."""
COMMANDS = {
    "run": "start a server instrumented: otel-infer run -- CMD …",
    "demo": "make a tiny model, serve it instrumented, load it, show where the time goes",
    "doctor": "what binds here, what has drifted, what the destination answers, and what to do",
    "dump": "write a tape of the last two minutes of a running server",
    "explain": "of a running server or a tape: which complaint it is, the evidence, what to change first",
    "replay": "read a tape: print its requests, or send them",
    "report": "read a tape: one HTML page that opens offline, and a trace for Perfetto",
    "sidecar": "read the rings of servers in another container",
    "dashboards": "for Grafana: write them, push them, see which panels have data",
    "alerts": "rules on what you promise and on causes, for Prometheus or Grafana",
}


MODULES = {name: f"{name}.command" for name in ("demo", "doctor", "explain", "report")}
"""Commands whose module is inside a package of their name."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    whole = argparse.ArgumentParser(
        prog="otel-infer",
        description="Every stage of every inference request as an OpenTelemetry trace.",
        epilog="environment:\n" + "\n".join(f"  {s.variable:<32}{s.meaning}" for s in SETTINGS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"otel-infer {VERSION}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"otel_infer.cli.{MODULES.get(name, name)}")
        one = commands.add_parser(name, help=summary, description=module.__doc__)
        one.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(one)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    whole = build_parser()
    parsed = whole.parse_args(arguments)
    if parsed.command is None:
        whole.print_help()
        return 2
    try:
        status: int = importlib.import_module(
            f"otel_infer.cli.{MODULES.get(parsed.command, parsed.command)}"
        ).run(parsed)
        sys.stdout.flush()
    except InvalidSetting as bad:
        print(f"otel-infer: {bad}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return BROKEN_PIPE_STATUS
    except KeyboardInterrupt:
        return 130
    return status
