"""Which integrations there are: ours, and those that other distributions offer by the `otel_infer.integrations` group."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from importlib import metadata

from otel_infer import asking, callers
from otel_infer.config import Config
from otel_infer.integrations import asgi
from otel_infer.integrations._base import Integration

log = logging.getLogger(__name__)

GROUP = "otel_infer.integrations"
BUILTIN = ("asgi", "threads", "interpreter", "transformers", "vllm", "torch", "dynamo", "cuda")
"""Modules beside this one, each with an `integration`."""

_on_change: Callable[[Integration], None] | None = None


def configure(settings: Config, on_change: Callable[[Integration], None]) -> None:
    """Tells integrations what they need of the configuration, and whom to tell when hooks were bound."""
    global _on_change
    _on_change = on_change
    asking.wanted = callers.wanted(settings.tenant, settings.tenant_hash_key, settings.traffic_class)
    asgi.configure(settings.excluded_urls, settings.response_headers)


def load() -> list[Integration]:
    """All integrations, ours first; one that cannot be loaded is named in the log and left out."""
    found = [importlib.import_module(f"otel_infer.integrations.{name}").integration for name in BUILTIN]
    for entry in metadata.entry_points(group=GROUP):
        try:
            found.append(entry.load())
        except Exception as reason:  # another distribution's mistake must not stop the server
            log.warning("integration %s is not loaded: %s", entry.name, type(reason).__name__)
    for integration in found:
        if _on_change is not None:
            integration.on_change = _on_change
    return found
