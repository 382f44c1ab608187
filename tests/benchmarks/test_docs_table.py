"""What is measured again comes in the place of what was measured before; what is not stays."""

from __future__ import annotations

from benchmarks.__main__ import merged


def row(claim: str, value: int) -> str:
    return f"| {claim} | ≤ 1 % | {value} % |"


def test_a_section_that_is_measured_again_replaces_its_own_rows() -> None:
    old = [row("hooks", 1), row("loop", 1), row("truth", 1)]
    assert merged(old, [row("loop", 2)]) == [row("hooks", 1), row("loop", 2), row("truth", 1)]


def test_a_new_claim_stands_beside_what_it_was_measured_with() -> None:
    old = [row("loop", 1), row("truth", 1)]
    new = [row("loop", 2), row("loop, alone", 2), row("loop, again", 2)]
    assert merged(old, new) == [*new, row("truth", 1)]
    assert merged(old, [row("other", 2)]) == [*old, row("other", 2)]
    assert merged([], new) == new
