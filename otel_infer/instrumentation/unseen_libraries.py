"""Names the libraries between a request and its model that no instrumentation follows, and what to do about each."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from typing import NamedTuple


class UnseenLibrary(NamedTuple):
    """A library. `module`: its name on import. `effect`: what is missing of its requests."""

    module: str
    effect: str


_MODELS = "its models have no stage: put `otel_infer.stage` around their calls"
_SERVER = "its requests have no SERVER span unless the application is wrapped: `otel_infer.instrumentation.wsgi.wrap`"
UNSEEN_LIBRARIES = (
    UnseenLibrary("uwsgi", _SERVER),
    UnseenLibrary("cheroot", _SERVER),
    UnseenLibrary("bjoern", _SERVER),
    UnseenLibrary("robyn", "its requests are not seen: open them by `otel_infer.request`"),
    UnseenLibrary("tensorflow", _MODELS),
    UnseenLibrary("jax", _MODELS),
    UnseenLibrary("tensorrt", _MODELS),
    UnseenLibrary("mlx", _MODELS),
)  # fmt: skip
"""In the order in which they are named."""


def find_imported() -> list[UnseenLibrary]:
    """Returns those that this process has imported."""
    return [library for library in UNSEEN_LIBRARIES if library.module in sys.modules]


def find_installed() -> list[UnseenLibrary]:
    """Returns those that are installed. None of them is imported."""
    return [library for library in UNSEEN_LIBRARIES if _is_installed(library.module)]


def _is_installed(module: str) -> bool:
    package, _, inner = module.partition(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module in `sys.modules` that has no spec
        return False
    if spec is None or not inner:
        return spec is not None
    places = spec.submodule_search_locations or ()
    return any(importlib.machinery.PathFinder.find_spec(module, [place]) is not None for place in places)
