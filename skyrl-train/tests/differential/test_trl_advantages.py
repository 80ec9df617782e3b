"""Our advantages against those of TRL's trainers on completions sampled by their own model.

Rewards are in the thousands, as are the weights of GDPO, so that the epsilons added to the standard deviation (TRL:
1e-4, ours: 1e-6) are smaller than rounding errors.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from train_kit.differential.batches import FLOAT32
from train_kit.differential.trl import MAX_LENGTH, ON_CPU, training_inputs
from trl import GRPOConfig, RLOOConfig

from skyrl_train.algorithms.advantages import gdpo, grpo, rloo
from skyrl_train.config.algorithm import AlgorithmConfig, GdpoConfig

N_STEPS = 4


def first(token_ids: Sequence[int]) -> float:
    """Return a reward of the first token, with several values of both signs."""
    return 1000.0 * (token_ids[0] % 7 - 3)


def second(token_ids: Sequence[int]) -> float:
    """Return another reward of the first token."""
    return 5000.0 * (token_ids[0] % 11 - 2)


@pytest.mark.parametrize(("scale", "by_std"), [("group", True), ("none", False)])
def test_grpo(scale: str, by_std: bool, tiny_model_path: Path, tmp_path: Path) -> None:
    config = GRPOConfig(
        str(tmp_path), **ON_CPU, max_completion_length=MAX_LENGTH, max_steps=N_STEPS, scale_rewards=scale
    )
    steps = training_inputs(tiny_model_path, config, [first])
    assert len(steps) == N_STEPS
    for inputs, prompts, rewards in steps:
        ours, _ = grpo(rewards, torch.ones_like(rewards), prompts, grpo_norm_by_std=by_std)
        torch.testing.assert_close(ours[:, 0], inputs["advantages"], rtol=FLOAT32, atol=FLOAT32)


def test_rloo(tiny_model_path: Path, tmp_path: Path) -> None:
    config = RLOOConfig(str(tmp_path), **ON_CPU, max_completion_length=MAX_LENGTH, max_steps=N_STEPS, beta=0.0)
    steps = training_inputs(tiny_model_path, config, [first])
    assert len(steps) == N_STEPS
    for inputs, prompts, rewards in steps:
        ours, _ = rloo(rewards, torch.ones_like(rewards), prompts)
        torch.testing.assert_close(ours[:, 0], inputs["advantages"], rtol=FLOAT32, atol=FLOAT32)


def test_gdpo(tiny_model_path: Path, tmp_path: Path) -> None:
    """Completions have one token, because the last normalization is over completions in TRL and over tokens here."""
    config = GRPOConfig(
        str(tmp_path),
        **ON_CPU,
        max_completion_length=1,
        max_steps=N_STEPS,
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=[1000.0, 500.0],
    )
    steps = training_inputs(tiny_model_path, config, [first, second])
    assert len(steps) == N_STEPS
    ours_config = AlgorithmConfig(gdpo=GdpoConfig(weights={"first": 1000.0, "second": 500.0}))
    for inputs, prompts, rewards in steps:
        components = {"first": rewards[:, 0], "second": rewards[:, 1]}
        ours, _ = gdpo(torch.ones(len(rewards), 1), prompts, components, ours_config)
        torch.testing.assert_close(ours[:, 0], inputs["advantages"], rtol=FLOAT32, atol=FLOAT32)
