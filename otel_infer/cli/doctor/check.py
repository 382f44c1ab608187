"""The result of one check of `otel-infer doctor`: its state, the finding and the remedy.

Checks leave the machine unchanged: a trial uses separate resources and removes them. Checks that are loud,
heavy or may hang (importing engines, exporting) run in a separate process (`probe_process`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """The result of one check. `do` is the remedy; empty if the state is `ok`."""

    name: str
    state: State
    found: str
    do: str = ""
