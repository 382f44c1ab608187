"""The tables of whole servers in docs/operate/cost.md, from the file that `python -m benchmarks.whole_results` writes."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import verdict
from benchmarks.verdict import Line
from benchmarks.whole import servers

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "whole.json"
COLUMNS = {
    "tokens or requests/s lost": ("tokens/s lost", "requests/s lost"),
    "gap p50": ("gap between tokens, p50",),
    "gap p99": ("gap between tokens, p99",),
    "first token or answer, p99": ("time to the first token, p99", "time to the answer, p99"),
    "CPU per token or request": ("CPU of the server per token", "CPU of the server per request"),
    "GIL samples that are ours": ("samples of who holds the GIL that are ours",),
    "sidecar, of both cores": ("sidecar, share of both cores",),
}
"""Headings, and the claims of `benchmarks.whole.lines` below them."""
NO_RESULTS = """\
There is no table yet, because no result is committed. These commands make it:

```sh
make bench-whole                          # transformers, FastAPI, a batcher
make bench-whole-vllm                     # vLLM
make bench-whole-servers                  # Flask under gunicorn, grpc.aio, LitServe
make bench-whole-engines                  # SGLang, llama-cpp-python's server, ONNX Runtime
python -m benchmarks.whole_results        # benchmarks/results/whole.json, from what was measured
python scripts/generate_docs.py           # this table
```
"""


def build_whole_section(results: Path = RESULTS) -> str:
    """Returns a table per server, or the commands that make one if there are no results."""
    if not results.exists():
        return NO_RESULTS
    saved = json.loads(results.read_text())
    parts = []
    for server, group in groupby(saved["servers"], key=lambda entry: entry["title"].rpartition(", ")[0]):
        parts.append(_build_table(server, list(group)))
    known = {served.name for served in servers.list_all_servers()}
    absent = sorted(known - {entry["name"] for entry in saved["servers"]})
    if absent:
        parts.append(f"Not measured: {', '.join(f'`{name}`' for name in absent)}.\n")
    return "\n".join(parts)


def _build_table(server: str, entries: list[dict[str, Any]]) -> str:
    measured_on = {
        ", ".join(f"{name} {value}" for name, value in entry["environment"].items())
        + f", source code `{entry['source']}`"
        for entry in entries
    }
    return "\n".join(
        [
            f"### {server}\n",
            f"| load | {' | '.join(COLUMNS)} | verdict |",
            "|---" * (len(COLUMNS) + 2) + "|",
            *(_build_row(entry) for entry in entries),
            "",
            *(f"Measured on: {machine}.\n" for machine in sorted(measured_on)),
        ]
    )


def _build_row(entry: dict[str, Any]) -> str:
    """Returns the row of a load. Raises ValueError if a line has no column, because a failure could be in it."""
    rows = [Line(**line) for line in entry["lines"]]
    by_claim = {row.claim.removeprefix(f"{entry['title']}: "): row for row in rows}
    cells = [entry["title"].rpartition(", ")[2]]
    for claims in COLUMNS.values():
        found = [by_claim.pop(claim) for claim in claims if claim in by_claim]
        cells.append(", ".join(map(_format_cell, found)) or "—")
    if by_claim:
        raise ValueError(f"without a column: {', '.join(by_claim)}")
    return f"| {' | '.join(cells)} | {_join_verdicts(rows)} |"


def _format_cell(row: Line) -> str:
    (_, gate, measured, bounds, control, judged) = verdict.format_rows([row])[0]
    said = {verdict.FAIL: f"**fails**, {gate}", verdict.INCONCLUSIVE.upper(): "inconclusive"}.get(judged, "")
    return " ".join(filter(None, (measured, bounds, said, f"({control})" if control else "")))


def _join_verdicts(rows: list[Line]) -> str:
    judged = {row.verdict for row in rows}
    if verdict.FAIL in judged:
        return "**fail**"
    return verdict.INCONCLUSIVE if verdict.INCONCLUSIVE in judged else verdict.PASS
