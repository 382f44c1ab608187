"""Tapes recorded before the package and its names changed come to the same spans, metrics, verdicts and pages, but for the renamed names.

`tests/tapes/renamed` holds eight tapes, and what is made of each: decoded spans and metrics, `explain`, `replay` and the figures of
`report`. The names on the wire that changed since are in docs/reference/renamed-names.md and nowhere else. Since then, time between stages
before the engine became `application`, time after `forward` became `postprocess`, and the weights of findings shares of the time of all.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from otel_infer import cli, semconv
from otel_infer.config import environment
from otel_infer.config.resource import detect_resource
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar.main import make_pipeline
from otel_infer.sidecar.recording import file
from tests.support.otlp_receiver import OtlpReceiver

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "tapes" / "renamed"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
PAGE = ROOT / "docs" / "reference" / "renamed-names.md"
PROSE = {"evidence", "complaint", "meaning", "change", "note"}
"""Keys of `explain` whose values are sentences."""
VOLATILE = (
    "infer.self.cpu",
    "infer.self.memory",
    "infer.self.steps.share",
    "infer.self.lost",
    "infer.self.requests",
    "infer.self.restarts",
    "infer.server.stopped",
)
"""Figures of this process, and counts that were added since: losses by reason, and what became of requests."""
ADDED_ATTRIBUTES = (semconv.URL_PATH,)
ADDED = semconv.HTTP_REQUEST_DURATION.name, semconv.REQUEST_HUNG.name
"""Attributes and metrics that the earlier release did not have."""
BEGIN_AT_ZERO = ("infer.marks", "infer.request.preemptions")
"""Counters that have a series before their first event."""


def is_counted_without_inference(point: list[Any]) -> bool:
    """Whether the earlier release counted a request that inferred nothing; it is an HTTP request only now."""
    name, _, data = point
    has_operation = semconv.OPERATION_NAME in data["attributes"]
    return not has_operation and name in (semconv.REQUEST_DURATION.name, semconv.STAGE_DURATION.name)


def renamed() -> dict[str, str]:
    """Old name → new name, as the page lists them."""
    rows = re.findall(r"^\| [^|]+ \| `([^`]+)` \| `([^`]+)` \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) > 30
    return dict(rows)


def translate(value: Any, names: Mapping[str, str]) -> Any:
    """The same with new names, in keys and in values that are a name."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return [translate(each, names) for each in value]
    if isinstance(value, dict):
        return {names.get(key, key): translate(each, names) for key, each in value.items()}
    return value


def without_prose(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_prose(each) for key, each in value.items() if key not in PROSE}
    return [without_prose(each) for each in value] if isinstance(value, list) else value


class Recorded(NamedTuple):
    """A tape as this release reads it, and what the earlier release made of it, with today's names."""

    tape: Path
    expected: dict[str, Any]


@pytest.fixture(params=NAMES)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Recorded:
    expected = json.loads(gzip.decompress((FOLDER / f"{request.param}.json.gz").read_bytes()))
    source = FOLDER / f"{request.param}.tape"
    if not source.exists():
        (source,) = (ROOT / "tests" / "tapes").glob(f"demo-*{request.param}*.tape")
    names = renamed()
    lines = [json.loads(line) for line in gzip.decompress(source.read_bytes()).splitlines()]
    tape = tmp_path / "a.tape"
    with gzip.open(tape, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(translate(line, names)) + "\n" for line in lines)
    return Recorded(tape, translate(expected, names))


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def in_order(items: list[Any]) -> list[Any]:
    return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def test_spans_are_the_same(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environ.items():
            monkeypatch.setenv(name, value)
        command(capsys, "replay", "--send", str(recorded.tape))
        spans = json.loads(json.dumps(receiver.spans))
    kept = [{key: value for key, value in span.items() if key not in ("resource", "scope")} for span in spans]
    for span in kept:
        for name in ADDED_ATTRIBUTES:
            span["attributes"].pop(name, None)
    assert in_order(kept) == in_order(recorded.expected["spans"])


def test_metrics_are_the_same(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    settings = environment.from_env(
        environment.child_environment(enabled="on", gpu_metrics="off", metrics_port="")
    )
    pipeline = make_pipeline(settings, detect_resource(), MergedReader(), show=False)
    horizon = 0
    for batch in file.read_batches(recorded.tape):
        horizon = batch.horizon
        pipeline.assembler.feed_events(batch.recorded_events)
        pipeline.export_requests(horizon)
    pipeline.export_without_grace(horizon)
    told = json.loads(pipeline._snapshot_metrics().to_json())
    points = [
        [metric["name"], metric["unit"], {k: v for k, v in point.items() if not k.endswith("time_unix_nano")}]
        for resource in told["resource_metrics"]
        for scope in resource["scope_metrics"]
        for metric in scope["metrics"]
        if not metric["name"].startswith(VOLATILE)
        for point in metric["data"]["data_points"]
        if not (metric["name"] in BEGIN_AT_ZERO and point["value"] == 0)
    ]
    points = [point for point in points if point[0] not in ADDED]
    expected = [
        point
        for point in recorded.expected["metrics"]
        if not point[0].startswith(VOLATILE) and not is_counted_without_inference(point)
    ]
    assert in_order(points) == in_order(expected)


def test_explain_names_the_same_symptoms_and_shares(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(command(capsys, "explain", "--json", str(recorded.tape)))
    del found["source"]
    assert without_prose(found) == without_prose(recorded.expected["explain"])


def test_replay_prints_the_same_requests(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    lines = command(capsys, "replay", "--json", str(recorded.tape)).splitlines()
    assert [json.loads(line) for line in lines] == recorded.expected["replay"]


def test_the_report_has_the_same_figures(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    page = recorded.tape.with_suffix(".html")
    command(capsys, "report", str(recorded.tape), "--out", str(page))
    assert re.findall(r'<td class="n">([^<]*)</td>', page.read_text()) == recorded.expected["report"]


def test_only_the_new_names_are_on_the_wire() -> None:
    names = {metric.name for metric in semconv.METRICS}
    names |= {value for value in vars(semconv).values() if isinstance(value, str)}
    names |= {*semconv.CAUSES, *semconv.LATENCY_BY_CAUSE.values()}
    ours = {old: new for old, new in renamed().items() if old.startswith("infer.")}
    assert [old for old in ours if old in names] == []
    assert [new for new in ours.values() if new not in names and not new.endswith(".")] == []
