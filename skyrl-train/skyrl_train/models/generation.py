"""The generation config in a model's folder."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PreTrainedModel

FILE = "generation_config.json"


def save_generation_config(model: PreTrainedModel, folder: Path, eos_ids: Collection[int] = ()) -> None:
    """Write a language model's generation config as it was loaded, with `eos_ids` among its EOS tokens."""
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.to_json_file(folder / FILE, keys_to_pop=["compile_config"])
        add_eos_ids(folder, eos_ids)


def add_eos_ids(folder: Path, eos_ids: Collection[int | None]) -> None:
    """Add tokens to the EOS tokens of a model in a folder. None, for a tokenizer without an EOS token, adds nothing.

    Transformers and vLLM stop at the tokens in this file. A base model may have `<|endoftext|>` there and be trained to
    end its turns with the tokenizer's EOS token, `<|im_end|>`: they would continue after each turn.
    """
    file = folder / FILE
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8"))
    else:
        settings = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).to_diff_dict()
    own = settings.get("eos_token_id")
    own = own if isinstance(own, list) else [] if own is None else [own]
    if missing := [token_id for token_id in eos_ids if token_id not in (None, *own)]:
        settings["eos_token_id"] = [*own, *missing]
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@contextmanager
def default_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Swap in a default GenerationConfig while transformers saves the model.

    Transformers refuses to save settings that it loads with a warning, e.g. a temperature without `do_sample`.
    """
    if not model.can_generate():
        yield
        return
    settings, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings
