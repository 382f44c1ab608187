"""Tests that run in an environment of their own (`make test-servers`) and are not collected elsewhere."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("tornado") else ["test_*.py"]
