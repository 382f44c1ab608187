"""Summarises requests by tenant: counts, latencies and the largest cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord

SHOWN_TENANTS = 5


def summarise_tenants(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Returns the tenants with the most requests; empty if requests have no tenant.

    p95 in ms; `ttft_p95_ms` is None if no request had a first token.
    """
    by_name: dict[str, list[RequestRecord]] = {}
    for record in records:
        name = record.attributes.get(semconv.TENANT)
        if name:
            by_name.setdefault(str(name), []).append(record)
    most = sorted(by_name.items(), key=lambda item: (-len(item[1]), item[0]))[:SHOWN_TENANTS]
    return [{"tenant": name, **_summarise_requests(requests)} for name, requests in most]


def _summarise_requests(records: list[RequestRecord]) -> dict[str, Any]:
    causes: Counter[str] = Counter()
    for record in records:
        causes.update(record.breakdown.causes if record.breakdown is not None else {})
    top, length = causes.most_common(1)[0] if causes else ("", 0)
    return {
        "requests": len(records),
        "ttft_p95_ms": _p95_ms([record.ttft_ns for record in records if record.ttft_ns]),
        "e2e_p95_ms": _p95_ms([record.duration_ns for record in records]),
        "top_cause": top,
        "top_cause_share": length / max(causes.total(), 1),
    }


def _p95_ms(lengths: list[int]) -> float | None:
    import numpy as np

    return float(np.percentile(lengths, 95)) / 1e6 if lengths else None


def format_tenant(row: dict[str, Any]) -> str:
    """Returns one line about a row of `summarise_tenants`."""
    ttft = f"{row['ttft_p95_ms']:.0f} ms" if row["ttft_p95_ms"] is not None else "none"
    return (
        f"tenant {row['tenant']}: {row['requests']} requests, p95 to first token {ttft}, end to end "
        f"{row['e2e_p95_ms']:.0f} ms; {row['top_cause_share']:.0%} of the time is {row['top_cause'].replace('_', ' ')}"
    )
