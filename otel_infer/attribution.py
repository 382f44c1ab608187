"""Whose the time of a batch was: an estimate by tokens, which sums to the batch with its named remainders. Pure.

The device was at the whole batch for `span`, which is measured, and each request was there for all of it. What a single request
took of it cannot be measured; here everybody has a part by the tokens that the step computed for them. Tokens of a prompt and of
decoding weigh the same, which favours neither; where prompts are long, they are charged more of the memory traffic than they
cause (arXiv 2401.00588 weighs by kind; nobody knows the weights of another's hardware).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

METHOD = "tokens"
K = TypeVar("K", bound=Hashable)


class Shares(NamedTuple):
    """ns. `of`: each one's part. `wasted`: of tokens that nobody got (rejected drafts, padding, discarded results).
    `rounding`: less than one ns for each. All of it is the span."""

    of: dict[Any, int]
    wasted: int
    rounding: int


def shared(span: int, tokens: Mapping[K, int], computed: int) -> Shares:
    """Divides the span of a step that computed so many tokens; `tokens`: of each one who got some."""
    got = sum(tokens.values())
    computed = max(computed, got)
    if not computed:
        return Shares(dict.fromkeys(tokens, 0), span, 0)
    of = {who: span * number // computed for who, number in tokens.items()}
    wasted = span * (computed - got) // computed
    return Shares(of, wasted, span - sum(of.values()) - wasted)


def shares_of(spans: Any, tokens: Any, computed: Any) -> int:
    """The part of one who got these tokens in these steps, ns; columns of the same length. As `shared` has it, step by step."""
    spans, tokens = np.asarray(spans, np.int64), np.asarray(tokens, np.int64)
    return int((spans * tokens // np.maximum(np.maximum(computed, tokens), 1)).sum())
