"""What a model may be called on the wire."""

from __future__ import annotations

import functools
import os
import re

_SEPARATORS = re.compile(r"[/\\]")


@functools.lru_cache(256)
def name_of(said: str) -> str:
    """A model's hub id as it is; of a folder or a file its own name, never its path."""
    is_path = os.path.isabs(said) or said.startswith((".", "~")) or said.count("/") > 1 or "\\" in said
    if is_path or os.path.exists(said):
        return _SEPARATORS.split(said.rstrip("/\\"))[-1]
    return said
