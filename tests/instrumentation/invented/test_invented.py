"""An integration in one file, written by CONTRIBUTING.md, records an invented model server completely."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from otel_infer import semconv
from tests.support.arrivals import assert_nothing_came_twice, counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.trees import tree

pytest.importorskip("torch", reason="torch is not installed")

FOLDER = Path(__file__).parent
CLIENT = "00000000000000ab"
SINGLE, FAILED, UNKNOWN, ODD_METHOD, ODD_HEADER = 1, 2, 3, 4, 5
BATCH = (11, 12, 13, 14)
CALLS = (SINGLE, FAILED, UNKNOWN, ODD_METHOD, ODD_HEADER, *BATCH)
REACHED_A_MODEL = 9  # among them a call without headers, and one without a client
WINDOW_S = 0.2
UNKNOWN_METHOD = "drop table; --"

MODELS = """
import json, socket, sys, threading, torch
from tests.instrumentation.invented import parlor

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.inner(x)

net, calls = Net().eval(), []

def double(payloads):
    calls.append(sorted(payloads))
    net(torch.tensor([[float(each)] for each in payloads]))
    return [2 * each for each in payloads]

ERROR = ValueError("too large")

def refuse(payloads):
    net(torch.zeros(len(payloads), 1))
    raise ERROR
"""

SERVE = f"""
server = parlor.Server({{"double": double, "refuse": refuse}}, max_size=2, window_s={WINDOW_S})
batching = parlor.Server({{"double": double}}, max_size={len(BATCH)}, window_s=30)

def ask(port, number, method, **headers):
    headers = {{"traceparent": f"00-{{number:032x}}-{CLIENT}-01"}} | headers
    return parlor.ask(port, method, number, **headers)

def ask_without_headers():
    with socket.create_connection(("127.0.0.1", server.port)) as connection, connection.makefile("rw") as stream:
        stream.write(json.dumps({{"method": "double", "payload": 9, "headers": None}}) + "\\n")
        stream.flush()
        return json.loads(stream.readline())

seen = {{
    "single": ask(server.port, {SINGLE}, "double"),
    "failed": ask(server.port, {FAILED}, "refuse"),
    "unknown": ask(server.port, {UNKNOWN}, {UNKNOWN_METHOD!r}),
    "odd method": ask(server.port, {ODD_METHOD}, ["double"]),
    "odd header": ask(server.port, {ODD_HEADER}, "double", other=7),
    "no headers": ask_without_headers(),
}}
answers = {{}}
threads = [
    threading.Thread(target=lambda number=number: answers.update({{number: ask(batching.port, number, "double")}}))
    for number in {BATCH}
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
try:
    server.serve_call(parlor.Call("refuse", 1, {{}}))
except Exception as error:
    seen["same exception"] = error is ERROR
seen["batch"], seen["calls"] = [answers[number] for number in {BATCH}], calls
print("SEEN", json.dumps(seen))
"""

COME_OFF = """
def list_functions():
    return [vars(parlor.Server)["serve_call"], vars(parlor.Batcher)["put"], vars(parlor.Batcher)["run_batch"]]

before = list_functions()
import otel_infer
otel_infer.instrument()
changed = [one is not other for one, other in zip(list_functions(), before)]
otel_infer.uninstrument()
restored = [one is other for one, other in zip(list_functions(), before)]
server = parlor.Server({"double": double})
print("SEEN", json.dumps([changed, restored, parlor.ask(server.port, "double", 2)]))
"""


class Served(NamedTuple):
    """What the clients and the receiver saw of one run."""

    seen: dict[str, Any]
    receiver: OtlpReceiver

    def list_spans(self, number: int) -> list[dict[str, Any]]:
        return [span for span in self.receiver.spans if span["trace_id"] == f"{number:032x}"]

    def draw_tree(self, number: int) -> list[str]:
        return tree(self.list_spans(number), CLIENT)

    def find_span(self, number: int, name: str) -> dict[str, Any]:
        (found,) = [span for span in self.list_spans(number) if span["name"] == name]
        return found


def run_script(folder: Path, script: str, receiver: OtlpReceiver) -> Any:
    """Returns what a script printed; the integration is installed in `folder`, as a package would be."""
    metadata = folder / "parlor_hooks-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: parlor-hooks\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[otel_infer_instrumentor]\nparlor = tests.instrumentation.invented.parlor_hooks:instrumentor\n"
    )
    paths = os.pathsep.join((str(folder), str(FOLDER.parents[2])))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | receiver.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    return json.loads(line.removeprefix("SEEN "))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    def has_all(it: OtlpReceiver) -> bool:
        closed = {span["trace_id"] for span in it.spans if span["kind"] == 2}
        stages = sum(span["name"] == "forward" for span in it.spans)
        numbers = {f"{number:032x}" for number in CALLS}
        return numbers <= closed and stages == counted(it) == REACHED_A_MODEL

    with OtlpReceiver() as receiver:
        script = f"import otel_infer\notel_infer.instrument()\n{MODELS}{SERVE}"
        seen = run_script(tmp_path_factory.mktemp("installed"), script, receiver)
        assert receiver.wait_for(has_all, 15), "not all requests have arrived"
        yield Served(seen, receiver)


def test_a_call_is_a_complete_tree(served: Served) -> None:
    assert served.draw_tree(SINGLE) == [
        "parlor double",
        "  inference Net",
        "    ingress",
        "    queue wait",
        "    forward",
    ]
    assert served.find_span(SINGLE, "parlor double")["kind"] == 2


@pytest.mark.parametrize("number", [SINGLE, ODD_HEADER, *BATCH])
def test_an_answered_call_is_a_success(served: Served, number: int) -> None:
    for name in ("parlor double", "inference Net"):
        span = served.find_span(number, name)
        assert (span["status"], span["attributes"].get(semconv.ERROR_TYPE)) == (0, None)


def test_the_wait_in_the_deque_is_measured(served: Served) -> None:
    wait, request = served.find_span(SINGLE, "queue wait"), served.find_span(SINGLE, "parlor double")
    assert WINDOW_S * 1e9 <= wait["end"] - wait["start"] <= request["end"] - request["start"]


def test_each_member_of_a_batch_is_complete(served: Served) -> None:
    for number in BATCH:
        assert served.draw_tree(number) == served.draw_tree(SINGLE)
        assert served.find_span(number, "forward")["attributes"][semconv.ITEMS] == len(BATCH)
    assert served.find_span(SINGLE, "forward")["attributes"][semconv.ITEMS] == 1


def test_members_of_a_batch_are_linked(served: Served) -> None:
    spans = [served.find_span(number, "inference Net") for number in BATCH]
    links = {span["span_id"]: {link["span_id"] for link in span["links"]} for span in spans}
    first = max(links, key=lambda span_id: len(links[span_id]))
    assert links.pop(first) == set(links)
    assert list(links.values()) == [{first}] * (len(BATCH) - 1)


def test_an_exception_of_a_model_is_the_error(served: Served) -> None:
    assert served.seen["failed"] == {"error": "ValueError: too large"}
    assert "    forward" in served.draw_tree(FAILED)
    for name in ("parlor refuse", "inference Net"):
        span = served.find_span(FAILED, name)
        assert (span["status"], span["attributes"][semconv.ERROR_TYPE]) == (2, "ValueError")


@pytest.mark.parametrize(("number", "error"), [(UNKNOWN, "KeyError"), (ODD_METHOD, "TypeError")])
def test_an_unknown_method_names_no_span(served: Served, number: int, error: str) -> None:
    assert served.draw_tree(number) == ["parlor _OTHER"]
    span = served.find_span(number, "parlor _OTHER")
    assert (span["status"], span["attributes"][semconv.ERROR_TYPE]) == (2, error)
    assert UNKNOWN_METHOD not in str(span)


def test_an_odd_header_loses_no_request(served: Served) -> None:
    assert served.draw_tree(ODD_HEADER) == served.draw_tree(SINGLE)


def test_each_call_is_counted_once(served: Served) -> None:
    assert counted(served.receiver) == REACHED_A_MODEL
    assert_nothing_came_twice(served.receiver)


def test_no_hook_of_ours_failed(served: Served) -> None:
    errors = [
        metric["points"] for metric in served.receiver.metrics if metric["name"] == semconv.SELF_ERRORS.name
    ]
    assert [point["value"] for point in errors[-1]] == [0]


def test_the_server_answers_as_without_us(served: Served, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        assert served.seen == run_script(tmp_path, MODELS + SERVE, receiver)
        assert not receiver.requests


def test_uninstrument_restores_the_functions(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        changed, restored, answer = run_script(tmp_path, MODELS + COME_OFF, receiver)
    assert changed == restored == [True] * 3
    assert answer == {"answer": 4}


def test_the_integration_is_at_most_eighty_lines() -> None:
    assert (FOLDER / "parlor_hooks.py").read_text(encoding="utf-8").count("\n") <= 80
