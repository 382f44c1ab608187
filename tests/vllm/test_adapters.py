"""Several models in one server, by LoRA adapters, on two workers that share each step."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.tiny import make_adapter
from tests.support.trees import trace
from tests.vllm.asking import COMPLETIONS, eventually, prompt, send_request
from tests.vllm.conftest import Serve

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def server(serve: Serve, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    adapter = make_adapter(tmp_path_factory.mktemp("adapters") / "customer", tiny_llama)
    return serve(
        "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"customer={adapter}", "--tensor-parallel-size", "2",
        environ={
            "OTEL_INFER_TENANT": "lora", "OTEL_METRIC_EXPORT_INTERVAL": "500", "VLLM_CPU_OMP_THREADS_BIND": "0|0",
        },
    )  # fmt: skip


@pytest.mark.parametrize(("model", "tenant"), [("tiny", None), ("customer", "customer")])
def test_an_adapter_is_the_requests_model_and_tenant(
    server: Server, receiver: OtlpReceiver, model: str, tenant: str | None
) -> None:
    answer = send_request(
        server.port, COMPLETIONS, model=model, prompt=prompt(8), max_tokens=4, ignore_eos=True
    )
    assert answer.status == 200, answer.body
    name = f"text_completion {model}"
    spans = trace(receiver, answer.trace_id, name)
    (request,) = [span for span in spans if span["name"] == name]
    assert request["attributes"][semconv.REQUEST_MODEL] == model
    assert request["attributes"].get(semconv.TENANT) == tenant
    assert [span["name"] for span in spans].count(semconv.SPAN_DECODE_STEP) == 3


def test_each_of_two_workers_reports_its_step_times(server: Server, receiver: OtlpReceiver) -> None:
    send_request(server.port, COMPLETIONS, prompt=prompt(8), max_tokens=4, ignore_eos=True)

    def executed() -> dict[int, int]:
        """Returns the steps by rank, as last exported."""
        steps: dict[int, int] = {}
        for metric in receiver.metrics:
            if metric["name"] == semconv.STEP_EXECUTION.name:
                for point in metric["points"]:
                    steps[point["attributes"][semconv.WORKER_RANK]] = point["count"]
        return steps

    assert eventually(lambda: executed().keys() == {0, 1} and len(set(executed().values())) == 1), executed()
