"""New results replace the rows of their section in the docs table. Other rows remain."""

from __future__ import annotations

from benchmarks.__main__ import merged


def row(claim: str, value: int) -> str:
    return f"| {claim} | ≤ 1 % | {value} % |"


def test_a_repeated_section_replaces_its_rows() -> None:
    old = [row("hooks", 1), row("loop", 1), row("truth", 1)]
    assert merged(old, [row("loop", 2)]) == [row("hooks", 1), row("loop", 2), row("truth", 1)]


def test_a_new_claim_is_added_to_its_section() -> None:
    old = [row("loop", 1), row("truth", 1)]
    new = [row("loop", 2), row("loop, alone", 2), row("loop, again", 2)]
    assert merged(old, new) == [*new, row("truth", 1)]
    assert merged(old, [row("other", 2)]) == [*old, row("other", 2)]
    assert merged([], new) == new
