"""What the benchmarks conclude from what they measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import asgi_requests, asgi_systems, peers, verdict
from benchmarks.asgi_requests import AGAIN, BARE, OURS, THEIRS, THEIRS_ALL, Found


def found(ours: float, theirs: float, again: float = 100.0) -> Found:
    rounds = 8
    columns = {BARE: 100.0, AGAIN: again, OURS: ours, THEIRS: theirs, THEIRS_ALL: theirs * 2}
    return Found({name: [value * 1000] * rounds for name, value in columns.items()}, sidecar=5000.0)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (found(110, 80), verdict.PASS),
        (found(120, 80), verdict.FAIL),
        (found(110, 80, again=101), verdict.PASS),
        (found(110, 80, again=104), verdict.INCONCLUSIVE),
    ],
)
def test_the_gate_is_what_ours_adds_to_bare_against_what_theirs_adds(measured: Found, said: str) -> None:
    gated = asgi_requests.lines_of("request", measured)[0]
    assert (gated.verdict, gated.gate) == (said, "≥ 5×")


@pytest.mark.filterwarnings("ignore:invalid value")  # the bounds of what is endless
def test_a_cost_that_cannot_be_told_from_nothing_is_endlessly_less() -> None:
    assert math.isinf(asgi_requests.times([50.0] * 4, [0.0] * 4).value)


def test_what_the_sidecar_takes_is_in_a_line_of_its_own() -> None:
    lines = {line.claim.rpartition(": ")[2]: line for line in asgi_requests.lines_of("r", found(110, 160))}
    assert lines["sidecar"].value == 5
    assert lines["below contrib without those, sidecar and server"].value == pytest.approx(60 / 15)


async def test_the_application_answers_both_routes_in_a_row() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def noting(message: Any) -> None:
            sent.append(message)
            await send(message)

        await application(scope, receive, noting)

    application = asgi_systems.application()
    system = asgi_systems.System("seen", app, *[asgi_systems.nothing] * 3)
    for path in (asgi_systems.JSON, asgi_systems.STREAM):
        await asgi_requests.in_a_row(system, path, 2)
    starts = [message["status"] for message in sent if message["type"] == "http.response.start"]
    chunks = [message for message in sent if message.get("more_body") and message.get("body")]
    assert starts == [200] * 4
    assert len(chunks) == 2 * asgi_systems.CHUNKS


def block(cpu: float, tokens: int = 10) -> dict[str, float]:
    return {"cpu": cpu * tokens, "wall": 2 * cpu * tokens, "sidecar": 0, "tokens": tokens, "requests": 1}


def test_a_peer_is_compared_per_token_with_both_bare_processes() -> None:
    measured = {
        "uninstrumented": [block(100)] * 5,
        peers.AGAIN: [block(100, 20)] * 5,
        "theirs": [block(150)] * 5,
    }
    seen = {"theirs": peers.Seen(5, {"decode step": 10, "chat": 5})}
    cpu, wall = peers.lines_of("generate", measured, seen)
    assert (cpu.value, wall.value, cpu.verdict) == (50.0, 50.0, verdict.INFORMATION)
    assert "3.0 spans a request: decode step, chat; no queue, prefill, decode" in cpu.note


def test_who_exports_nothing_is_said_to_see_nothing() -> None:
    assert peers.Seen(5, {}).said() == "sees nothing of it"


def test_a_figure_without_bounds_passes_no_gate() -> None:
    once = verdict.median([5.0])
    less = verdict.times_less(once, verdict.median([1000.0]))
    assert less.value == 200
    assert verdict.line("less", "×", less, verdict.Gate(100, at_least=True)).verdict == verdict.INCONCLUSIVE
