"""The generation config in a model's folder."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PreTrainedModel

FILE = "generation_config.json"


def save_generation_config(model: PreTrainedModel, folder: Path, eos_ids: Collection[int] = ()) -> None:
    """Write a language model's generation config as it was loaded, plus `eos_ids` among its EOS tokens."""
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.to_json_file(folder / FILE, keys_to_pop=["compile_config"])
        add_eos_ids(folder, eos_ids)


def add_eos_ids(folder: Path, eos_ids: Collection[int | None]) -> None:
    """Add tokens to the EOS tokens in a model folder. None (a tokenizer without an EOS token) adds nothing.

    Transformers and vLLM stop at the tokens in this file. A base model may list only `<|endoftext|>` and still be
    trained to end its turns with the tokenizer's `<|im_end|>`. Without this, they would generate past every turn.
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

    Transformers loads some settings with a warning and refuses to save them, e.g. a temperature without `do_sample`.
    """
    if not model.can_generate():
        yield
        return
    settings, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings
