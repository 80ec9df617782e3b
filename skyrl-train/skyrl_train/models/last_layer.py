"""A last decoder layer that computes only the tokens whose hidden states are used.

The layer computes keys and values of all tokens, but queries, attention and MLP only of the selected ones: the trained
tokens in an update, the last token of each prompt in generation. This is for small models on CPUs, because with 28
layers there is little to gain, and GPU kernels would need a mask of queries and keys.
"""

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

MAX_SHARE = 0.75
"""Maximum share of selected tokens. Above it, computing every token in one pass is as fast."""


class KeysAndValues(Exception):
    """Raised by an attention function to end a pass that needs only keys and values (`wants_keys=True`)."""

    def __init__(self, keys: Any, values: Any) -> None:
        self.states = (keys, values)


def narrow_last_layer(model: PreTrainedModel) -> None:
    """Make the last layer compute only the tokens in `selected_tokens` (M,), an argument of the model's forward pass.

    The layer runs twice. The first pass covers all tokens and stops in attention, where `KeysAndValues` carries the
    keys and values out. The second covers only the selected tokens and attends to those keys. So every attention
    function used with the model must raise `KeysAndValues` for `wants_keys`, and accept `keys_and_values`. Without
    `selected_tokens`, the layer is unchanged.
    """
    if (layer := _last_layer(model)) is not None:
        layer.forward = MethodType(_forward, layer)


def widen_last_layer(model: PreTrainedModel) -> None:
    """Undo `narrow_last_layer`, for a model whose hidden states it changes."""
    if is_narrow(model):
        del _last_layer(model).forward


def is_narrow(model: PreTrainedModel) -> bool:
    """Return True if the last layer accepts `selected_tokens`."""
    layer = _last_layer(model)
    return layer is not None and "forward" in vars(layer)


def _last_layer(model: PreTrainedModel) -> Any:
    layers = getattr(model.base_model, "layers", None)
    return layers[-1] if isinstance(layers, torch.nn.ModuleList) else None


def _forward(self: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    selected: torch.Tensor | None = kwargs.pop("selected_tokens", None)
    forward = type(self).forward
    if selected is None:
        return forward(self, hidden_states, *args, **kwargs)
    try:
        forward(self, hidden_states, *args, **kwargs, wants_keys=True)
    except KeysAndValues as end:
        keys_and_values = end.states
    else:
        raise NotImplementedError("its last layer has no attention that supports wants_keys")
    for name in ("position_ids", "position_embeddings"):
        if isinstance(values := kwargs.get(name), torch.Tensor):
            kwargs[name] = values.index_select(1, selected)
        elif values is not None:
            kwargs[name] = tuple(value.index_select(1, selected) for value in values)
    return forward(self, hidden_states.index_select(1, selected), *args, **kwargs, keys_and_values=keys_and_values)
