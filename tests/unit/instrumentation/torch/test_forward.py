"""Recording of outermost modules, tested with a stand-in for `torch.nn.Module` that calls as torch does."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import mark_engine_models, suppress_torch, torch_suppressed
from otel_infer.instrumentation.torch import forward as forward_hooks
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from tests.support.rings import Recording, stages_of


class Module:
    """Stand-in for `torch.nn.Module`."""

    _compiled_call_impl: Any = None

    def __init__(self, *children: Module) -> None:
        self._modules = dict(enumerate(children))
        self.training = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled_call_impl is not None:
            return self._compiled_call_impl(*args, **kwargs)
        return self._call_impl(*args, **kwargs)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def train(self, mode: bool = True) -> Any:
        self.training = mode
        for child in self._modules.values():
            child.train(mode)
        return self

    def eval(self) -> Any:
        return self.train(False)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_compiled_call_impl", None)
        return state


class Tensor:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


class Encoder(Module):
    """A model with child layers; it raises `fail` if that is given."""

    def forward(self, x: Any = None, fail: BaseException | None = None, **kwargs: Any) -> Any:
        if fail is not None:
            raise fail
        for child in self._modules.values():
            child(x)
        return x


class FakeTorch:
    """The torch state that the instrumentation reads."""

    grad = tracing = _is_compiling_flag = False


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    fake = FakeTorch()
    others = dict(forward_hooks._outermost_modules)  # of tests with the real torch
    forward_hooks._outermost_modules.clear()
    monkeypatch.setattr(forward_hooks, "_patched_classes", weakref.WeakSet())
    calls = forward_hooks._call_descriptor
    monkeypatch.setattr(calls, "hook", Hook("stand-in"))
    monkeypatch.setattr(calls, "bind_torch_functions", lambda: None)
    monkeypatch.setattr(calls, "is_dynamo_compiling", lambda: False, raising=False)
    monkeypatch.setattr(calls, "compiler", fake, raising=False)
    monkeypatch.setattr(calls, "tensor", Tensor, raising=False)
    monkeypatch.setattr(calls, "is_tracing", lambda: fake.tracing, raising=False)
    monkeypatch.setattr(calls, "is_grad_enabled", lambda: fake.grad, raising=False)
    yield fake
    forward_hooks._outermost_modules.clear()
    forward_hooks._outermost_modules.update(others)
    for owner in list(forward_hooks._patched_classes):
        delattr(owner, "_compiled_call_impl")


@pytest.fixture
def recording(torch: FakeTorch) -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()


def watch_module(module: Any) -> Any:
    forward_hooks.watch_module(module)
    return module


# ── what is recorded ─────────────────────────────────────────────────────────────────────────────────────────────


def test_forward_without_a_request_opens_its_own(recording: Recording) -> None:
    model = watch_module(Encoder())
    x = Tensor(3, 7)
    assert model(x) is x
    (record,) = recording.records()
    assert (record.operation, record.provider, record.model) == ("inference", "torch", "Encoder")
    assert not record.generative
    assert record.outcome == events.OK
    assert stages_of(record) == ["forward"]
    stage = record.stages[0]
    assert stage.attributes == {"infer.items": 3}
    assert record.arrived_at == stage.started_at <= stage.ended_at <= record.ended_at


def test_forward_in_a_request_is_a_named_stage(recording: Recording, torch: FakeTorch) -> None:
    torch.grad = True  # the user forgot to disable gradients; this is no training
    model = watch_module(Encoder())
    request = start.open_request("POST", owner="asgi", server=True)
    assert request is not None
    token = request.attach()
    model(x=Tensor(2, 5))
    model(Tensor(4, 5))
    detach(token)
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "forward", "forward"]
    assert (record.operation, record.provider, record.model) == ("inference", "torch", "Encoder")


def test_forward_keeps_explicit_and_engine_names(recording: Recording) -> None:
    model = watch_module(Encoder())
    for named in (True, False):
        request = start.open_request("POST", owner="asgi", operation="chat", model="llama")
        assert request is not None
        request.is_named = named
        token = request.attach()
        model(Tensor(1, 1))
        if not named:
            request.set_operation("chat", "transformers", "llama")
        model(Tensor(1, 1))
        detach(token)
        request.close()
    assert [(r.operation, r.model) for r in recording.records()] == [("chat", "llama")] * 2


def test_training_loop_is_not_recorded(recording: Recording, torch: FakeTorch) -> None:
    model = watch_module(Encoder())
    torch.grad = True
    model(Tensor(1, 1))
    assert recording.records() == []


@pytest.mark.parametrize("state", ["_is_compiling_flag", "tracing"])
def test_model_being_compiled_or_traced_is_not_recorded(
    recording: Recording, torch: FakeTorch, state: str
) -> None:
    model = watch_module(Encoder())
    setattr(torch, state, True)
    model(Tensor(1, 1))
    assert recording.records() == []


def test_failing_forward_records_the_type_and_reraises(
    recording: Recording,
) -> None:
    model = watch_module(Encoder())
    for raised, outcome, error_type in (
        (ValueError("secret"), events.ERROR, "ValueError"),
        (StopIteration(3), events.ERROR, "StopIteration"),
        (TimeoutError(), events.ABORTED, "timeout"),
        (KeyboardInterrupt(), events.ABORTED, "cancelled"),
    ):
        with pytest.raises(type(raised)) as caught:
            model(Tensor(1, 1), fail=raised)
        assert caught.value is raised
        (record,) = recording.records()
        assert (record.outcome, record.error_type) == (outcome, error_type)
        assert stages_of(record) == ["forward"]
    assert start.current_request() is None
    assert not torch_suppressed.get()


def test_failed_device_timing_keeps_stage_and_end(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("the device failed")

    monkeypatch.setattr(forward_hooks.timing, "begin", lambda **more: 1)
    monkeypatch.setattr(forward_hooks.timing, "end", fail)
    # A new thread looks for a device in its first call.
    thread = threading.Thread(target=watch_module(Encoder()), args=(Tensor(3, 7),))
    thread.start()
    thread.join()
    (record,) = recording.records()
    assert (record.outcome, stages_of(record)) == (events.OK, ["forward"])
    assert not forward_hooks._call_descriptor.hook.alive


def test_exception_of_a_forward_is_not_retained(recording: Recording) -> None:
    class Boom(Exception):
        pass

    class Failing(Encoder):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise Boom

    model = watch_module(Failing())
    seen = None
    gc.disable()
    try:
        try:
            model(Tensor(1, 1))
        except Boom as exc:
            seen = weakref.ref(exc)
        assert seen is not None
        assert seen() is None
    finally:
        gc.enable()


def test_nested_model_is_part_of_the_outer_model(recording: Recording) -> None:
    inner = watch_module(Encoder())
    outer = watch_module(Encoder(inner))
    outer(Tensor(1, 1))
    inner(Tensor(2, 1))
    assert [r.stages[0].attributes["infer.items"] for r in recording.records()] == [1, 2]


def test_models_loaded_by_an_engine_are_not_recorded(recording: Recording) -> None:
    """The engine loads a user's model and calls it outside a suppressed section."""
    model = Encoder()
    mark_engine_models(model.eval, Hook("load"))()
    assert model("x") == "x"
    assert recording.records() == []


def test_forward_is_suppressed_only_inside_an_engine_call(recording: Recording) -> None:
    model = watch_module(Encoder())
    generate = suppress_torch(lambda x: model(x), Hook("generate"))
    generate(Tensor(1, 1))
    assert recording.records() == []
    with pytest.raises(ValueError):
        suppress_torch(lambda: model(fail=ValueError()), Hook("generate"))()
    model(Tensor(1, 1))
    assert len(recording.records()) == 1


def test_concurrent_forwards_keep_separate_records(recording: Recording) -> None:
    model = watch_module(Encoder(Encoder()))

    def work(rows: int) -> None:
        for _ in range(50):
            model(Tensor(rows, 1))

    threads = [threading.Thread(target=work, args=(rows,)) for rows in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = [record.stages[0].attributes["infer.items"] for record in recording.records()]
    assert {rows: counts.count(rows) for rows in range(1, 5)} == dict.fromkeys(range(1, 5), 50)


def test_instrumentation_error_disables_the_hook_and_is_logged(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = watch_module(Encoder())

    def broken(module: Any) -> str:
        raise RuntimeError("secret")

    monkeypatch.setattr(forward_hooks, "read_model_name", broken)
    x = Tensor(1, 1)
    with caplog.at_level(logging.ERROR):
        assert model(x) is x
        assert model(x) is x
    assert not forward_hooks._call_descriptor.hook.alive
    assert len(caplog.messages) == 1
    assert "secret" not in caplog.text


def test_uncountable_batch_is_recorded_without_error(recording: Recording) -> None:
    class Odd:
        @property
        def shape(self) -> Any:
            raise RuntimeError("lazy")

    model = watch_module(Encoder())
    odd = Odd()
    assert model(odd) is odd
    assert forward_hooks._call_descriptor.hook.alive
    assert len(recording.records()) == 1
    assert start.current_request() is None


@pytest.mark.parametrize(
    ("args", "kwargs", "rows"),
    [
        ((Tensor(3, 7),), {}, 3),
        ((), {"input_ids": Tensor(5, 7), "attention_mask": Tensor(5, 7)}, 5),
        (({"input_ids": Tensor(2, 7)},), {}, 2),
        ((None, 4), {"pixel_values": Tensor(8, 3, 2, 2)}, 8),
        ((Tensor(9),), {}, 0),
        ((), {}, 0),
    ],
)
def test_batch_size_is_read_from_the_first_tensor(args: Any, kwargs: Any, rows: int) -> None:
    assert forward_hooks.read_batch_size(args, kwargs) == rows


class Config:
    def __init__(self, name: Any) -> None:
        self._name_or_path = name


@pytest.mark.parametrize(
    ("configured", "name"),
    [
        ("BAAI/bge-small-en", "BAAI/bge-small-en"),
        ("/srv/models/bge-small/", "bge-small"),
        ("./bge-small", "bge-small"),
        (
            "/root/.cache/hub/models--BAAI--bge-small-en/snapshots/5c38ec7c405ec4b44b94cc5a9bb96e735b38267a",
            "BAAI/bge-small-en",
        ),
        ("", "Encoder"),
        (None, "Encoder"),
        (5, "Encoder"),
    ],
)
def test_model_name_is_its_id_or_folder_name(configured: Any, name: str) -> None:
    model: Any = Encoder()
    model.config = Config(configured)
    assert forward_hooks.read_model_name(model) == name
    wrapper: Any = Module()
    wrapper._orig_mod = model
    assert forward_hooks.read_model_name(wrapper) == name


# ── which modules are watched, and what stays on them ────────────────────────────────────────────────────────────


def test_watched_module_is_not_retained(torch: FakeTorch) -> None:
    model = watch_module(Encoder())
    seen = weakref.ref(model)
    del model
    assert seen() is None
    assert not forward_hooks._outermost_modules


def test_watching_adds_no_instance_attributes(recording: Recording) -> None:
    model = watch_module(Encoder())
    before = dict(vars(model))
    model(Tensor(1, 1))
    assert vars(model) == before
    assert Encoder.__dict__["_compiled_call_impl"] is forward_hooks._call_descriptor
    assert "_compiled_call_impl" not in vars(Module) or Module._compiled_call_impl is None


def test_copies_and_pickles_are_not_watched(recording: Recording) -> None:
    model = watch_module(Encoder())
    replica = Encoder.__new__(Encoder)
    replica.__dict__ = model.__dict__.copy()  # as DataParallel does
    for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model)), replica):
        x = Tensor(1, 1)
        assert other(x) is x
    assert recording.records() == []


def test_call_descriptor_pickles_and_copies_as_none() -> None:
    assert pickle.loads(pickle.dumps(forward_hooks._call_descriptor)) is None
    assert copy.deepcopy(forward_hooks._call_descriptor) is None


def test_compiled_call_is_recorded_and_can_be_removed(recording: Recording) -> None:
    model = watch_module(Encoder())
    model._compiled_call_impl = lambda x: ("compiled", x)
    assert model(1) == ("compiled", 1)
    assert len(recording.records()) == 1
    assert "_compiled_call_impl" in vars(model)
    unwatched = Encoder()
    unwatched._compiled_call_impl = lambda x: ("compiled", x)
    assert unwatched(1) == ("compiled", 1)
    del model._compiled_call_impl
    assert model(1) == 1
    model._compiled_call_impl = None
    assert model(1) == 1


def test_subclass_is_recorded_once_through_its_base(recording: Recording) -> None:
    class Derived(Encoder):
        pass

    watch_module(Encoder())
    derived = watch_module(Derived())
    derived(Tensor(1, 1))
    assert "_compiled_call_impl" not in Derived.__dict__
    assert [record.model for record in recording.records()] == ["Derived"]


def test_immutable_class_is_not_watched(torch: FakeTorch) -> None:
    class Frozen(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise TypeError("frozen")

    class Sealed(Encoder, metaclass=Frozen):
        pass

    sealed = watch_module(Sealed())
    assert not forward_hooks._outermost_modules
    assert sealed(1) == 1


@pytest.mark.parametrize("module", ["torch.nn.modules.linear", "vllm.model_executor.models.llama"])
def test_layers_and_engine_models_are_not_watched(torch: FakeTorch, module: str) -> None:
    kind = type("Linear", (Encoder,), {"__module__": module})
    watch_module(kind())
    assert not forward_hooks._outermost_modules
