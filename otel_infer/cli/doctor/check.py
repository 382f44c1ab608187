"""The result of one check of `otel-infer doctor`: its state, the finding and the remedy.

Checks leave the machine unchanged: a trial uses separate resources and removes them. Checks that are loud,
heavy or may hang (importing engines, exporting) run in a separate process (`probe_process`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple
from urllib.parse import unquote

State = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """The result of one check. `do` is the remedy; empty if the state is `ok`."""

    name: str
    state: State
    found: str
    do: str = ""


def mask_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Masks the credentials and queries of URLs, and the values of configured headers, in a text."""
    for name, headers in environ.items():
        if name.startswith("OTEL_") and name.endswith("_HEADERS"):
            for pair in headers.split(","):
                value = pair.partition("=")[2].strip()
                secrets = {value, unquote(value), unquote(value).rpartition(" ")[2]}
                for secret in sorted(secrets, key=len, reverse=True):
                    text = text.replace(secret, "***") if len(secret) > 3 else text
    text = re.sub(r"(?<=://)[^/\s]+@", "***@", text)
    return re.sub(r"(://[^\s?]*)\?[^\s,)]+", r"\1?***", text)
