"""A short measurement of whole servers, from start to table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.whole import gil_samples, lines, measurement, section, servers
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
    assert measurement.load_result(path, "source") == result
    (pair,) = result.rounds
    assert pair["on"]["errors"] == pair["off"]["errors"] == 0
    assert 0 < pair["off"]["cpu"] < 0.1
    assert result.running_samples["ours"] > 0
    assert len(lines.make_lines(served, result, True)) == (7 if served.kind == "streams" else 5)


def test_a_complete_result_is_not_measured_again(tmp_path: Path) -> None:
    served = servers.ServedLoad("x", "x", ("/does/not/exist",), "streams", 1, {})
    result = ServerResult("source", is_complete=True)
    measurement.measure_server(served, tmp_path, result, tmp_path / "x.json", PLAN, lambda result: True)
    assert result.rounds == []


def test_an_unknown_server_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="unknown here: nginx; known: "):
        section.measure(True, ["nginx"])
