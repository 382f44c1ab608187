"""One wake of the reading side: what is concluded is handed on, whatever becomes of one of them."""

from __future__ import annotations

from typing import Any

import pytest

from otel_infer import keeper
from otel_infer.config import Config
from otel_infer.pipeline import Pipeline
from otel_infer.records import RequestRecord, StartRecord
from otel_infer.ring.folder import Rings
from tests.story import LATER, Story, ids


class Taken:
    """A sink that remembers, and cannot describe one of them."""

    exported_only = True

    def __init__(self, bad: bytes = b"") -> None:
        self.bad, self.spans = bad, list[bytes]()

    def request(self, record: RequestRecord, decision: keeper.Decision) -> None:
        if record.span_id == self.bad:
            raise ValueError
        self.spans.append(record.span_id)

    def start(self, record: StartRecord) -> None:
        self.spans.append(record.span_id)

    def flush(self, now: int) -> None:
        """Nothing waits here."""


def fed(sink: Taken) -> Pipeline:
    story = Story()
    for name in "abc":
        story.ends(10, story.arrives(0, name))
    pipeline = Pipeline(Config(), Rings(), [sink], None, {}, None, 0)
    pipeline.assembler.feed(story.in_order())
    return pipeline


@pytest.mark.parametrize("where", ["sink", "keeper", "metrics"])
def test_one_request_that_cannot_be_described_costs_no_other(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = ids("b")[1]
    sink = Taken(bad if where == "sink" else b"")
    pipeline = fed(sink)

    def refusing(original: Any) -> Any:
        def refuse(record: RequestRecord, *args: Any, **more: Any) -> Any:
            if record.span_id == bad:
                raise ValueError
            return original(record, *args, **more)

        return refuse

    if where == "keeper":
        monkeypatch.setattr(pipeline.keeper, "decide", refusing(pipeline.keeper.decide))
    if where == "metrics":
        monkeypatch.setattr(pipeline.metrics, "request", refusing(pipeline.metrics.request))
    pipeline.conclude(LATER)
    assert {ids("a")[1], ids("c")[1]} <= set(sink.spans)
    assert (pipeline.requests, pipeline.losses()["requests_not_described"]) == (3, 1)
