"""The stack's Collectors keep and drop whole traces as their files say: one sampler, and a front with two.

The files are the stack's, byte for byte. Addresses and waits are laid over them.
"""

from __future__ import annotations

import random
import secrets
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from otel_infer import semconv
from tests.stack.processes import Collector, until
from tests.stack.running import ROOT
from tests.stack.tools import tool
from tests.support.otlp_receiver import GRPC, OtlpReceiver

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(180)]

STACK = ROOT / "examples" / "stack"
SAMPLER = [STACK / "collector.yaml", STACK / "collector-tail-sampling.yaml"]
FRONT = [STACK / "collector-front.yaml"]
WAITS = {"processors": {"tail_sampling": {"decision_wait": "9s", "decision_wait_after_root_received": "4s"}}}
KEPT_REASONS = ("error", "aborted", "preempted", "slo", "slow", "interferer", "baseline")
ORDINARY_REASONS = ("budget", "sampled", "all", "none")
SPANS = 5
"""Spans of a trace: the server's, the request's, and its stages."""
PER_KIND = 60
ORDINARY = 1600


class Trace(NamedTuple):
    """A trace: its kind, its id, and its spans, the root last as a server sends it."""

    kind: str
    trace_id: bytes
    spans: list[Span]


def make_trace(kind: str, *, has_root: bool = True, **changes: Any) -> Trace:
    """Returns a trace with one request. `kind`: a keep reason, or another that the policies tell apart."""
    trace_id, root, request = secrets.token_bytes(16), secrets.token_bytes(8), secrets.token_bytes(8)
    name = semconv.SPAN_SERVER_START if kind == "server start" else "POST /v1/chat/completions"
    reason = KeyValue(key=semconv.KEEP_REASON, value=AnyValue(string_value=kind))
    attributes = [reason] if kind in (*KEPT_REASONS, *ORDINARY_REASONS) else []
    status = Status(code=Status.STATUS_CODE_ERROR if kind == "error of another service" else 0)
    parent = b"" if has_root else secrets.token_bytes(8)
    spans = [
        make_span(trace_id, secrets.token_bytes(8), request, stage)
        for stage in ("queue", "prefill", "decode")
    ]
    spans.append(make_span(trace_id, request, root, "chat toy", attributes=attributes))
    spans.append(make_span(trace_id, root, parent, name, status=status))
    return Trace(kind, trace_id, spans)


def make_span(trace_id: bytes, span_id: bytes, parent: bytes, name: str, **more: Any) -> Span:
    return Span(
        trace_id=trace_id, span_id=span_id, parent_span_id=parent, name=name, start_time_unix_nano=1,
        end_time_unix_nano=2, **more,
    )  # fmt: skip


def make_traces() -> list[Trace]:
    kinds = [*KEPT_REASONS, "server start", "error of another service"]
    traces = [make_trace(kind) for kind in kinds for _ in range(PER_KIND)]
    ordinary = [*ORDINARY_REASONS, "without a reason"]
    traces += [make_trace(ordinary[number % len(ordinary)]) for number in range(ORDINARY)]
    traces += [make_trace("slow", has_root=False) for _ in range(PER_KIND)]
    random.Random(1).shuffle(traces)
    return traces


def send_spans(port: int, spans: list[Span]) -> None:
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])])
    headers = {"Content-Type": "application/x-protobuf"}
    posted = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/traces", request.SerializeToString(), headers
    )
    assert urllib.request.urlopen(posted, timeout=20).status == 200


def send_traces(port: int, traces: list[Trace]) -> None:
    """Sends each trace in several exports, mixed with others."""
    for at in range(0, len(traces), 100):
        for part in range(SPANS):
            send_spans(port, [trace.spans[part] for trace in traces[at : at + 100]])


def send_to(receiver: OtlpReceiver) -> dict[str, Any]:
    """Returns what is laid over a sampler: the address of Tempo, and no Prometheus."""
    return {
        **WAITS,
        "exporters": {
            "otlp_grpc/tempo": {"endpoint": f"127.0.0.1:{receiver.port}"},
            "otlp_http/prometheus": {"endpoint": "http://127.0.0.1:9"},
        },
    }


def balance_to(samplers: list[Collector]) -> dict[str, Any]:
    """Returns what is laid over the front: the addresses of the samplers."""
    hosts = [f"127.0.0.1:{sampler.grpc_port}" for sampler in samplers]
    return {"exporters": {"load_balancing": {"resolver": {"dns": None, "static": {"hostnames": hosts}}}}}


class Kept(NamedTuple):
    """Received spans per trace and sampler: by one sampler, and by two behind a front."""

    traces: list[Trace]
    one: Mapping[bytes, int]
    two: list[Mapping[bytes, int]]


def count_spans(receiver: OtlpReceiver) -> Mapping[bytes, int]:
    return Counter(bytes.fromhex(span["trace_id"]) for span in receiver.spans)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Sends the same traces to one sampler, and to a front with two."""
    tool("otelcol")
    folder = tmp_path_factory.mktemp("sampling")
    with ExitStack() as running:
        receivers = [running.enter_context(OtlpReceiver(GRPC)) for _ in range(3)]
        samplers = []
        for number, receiver in enumerate(receivers):
            samplers.append(Collector(folder / f"{number}", SAMPLER, send_to(receiver)))
            running.callback(samplers[-1].stop)
        front = Collector(folder / "front", FRONT, balance_to(samplers[1:]))
        running.callback(front.stop)
        traces = make_traces()
        for port in (samplers[0].http_port, front.http_port):
            send_traces(port, traces)
        last = [make_trace("error") for _ in range(40)]  # decided after all others
        for port in (samplers[0].http_port, front.http_port):
            send_traces(port, last)
        ids = {trace.trace_id for trace in last}

        def has_last(*chosen: OtlpReceiver) -> bool:
            counts = Counter({key: n for it in chosen for key, n in count_spans(it).items() if key in ids})
            return counts.total() == len(last) * SPANS

        assert until(lambda: has_last(receivers[0]) and has_last(*receivers[1:]), 60)
        assert until(lambda: _is_waited_for(receivers), 30, 2)
        one, *two = map(count_spans, receivers)
        yield Kept(traces, one, two)


def _is_waited_for(receivers: list[OtlpReceiver]) -> bool:
    """Returns whether no more spans arrive: traces without a root are decided last."""
    before = [len(receiver.spans) for receiver in receivers]
    return not any(
        receiver.wait_for(lambda it, n=count: len(it.spans) > n, 8)
        for receiver, count in zip(receivers, before)
    )


def test_the_gateway_passes_traces_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its health check, which a Collector without contributions does not have."""
    tool("otelcol")
    config = yaml.safe_load((ROOT / "examples" / "kubernetes" / "base" / "collector.yaml").read_text())
    del config["extensions"], config["service"]["extensions"]
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(config))
    with OtlpReceiver(GRPC) as receiver, ExitStack() as running:
        monkeypatch.setenv("TEMPO_ENDPOINT", f"127.0.0.1:{receiver.port}")
        gateway = Collector(tmp_path / "gateway", [tmp_path / "gateway.yaml"])
        running.callback(gateway.stop)
        send_traces(gateway.http_port, [make_trace("all") for _ in range(10)])
        assert receiver.wait_for(lambda it: len(it.spans) == 10 * SPANS, 15)


def test_traces_with_a_reason_are_kept_whole(kept: Kept) -> None:
    assert len(kept.traces) >= 2000
    explained = [trace for trace in kept.traces if trace.kind not in (*ORDINARY_REASONS, "without a reason")]
    merged = Counter(kept.two[0]) + Counter(kept.two[1])
    for counts in (kept.one, merged):
        missing = Counter(trace.kind for trace in explained if counts.get(trace.trace_id) != SPANS)
        assert missing == Counter()


def test_a_twentieth_of_the_ordinary_is_kept(kept: Kept) -> None:
    """5 % of 1600: 80, with a standard deviation of 9."""
    ordinary = [trace for trace in kept.traces if trace.kind in (*ORDINARY_REASONS, "without a reason")]
    assert len(ordinary) == ORDINARY
    count = sum(trace.trace_id in kept.one for trace in ordinary)
    print(f"{count} of {ORDINARY} ordinary traces were kept")
    assert 40 < count < 120


def test_no_trace_is_split_or_sent_twice(kept: Kept) -> None:
    assert {*kept.one.values()} == {SPANS}
    first, second = kept.two
    assert {*first.values()} | {*second.values()} == {SPANS}
    assert first.keys() & second.keys() == set()
    assert min(len(first), len(second)) > 200


def test_two_samplers_decide_as_one(kept: Kept) -> None:
    assert kept.one.keys() == kept.two[0].keys() | kept.two[1].keys()
