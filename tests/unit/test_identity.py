from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import sampling
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from otel_infer.identity import IdOpener, Limits

parents = st.builds(
    SpanContext,
    st.sampled_from((0, 7)),
    st.just(9),
    st.booleans(),
    st.sampled_from((TraceFlags(0), TraceFlags(1), TraceFlags(2), TraceFlags(3))),
    st.sampled_from((None, TraceState([("ot", "th:8")]))),
)


@pytest.mark.parametrize(
    "sampler", [sampling.DEFAULT_ON, sampling.DEFAULT_OFF, sampling.ALWAYS_ON, sampling.ALWAYS_OFF]
)
@given(above=parents, own_server=st.booleans())
def test_what_a_sampler_decides_is_the_same_whether_it_is_asked_or_known(
    sampler: Any, above: SpanContext, own_server: bool
) -> None:
    around = trace.set_span_in_context(NonRecordingSpan(above))
    opener = IdOpener(sampler, RandomIdGenerator(), Limits())
    assert opener._constant is not None
    known = opener.open("POST", around, above, own_server, 0)
    opener._constant = None
    asked = opener.open("POST", around, above, own_server, 0)
    assert known.request.trace_flags == asked.request.trace_flags
    assert (known.request.trace_state or None) == (asked.request.trace_state or None)
    assert (known.server is None, known.parent) == (asked.server is None, asked.parent)


def test_a_sampler_of_somebody_elses_is_asked_each_time() -> None:
    class Odd(sampling.StaticSampler):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    assert IdOpener(Odd(sampling.Decision.DROP), RandomIdGenerator(), Limits())._constant is None
