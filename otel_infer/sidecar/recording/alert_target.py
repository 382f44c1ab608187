"""Decides whether a notification of Alertmanager is about this server, by the labels `job` and `instance`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from otel_infer import semconv
from otel_infer.ringbuffer.events import Value

LABELS = ("job", "instance")


def find_own_labels(resource: Mapping[str, Value]) -> dict[str, str]:
    """Returns the labels that Prometheus gives to metrics with this resource, if it receives them over OTLP."""
    name = str(resource.get(semconv.SERVICE_NAME, ""))
    namespace = str(resource.get(semconv.SERVICE_NAMESPACE, ""))
    job = f"{namespace}/{name}" if namespace and name else name
    own = {"job": job, "instance": str(resource.get(semconv.SERVICE_INSTANCE_ID, ""))}
    return {label: value for label, value in own.items() if value}


def replace_labels(own: Mapping[str, str], address: str) -> dict[str, str]:
    """Returns the labels of a server, of which those in the query of the address take precedence.

    For a scraped server the configuration of Prometheus defines them: `/dump?job=chat&instance=10.0.0.1:9464`.
    """
    query = parse_qs(urlsplit(address).query)
    return {**own, **{label: query[label][0] for label in LABELS if label in query}}


def is_addressed(notification: Any, own: Mapping[str, str]) -> bool:
    """Returns whether one of the firing alerts is about the server with these labels.

    An alert without a label is about all its values. A body without alerts is a plain request for a tape.
    """
    alerts = notification.get("alerts") if isinstance(notification, dict) else None
    if not isinstance(alerts, list) or not alerts:
        return True
    firing = [it for it in alerts if isinstance(it, dict) and it.get("status") != "resolved"]
    return any(_has_labels(alert.get("labels"), own) for alert in firing)


def _has_labels(labels: Any, own: Mapping[str, str]) -> bool:
    return not isinstance(labels, dict) or all(
        labels.get(label, value) == value for label, value in own.items()
    )
