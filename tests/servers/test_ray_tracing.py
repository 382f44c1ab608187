"""Ray Serve with its own tracing on, instrumented by one line in the application: its spans are below the request."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_infer import semconv
from tests.servers.ray_check import can_unshare, run_check
from tests.servers.test_ray import Found

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not can_unshare(), reason="no permission to make network namespaces"),
]
REPLICA_SPAN = "replica_handle_request Batcher __call__"
RAY_SPANS = ("proxy_http_request", "route_to_replica", "replica_handle_request")


def test_spans_of_ray_are_below_the_request(tmp_path: Path) -> None:
    found = Found(run_check(tmp_path, "own"))
    waits = ["    queue wait", "    batch wait", "    forward", "    postprocess"]
    lines = [line for line in found.lines_of("single") if not line.lstrip().startswith(RAY_SPANS)]
    assert lines == ["POST /batched", "  inference Scorer", "    ingress", *waits]
    by_id = {span["span_id"]: span for span in found.spans}
    (replica,) = [span for span in found.spans_of("single") if span["name"] == REPLICA_SPAN]
    proxy = by_id[by_id[replica["parent_span_id"]]["parent_span_id"]]
    assert by_id[proxy["parent_span_id"]]["name"] == "inference Scorer"
    # a deployment that FastAPI calls, whose own spans are children of the client's
    assert found.find_span("composed", "inference Scorer")["attributes"].get(semconv.ERROR_TYPE) is None
    assert found.counted == len(found.answers) - 1
    starts = [span for span in found.spans if span["name"] == semconv.SPAN_SERVER_START]
    assert [span["attributes"].get(semconv.ERROR_TYPE, "") for span in starts] == [""]
