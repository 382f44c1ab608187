"""What a call of `model.generate` was asked for."""

from __future__ import annotations

from typing import Any

from otel_infer.instrumentation.hooks.probe import Call


def get_setting(call: Call, name: str) -> Any:
    """A generation setting, by the library's order: the call, the configuration given to it, the model's."""
    found = call.kwargs.get(name)
    for config in (call["generation_config"], getattr(call.instance, "generation_config", None)):
        if found is None:
            found = getattr(config, name, None)
    return found


def tensor_shape(tensor: Any) -> tuple[int, ...]:
    """Empty where it is no tensor, whatever the user hands over in the place of one."""
    try:
        return tuple([int(size) for size in tensor.shape])
    except Exception:
        return ()


def prompt_length(ids: Any) -> int:
    """Tokens of one prompt; 0 where it is none, which the library has to say."""
    try:
        return len(ids)
    except Exception:
        return 0


def prompt_shape(call: Call) -> tuple[int, int]:
    """(rows, tokens per row) of the prompt; 0 tokens where it is not made of tokens."""
    given = call["inputs"]
    ids = call.kwargs.get("input_ids") if given is None else given
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
