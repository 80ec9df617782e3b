"""Save models with the generation config that they were loaded with."""

import json
from collections.abc import Collection
from pathlib import Path

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from skyrl_train.models.attributes import with_attribute

FILE = "generation_config.json"


def save_model(model: PreTrainedModel, folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write a Hugging Face folder with `tensors` (default: the model's). Its config.json names their dtype.

    Transformers empties the dictionary.
    """
    dtype = model.dtype if tensors is None else next(iter(tensors.values())).dtype
    # Transformers loads some generation settings with a warning but rejects them when saving, e.g. a temperature
    # without `do_sample`, so it saves a default.
    with with_attribute([model] if model.can_generate() else [], "generation_config", GenerationConfig()):
        model.save_pretrained(folder, state_dict=tensors)
    save_generation_config(model, folder)
    if dtype != model.dtype:
        model.config.dtype = dtype  # save_pretrained has written the model's dtype
        model.config.save_pretrained(folder)


def save_generation_config(model: PreTrainedModel, folder: Path, eos_ids: Collection[int] = ()) -> None:
    """Write a language model's generation config as it was loaded, plus `eos_ids` among its EOS tokens."""
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.to_json_file(folder / FILE, keys_to_pop=["compile_config"])
        add_eos_ids(folder, eos_ids)


def add_eos_ids(folder: Path, eos_ids: Collection[int | None]) -> None:
    """Add tokens to the EOS tokens in a folder's generation_config.json, which is created if it is missing.

    None (a tokenizer without an EOS token) adds nothing. Transformers stops only at the tokens in this file. A base
    model may list only `<|endoftext|>` but be trained to end its turns with `<|im_end|>`, and would then generate past
    the end of every turn.
    """
    file = folder / FILE
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8"))
    else:
        settings = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).to_diff_dict()
    existing = settings.get("eos_token_id")
    existing = existing if isinstance(existing, list) else [] if existing is None else [existing]
    if missing := [token_id for token_id in eos_ids if token_id not in (None, *existing)]:
        settings["eos_token_id"] = [*existing, *missing]
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
