"""The version of this distribution, as installed."""

from __future__ import annotations

from importlib import metadata

try:
    VERSION = metadata.version("otel-infer")
except metadata.PackageNotFoundError:  # a source tree on sys.path
    VERSION = "0+unknown"
