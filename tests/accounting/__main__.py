"""Runs the scenarios in full and prints a table: `python -m tests.accounting [NAME …]`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.accounting.scenarios import FULL, QUICK, SCENARIOS


def main() -> int:
    """Runs the named scenarios, or all; returns 1 if one of them does not add up."""
    names = [name for name in sys.argv[1:] if name != "--quick"] or list(SCENARIOS)
    size = QUICK if "--quick" in sys.argv else FULL
    failed = 0
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcome = SCENARIOS[name](Path(folder), size)
        try:
            outcome.check()
            verdict = "adds up"
        except AssertionError:
            verdict, failed = "DOES NOT ADD UP", 1
        counts = {label: count for label, count in outcome.counts.items() if count}
        print(
            f"{name}: {outcome.offered:,} offered, {outcome.received:,} received, {counts}: {verdict} "
            f"({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
