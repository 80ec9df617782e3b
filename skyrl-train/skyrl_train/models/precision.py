"""Dtypes of weights: train in float32, load and export in any dtype."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from skyrl_train.models.generation import default_generation_config, save_generation_config


def train_in_float32(model: PreTrainedModel, *, is_empty: bool) -> dict[str, torch.dtype]:
    """Convert parameters of shorter dtypes to float32 in place, and return their previous dtypes by name.

    A step of AdamW changes a weight by about the learning rate. A bfloat16 weight has 8 significant bits, so near 0.02
    its neighbors are 1e-4 apart, and a step of 1e-6 would round to nothing. With `is_empty`, values are not copied,
    because they are written later.
    """
    dtype, dtypes = model.dtype, {}
    for name, parameter in model.named_parameters():
        if parameter.dtype.itemsize < torch.float32.itemsize:
            dtypes[name] = parameter.dtype
            values = parameter.detach()
            parameter.data = torch.empty_like(values, dtype=torch.float32) if is_empty else values.float()
    model.config.dtype = dtype  # a checkpoint's config.json describes exports, not the trained weights
    return dtypes


def save_model(model: PreTrainedModel, folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write a Hugging Face folder with `tensors` (default: the model's). Its config.json names their dtype.

    Transformers empties the dictionary.
    """
    dtype = model.dtype if tensors is None else next(iter(tensors.values())).dtype
    with default_generation_config(model):
        model.save_pretrained(folder, state_dict=tensors)
    save_generation_config(model, folder)
    if dtype != model.dtype:
        model.config.dtype = dtype  # save_pretrained has written the model's dtype
        model.config.save_pretrained(folder)
