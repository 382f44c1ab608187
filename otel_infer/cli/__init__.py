"""The `otel-infer` command. One module per subcommand, each with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from otel_infer._version import VERSION
from otel_infer.cli.errors import CommandError
from otel_infer.config.redaction import replace_controls
from otel_infer.config.settings import SETTINGS, InvalidSetting

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
"""The exit status that a shell reports for a command that SIGPIPE ended."""
COMMANDS = {
    "run": "start a server with instrumentation: otel-infer run -- CMD …",
    "demo": "make a tiny model, serve it with instrumentation, load it, show where the time goes",
    "doctor": "check what binds, what does not match, whether the destination accepts data, and what to do",
    "dump": "write a tape of the last two minutes of a running server",
    "explain": "the symptom of slow requests on a server or a tape, the evidence, what to change first",
    "replay": "read a tape: print its requests, or export them",
    "report": "read a tape: write one HTML page that opens offline, and a trace for Perfetto",
    "sidecar": "read the rings of servers in another container",
    "dashboards": "write or push Grafana dashboards, check which panels have data",
    "alerts": "alert rules on objectives and on causes, for Prometheus or Grafana",
}


MODULES = {name: f"{name}.command" for name in ("demo", "doctor", "explain", "report")}
"""Commands whose module is inside a package of the same name."""


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="otel-infer",
        description="Every stage of every inference request as an OpenTelemetry trace.",
        epilog="environment:\n" + "\n".join(f"  {s.variable:<32}{s.meaning}" for s in SETTINGS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"otel-infer {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"otel_infer.cli.{MODULES.get(name, name)}")
        subparser = commands.add_parser(name, help=summary, description=module.__doc__)
        subparser.formatter_class = argparse.RawDescriptionHelpFormatter
        subparser.set_defaults(run=module.run)
        module.add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 2
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except CommandError as error:
        print(f"otel-infer {parsed.command}: {replace_controls(str(error))}", file=sys.stderr)
        return 2
    except InvalidSetting as error:
        print(f"otel-infer: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the pipe is gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail
        return BROKEN_PIPE_STATUS
    except KeyboardInterrupt:
        return 130
    return status
