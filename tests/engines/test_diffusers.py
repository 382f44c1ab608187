"""diffusers: a call of a pipeline is one stage, with its text encoder, each denoising step and the image's decoder inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tqdm import tqdm

from otel_infer import semconv
from otel_infer.instrumentation import diffusers as hooks
from otel_infer.instrumentation.torch import forward as torch_hooks
from otel_infer.ringbuffer import events
from tests.engines.conftest import Serve, describe, install
from tests.support.rings import Recording, stages_of

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
INSTRUMENTORS = torch_hooks.instrumentor, hooks.instrumentor


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    import diffusers.pipelines.pipeline_utils

    assert diffusers.pipelines.pipeline_utils
    with install(*INSTRUMENTORS):
        yield


def make_unet(**settings: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 8), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, **settings,
    )  # fmt: skip


def make_parts() -> dict[str, Any]:
    """Returns the parts of a tiny Stable Diffusion with random weights."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    words = {"<|startoftext|>": 0, "<|endoftext|>": 1, "s</w>": 2, "k</w>": 3, "y</w>": 4}
    tokenizer = CLIPTokenizer(vocab=words, merges=[], unk_token="<|endoftext|>")
    tokenizer.model_max_length = 8
    text = CLIPTextConfig(
        vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=1, projection_dim=16,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4, norm_num_groups=4, sample_size=16,
    )  # fmt: skip
    return {
        "unet": make_unet(), "vae": vae, "text_encoder": CLIPTextModel(text).eval(), "tokenizer": tokenizer,
        "scheduler": diffusers.DDIMScheduler(), "safety_checker": None, "feature_extractor": None,
    }  # fmt: skip


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return make_parts()


@pytest.fixture
def pipeline(parts: dict[str, Any]) -> Any:
    made = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def draw(steps: int) -> list[str]:
    return ["encode prompt", *["denoise step"] * steps, "decode image", "forward"]


def test_a_call_has_its_parts(pipeline: Any, recording: Recording, serve: Serve) -> None:
    with serve():
        images = pipeline("sky", num_inference_steps=4, num_images_per_prompt=2).images
    (record,) = recording.records()
    assert describe(record) == ("generate_content", "diffusers", "StableDiffusionPipeline")
    in_order = sorted(record.stages, key=lambda stage: stage.ended_at)
    assert [stage.name for stage in in_order] == ["ingress", *draw(4)]
    assert in_order[-1].attributes[semconv.ITEMS] == len(images) == 2
    size = record.attributes[semconv.IMAGE_WIDTH], record.attributes[semconv.IMAGE_HEIGHT]
    assert (size, record.attributes[semconv.DIFFUSION_STEPS]) == (images[0].size, 4)


def test_a_call_without_a_request_is_one(pipeline: Any, recording: Recording) -> None:
    pipeline("sky", num_inference_steps=2, output_type="np")
    (record,) = recording.records()
    assert record.name == "generate_content StableDiffusionPipeline"
    assert sorted(stages_of(record)) == sorted(draw(2))


def test_a_pipeline_that_iterates_over_its_bar_has_steps(recording: Recording) -> None:
    unet = diffusers.UNet2DModel(
        block_out_channels=(8, 8), layers_per_block=1, sample_size=8, norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    made = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    made.set_progress_bar_config(disable=True)
    made(num_inference_steps=3)
    (record,) = recording.records()
    assert stages_of(record).count("denoise step") == 3


@pytest.mark.parametrize(("kind", "size"), [("np", (16, 16)), ("pt", (16, 16)), ("latent", None)])
def test_the_size_is_that_of_a_decoded_image(
    pipeline: Any, recording: Recording, kind: str, size: Any
) -> None:
    pipeline("sky", num_inference_steps=1, output_type=kind, return_dict=False)
    (record,) = recording.records()
    found = record.attributes.get(semconv.IMAGE_WIDTH), record.attributes.get(semconv.IMAGE_HEIGHT)
    assert found == (size or (None, None))
    (call,) = (stage for stage in record.stages if stage.name == "forward")
    assert call.attributes[semconv.ITEMS] == 1


def make_custom(**methods: Any) -> Any:
    """Returns a pipeline of the application, of a module of its own."""
    cls = type("Custom", (diffusers.DiffusionPipeline,), {"__module__": "application", **methods})
    made = cls()
    made.register_modules()
    made.set_progress_bar_config(disable=True)
    return made


def test_a_bar_of_any_use_has_steps(recording: Recording) -> None:
    def by_name(self: Any) -> Any:
        with self.progress_bar(total=2) as bar:
            bar.update(n=1)
            bar.update(n=1)

    def reverse(self: Any) -> Any:
        return list(reversed(self.progress_bar([1, 2])))

    assert make_custom(__call__=by_name)() is None
    as_before = list(reversed(tqdm([1, 2], disable=True)))
    assert make_custom(__call__=reverse)() == as_before
    assert [stages_of(record).count("denoise step") for record in recording.records()] == [2, 2]


def test_results_and_methods_of_other_kinds_work_as_before(pipeline: Any, recording: Recording) -> None:
    class Layers:
        images = ([1, 2], [3])

    layered = make_custom(__call__=lambda self: Layers, encode_prompt=staticmethod(str.upper))
    assert layered() is Layers
    assert layered.encode_prompt("sky") == "SKY"
    pipeline("sky", num_inference_steps=1)
    assert [record.outcome for record in recording.records()] == [events.OK] * 2


def test_a_call_that_fails_keeps_its_exception(pipeline: Any, recording: Recording) -> None:
    with pytest.raises(ValueError, match="prompt"):
        pipeline(prompt=3)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "ValueError")


def test_a_call_that_is_interrupted_in_a_step_keeps_the_steps_before(
    pipeline: Any, recording: Recording
) -> None:
    def stop(pipe: Any, step: int, time: Any, values: Any) -> Any:
        if step == 1:
            raise RuntimeError("stop")
        return values

    with pytest.raises(RuntimeError, match="stop"):
        pipeline("sky", num_inference_steps=4, callback_on_step_end=stop)
    (record,) = recording.records()
    assert (record.error_type, stages_of(record).count("denoise step")) == ("RuntimeError", 1)


def test_hooks_that_are_removed_leave_the_classes_as_they_were(pipeline: Any) -> None:
    cls = type(pipeline)
    assert hasattr(cls.__call__, "__wrapped__")
    wrapped = cls.__dict__["__call__"]
    hooks.instrumentor.remove()
    assert cls.__dict__["__call__"] is not wrapped
