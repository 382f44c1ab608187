"""torch: models that nobody put into evaluation mode, parts and programs of models, and training loops beside them."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.instrumentation.torch import forward as forward_hooks
from otel_infer.instrumentation.torch import loaded_models
from tests.engines.conftest import Serve
from tests.support.rings import Recording, stages_of

torch = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn


class Vision(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


class Pair(nn.Module):  # type: ignore[misc, name-defined]
    """A model with several methods, as CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = Vision(), Vision()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.vision(rows) + self.text(rows)

    def encode_image(self, rows: torch.Tensor) -> torch.Tensor:
        return self.vision(rows)


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    loaded_models.instrumentor.install()
    assert loaded_models.instrumentor.status.state == "active", loaded_models.instrumentor.status.drift
    assert loaded_models.instrumentor is forward_hooks.instrumentor
    yield
    loaded_models.instrumentor.remove()


def rows(count: int = 3) -> Any:
    return torch.ones(count, 8)


def names_and_stages(recording: Recording) -> list[tuple[str, list[str]]]:
    return [(record.model, stages_of(record)) for record in recording.records()]


@pytest.mark.parametrize(
    "ready", [lambda model: model.load_state_dict(model.state_dict()), lambda model: model.to("cpu")]
)
def test_a_model_that_is_never_put_into_evaluation_mode_is_seen(
    ready: Any, recording: Recording, serve: Serve
) -> None:
    model = Pair()
    ready(model)
    with serve():
        model(rows())
    with torch.no_grad():
        model(rows())
    assert names_and_stages(recording) == [("Pair", ["ingress", "forward"]), ("Pair", ["forward"])]


def test_a_training_loop_is_no_inference(recording: Recording) -> None:
    model = Pair().to("cpu")
    model(rows()).sum().backward()
    model.train()
    with torch.no_grad():
        model(rows())
    assert recording.records() == []


class Frozen(torch.nn.Module):
    """A trained head on a backbone that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Vision(), torch.nn.Linear(8, 2)
        self.backbone.load_state_dict(self.backbone.state_dict())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.backbone(rows)
        return self.head(features)


@pytest.mark.parametrize("ready", [lambda model: model.to("cpu"), lambda model: model.train()])
def test_a_part_that_is_not_trained_is_no_inference(ready: Any, recording: Recording) -> None:
    model = ready(Frozen())
    model(rows()).sum().backward()
    assert recording.records() == []
    with torch.no_grad():
        model.eval()(rows())
    assert names_and_stages(recording) == [("Frozen", ["forward"])]


def test_another_method_is_seen_by_the_part_that_it_calls(recording: Recording, serve: Serve) -> None:
    model = Pair().eval()
    with serve():
        model.encode_image(rows())
    with torch.no_grad():
        model.text(rows())
    assert names_and_stages(recording) == [("Pair", ["ingress", "forward"]), ("Pair", ["forward"])]


def test_forward_that_is_called_as_a_method_is_seen_by_its_parts(recording: Recording, serve: Serve) -> None:
    model = Pair().eval()
    with serve():
        model.forward(rows())
    assert names_and_stages(recording) == [("Pair", ["ingress", "forward", "forward"])]


def test_parts_inside_of_a_call_are_none_of_their_own(recording: Recording, serve: Serve) -> None:
    model = Pair().eval()
    with serve():
        model(rows())
    assert names_and_stages(recording) == [("Pair", ["ingress", "forward"])]


def test_parts_of_a_model_in_training_are_not_seen(recording: Recording) -> None:
    model = Pair().eval().train()
    with torch.no_grad():
        model.encode_image(rows())
    assert recording.records() == []


def test_a_script_that_is_loaded_is_seen(tmp_path: Path, recording: Recording, serve: Serve) -> None:
    torch.jit.script(Vision()).save(str(tmp_path / "vision.pt"))
    loaded = torch.jit.load(str(tmp_path / "vision.pt"))
    with serve():
        loaded(rows())
    frozen = torch.jit.freeze(loaded.eval())
    with serve():
        frozen(rows())
    assert [stages for _, stages in names_and_stages(recording)] == [["ingress", "forward"]] * 2


@pytest.mark.parametrize(
    "make",
    [
        torch.jit.script,
        lambda model: torch.jit.trace(model, rows()),
        lambda model: torch.jit.optimize_for_inference(torch.jit.script(model)),
    ],
)
def test_a_program_of_a_model_in_evaluation_mode_is_seen(
    make: Any, recording: Recording, serve: Serve
) -> None:
    program = make(Vision().eval())
    assert recording.records() == []  # what `trace` checks is no call of the application
    with serve():
        program(rows())
    assert [stages for _, stages in names_and_stages(recording)] == [["ingress", "forward"]]


def unpickle(program: Any) -> Any:
    stream = io.BytesIO()
    torch.save(program, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize(
    ("make", "copied"),
    [
        (torch.jit.script, copy.copy),
        (torch.jit.script, copy.deepcopy),
        (lambda model: torch.jit.trace(model, rows()), copy.deepcopy),
        (torch.fx.symbolic_trace, copy.deepcopy),
        (lambda model: torch.fx.symbolic_trace(model.layers), unpickle),
        (lambda model: torch.export.export(model, (rows(),)).module(), copy.deepcopy),
    ],
)
def test_a_copy_of_a_program_is_seen(make: Any, copied: Any, recording: Recording, serve: Serve) -> None:
    program = make(Vision().eval())
    if isinstance(program, torch.fx.GraphModule) and program.training:
        with contextlib.suppress(NotImplementedError):  # an exported program has one mode
            program.eval()
    other = copied(program)
    recording.records()
    with serve():
        other(rows())
    assert [stages for _, stages in names_and_stages(recording)] == [["ingress", "forward"]]


def test_an_exported_program_is_seen(tmp_path: Path, recording: Recording, serve: Serve) -> None:
    torch.export.save(torch.export.export(Vision(), (rows(),)), tmp_path / "vision.pt2")
    module = torch.export.load(tmp_path / "vision.pt2").module()
    recording.records()
    with serve():
        module(rows())
    assert [stages for _, stages in names_and_stages(recording)] == [["ingress", "forward"]]


def test_a_compiled_package_is_seen(tmp_path: Path, recording: Recording, serve: Serve) -> None:
    program = torch.export.export(Vision(), (rows(),))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "vision.pt2"))
    package = torch._inductor.aoti_load_package(path)
    recording.records()
    with serve():
        package(rows())
    assert names_and_stages(recording) == [("vision", ["ingress", "forward"])]
