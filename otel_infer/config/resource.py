"""Detects the resource of this server: what the standard variables and detectors state about it."""

from __future__ import annotations

from typing import Any

from otel_infer.config.standard_variables import replace_invalid


def detect_resource() -> dict[str, Any]:
    """Returns the resource of this server, by standard variables and detectors.

    `service.name` is only in it if it is configured.
    """
    from opentelemetry.sdk.resources import Resource

    attributes = {
        key: replace_invalid(value) if isinstance(value, str) else value
        for key, value in Resource.create().attributes.items()
    }
    if str(attributes.get("service.name", "")).startswith("unknown_service"):
        del attributes["service.name"]
    return attributes
