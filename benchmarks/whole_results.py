"""Writes the kept results of whole servers to benchmarks/results/whole.json, and measures nothing.

    python -m benchmarks.whole_results        then `python scripts/generate_docs.py`, which makes the table of docs/operate/cost.md

`make bench-whole`, `make bench-whole-vllm` and `make bench-whole-servers` measure them. A result that is not complete, or that was measured with
other source code than the present one, does not replace the one in the file. Exit status 1 if there is none to write.
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
    """Writes the file, and prints the servers whose entries stay as they are."""
    entries, missing = collect_results(section.RESULTS, section.hash_source())
    if missing:
        print(f"no complete result of this source code: {', '.join(missing)}", file=sys.stderr)
    if not entries:
        return 1
    published = json.loads(PUBLISHED.read_text())["servers"] if PUBLISHED.exists() else []
    merged = merge_entries(published, entries)
    PUBLISHED.write_text(json.dumps({"servers": merged}, indent=1, ensure_ascii=False) + "\n")
    print(f"{PUBLISHED}: {len(entries)} of {len(merged)} servers; now run python scripts/generate_docs.py")
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
        identity = {"name": served.name, "title": served.title, "source": source}
        entries.append({**identity, "environment": result.environment, "lines": rows})
    return entries, missing


def merge_entries(published: list[dict[str, Any]], entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one entry per server, in the order of the servers; a new one replaces the published one."""
    by_name = {entry["name"]: entry for entry in (*published, *entries)}
    return [by_name[served.name] for served in servers.list_all_servers() if served.name in by_name]


if __name__ == "__main__":
    sys.exit(main())
