"""Small models, adapters and checkpoints to merge, and their logits."""

import shutil
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3MoeConfig

from skyrl_train.algorithms.objectives import RewardObjective, ValueObjective
from skyrl_train.models.loading import load_model
from skyrl_train.types.specs import Role
from train_kit.batches import random_batch
from train_kit.models import CPU, SMALL, create_model, load_on_cpu
from train_kit.workers import SingleRankGroup, complete, config, make_worker

TOKENS = torch.arange(3, 23).view(2, 10)
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-1}
"""Relative differences of logits that rounding explains, by type."""


def save_base(
    folder: Path, *, seed: int = 0, is_tied: bool = False, dtype: str = "float32", hidden_size: int = 32
) -> Path:
    """Save a Qwen3 of two layers, without a tokenizer."""
    settings = Qwen3Config(**SMALL | {"hidden_size": hidden_size}, tie_word_embeddings=is_tied)
    create_model(settings, seed=seed).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def save_experts(folder: Path, *, seed: int = 0) -> Path:
    """Save a mixture of experts: files have the matrices of each expert, and the loaded model has one tensor of all."""
    experts = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    create_model(experts, seed=seed).save_pretrained(folder)
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in load_file(folder / "model.safetensors")
    return folder


def save_adapter(folder: Path, base: Path, *, scale: float = 0.2, **settings: Any) -> Path:
    """Save an adapter of a base with random matrices."""
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**defaults | settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=scale)
    model.save_pretrained(folder)
    return folder


def train_and_save(
    folder: Path, base: Path, tokenizer: PreTrainedTokenizerBase, *, dtype: str = "float32", **lora: Any
) -> tuple[PreTrainedModel, SingleRankGroup]:
    """Train a policy, or an adapter with the settings `lora`, and save it as `folder/policy`."""
    model = load_on_cpu(base, dtype=getattr(torch, dtype))
    section = {"optimizer_config": {"lr": 1e-2}, "model": {"path": str(base), "lora": lora}}
    worker = make_worker(model, tokenizer=tokenizer, policy=section)
    for seed in range(2):
        worker.update(random_batch(seed, n_tokens=60))
    worker.save(folder / "policy")
    return model, worker


def load_head(base: Path, role: Role, pad_token_id: int | None = 0) -> PreTrainedModel:
    """Load a base as a critic or a reward model."""
    pad_token_id = pad_token_id if role == "reward" else None
    return load_model(str(base), role, dtype=torch.float32, device=CPU, key="path", pad_token_id=pad_token_id)


def save_head_adapter(
    folder: Path, base: Path, role: Role, tokenizer: PreTrainedTokenizerBase, **lora: Any
) -> PreTrainedModel:
    """Save a critic or reward model with a random adapter and head as `folder/step`, and export it as `folder/adapter`.

    Return the model.
    """
    model = load_head(base, role, tokenizer.pad_token_id)
    section = {"model": {"path": str(base), "lora": {"rank": 4, **lora}}}
    cfg = config(**{"critic" if role == "critic" else "policy": section}).trainer
    objective = ValueObjective(0.2) if role == "critic" else RewardObjective()
    group = SingleRankGroup(role, model, cfg, objective, tokenizer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3, generator=generator)
    group.save(folder / "step" / role)
    complete(group.group.export(folder / "adapter"))
    return model


def copy_folder(source: Path, target: Path) -> Path:
    """Copy a shared model or adapter that a test is going to change."""
    return Path(shutil.copytree(source, target))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS, use_cache=False).logits.float()


def logits_in(folder: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder))
