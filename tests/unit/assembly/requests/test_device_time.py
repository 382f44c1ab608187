"""The device share of each request in a batch: shares, waste and rounding add up to the whole span."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import otel_infer
from otel_infer import _clock
from otel_infer.assembly.requests.device_time import sum_request_share
from otel_infer.gpu.timed_work import StepWork
from otel_infer.gpu.timeline import DeviceInterval
from tests.support.rings import Recording

MS = 1_000_000


class DeviceTimeShares(NamedTuple):
    """ns; all fields sum to the span.

    `wasted`: for tokens that no request got (rejected drafts, padding, discarded results). `rounding`: less
    than one ns per request.
    """

    by_request: dict[Any, int]
    wasted: int
    rounding: int


def share_span(span: int, tokens: Mapping[Any, int], computed: int) -> DeviceTimeShares:
    """Divides the span of a step that computed `computed` tokens. `tokens`: delivered tokens by request."""
    delivered = sum(tokens.values())
    computed = max(computed, delivered)
    if not computed:
        return DeviceTimeShares(dict.fromkeys(tokens, 0), span, 0)
    by_request = {key: sum_request_share(span, count, computed) for key, count in tokens.items()}
    wasted = span * (computed - delivered) // computed
    return DeviceTimeShares(by_request, wasted, span - sum(by_request.values()) - wasted)


spans = st.integers(0, 1 << 40)
batches = st.dictionaries(st.integers(0, 1000), st.integers(0, 1 << 16), max_size=300)


@given(spans, batches, st.integers(0, 1 << 20))
def test_shares_waste_and_rounding_sum_to_the_span(span: int, tokens: dict[int, int], more: int) -> None:
    shares = share_span(span, tokens, sum(tokens.values()) + more)
    assert sum(shares.by_request.values()) + shares.wasted + shares.rounding == span
    assert min([*shares.by_request.values(), shares.wasted, shares.rounding]) >= 0
    assert shares.rounding <= len(tokens) + 1


@given(spans, batches, st.integers(0, 1 << 20))
def test_more_tokens_never_mean_a_smaller_share(span: int, tokens: dict[int, int], more: int) -> None:
    shares = share_span(span, tokens, sum(tokens.values()) + more).by_request
    ordered = sorted(tokens, key=tokens.__getitem__)
    assert [shares[member] for member in ordered] == sorted(shares.values())


@given(st.lists(st.tuples(spans, st.integers(0, 1 << 12), st.integers(0, 1 << 16)), max_size=50))
def test_request_share_sums_the_shares_of_its_steps(steps: list[tuple[int, int, int]]) -> None:
    each = [
        share_span(span, {"a": own, "b": others}, own + others).by_request["a"] for span, own, others in steps
    ]
    columns = np.array(steps, np.int64).reshape(-1, 3).T
    assert sum_request_share(columns[0], columns[1], columns[1] + columns[2]) == sum(each)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_shares_stay_within_the_step_for_any_delivery(delivered: list[int]) -> None:
    """A hand-written loop may draft tokens and report only the accepted ones."""
    recording, batch = Recording(), [otel_infer.request() for _ in delivered]
    try:
        for request in batch:
            contextvars.Context().run(request.__enter__)
        with otel_infer.step(batch, prompt_tokens=dict.fromkeys(batch, 4)):
            pass
        with otel_infer.step(batch) as step:
            step.delivered = dict(zip(batch, delivered))
        at = _clock.now()
        StepWork("custom", os.getpid(), 0, 2, 0).on_device(DeviceInterval(at, at + 10 * MS, 0, 0, -1, 0))
        for request in batch:
            request._live.close()  # type: ignore[union-attr]
        parts = sum(record.device_share for record in recording.records())
    finally:
        recording.stop()
    computed = max(sum(delivered), len(delivered))
    assert parts <= 10 * MS
    assert parts == pytest.approx(10 * MS * sum(delivered) / computed, abs=len(delivered))


def test_step_without_tokens_is_wasted() -> None:
    assert share_span(500, {}, 0) == ({}, 500, 0)
    assert share_span(500, {"a": 0}, 0) == ({"a": 0}, 500, 0)


def test_batch_time_is_shared_by_tokens(recording: Recording) -> None:
    first, second = otel_infer.request(), otel_infer.request()
    for request in (first, second):  # not nested, because a serving loop has many at once
        contextvars.Context().run(request.__enter__)
    with otel_infer.step([first, second], prompt_tokens={first: 90, second: 10}):
        pass
    with otel_infer.step([first, second]):
        pass
    for number in (1, 2):
        at = _clock.now()
        StepWork("custom", os.getpid(), 0, number, 0).on_device(DeviceInterval(at, at + 10 * MS, 0, 0, -1, 0))
    for request in (first, second):
        request._live.close()  # type: ignore[union-attr]
    records = recording.records()
    parts = []
    for record in records:
        prefill, decode = record.find_stage("prefill"), record.find_stage("decode")
        assert prefill is not None
        assert decode is not None
        parts.append((prefill.attributes["infer.device.share"], decode.attributes["infer.device.share"]))
        assert decode.attributes["infer.device.share.method"] == "tokens"
    assert sorted(parts) == [(0.001, 0.005), (0.009, 0.005)]
