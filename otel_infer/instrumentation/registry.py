"""Which integrations there are: ours, and those that other distributions offer by the `otel_infer_instrumentor` group."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from importlib import metadata

from otel_infer.config import tenancy
from otel_infer.config.environment import Config
from otel_infer.instrumentation import asgi
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.tracing import caller

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "otel_infer_instrumentor"
BUILTIN = {
    "asgi": "asgi",
    "threading": "threading",
    "gc": "garbage_collector",
    "transformers": "transformers",
    "vllm": "vllm",
    "torch": "torch.forward",
    "torch_compile": "torch.compile",
    "cuda_graphs": "torch.cuda_graphs",
}
"""By the name of each integration, the module beside this one that has it as `integration`."""

_on_change: Callable[[Instrumentor], None] | None = None


def configure_instrumentors(settings: Config, on_change: Callable[[Instrumentor], None]) -> None:
    """Tells integrations what they need of the configuration, and whom to tell when hooks were bound."""
    global _on_change
    _on_change = on_change
    caller.caller_settings = tenancy.parse_caller_settings(
        settings.tenant, settings.tenant_hash_key, settings.traffic_class
    )
    asgi.configure_asgi(settings.excluded_urls, settings.response_headers)


def load_instrumentors() -> list[Instrumentor]:
    """All integrations, ours first; one that cannot be loaded is named in the log and left out."""
    found = [
        importlib.import_module(f"otel_infer.instrumentation.{name}").instrumentor
        for name in BUILTIN.values()
    ]
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            found.append(entry.load())
        except Exception as reason:  # another distribution's mistake must not stop the server
            log.warning("integration %s is not loaded: %s", entry.name, type(reason).__name__)
    for integration in found:
        if _on_change is not None:
            integration.on_change = _on_change
    return found
