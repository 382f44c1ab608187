"""The installed `torch`: which modules are outermost, which forwards are recorded, and that models stay unchanged."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.torch import compile as dynamo
from otel_infer.instrumentation.torch import cuda_graphs
from otel_infer.instrumentation.torch import forward as forward_hooks
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from tests.support.rings import Recording, stages_of

torch = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn

pytestmark = pytest.mark.real


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # jit reads the types
        return self.layer(self.norm(x))


class Net(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # jit reads the types
        return self.second(self.first(x))


@pytest.fixture(autouse=True)
def installed() -> Iterator[Instrumentor]:
    forward_hooks.instrumentor.install()
    assert forward_hooks.instrumentor.status.state == "active", forward_hooks.instrumentor.status.drift
    yield forward_hooks.instrumentor
    forward_hooks.instrumentor.remove()


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def rows(recording: Recording) -> list[Any]:
    """Returns the item counts of the forwards of each request since the last call."""
    return [[stage.attributes.get("infer.items") for stage in r.stages] for r in recording.records()]


def x(size: int = 4) -> Any:
    return torch.rand(size, 8)


# ── what is recorded ─────────────────────────────────────────────────────────────────────────────────────────────


def test_forward_of_a_whole_model_is_one_stage(recording: Recording, no_grad: None) -> None:
    model = Net()
    model(x())
    assert rows(recording) == []  # not in evaluation mode yet
    assert model.eval() is model
    model(x())
    model(x(2))
    (first, second) = recording.records()
    assert (first.operation, first.provider, first.model) == ("inference", "torch", "Net")
    assert (stages_of(first), first.generative) == (["forward"], False)
    assert second.stages[0].attributes == {"infer.items": 2}


def test_forward_under_request_is_a_stage_with_gradients(recording: Recording) -> None:
    model = Net().eval()
    request = start.open_request("POST", owner="asgi", server=True)
    assert request is not None
    token = request.attach()
    model(x())
    detach(token)
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "forward"]
    assert (record.operation, record.model) == ("inference", "Net")


def test_a_model_in_training_is_not_traced(recording: Recording) -> None:
    model = Net().eval()
    model(x())
    model.train()
    with torch.no_grad():
        model(x())
    assert rows(recording) == []


def test_nothing_is_kept_of_a_model_that_was_trained_after_it_served() -> None:
    """A later module may get the id of one of its parts, and must not get its name."""
    net = Net().eval()
    assert id(net.first) in forward_hooks._wholes
    ids = {id(net), id(net.first), id(net.second)}
    net.train()
    assert ids.isdisjoint(forward_hooks._wholes) and ids.isdisjoint(forward_hooks._outermost_modules)


def test_frozen_layers_of_model_in_training_are_not_models(recording: Recording) -> None:
    model = Net()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    model(x()).sum().backward()
    assert rows(recording) == []
    assert not forward_hooks._outermost_modules


def test_inference_mode_counts_as_gradients_off(recording: Recording) -> None:
    model = Net().train(False)
    with torch.inference_mode():
        model(x())
    assert rows(recording) == [[4]]


def test_a_failing_forward_is_an_error_and_reraises(recording: Recording, no_grad: None) -> None:
    model = Net().eval()
    with pytest.raises(RuntimeError):
        model(torch.rand(4, 9))
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "RuntimeError")


def test_only_the_outermost_sequential_is_traced(recording: Recording, no_grad: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())).eval()
    model(x())
    model[1](x())
    assert rows(recording) == [[4]]
    assert "_compiled_call_impl" not in vars(nn.Linear)
    assert nn.Module.__dict__["_compiled_call_impl"] is None


def test_user_hooks_run_once(recording: Recording, no_grad: None) -> None:
    model = Net().eval()
    seen: list[str] = []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, output: seen.append("after"))
    model(x())
    assert seen == ["before", "after"]
    assert rows(recording) == [[4]]


IMPORTED_AFTERWARDS = """
from otel_infer.instrumentation.torch.forward import instrumentor
instrumentor.install()
import torch
print(*instrumentor.parts.values(), instrumentor.status.drift)
torch.compile(torch.nn.Sequential(torch.nn.Linear(1, 1)).eval(), backend="eager")(torch.rand(1, 1))
print(*instrumentor.parts.values(), instrumentor.status.drift)
"""


def test_install_during_torch_import_defers_the_compiler_part() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_AFTERWARDS], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["active waiting None", "active active None"]
    assert done.stderr == ""


# ── models stay unchanged ────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_returns_the_same_output(no_grad: None) -> None:
    model = Net()
    data = x()
    forward_hooks.instrumentor.remove()
    before = model.eval()(data)
    model.train()
    forward_hooks.instrumentor.install()
    assert torch.equal(model.eval()(data), before)


def test_state_copies_and_pickles_contain_nothing_of_otel_infer(recording: Recording, no_grad: None) -> None:
    model = Net()
    before = set(vars(model))
    model.eval()
    model(x())
    assert rows(recording) == [[4]]
    assert set(vars(model)) == before
    saved = io.BytesIO()
    torch.save(model, saved)
    assert b"otel_infer" not in saved.getvalue()
    assert b"otel_infer" not in pickle.dumps(model)
    saved.seek(0)
    data = x()
    for other in (copy.copy(model), copy.deepcopy(model), torch.load(saved, weights_only=False)):
        assert torch.equal(other(data), model(data))
    assert len(rows(recording)) == 6  # the original and its copies, which keep its mode


def test_only_the_outermost_module_of_a_pickle_is_traced(recording: Recording, no_grad: None) -> None:
    outer = nn.Sequential(nn.Sequential(Net(), nn.ReLU()), nn.ReLU())
    in_training, in_evaluation = pickle.loads(pickle.dumps(outer)), pickle.loads(pickle.dumps(outer.eval()))
    in_training(x())
    assert rows(recording) == []
    in_evaluation(x())
    assert [(len(record.stages), record.model) for record in recording.records()] == [(1, "Sequential")]


def test_a_replica_runs_its_own_forward(recording: Recording, no_grad: None) -> None:
    model = Net().eval()
    replica = model._replicate_for_data_parallel()
    replica.forward = lambda x: "replica"
    assert replica(x()) == "replica"
    assert rows(recording) == []


def test_a_model_is_freed_without_garbage_collection(recording: Recording, no_grad: None) -> None:
    gc.collect()
    gc.disable()
    try:
        model = Net().eval()
        model(x())
        seen = weakref.ref(model)
        del model
        assert seen() is None
    finally:
        gc.enable()
    assert not forward_hooks._outermost_modules


def test_remove_restores_classes_and_reinstall_finds_the_model(recording: Recording, no_grad: None) -> None:
    model = Net().eval()
    forward_hooks.instrumentor.remove()
    assert "_compiled_call_impl" not in vars(Net)
    assert nn.Module.train.__code__.co_filename.endswith("module.py")
    model(x())
    assert rows(recording) == []
    forward_hooks.instrumentor.install()
    model(x())
    assert rows(recording) == [[4]]


def test_scripted_and_traced_models_are_recorded(recording: Recording, no_grad: None) -> None:
    model = Net().eval()
    scripted = torch.jit.script(model)
    traced = torch.jit.trace(model, x(), check_trace=False)
    assert rows(recording) == []
    data = x(3)
    for other in (scripted, traced):
        assert torch.allclose(other.eval()(data), model(data))
    records = recording.records()
    assert [record.model for record in records] == ["Net"] * 4


def test_symbolic_tracing_still_keeps_modules_as_leaves(recording: Recording, no_grad: None) -> None:
    model = Net()
    model.first.eval()  # a hooked class inside the traced model
    graph = torch.fx.symbolic_trace(model.eval())
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"][:2] == [
        "first.norm",
        "first.layer.0",
    ]
    data = x()
    assert torch.equal(graph.eval()(data), model(data))
    copy.deepcopy(graph)(data)


def test_export_produces_the_same_graph(no_grad: None) -> None:
    model = Net().eval()
    forward_hooks.instrumentor.remove()
    plain = torch.export.export(model, (x(),))
    forward_hooks.instrumentor.install()
    program = torch.export.export(model, (x(),))
    assert [n.name for n in program.graph.nodes] == [n.name for n in plain.graph.nodes]


# ── compiled ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def compiling() -> Iterator[list[int]]:
    """Returns a list that receives the node count of each compiled graph."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def backend(graphs: list[int]) -> Any:
    def compile(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    return compile


def test_compiled_model_is_one_stage_and_one_graph(
    recording: Recording, no_grad: None, compiling: list[int]
) -> None:
    model = Net().eval()
    data = x()
    expected = model(data)
    recording.records()
    compiled = torch.compile(model, backend=backend(compiling))
    for _ in range(3):
        assert torch.allclose(compiled(data), expected)
    assert len(compiling) == 1
    records = recording.records()
    assert [stages_of(record) for record in records] == [["forward"]] * 3
    assert {record.model for record in records} == {"Net"}


def test_compiled_model_has_the_same_graph_when_instrumented(no_grad: None) -> None:
    counts = []
    for instrumented in (True, False):
        if not instrumented:
            forward_hooks.instrumentor.remove()
        torch._dynamo.reset()
        graphs: list[int] = []
        compiled = torch.compile(Net().eval(), backend=backend(graphs), fullgraph=True)
        compiled(x())
        compiled(x())
        counts.append(graphs)
    assert counts[0] == counts[1]
    assert len(counts[0]) == 1


def test_compilation_is_a_pause_of_the_waiting_request(
    recording: Recording, no_grad: None, compiling: list[int]
) -> None:
    dynamo.instrumentor.install()
    try:
        assert dynamo.instrumentor.status.state == "active", dynamo.instrumentor.status.drift
        torch._dynamo.reset()  # which drops the callbacks of `on_compile_start`
        compiled = torch.compile(Net().eval(), backend=backend(compiling))
        for _ in range(2):
            compiled(x())
    finally:
        dynamo.instrumentor.remove()
    first, second = recording.records()
    assert [pause.cause for pause in first.pauses] == ["compile"]
    assert second.pauses == ()
    (pause,) = first.pauses
    assert first.arrived_at < pause.started_at < pause.ended_at < first.ended_at


def test_compile_in_place_is_traced_before_and_after_eval(
    recording: Recording, no_grad: None, compiling: list[int]
) -> None:
    before, after = Net(), Net().eval()
    for model in (before, after):
        model.compile(backend=backend(compiling))
    before.eval()
    before(x())
    after(x())
    assert rows(recording) == [[4], [4]]
    assert len(compiling) == 2
    assert "_compiled_call_impl" not in vars(copy.deepcopy(after))


@pytest.mark.parametrize("with_hook", [False, True])
def test_hooked_model_inside_a_compiled_function_is_inlined(
    recording: Recording, no_grad: None, compiling: list[int], with_hook: bool
) -> None:
    model = Net().eval()
    if with_hook:  # dynamo then traces the module's own `__call__`
        model.register_forward_hook(lambda module, args, output: output + 1)

    @torch.compile(backend=backend(compiling), fullgraph=True)  # type: ignore[untyped-decorator]
    def embed(data: Any) -> Any:
        return model(data) * 2

    data = x()
    got = embed(data)
    embed(data)
    assert torch.allclose(got, model(data) * 2)
    assert len(compiling) == 1
    assert len(recording.records()) == 1  # the call outside the compiled function


# ── transformers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def transformers() -> Iterator[Any]:
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    from otel_infer.instrumentation.transformers import instrumentor

    instrumentor.install()
    yield library
    instrumentor.remove()


def test_a_pretrained_encoder_is_named_after_its_folder(
    recording: Recording, transformers: Any, tiny_encoder: Path, no_grad: None
) -> None:
    model = transformers.AutoModel.from_pretrained(tiny_encoder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_encoder)
    batch = tokenizer(["hello", "hello again, world"], padding=True, return_tensors="pt")
    model(**batch)
    (record,) = recording.records()
    assert (record.model, record.provider) == ("tiny-encoder", "torch")
    assert record.stages[0].attributes == {"infer.items": 2}


def test_pipeline_under_a_request_has_tokenize_and_forward(
    recording: Recording, transformers: Any, tiny_encoder: Path
) -> None:
    pipe = transformers.pipeline("feature-extraction", model=str(tiny_encoder), device="cpu")
    request = start.open_request("POST", owner="asgi", server=True)
    assert request is not None
    token = request.attach()
    pipe("hello")
    detach(token)
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "tokenize", "forward"]


def test_generate_and_its_forwards_are_one_request(
    recording: Recording, transformers: Any, tiny_llama: Path, no_grad: None
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
    (record,) = recording.records()
    assert record.operation == "text_completion"
    assert "forward" not in stages_of(record)
    model(torch.tensor([[5, 6, 7]]))
    (record,) = recording.records()
    assert record.operation == "inference"


def test_continuous_batching_forwards_are_no_requests(
    recording: Recording, transformers: Any, tiny_llama: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    generation = transformers.GenerationConfig(max_new_tokens=3, eos_token_id=2, pad_token_id=0)
    small = transformers.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)
    outputs = model.generate_batch(
        [[5, 6, 7], [8, 9]],
        generation_config=generation,
        continuous_batching_config=small,
        progress_bar=False,
    )
    assert len(outputs) == 2
    records = recording.records()
    assert [record.operation for record in records] == ["text_completion"] * 2
    assert all("forward" not in stages_of(record) for record in records)


def test_cuda_graph_hooks_bind_without_initializing_cuda(recording: Recording) -> None:
    before = torch.cuda.is_initialized()
    cuda_graphs.instrumentor.install()
    try:
        assert cuda_graphs.instrumentor.status.state == "active", cuda_graphs.instrumentor.status.drift
        request = start.open_request("POST", owner="test")
        assert request is not None
        request.close()
    finally:
        cuda_graphs.instrumentor.remove()
    (record,) = recording.records()
    assert record.marks == ()
    assert torch.cuda.is_initialized() == before
