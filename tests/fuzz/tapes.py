"""Damaged and hostile tapes, given to `replay`, `explain` and `report`."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import tempfile
from functools import cache
from pathlib import Path

from otel_infer import cli
from tests.fuzz.odd_values import draw_value, mutate_bytes

TAPES = Path(__file__).parents[1] / "tapes" / "renamed"
ACCEPTED = (0, 1, 2)
MAX_LINES = 400


@cache
def _read_tape(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()[:MAX_LINES]


def run_once(draw: random.Random) -> int:
    """Gives one mutated tape to one command. Returns 1."""
    lines = list(_read_tape(draw.choice(sorted(TAPES.glob("*.tape")))))
    for _ in range(draw.randint(1, 12)):
        _mutate_line(draw, lines, draw.randrange(len(lines)))
    data = gzip.compress("\n".join(lines).encode("utf-8", "surrogatepass"), 1)
    if draw.random() < 0.2:
        data = mutate_bytes(draw, data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.tape"
        path.write_bytes(data)
        command = draw.choice(
            (["replay"], ["explain"], ["explain", "--json"], ["report", "--out", folder + "/a.html"])
        )
        arguments = [command[0], str(path), *command[1:]]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = cli.main(arguments)
    if status not in ACCEPTED:
        raise AssertionError(f"status {status}")
    return 1


def _mutate_line(draw: random.Random, lines: list[str], at: int) -> None:
    change = draw.randrange(6)
    if change == 0:
        lines[at] = mutate_bytes(draw, lines[at].encode("utf-8", "surrogatepass"), 3).decode(
            "utf-8", "replace"
        )
    elif change == 1:
        lines[at], other = lines[draw.randrange(len(lines))], lines[at]
        lines[draw.randrange(len(lines))] = other
    elif change == 2:
        del lines[at : at + draw.randint(1, 20)]
        lines.append("[]") if not lines else None
    else:
        with contextlib.suppress(ValueError):
            event = json.loads(lines[at])
            if isinstance(event, list) and event:
                event[draw.randrange(len(event))] = draw_value(draw)
            elif isinstance(event, dict):
                event[draw.choice(sorted(event))] = draw_value(draw)
            lines[at] = json.dumps(event)
