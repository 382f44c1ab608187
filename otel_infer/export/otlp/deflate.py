"""The library that compresses: igzip where it is installed, which writes the same format for a tenth of the CPU."""

from __future__ import annotations

from typing import Any

deflate: Any
try:
    from isal import isal_zlib as deflate
except ImportError:
    import zlib as deflate

__all__ = ["deflate"]
