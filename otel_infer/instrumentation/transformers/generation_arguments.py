"""Reads settings and prompt sizes from the arguments of a `model.generate` call."""

from __future__ import annotations

from typing import Any

from otel_infer.instrumentation.hooks.probe import Call


def get_setting(call: Call, name: str) -> Any:
    """Returns a generation setting or None, first from the call, then its configuration, then the model's."""
    setting = call.kwargs.get(name)
    for config in (call["generation_config"], getattr(call.instance, "generation_config", None)):
        if setting is None:
            setting = getattr(config, name, None)
    return setting


def tensor_shape(tensor: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor; () for any other object."""
    try:
        return tuple([int(size) for size in tensor.shape])
    except Exception:
        return ()


def prompt_length(ids: Any) -> int:
    """Returns the number of tokens of one prompt; 0 for an invalid prompt, which the library rejects."""
    try:
        return len(ids)
    except Exception:
        return 0


def read_prompt_shape(call: Call) -> tuple[int, int]:
    """Returns (rows, tokens per row) of the prompt; 0 tokens if it is something else, such as audio."""
    inputs = call["inputs"]
    ids = call.kwargs.get("input_ids") if inputs is None else inputs
    for candidate, dimensions in ((ids, 2), (call.kwargs.get("inputs_embeds"), 3)):
        shape = tensor_shape(candidate)
        if len(shape) == dimensions:
            return shape[0], shape[1]
    others = ("input_features", "input_values", "pixel_values")
    for candidate in (ids, *map(call.kwargs.get, others)):
        shape = tensor_shape(candidate)
        if len(shape) > 1:
            return shape[0], 0
    return 1, 0
