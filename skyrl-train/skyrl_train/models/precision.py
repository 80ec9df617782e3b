"""Types of weights: trained ones are at least float32, whatever the type that they are loaded and exported in."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from skyrl_train.models.generation import default_generation_config, save_generation_config


def train_in_float32(model: PreTrainedModel, *, is_empty: bool) -> dict[str, torch.dtype]:
    """Make parameters of shorter types float32, in place, and return the types that they had, by name.

    A step of AdamW changes a weight by about the learning rate. A bfloat16 weight has 8 significant bits, so most steps
    would leave it as it is. With `is_empty`, values are not copied, because they are written later.
    """
    dtype, dtypes = model.dtype, {}
    for name, parameter in model.named_parameters():
        if parameter.dtype.itemsize < torch.float32.itemsize:
            dtypes[name] = parameter.dtype
            values = parameter.detach()
            parameter.data = torch.empty_like(values, dtype=torch.float32) if is_empty else values.float()
    model.config.dtype = dtype  # of exports, which the configuration in a checkpoint describes
    return dtypes


def save_model(model: PreTrainedModel, folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write a Hugging Face folder with these tensors, or else the model's own. Its configuration names their type.

    Transformers empties the dictionary.
    """
    dtype = model.dtype if tensors is None else next(iter(tensors.values())).dtype
    with default_generation_config(model):
        model.save_pretrained(folder, state_dict=tensors)
    save_generation_config(model, folder)
    if dtype != model.dtype:
        model.config.dtype = dtype  # transformers has set that of the model
        model.config.save_pretrained(folder)
