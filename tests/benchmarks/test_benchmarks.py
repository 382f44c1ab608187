"""The benchmarks' verdicts for given measurements."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import asgi_requests, asgi_systems, peers, verdict
from benchmarks.asgi_requests import AGAIN, BARE, OURS, THEIRS, THEIRS_DEFAULT, RequestCosts


def make_costs(ours: float, theirs: float, again: float = 100.0) -> RequestCosts:
    rounds = 8
    columns = {BARE: 100.0, AGAIN: again, OURS: ours, THEIRS: theirs, THEIRS_DEFAULT: theirs * 2}
    return RequestCosts({name: [value * 1000] * rounds for name, value in columns.items()}, sidecar=5000.0)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (make_costs(110, 80), verdict.PASS),
        (make_costs(120, 80), verdict.FAIL),
        (make_costs(110, 80, again=101), verdict.PASS),
        (make_costs(110, 80, again=104), verdict.INCONCLUSIVE),
    ],
)
def test_the_gate_compares_costs_beyond_the_bare_server(measured: RequestCosts, expected: str) -> None:
    gated = asgi_requests.make_lines("request", measured)[0]
    assert (gated.verdict, gated.gate) == (expected, "≥ 5×")


@pytest.mark.filterwarnings("ignore:invalid value")  # the bounds of an infinite ratio
def test_the_ratio_to_a_zero_cost_is_infinite() -> None:
    assert math.isinf(asgi_requests.divide_costs([50.0] * 4, [0.0] * 4).value)


def test_the_sidecar_cost_has_a_separate_line() -> None:
    lines = {
        line.claim.rpartition(": ")[2]: line for line in asgi_requests.make_lines("r", make_costs(110, 160))
    }
    assert lines["sidecar"].value == 5
    assert lines["below contrib without a span per message, sidecar and server"].value == pytest.approx(
        60 / 15
    )


async def test_the_application_serves_both_routes_in_sequence() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def record(message: Any) -> None:
            sent.append(message)
            await send(message)

        await application(scope, receive, record)

    application = asgi_systems.make_application()
    system = asgi_systems.System("recorded", app, *[asgi_systems.do_nothing] * 3)
    for path in (asgi_systems.JSON, asgi_systems.STREAM):
        await asgi_requests.call_in_sequence(system, path, 2)
    starts = [message["status"] for message in sent if message["type"] == "http.response.start"]
    chunks = [message for message in sent if message.get("more_body") and message.get("body")]
    assert starts == [200] * 4
    assert len(chunks) == 2 * asgi_systems.CHUNKS


def make_block(cpu: float, tokens: int = 10) -> dict[str, float]:
    return {"cpu": cpu * tokens, "wall": 2 * cpu * tokens, "sidecar": 0, "tokens": tokens, "requests": 1}


def test_peers_are_compared_per_token_with_bare_processes() -> None:
    measured = {
        "uninstrumented": [make_block(100)] * 5,
        peers.AGAIN: [make_block(100, 20)] * 5,
        "peer": [make_block(150)] * 5,
    }
    spans = {"peer": peers.ExportedSpans(5, {"decode step": 10, "chat": 5})}
    cpu, wall = peers.make_lines("generate", measured, spans)
    assert (cpu.value, wall.value, cpu.verdict) == (50.0, 50.0, verdict.INFORMATION)
    for part in ("3.0 spans", "decode step, chat", "no queue, prefill, decode"):
        assert part in cpu.note


def test_a_peer_without_spans_is_described_as_such() -> None:
    assert "no spans" in peers.ExportedSpans(5, {}).describe_spans()


def test_a_figure_without_bounds_passes_no_gate() -> None:
    single = verdict.estimate_median([5.0])
    ratio = verdict.divide_figures(single, verdict.estimate_median([1000.0]))
    assert ratio.value == 200
    assert (
        verdict.make_line("less", "×", ratio, verdict.Gate(100, at_least=True)).verdict
        == verdict.INCONCLUSIVE
    )
