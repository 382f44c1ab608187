"""Ray Serve: what replicas do is a part of the request that the proxy got, with waits and batches."""

from __future__ import annotations

from typing import Any

import pytest

from otel_infer import semconv
from tests.servers.ray_check import SIZE, can_unshare, run_check
from tests.support.trees import tree

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not can_unshare(), reason="no permission to make network namespaces"),
]

REQUEST = "  inference Scorer"
INGRESS, WAIT, BATCH_WAIT, FORWARD, EGRESS = (
    f"    {name}" for name in ("ingress", "queue wait", "batch wait", "forward", "postprocess")
)


class Found:
    """What one run of the check has received."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.answers, self.spans, self.counted = result["answers"], result["spans"], result["counted"]

    def spans_of(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["trace_id"] == self.answers[name][1]]

    def lines_of(self, name: str) -> list[str]:
        return tree(self.spans_of(name), self.answers[name][2])

    def find_span(self, name: str, span_name: str) -> dict[str, Any]:
        (span,) = [span for span in self.spans_of(name) if span["name"] == span_name]
        return span


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(run_check(tmp_path_factory.mktemp("ray")))


def test_all_requests_are_answered(found: Found) -> None:
    failed = {name: status for name, (status, *_) in found.answers.items() if status != 200}
    assert failed == {"failed": 500}
    assert found.counted == len(found.answers) - 1  # the failed one has reached no model


def test_what_replicas_do_belongs_to_the_request(found: Found) -> None:
    assert found.lines_of("single") == ["POST /batched", REQUEST, INGRESS, WAIT, BATCH_WAIT, FORWARD, EGRESS]
    composed = [REQUEST, INGRESS, WAIT, WAIT, FORWARD, EGRESS]
    assert found.lines_of("composed") == ["POST /app/compose/{name}", *composed]
    assert found.lines_of("got") == ["GET /app/score/{name}", *composed]
    first, second, *stages = found.lines_of("stream")
    assert [first, second] == ["POST /app/stream", REQUEST]
    assert sorted(stages) == sorted([INGRESS, WAIT, WAIT, *[FORWARD] * 3, EGRESS])


def test_errors_and_clients_that_leave_are_recorded(found: Found) -> None:
    assert found.find_span("failed", "POST /app/compose/{name}")["attributes"][semconv.ERROR_TYPE] == "500"
    left = found.find_span("left", "inference Scorer")
    assert left["attributes"][semconv.ERROR_TYPE] == "client_disconnect"


def test_requests_of_a_batch_are_linked(found: Found) -> None:
    names = [f"batched {number}" for number in range(SIZE)]
    sizes = [found.find_span(name, "forward")["attributes"][semconv.ITEMS] for name in names]
    links = sum(len(found.find_span(name, "inference Scorer")["links"]) for name in names)
    assert max(sizes) > 1
    assert links >= 2 * (max(sizes) - 1)


def test_complete_batch_waits_in_the_queue_while_an_earlier_one_runs(found: Found) -> None:
    stages = [found.lines_of(f"batched {number}")[3:] for number in range(SIZE)]
    assert [WAIT, BATCH_WAIT, FORWARD, EGRESS] in stages
    assert [WAIT, BATCH_WAIT, WAIT, FORWARD, EGRESS] in stages


def test_proxy_and_replicas_are_one_server(found: Found) -> None:
    starts = [span for span in found.spans if span["name"] == semconv.SPAN_SERVER_START]
    assert [span["attributes"].get(semconv.ERROR_TYPE, "") for span in starts] == [""]
    assert len({span["resource"]["service.instance.id"] for span in found.spans}) == 1
