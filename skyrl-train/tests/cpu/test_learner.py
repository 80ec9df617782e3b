"""The learner counts trajectories, independent of their number of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from trajectories import make_segment, make_trajectory
from transformers import PreTrainedModel
from workers.worker_batches import SingleRankGroup, config, policy_objective

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.learner import Learner
from skyrl_train.types import TrainingBatch, Trajectory

COEFFICIENT = 0.5


def learner(model: PreTrainedModel, **algorithm: Any) -> Learner:
    cfg = config(algorithm={"kl_loss_coef": COEFFICIENT, **algorithm}).trainer
    policy = SingleRankGroup("policy", model, None, cfg, policy_objective(cfg))
    return Learner(cfg, advantage_estimator(cfg.algorithm.advantage_estimator), policy=policy.group)


def two_rows(uid: str, repetition: int, *rewards: float) -> Trajectory:
    """A trajectory whose history was rewritten before its last turn."""
    earlier = [make_segment([reward]) for reward in rewards[:-1]]
    return make_trajectory(uid, [rewards[-1]], earlier=earlier, repetition=repetition)


def with_kl(batch: TrainingBatch, *token_kl: float) -> TrainingBatch:
    """Return the batch with log-probs whose k1 estimate is the given value in each row's token."""
    ref = torch.full_like(batch.loss_mask, -2.0)
    return replace(batch, ref_logprobs=ref, old_logprobs=ref + torch.tensor(token_kl)[:, None])


def test_groups_of_equal_total_reward_are_filtered(tiny_model: PreTrainedModel) -> None:
    trajectories = [
        two_rows("0", 0, 1.0, 0.0),
        two_rows("0", 1, 0.0, 1.0),
        two_rows("1", 0, 0.5, 0.5),
        two_rows("1", 1, 0, 0),
    ]
    batch, metrics = learner(tiny_model, zero_variance_filter=True).filter_groups(build_training_batch(trajectories, 0))
    assert batch.loss_mask.sum(dim=1).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert metrics.numbers() == {"reward/num_zero_variance_filtered": 2}


def test_the_reward_of_a_trajectory_is_the_sum_over_its_rows(tiny_model: PreTrainedModel) -> None:
    trajectories = [two_rows("0", i, 0.5, 0.5) for i in range(4)]
    _, metrics = learner(tiny_model).advantages(build_training_batch(trajectories, 0))
    assert metrics.numbers()["loss/avg_final_rewards"] == 1.0


def test_the_kl_penalties_of_all_rows_lower_the_reward_of_the_trajectory(tiny_model: PreTrainedModel) -> None:
    trajectories = [two_rows("0", 0, 0.0, 1.0), two_rows("0", 1, 0.0, 1.0)]
    batch = with_kl(build_training_batch(trajectories, 0), 0.4, 0.1, 0.0, 0.1)
    in_reward = {"use_kl_loss": False, "use_kl_in_reward": True, "kl_estimator_type": "k1"}
    batch, metrics = learner(tiny_model, **in_reward, grpo_norm_by_std=False).advantages(batch)
    assert batch.advantages is not None
    total = COEFFICIENT * 0.4  # additional penalty of the first trajectory, in its earlier row
    expected = torch.tensor([[-total / 2], [-total / 2], [total / 2], [total / 2]])
    torch.testing.assert_close(batch.advantages, expected)
    assert metrics.numbers()["loss/avg_final_rewards"] == pytest.approx(1 - COEFFICIENT * 0.3)
    assert metrics.numbers()["loss/avg_kl"] == pytest.approx(0.15)
    assert metrics.numbers()["loss/avg_kl_max"] == pytest.approx(0.4)


def test_padding_does_not_count_as_a_token_without_divergence(tiny_model: PreTrainedModel) -> None:
    trajectories = [make_trajectory("0", [0.0], repetition=0), make_trajectory("0", [0.0] * 3, repetition=1)]
    batch = build_training_batch(trajectories, 0)
    old = torch.full_like(batch.loss_mask, -1.5)
    batch = replace(batch, old_logprobs=old, ref_logprobs=old - 0.4)
    in_reward = {"use_kl_loss": False, "use_kl_in_reward": True, "kl_estimator_type": "k1"}
    _, metrics = learner(tiny_model, **in_reward).advantages(batch)
    assert metrics.numbers()["loss/avg_kl"] == pytest.approx(0.4)


def test_the_kl_controller_counts_trajectories(tiny_model: PreTrainedModel) -> None:
    adaptive = {
        "use_kl_loss": False,
        "use_kl_in_reward": True,
        "kl_ctrl": {"type": "adaptive", "kl_target": 0.01, "horizon": 10},
    }
    coefficients = []
    for rows in ((0.0, 1.0), (0.0, 0.0, 0.0, 1.0)):
        model = learner(tiny_model, **adaptive)
        batch = build_training_batch([two_rows("0", i, *rows) for i in range(2)], 0)
        model.advantages(with_kl(batch, *[1.0] * len(batch)))
        coefficients.append(model.state_dict()["kl_controller"]["value"])
    assert coefficients == pytest.approx([COEFFICIENT * (1 + 0.2 * 2 / 10)] * 2), "two trajectories at a horizon of ten"
