"""The critic against a naive loop; micro-batches and checkpoints."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.batches import fill_in_values, random_batch
from train_kit.workers import SingleRankGroup, config
from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import ValueObjective
from skyrl_train.errors import CheckpointError
from skyrl_train.models.loading import load_model
from skyrl_train.types import TrainingBatch

VALUE_CLIP = 0.3


@pytest.fixture
def value_model(tiny_model_path: Path) -> PreTrainedModel:
    """The tiny model with a nonzero value head."""
    model = load_model(str(tiny_model_path), "critic", dtype=torch.float32, device=torch.device("cpu"))
    torch.nn.init.normal_(model.score.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return model


def make_critic(model: PreTrainedModel, **trainer: Any) -> SingleRankGroup:
    trainer = {"algorithm": {"value_clip": VALUE_CLIP}, **trainer}
    cfg = config(**trainer).trainer
    return SingleRankGroup("critic", model, cfg, ValueObjective(cfg.algorithm.value_clip))


def make_batch(seed: int = 0) -> TrainingBatch:
    return fill_in_values(random_batch(seed, n_prompts=3, n_samples=4), seed)


def test_scored_values_equal_the_values_in_the_loss(value_model: PreTrainedModel) -> None:
    batch = make_batch()
    worker = make_critic(value_model, micro_forward_batch_size_per_gpu=5)
    batch.values = worker.score(batch)["values"]
    assert (batch.values[batch.loss_mask == 0] == 0).all()
    assert batch.values[batch.loss_mask > 0].std() > 0.1
    metrics = worker.forward_backward(batch)
    assert metrics["critic/values_clipfrac"] == 0
    assert metrics["critic/values_mean"] == pytest.approx(batch.values[batch.loss_mask > 0].mean().item(), abs=1e-5)
    batch.loss_mask.zero_()
    assert worker.forward_backward(batch) == {}


def test_the_critic_learns_its_targets(value_model: PreTrainedModel) -> None:
    batch = make_batch(4)
    optimizer = {"lr": 3e-3, "weight_decay": 0.0}
    worker = make_critic(value_model, algorithm={"value_clip": None}, critic={"optimizer_config": optimizer})
    first = worker.update(batch)["critic/critic_loss"]
    for _ in range(60):
        last = worker.update(batch)
    assert last["critic/critic_loss"] < 0.1 * first
    assert last["critic/critic_lr"] == 3e-3


def test_save_and_load_continue_bit_for_bit(value_model: PreTrainedModel, tmp_path: Path) -> None:
    batches = [make_batch(seed) for seed in range(4)]
    first = make_critic(value_model)
    for batch in batches[:2]:
        first.update(batch)
    first.save(tmp_path / "critic")
    other = copy.deepcopy(value_model)
    torch.nn.init.zeros_(other.score.weight)
    second = make_critic(other)
    second.load(tmp_path / "critic")
    for batch in batches[2:]:
        assert first.update(batch) == second.update(batch)
    (tmp_path / "critic/__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"cannot resume the critic .*__0_0\.distcp"):
        second.load(tmp_path / "critic")
