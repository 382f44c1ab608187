"""OTLP requests as plain dicts: ids in hex, attributes decoded, each item with its resource and scope."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service


def decoded(signal: str, raw: bytes) -> list[dict[str, Any]]:
    """Returns the spans or metrics of a request; raises google.protobuf's DecodeError."""
    if signal == "traces":
        return list(_spans(trace_service.ExportTraceServiceRequest.FromString(raw)))
    return list(_metrics(metrics_service.ExportMetricsServiceRequest.FromString(raw)))


def response(signal: str, rejected: int, message: str) -> bytes:
    """Returns the response of a receiver that accepted all but `rejected` spans or data points."""
    answer: Any
    if signal == "traces":
        answer = trace_service.ExportTraceServiceResponse()
        fields = {"rejected_spans": rejected, "error_message": message}
    else:
        answer = metrics_service.ExportMetricsServiceResponse()
        fields = {"rejected_data_points": rejected, "error_message": message}
    for name, value in fields.items():
        if value:
            setattr(answer.partial_success, name, value)
    encoded: bytes = answer.SerializeToString()
    return encoded


def _value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in any_value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(any_value.kvlist_value.values)
    return None if kind is None else getattr(any_value, kind)


def _attributes(key_values: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in key_values}


def _scoped(resources: Any, scopes: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields (resource and scope, the scope's message) for each scope of each resource."""
    for of_resource in resources:
        for of_scope in getattr(of_resource, scopes):
            scope = {
                "name": of_scope.scope.name,
                "version": of_scope.scope.version,
                "attributes": _attributes(of_scope.scope.attributes),
                "schema_url": of_scope.schema_url,
            }
            yield {"resource": _attributes(of_resource.resource.attributes), "scope": scope}, of_scope


def _spans(request: Any) -> Iterator[dict[str, Any]]:
    for origin, of_scope in _scoped(request.resource_spans, "scope_spans"):
        for span in of_scope.spans:
            yield {
                "trace_id": span.trace_id.hex(),
                "span_id": span.span_id.hex(),
                "parent_span_id": span.parent_span_id.hex(),
                "name": span.name,
                "kind": span.kind,
                "start": span.start_time_unix_nano,
                "end": span.end_time_unix_nano,
                "attributes": _attributes(span.attributes),
                "events": [
                    {
                        "at": event.time_unix_nano,
                        "name": event.name,
                        "attributes": _attributes(event.attributes),
                    }
                    for event in span.events
                ],
                "links": [{**_ids(link), "attributes": _attributes(link.attributes)} for link in span.links],
                "status": span.status.code,
                "status_message": span.status.message,
                "trace_state": span.trace_state,
                "flags": span.flags,
                **origin,
            }


def _ids(message: Any) -> dict[str, str]:
    return {"trace_id": message.trace_id.hex(), "span_id": message.span_id.hex()}


def _metrics(request: Any) -> Iterator[dict[str, Any]]:
    for origin, of_scope in _scoped(request.resource_metrics, "scope_metrics"):
        for metric in of_scope.metrics:
            kind = metric.WhichOneof("data")
            data = getattr(metric, kind)
            yield {
                "name": metric.name,
                "unit": metric.unit,
                "description": metric.description,
                "kind": kind,
                "temporality": getattr(data, "aggregation_temporality", 0),
                "monotonic": getattr(data, "is_monotonic", False),
                "points": [_point(point) for point in data.data_points],
                **origin,
            }


def _point(point: Any) -> dict[str, Any]:
    """Returns the fields set on a point under their protobuf names; a number as `value`, an instant in unix ns."""
    fields = {field.name for field in point.DESCRIPTOR.fields}
    named = {
        name: getattr(point, name) for name in fields - {"attributes", "exemplars", "as_int", "as_double"}
    }
    for name in {"sum", "min", "max"} & named.keys():
        if not point.HasField(name):
            del named[name]
    for name in {"bucket_counts", "explicit_bounds"} & named.keys():
        named[name] = list(named[name])
    for name in {"positive", "negative"} & named.keys():
        named[name] = {"offset": named[name].offset, "bucket_counts": list(named[name].bucket_counts)}
    named |= {"attributes": _attributes(point.attributes), "exemplars": [*map(_exemplar, point.exemplars)]}
    return {**named, "value": _number(point)} if "as_int" in fields else named


def _exemplar(exemplar: Any) -> dict[str, Any]:
    return {
        **_ids(exemplar),
        "at": exemplar.time_unix_nano,
        "value": _number(exemplar),
        "attributes": _attributes(exemplar.filtered_attributes),
    }


def _number(holder: Any) -> int | float | None:
    kind = holder.WhichOneof("value")
    return getattr(holder, kind) if kind else None
