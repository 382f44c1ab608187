"""A short measurement of whole servers, from start to table."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.whole import client, gil_samples, lines, measurement, section, servers
from benchmarks.whole.measurement import Plan, ServerResult
from otel_infer.cli.demo.model import make_demo_model

PLAN = Plan(1.0, 0.5, 1, 0.0, 1, 0.5, 20, 4.0, 2.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    try:
        gil_samples.find_py_spy()
    except SystemExit as reason:
        pytest.skip(str(reason))
    return make_demo_model(tmp_path_factory.mktemp("model"), layers=1, hidden=128)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate-1", "batcher", "forward"])
def test_a_server_is_measured_and_its_result_is_kept(name: str, model: Path, tmp_path: Path) -> None:
    served = next(served for served in servers.list_servers() if served.name == name)
    result, path = ServerResult("source"), tmp_path / "result.json"
    measurement.measure_server(served, model, result, path, PLAN, lambda result: True)
    assert repr(measurement.load_result(path, "source")) == repr(result)
    (pair,) = result.rounds
    assert pair["on"]["errors"] == pair["off"]["errors"] == 0
    assert 0 < pair["off"]["cpu"] < 0.1
    assert result.running_samples["total"] > 0
    assert len(lines.make_lines(served, result, True)) == (7 if served.kind == "streams" else 5)


def test_a_complete_result_is_not_measured_again(tmp_path: Path) -> None:
    served = servers.ServedLoad("x", "x", ("/does/not/exist",), "streams", 1, {})
    result = ServerResult("source", is_complete=True)
    measurement.measure_server(served, tmp_path, result, tmp_path / "x.json", PLAN, lambda result: True)
    assert result.rounds == []


def test_an_unknown_server_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="unknown here: nginx; known: "):
        section.measure(True, ["nginx"])


async def test_tokens_that_arrive_together_are_all_counted() -> None:
    """An event of vLLM may have several tokens."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for total in (1, 3, 4):
            writer.write(b'data: {"content":"a","usage":{"completion_tokens":%d}}\n\n' % total)
        writer.write(b'data: {"content":"","usage":{"completion_tokens":4}}\n\ndata: [DONE]\n\n')
        writer.close()

    measured = client.Measurements()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await client.read_stream(port, "/", {"max_tokens": 4}, measured)
    assert (measured.tokens, measured.errors) == (4, 0)
    assert [len(measured.columns[name]) for name in client.COLUMNS] == [2, 1, 1]
