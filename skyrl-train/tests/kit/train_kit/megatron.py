"""Models and layouts of Megatron-Core, and the comparison of two ranks with one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.types import TrainingBatch
from skyrl_train.types.specs import ModelSpec
from skyrl_train.workers.group import WorkerGroup
from skyrl_train.workers.ranks import Rank
from train_kit.batches import off_policy_batch
from train_kit.models import SMALL, load_on_cpu
from train_kit.ranks import load_group, single_rank, spec
from train_kit.workers import config, policy_objective

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PADDING = 7  # a token that rows contain: its embedding is not trained
MODELS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL | {"head_dim": 16}, tie_word_embeddings=False, pad_token_id=PADDING),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True, pad_token_id=PADDING),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
}
N_TOKENS = SMALL["vocab_size"]  # odd: the last rank's part of the vocabulary is padded

TENSOR = MegatronConfig(tensor_model_parallel_size=2)
SEQUENCE = MegatronConfig(tensor_model_parallel_size=2, sequence_parallel=True)
PIPELINE = MegatronConfig(pipeline_model_parallel_size=2)
CONTEXT = MegatronConfig(context_parallel_size=2)
DATA = MegatronConfig()
LAYOUTS = {"tensor": TENSOR, "sequence": SEQUENCE, "pipeline": PIPELINE, "context": CONTEXT, "data": DATA}

MERGED = {"merge_on_export": True}


def layouts(default: Sequence[str], nightly: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Run a test for these layouts, for some of them every night only."""
    params = [pytest.param(LAYOUTS[name], id=name) for name in default]
    params += [pytest.param(LAYOUTS[name], id=name, marks=pytest.mark.nightly) for name in nightly]
    return pytest.mark.parametrize("megatron", params)


def layouts_and_models(default: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    """Run a test for each of these pairs, and every night for all others."""
    params = [
        pytest.param(
            megatron, model, id=f"{name}-{model}", marks=() if (name, model) in default else pytest.mark.nightly
        )
        for name, megatron in LAYOUTS.items()
        for model in MODELS
    ]
    return pytest.mark.parametrize(("megatron", "model"), params)


def model_spec(
    path: Path, megatron: MegatronConfig | None = None, lora: dict[str, Any] | None = None, **loading: Any
) -> ModelSpec:
    """Return the spec of a policy, or of its adapter, whose gradients are clipped in most steps."""
    optimizer = {"lr": 1e-4 if lora is None else 1e-3, "scheduler": "linear", "num_warmup_steps": 2}
    policy = {"optimizer_config": optimizer, "model": {"path": str(path), "lora": lora or {}}}
    cfg = config(micro_train_batch_size_per_gpu=3, policy=policy).trainer
    return replace(spec("policy", path, cfg, max_grad_norm=0.5, **loading), megatron=megatron)


async def load_model_group(ranks: Sequence[Rank], spec: ModelSpec, objective: Objective | None = None) -> WorkerGroup:
    """Load a model with an objective, by default GRPO's with a bonus for entropy."""
    cfg = config(algorithm={"use_entropy_loss": True}).trainer
    return await load_group(ranks, spec, objective or policy_objective(cfg))


@cache
def batch_for(path: Path, seed: int) -> TrainingBatch:
    """Return a random batch for a model, which tests must not change."""
    return off_policy_batch(load_on_cpu(path), seed, n_tokens=N_TOKENS)


async def exported_tensors(group: WorkerGroup, folder: Path) -> dict[str, torch.Tensor]:
    """Return the exported weights of a group."""
    await group.export(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


Step = tuple[dict[str, torch.Tensor], dict[str, float]]
"""Scores before a step, and its metrics."""


async def train(group: WorkerGroup, batches: Sequence[TrainingBatch]) -> list[Step]:
    """Return scores before and metrics of a step on each batch."""
    return [(await group.score(batch), (await group.update(batch)).numbers()) for batch in batches]


async def compare(
    ranks: Sequence[Rank],
    path: Path,
    megatron: MegatronConfig,
    folder: Path,
    lora: dict[str, Any] | None = None,
    batches: Sequence[TrainingBatch] | None = None,
    **loading: Any,
) -> None:
    """Assert that steps on batches, by default three, have the scores, metrics and weights of one process.

    Both groups are exported after the steps, to `folder/single` and `folder/divided`.
    """
    batches = batches or [batch_for(path, seed) for seed in range(3)]  # the learning rate starts at 0
    single = await load_model_group([single_rank()], model_spec(path, lora=lora))
    divided = await load_model_group(ranks, model_spec(path, megatron, lora, **loading))
    steps = zip(await train(single, batches), await train(divided, batches), strict=True)
    for (expected, expected_metrics), (scores, metrics) in steps:
        for name in ("logprobs", "entropy", "sum_pi_squared"):
            torch.testing.assert_close(scores[name], expected[name], rtol=0, atol=2e-5, msg=name)
        assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)
    before, after = load_on_cpu(path).state_dict(), await exported_tensors(single, folder / "single")
    assert max((after[name] - before[name]).abs().max().item() for name in after) > 1e-4, "nothing was trained"
    for name, tensor in (await exported_tensors(divided, folder / "divided")).items():
        torch.testing.assert_close(tensor, after[name], rtol=0, atol=1e-5, msg=name)
