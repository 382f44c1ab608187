"""New results replace the rows of their section in the docs table. Other rows remain."""

from __future__ import annotations

from benchmarks.__main__ import merge_rows


def make_row(claim: str, value: int) -> str:
    return f"| {claim} | ≤ 1 % | {value} % |"


def test_a_repeated_section_replaces_its_rows() -> None:
    old = [make_row("hooks", 1), make_row("loop", 1), make_row("truth", 1)]
    assert merge_rows(old, [make_row("loop", 2)]) == [
        make_row("hooks", 1),
        make_row("loop", 2),
        make_row("truth", 1),
    ]


def test_a_new_claim_is_added_to_its_section() -> None:
    old = [make_row("loop", 1), make_row("truth", 1)]
    new = [make_row("loop", 2), make_row("loop, alone", 2), make_row("loop, again", 2)]
    assert merge_rows(old, new) == [*new, make_row("truth", 1)]
    assert merge_rows(old, [make_row("other", 2)]) == [*old, make_row("other", 2)]
    assert merge_rows([], new) == new
