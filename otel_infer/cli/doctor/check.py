"""What `otel-infer doctor` looks at. Each check says what it found and, unless that is fine, what to do.

Nothing is changed by being looked at: what a trial needs is made apart from everybody else's, and removed; what is loud,
heavy or may hang (importing engines, exporting) happens in a process of its own (`apart`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple
from urllib.parse import unquote

State = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """One thing looked at. `do` says what to do about it, and is empty where all is well."""

    name: str
    state: State
    found: str
    do: str = ""


def mask_secrets(text: str, environ: Mapping[str, str]) -> str:
    """The text without credentials in URLs, without their queries, and without the values of configured headers."""
    for name, headers in environ.items():
        if name.startswith("OTEL_") and name.endswith("_HEADERS"):
            for pair in headers.split(","):
                value = pair.partition("=")[2].strip()
                said = {value, unquote(value), unquote(value).rpartition(" ")[2]}
                for secret in sorted(said, key=len, reverse=True):
                    text = text.replace(secret, "***") if len(secret) > 3 else text
    text = re.sub(r"(?<=://)[^/\s]+@", "***@", text)
    return re.sub(r"(://[^\s?]*)\?[^\s,)]+", r"\1?***", text)
