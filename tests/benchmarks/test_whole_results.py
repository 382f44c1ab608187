"""The tables of whole servers show what was measured, failures too, and invent nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import whole_results
from benchmarks.whole.measurement import ServerResult
from scripts.docs_pages import whole_servers
from scripts.generate_docs import replace_section
from tests.benchmarks.test_whole_verdicts import make_result

STREAMS, BATCHER = "transformers-serve-8", "batcher"


def write_results(folder: Path, results: dict[str, ServerResult]) -> Path:
    """Keeps these results as the section does, and writes the file that is committed."""
    for name, result in results.items():
        result.is_complete, result.environment = True, {"processor": "a processor", "python": "3.11"}
        result.save(folder / f"{name}.json")
    entries, _ = whole_results.collect_results(folder, "x")
    path = folder / "whole.json"
    path.write_text(json.dumps({"servers": entries}))
    return path


def read_rows(section: str) -> dict[str, list[str]]:
    """Returns the cells of each row by its load."""
    rows = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in rows if cells[0] != "load"}


def test_only_complete_results_of_this_source_code_are_collected(tmp_path: Path) -> None:
    complete, interrupted, older = (make_result(1.005) for _ in range(3))
    complete.is_complete = older.is_complete = True
    older.source = "older"
    complete.save(tmp_path / f"{STREAMS}.json")
    interrupted.save(tmp_path / "transformers-serve-1.json")
    older.save(tmp_path / "vllm-8.json")
    entries, missing = whole_results.collect_results(tmp_path, "x")
    assert [entry["name"] for entry in entries] == [STREAMS]
    assert {"transformers-serve-1", "vllm-8", BATCHER} < set(missing)


def test_a_new_result_replaces_the_published_one_of_its_server_alone() -> None:
    published = [{"name": BATCHER, "source": "old"}, {"name": STREAMS, "source": "old"}]
    merged = whole_results.merge_entries(published, [{"name": BATCHER, "source": "new"}])
    assert {entry["name"]: entry["source"] for entry in merged} == {BATCHER: "new", STREAMS: "old"}


def test_the_table_has_every_figure_of_the_file(tmp_path: Path) -> None:
    streams = make_result(1.004)
    streams.rounds += make_result(1.006, rounds=19).rounds
    results = write_results(tmp_path, {STREAMS: streams, BATCHER: make_result(1.002)})
    section = whole_servers.build_whole_section(results)
    rows = read_rows(section)
    assert rows["8 streams"] == [
        "0.398 % [0.398, 0.596]",
        "0.4 % [0.4, 0.6]",
        "0.4 % [0.4, 0.6]",
        "0.4 % [0.4, 0.6]",
        "4 µs [4, 6]",
        "0.5 % [0.397, 0.63]",
        "0.4 %",
        "pass",
    ]
    assert rows["200 requests/s"][1:3] == ["—", "—"]
    assert rows["200 requests/s"][4] == "2 µs"
    assert "### transformers serve\n" in section
    assert "### a hand-made batcher\n" in section
    assert "Measured on: processor a processor, python 3.11, source code `x`." in section


def test_lines_that_fail_are_shown_as_failing(tmp_path: Path) -> None:
    results = write_results(tmp_path, {STREAMS: make_result(1.015, ours=90)})
    lost, p50, p99, first, _, samples, sidecar, judged = read_rows(
        whole_servers.build_whole_section(results)
    )["8 streams"]
    assert [cell for cell in (lost, p50, samples) if "**fails**" in cell] == [lost, p50, samples]
    assert samples.endswith("**fails**, ≤ 0.8 %")
    assert not [cell for cell in (p99, first, sidecar) if "fails" in cell]
    assert judged == "**fail**"


def test_what_is_not_conclusive_is_no_pass(tmp_path: Path) -> None:
    results = write_results(tmp_path, {STREAMS: make_result(1.0, rounds=1)})
    lost, *_, judged = read_rows(whole_servers.build_whole_section(results))["8 streams"]
    assert lost == "0 % [?, ?] inconclusive"
    assert judged == "inconclusive"


def test_servers_without_a_result_are_named(tmp_path: Path) -> None:
    section = whole_servers.build_whole_section(write_results(tmp_path, {STREAMS: make_result(1.0)}))
    assert "Not measured: `batcher`, `flask-gunicorn`, `forward`, `generate-1`" in section


def test_a_line_without_a_column_is_an_error(tmp_path: Path) -> None:
    results = write_results(tmp_path, {STREAMS: make_result(1.0)})
    results.write_text(results.read_text().replace("gap between tokens, p99", "gap between tokens, p98"))
    with pytest.raises(ValueError, match="without a column: gap between tokens, p98"):
        whole_servers.build_whole_section(results)


def test_without_results_the_page_has_the_commands(tmp_path: Path) -> None:
    section = whole_servers.build_whole_section(tmp_path / "whole.json")
    assert "python -m benchmarks.whole_results" in section
    assert "|" not in section


def test_only_the_part_between_the_comments_is_replaced() -> None:
    page = "before\n<!-- x: begin -->\nold\n<!-- x: end -->\nafter\n"
    assert replace_section(page, "x", "new\n") == "before\n<!-- x: begin -->\nnew\n<!-- x: end -->\nafter\n"
    with pytest.raises(ValueError, match="there is no"):
        replace_section("before\n", "x", "new\n")
