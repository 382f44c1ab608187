"""Tenants and traffic classes: what the settings accept, and the result for one request."""

from __future__ import annotations

import pytest

from otel_infer.config import tenancy
from otel_infer.config.tenancy import TenantSource

KEY = tenancy.derive_hash_key("a secret")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("header:X-Tenant", TenantSource("header", "x-tenant")),
        ("baggage:Tenant", TenantSource("baggage", "Tenant")),
        ("lora", TenantSource("lora")),
    ],
)
def test_tenant_source_is_header_baggage_or_lora(text: str, source: TenantSource) -> None:
    assert tenancy.parse_tenant_source(text) == source


@pytest.mark.parametrize("text", ["header", "header:", "header:a b", "header:a,b", "lora:x", "cookie:a", "x"])
def test_invalid_tenant_source_error_lists_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match="header:NAME, baggage:KEY or lora"):
        tenancy.parse_tenant_source(text)


def test_at_most_fifty_tenants_are_listed() -> None:
    names = [f"t{number}" for number in range(50)]
    assert tenancy.parse_tenants(",".join([*names, " t0 ", ""])) == tuple(names)
    with pytest.raises(ValueError, match="51"):
        tenancy.parse_tenants(",".join([*names, "one more"]))


def test_tenant_name_is_truncated_and_control_characters_replaced() -> None:
    assert tenancy.sanitize_tenant("a" * 65, b"") == "a" * 64
    assert tenancy.sanitize_tenant("a\x1b[2Jb\n", b"") == "a?[2Jb?"


def test_tenant_hash_depends_on_name_and_key() -> None:
    hashed = tenancy.sanitize_tenant("acme", KEY)
    assert len(hashed) == 16 and int(hashed, 16) >= 0
    assert hashed == tenancy.sanitize_tenant("acme", tenancy.derive_hash_key("a secret"))
    assert hashed != tenancy.sanitize_tenant("acme", tenancy.derive_hash_key("another"))
    assert hashed != tenancy.sanitize_tenant("acme2", KEY)


def test_long_names_with_one_prefix_hash_differently() -> None:
    assert tenancy.sanitize_tenant("a" * 64 + "b", KEY) != tenancy.sanitize_tenant("a" * 64 + "c", KEY)


def test_empty_tenant_has_no_hash() -> None:
    assert tenancy.sanitize_tenant("", KEY) == ""


@pytest.mark.parametrize(
    ("header", "path", "expected"),
    [
        (None, "/v1/chat", "interactive"),
        (None, "/v1/batches", "batch"),
        (None, "/v1/batches/7/cancel", "batch"),
        (None, "/v1/batches2", "interactive"),
        (None, "/v1/batches\n", "interactive"),
        (None, "/v1/acme/jobs", "batch"),
        (None, "/v1/a/b/jobs", "interactive"),
        (None, "/v1/batches/now", "interactive"),
        ("Batch ", "/v1/chat", "batch"),
        ("interactive", "/v1/batches", "interactive"),
        ("whatever", "/v1/batches", "interactive"),
        ("", "/v1/batches", "interactive"),
    ],
)
def test_traffic_class_is_header_then_first_matching_route(
    header: str | None, path: str, expected: str
) -> None:
    traffic = tenancy.parse_traffic_rules(
        "header:X-Class, route:/v1/batches/now=interactive, route:/v1/batches/=batch, route:/v1/{tenant}/jobs=batch"
    )
    assert traffic.header == "x-class"
    assert traffic.classify_request(header, path) == expected


@pytest.mark.parametrize(
    "text", ["x", "header:", "header:a,header:b", "route:/a", "route:a=batch", "route:/a=slow", "batch"]
)
def test_invalid_traffic_rule_error_names_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match="header:NAME and route:/PATH") as bad:
        tenancy.parse_traffic_rules(text)
    assert repr(text.split(",")[-1]) in str(bad.value)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, "unknown"), (1, "short"), (255, "short"), (256, "medium"), (2047, "medium"), (2048, "long")],
)
def test_class_defaults_to_the_prompt_size(tokens: int, expected: str) -> None:
    assert tenancy.request_class(None, tokens) == expected
    assert tenancy.request_class("invented", tokens) == tenancy.request_class(["batch"], tokens) == expected
    assert tenancy.request_class("batch", tokens) == "batch"
