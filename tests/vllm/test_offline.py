"""`LLM.generate` in a script, with the engine core in a process of its own or in the script's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from otel_infer import semconv
from tests.support.arrivals import assert_nothing_came_twice, requests_of
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.trees import tree
from tests.vllm.serving import ENVIRON

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SCRIPT = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], served_model_name="tiny", dtype="float32", max_model_len=256, enforce_eager=True)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for answer in llm.generate(["time and time", "and again"], params):
        assert len(answer.outputs[0].token_ids) == 5
"""


@pytest.mark.parametrize("processes", ["0", "1"], ids=["in-process", "multi-process"])
def test_every_prompt_of_a_script_is_a_request(tiny_llama: Path, tmp_path: Path, processes: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with OtlpReceiver() as receiver:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        environ = {**kept, **ENVIRON, **receiver.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": processes}
        command = [sys.executable, str(script), str(tiny_llama)]
        environ["OTEL_INFER_STEPS"] = "all"
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-4000:]
        assert receiver.wait_for(lambda it: len(requests_of(it)) == 2), requests_of(receiver)
        for trace_id, (request,) in requests_of(receiver).items():
            spans = [span for span in receiver.spans if span["trace_id"] == trace_id]
            assert tree(spans, "") == [
                "text_completion tiny",
                "  queue",
                "  prefill",
                "  decode",
                f"    {semconv.SPAN_DECODE_STEP} ×4",
                "  postprocess",
            ]
            assert request["attributes"]["gen_ai.usage.output_tokens"] == 5
        assert_nothing_came_twice(receiver)
