"""Detects the resource of this server: what the standard variables and detectors state about it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

from otel_infer.config.standard_variables import replace_invalid

INSTANCE_ID = "service.instance.id"


def detect_resource(instance_id: str = "") -> dict[str, Any]:
    """Returns the resource of this server, by standard variables and detectors.

    `service.name` is only in it if it is configured. `instance_id`: in place of the id that the SDK generates for
    each process; one that is configured stays.
    """
    from opentelemetry.sdk.resources import Resource

    attributes = {
        key: replace_invalid(value) if isinstance(value, str) else value
        for key, value in Resource.create().attributes.items()
    }
    if str(attributes.get("service.name", "")).startswith("unknown_service"):
        del attributes["service.name"]
    if instance_id and INSTANCE_ID not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes[INSTANCE_ID] = instance_id
    return attributes


def find_given_instance_id(resource: Mapping[str, Any]) -> str:
    """Returns the configured `service.instance.id`, which other processes may have too; "" if there is none.

    The SDK generates a UUID for each process, which is not configured.
    """
    instance = str(resource.get(INSTANCE_ID, ""))
    try:
        is_uuid = str(uuid.UUID(instance)) == instance
    except ValueError:
        is_uuid = False
    return "" if is_uuid and instance not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "") else instance
