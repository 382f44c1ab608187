"""Writes the kept results of whole servers to benchmarks/results/whole.json, and measures nothing.

    python -m benchmarks.whole_results        then `python scripts/generate_docs.py`, which makes the table of docs/operate/cost.md

`make bench-whole`, `make bench-whole-vllm` and `make bench-whole-servers` measure them. Results that are not complete, or that were measured with other
source code, are named and left out. Exit status 1 if there is none.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.whole import lines, measurement, section, servers

PUBLISHED = Path(__file__).parent / "results" / "whole.json"


def main() -> int:
    """Writes the file, and prints the servers that it lacks."""
    source = section.hash_source()
    entries, missing = collect_results(section.RESULTS, source)
    if missing:
        print(f"no complete result of this source code: {', '.join(missing)}", file=sys.stderr)
    if not entries:
        return 1
    text = json.dumps({"source": source, "servers": entries}, indent=1, ensure_ascii=False)
    PUBLISHED.write_text(text + "\n")
    print(f"{PUBLISHED}: {len(entries)} servers; now run python scripts/generate_docs.py")
    return 0


def collect_results(folder: Path, source: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the rows of each server that was measured with this source code, and the names of the others."""
    entries, missing = [], []
    for served in servers.list_all_servers():
        result = measurement.load_result(folder / f"{served.name}.json", source)
        if not result.is_complete:
            missing.append(served.name)
            continue
        rows = [asdict(line) for line in lines.make_lines(served, result, is_quick=False)]
        identity = {"name": served.name, "title": served.title, "environment": result.environment}
        entries.append({**identity, "lines": rows})
    return entries, missing


if __name__ == "__main__":
    sys.exit(main())
