"""What is seen of outermost modules, against a stand-in for `torch.nn.Module` that calls the way torch does."""

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
from otel_infer.instrumentation.torch import forward as ours
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from tests.support.rings import Recording, stages_of


class Module:
    """`torch.nn.Module` as far as it matters here."""

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
    """A model with a layer inside, that can fail."""

    def forward(self, x: Any = None, fail: BaseException | None = None, **kwargs: Any) -> Any:
        if fail is not None:
            raise fail
        for child in self._modules.values():
            child(x)
        return x


class Fake:
    """What the integration asks of torch."""

    grad = compiling = tracing = False


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    fake = Fake()
    monkeypatch.setattr(ours, "_outermost_modules", {})
    monkeypatch.setattr(ours, "_patched_classes", weakref.WeakSet())
    calls = ours._call_descriptor
    monkeypatch.setattr(calls, "hook", Hook("stand-in"))
    monkeypatch.setattr(calls, "bind_torch_functions", lambda: None)
    monkeypatch.setattr(calls, "is_compiling", lambda: fake.compiling, raising=False)
    monkeypatch.setattr(calls, "is_tracing", lambda: fake.tracing, raising=False)
    monkeypatch.setattr(calls, "is_grad_enabled", lambda: fake.grad, raising=False)
    yield fake
    for owner in list(ours._patched_classes):
        delattr(owner, "_compiled_call_impl")


@pytest.fixture
def recording(torch: Fake) -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()


def watched(module: Any) -> Any:
    ours._watch_module(module)
    return module


# ── what is recorded ─────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_request_a_forward_is_one_of_its_own(recording: Recording) -> None:
    model = watched(Encoder())
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


def test_under_a_request_a_forward_is_a_stage_of_it_and_names_it(recording: Recording, torch: Fake) -> None:
    torch.grad = True  # forgotten by the user, and no training either
    model = watched(Encoder())
    request = start.open_request("POST", owner="asgi", server=True)
    assert request is not None
    token = request.attach()
    model(x=Tensor(2, 5))
    model(Tensor(4, 5))
    start.detach(token)
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "forward", "forward"]
    assert (record.operation, record.provider, record.model) == ("inference", "torch", "Encoder")


def test_the_name_that_somebody_gave_stays_and_what_an_engine_says_later_wins(recording: Recording) -> None:
    model = watched(Encoder())
    for named in (True, False):
        request = start.open_request("POST", owner="asgi", operation="chat", model="llama")
        assert request is not None
        request.is_named = named
        token = request.attach()
        model(Tensor(1, 1))
        if not named:
            request.set_operation("chat", "transformers", "llama")
        model(Tensor(1, 1))
        start.detach(token)
        request.close()
    assert [(r.operation, r.model) for r in recording.records()] == [("chat", "llama")] * 2


def test_a_training_loop_is_no_request(recording: Recording, torch: Fake) -> None:
    model = watched(Encoder())
    torch.grad = True
    model(Tensor(1, 1))
    assert recording.records() == []


@pytest.mark.parametrize("state", ["compiling", "tracing"])
def test_a_model_that_is_being_compiled_or_traced_is_left_alone(
    recording: Recording, torch: Fake, state: str
) -> None:
    model = watched(Encoder())
    setattr(torch, state, True)
    model(Tensor(1, 1))
    assert recording.records() == []


def test_a_forward_that_raises_is_an_error_by_type_and_the_exception_passes_untouched(
    recording: Recording,
) -> None:
    model = watched(Encoder())
    for raised in (ValueError("secret"), StopIteration(3), KeyboardInterrupt()):
        with pytest.raises(type(raised)) as caught:
            model(Tensor(1, 1), fail=raised)
        assert caught.value is raised
        (record,) = recording.records()
        assert (record.outcome, record.error_type) == (events.ERROR, type(raised).__name__)
        assert stages_of(record) == ["forward"]
    assert start.current_request() is None
    assert not torch_suppressed.get()


def test_an_exception_is_not_kept_alive(recording: Recording) -> None:
    class Boom(Exception):
        pass

    class Failing(Encoder):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise Boom

    model = watched(Failing())
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


def test_a_model_inside_another_is_part_of_it(recording: Recording) -> None:
    inner = watched(Encoder())
    outer = watched(Encoder(inner))
    outer(Tensor(1, 1))
    inner(Tensor(2, 1))
    assert [r.stages[0].attributes["infer.items"] for r in recording.records()] == [1, 2]


def test_what_an_engine_loads_is_its_own_model_for_good(recording: Recording) -> None:
    """An engine loads a model that is the user's own, and calls it where no claim is made."""
    model = Encoder()
    mark_engine_models(model.eval, Hook("load"))()
    assert model("x") == "x"
    assert recording.records() == []


def test_inside_a_claim_it_is_silent_and_after_it_no_more(recording: Recording) -> None:
    model = watched(Encoder())
    generate = suppress_torch(lambda x: model(x), Hook("generate"))
    generate(Tensor(1, 1))
    assert recording.records() == []
    with pytest.raises(ValueError):
        suppress_torch(lambda: model(fail=ValueError()), Hook("generate"))()
    model(Tensor(1, 1))
    assert len(recording.records()) == 1


def test_threads_do_not_mix(recording: Recording) -> None:
    model = watched(Encoder(Encoder()))

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


def test_what_of_ours_raises_is_counted_and_never_seen(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = watched(Encoder())

    def broken(module: Any) -> str:
        raise RuntimeError("secret")

    monkeypatch.setattr(ours, "model_name", broken)
    x = Tensor(1, 1)
    with caplog.at_level(logging.ERROR):
        assert model(x) is x
        assert model(x) is x
    assert not ours._call_descriptor.hook.alive
    assert len(caplog.messages) == 1
    assert "secret" not in caplog.text


def test_a_batch_that_cannot_be_counted_spoils_nothing(recording: Recording) -> None:
    class Odd:
        @property
        def shape(self) -> Any:
            raise RuntimeError("lazy")

    model = watched(Encoder())
    odd = Odd()
    assert model(odd) is odd
    assert ours._call_descriptor.hook.alive
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
def test_rows_are_those_of_the_first_batch(args: Any, kwargs: Any, rows: int) -> None:
    assert ours._read_batch_size(args, kwargs) == rows


class Config:
    def __init__(self, name: Any) -> None:
        self._name_or_path = name


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("BAAI/bge-small-en", "BAAI/bge-small-en"),
        ("/srv/models/bge-small/", "bge-small"),
        ("./bge-small", "bge-small"),
        ("", "Encoder"),
        (None, "Encoder"),
        (5, "Encoder"),
    ],
)
def test_a_model_is_called_by_its_id_or_folder_never_by_a_path(said: Any, name: str) -> None:
    model: Any = Encoder()
    model.config = Config(said)
    assert ours.model_name(model) == name
    wrapper: Any = Module()
    wrapper._orig_mod = model
    assert ours.model_name(wrapper) == name


# ── whose calls are seen, and what it leaves behind ──────────────────────────────────────────────────────────────


def test_a_module_is_not_kept_alive(torch: Fake) -> None:
    model = watched(Encoder())
    seen = weakref.ref(model)
    del model
    assert seen() is None
    assert not ours._outermost_modules


def test_a_module_holds_nothing_of_ours(recording: Recording) -> None:
    model = watched(Encoder())
    before = dict(vars(model))
    model(Tensor(1, 1))
    assert vars(model) == before
    assert Encoder.__dict__["_compiled_call_impl"] is ours._call_descriptor
    assert "_compiled_call_impl" not in vars(Module) or Module._compiled_call_impl is None


def test_copies_and_pickles_are_modules_that_nobody_watches(recording: Recording) -> None:
    model = watched(Encoder())
    replica = Encoder.__new__(Encoder)
    replica.__dict__ = model.__dict__.copy()  # as DataParallel does it
    for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model)), replica):
        x = Tensor(1, 1)
        assert other(x) is x
    assert recording.records() == []


def test_what_is_on_a_class_pickles_as_what_torch_has_there() -> None:
    assert pickle.loads(pickle.dumps(ours._call_descriptor)) is None
    assert copy.deepcopy(ours._call_descriptor) is None


def test_a_compiled_call_is_called_and_seen_and_can_be_taken_back(recording: Recording) -> None:
    model = watched(Encoder())
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


def test_a_subclass_is_seen_through_its_base_and_once(recording: Recording) -> None:
    class Derived(Encoder):
        pass

    watched(Encoder())
    derived = watched(Derived())
    derived(Tensor(1, 1))
    assert "_compiled_call_impl" not in Derived.__dict__
    assert [record.model for record in recording.records()] == ["Derived"]


def test_a_class_that_takes_no_attributes_is_left_alone(torch: Fake) -> None:
    class Frozen(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise TypeError("frozen")

    class Sealed(Encoder, metaclass=Frozen):
        pass

    sealed = watched(Sealed())
    assert not ours._outermost_modules
    assert sealed(1) == 1


@pytest.mark.parametrize("module", ["torch.nn.modules.linear", "vllm.model_executor.models.llama"])
def test_layers_and_models_of_engines_are_not_watched(torch: Fake, module: str) -> None:
    kind = type("Linear", (Encoder,), {"__module__": module})
    watched(kind())
    assert not ours._outermost_modules
