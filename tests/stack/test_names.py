"""What `dashboards check` says of each way in which a real Prometheus 3 may name and store our metrics."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from otel_infer.cli import main
from tests.stack.load import Load, loop_client
from tests.stack.processes import Collector, Prometheus, until
from tests.stack.running import ROOT, loop_server
from tests.stack.tools import prometheus_3, tool

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(180)]

OWN = "UnderscoreEscapingWithSuffixes"
STRATEGIES = (OWN, "UnderscoreEscapingWithoutSuffixes", "NoUTF8EscapingWithSuffixes", "NoTranslation")
EXPONENTIAL = "exponential"
FAN_OUT = ROOT / "examples" / "stack" / "collector.yaml"
LOAD_S = 25


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Prometheus]]:
    """A Prometheus for each strategy, with the same metrics, and one with exponential histograms."""
    tool("otelcol")
    prometheus_3()
    folder = tmp_path_factory.mktemp("names")
    with ExitStack() as running:
        found = {}
        for name in (*STRATEGIES, EXPONENTIAL):
            (folder / name).mkdir()
            found[name] = Prometheus(folder / name, {}, strategy=OWN if name == EXPONENTIAL else name)
            running.callback(found[name].stop)
        for kind, names in (("explicit", STRATEGIES), (EXPONENTIAL, (EXPONENTIAL,))):
            collector = Collector(folder / kind, [FAN_OUT], _send_to([found[name].url for name in names]))
            running.callback(collector.stop)
            server = loop_server(
                folder / f"{kind}.log", _environ(collector, kind), max_batch=8, prompt_ms=0.1
            )
            running.callback(lambda started=server: started.process and started.stop())
            server.start()
            running.callback(Load(loop_client(server.port), 4, 0.2).stop)
        time.sleep(LOAD_S)
        yield found


def _send_to(urls: list[str]) -> dict[str, object]:
    """Returns what is laid over the stack's collector: metrics go to these addresses, and traces nowhere."""
    exporters = {f"otlp_http/{number}": {"endpoint": f"{url}/api/v1/otlp"} for number, url in enumerate(urls)}
    pipelines = {"traces": {"exporters": ["debug"]}, "metrics": {"exporters": [*exporters]}}
    return {"exporters": {**exporters, "debug": {}}, "service": {"pipelines": pipelines}}


def _environ(collector: Collector, kind: str) -> dict[str, str]:
    base2 = "base2_exponential_bucket_histogram"
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.http_port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_METRIC_EXPORT_INTERVAL": "2000",
        "OTEL_INFER_GPU_METRICS": "off",
        "OTEL_INFER_SLO": "ttft=250ms",
        "PYTHONPATH": str(ROOT),
        **(
            {"OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": base2} if kind == EXPONENTIAL else {}
        ),
    }


def check(capsys: pytest.CaptureFixture[str], prometheus: Prometheus, *options: str) -> tuple[int, int, str]:
    """Returns the exit status of `dashboards check`, the number of queries with data, and the last line."""
    status = main(["dashboards", "check", "--prometheus", prometheus.url, "--window", "20s", *options])
    output = capsys.readouterr().out
    (count,) = re.findall(r"^(\d+) with data", output, re.MULTILINE)
    print(output.splitlines()[-1], count, file=sys.stderr)
    return status, int(count), output.splitlines()[-1]


def test_own_names_have_data(stores: dict[str, Prometheus], capsys: pytest.CaptureFixture[str]) -> None:
    assert until(lambda: check(capsys, stores[OWN])[1] > 80, 30, 2)
    assert check(capsys, stores[OWN])[0] == 0


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_another_strategy_is_named(
    stores: dict[str, Prometheus], capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    status, _, last = check(capsys, stores[strategy])
    assert status == 1
    assert f"translation_strategy {strategy}; set" in last


def test_native_histograms_are_named(
    stores: dict[str, Prometheus], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, last = check(capsys, stores[EXPONENTIAL])
    assert status == 1
    assert "--histograms native" in last


def test_native_queries_have_the_data_of_classic_ones(
    stores: dict[str, Prometheus], capsys: pytest.CaptureFixture[str]
) -> None:
    def count_native() -> int:
        return check(capsys, stores[EXPONENTIAL], "--histograms", "native")[1]

    assert until(lambda: count_native() >= check(capsys, stores[OWN])[1] - 3, 40, 2)
    assert check(capsys, stores[EXPONENTIAL], "--histograms", "native")[0] == 0
