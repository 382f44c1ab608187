"""The one `Integration` that the files of this folder fill, and what they share."""

from __future__ import annotations

import os
from typing import Any

from otel_infer import ingress
from otel_infer.integrations._base import Integration

ENGINE = "transformers"

integration = Integration("transformers", "transformers", ("transformers",), is_engine=True)


def model_name(model: Any) -> str:
    """The served name of a model: its hub id, or the folder's own name, never a path."""
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    if os.path.isabs(name) or name.startswith("."):
        return os.path.basename(name.rstrip("/\\"))
    return name or type(model).__name__


def own_request(operation: str, model: Any) -> ingress.LiveRequest | None:
    """A request of its own, for work that no server's request is current for (offline use)."""
    name = model_name(model)
    return ingress.open_request(
        f"{operation} {name}", owner=ENGINE, operation=operation, provider=ENGINE, model=name
    )


def name_request(request: ingress.LiveRequest, operation: str, model: Any) -> None:
    """Says on a server's request which model serves it, once."""
    if not request.named:
        request.named = True
        request.name(operation=request.operation or operation, provider=ENGINE, model=model_name(model))
