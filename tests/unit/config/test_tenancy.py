"""Who asks, and whether somebody waits for it: what the settings accept, and what follows for one request."""

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
def test_a_tenant_comes_from_a_header_from_baggage_or_from_an_adapter(
    text: str, source: TenantSource
) -> None:
    assert tenancy.parse_tenant_source(text) == source


@pytest.mark.parametrize("text", ["header", "header:", "header:a b", "header:a,b", "lora:x", "cookie:a", "x"])
def test_a_source_that_is_none_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="header:NAME, baggage:KEY or lora"):
        tenancy.parse_tenant_source(text)


def test_metrics_name_at_most_fifty_tenants() -> None:
    names = [f"t{number}" for number in range(50)]
    assert tenancy.parse_tenants(",".join([*names, " t0 ", ""])) == tuple(names)
    with pytest.raises(ValueError, match="at most 50 names, comma-separated, not 51"):
        tenancy.parse_tenants(",".join([*names, "one more"]))


def test_a_name_is_cut_and_cannot_move_the_cursor_of_whoever_reads_it() -> None:
    assert tenancy.sanitize_tenant("a" * 65, b"") == "a" * 64
    assert tenancy.sanitize_tenant("a\x1b[2Jb\n", b"") == "a?[2Jb?"


def test_with_a_key_a_name_is_told_as_its_hash_and_as_another_with_another_key() -> None:
    said = tenancy.sanitize_tenant("acme", KEY)
    assert len(said) == 16 and int(said, 16) >= 0
    assert said == tenancy.sanitize_tenant("acme", tenancy.derive_hash_key("a secret"))
    assert said != tenancy.sanitize_tenant("acme", tenancy.derive_hash_key("another"))
    assert said != tenancy.sanitize_tenant("acme2", KEY)


def test_of_names_that_begin_alike_each_has_a_hash_of_its_own() -> None:
    assert tenancy.sanitize_tenant("a" * 64 + "b", KEY) != tenancy.sanitize_tenant("a" * 64 + "c", KEY)


def test_nobody_has_no_hash() -> None:
    assert tenancy.sanitize_tenant("", KEY) == ""


@pytest.mark.parametrize(
    ("header", "path", "named"),
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
def test_the_header_decides_and_without_it_the_first_route_that_fits(
    header: str | None, path: str, named: str
) -> None:
    traffic = tenancy.parse_traffic_rules(
        "header:X-Class, route:/v1/batches/now=interactive, route:/v1/batches/=batch, route:/v1/{tenant}/jobs=batch"
    )
    assert traffic.header == "x-class"
    assert traffic.classify_request(header, path) == named


@pytest.mark.parametrize(
    "text", ["x", "header:", "header:a,header:b", "route:/a", "route:a=batch", "route:/a=slow", "batch"]
)
def test_a_rule_that_is_none_is_refused_and_named(text: str) -> None:
    with pytest.raises(
        ValueError, match="header:NAME and route:/PATH=interactive or route:/PATH=batch"
    ) as bad:
        tenancy.parse_traffic_rules(text)
    assert repr(text.split(",")[-1]) in str(bad.value)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [(0, "unknown"), (1, "short"), (255, "short"), (256, "medium"), (2047, "medium"), (2048, "long")],
)
def test_where_no_class_was_said_the_size_of_the_prompt_is_one(tokens: int, named: str) -> None:
    assert tenancy.request_class(None, tokens) == named
    assert tenancy.request_class("invented", tokens) == tenancy.request_class(["batch"], tokens) == named
    assert tenancy.request_class("batch", tokens) == "batch"
