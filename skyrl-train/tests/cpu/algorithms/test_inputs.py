from typing import Any

import pytest
import torch
from train_kit.trajectories import make_segment, make_trajectory

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms.inputs import TrajectoryView, estimator_inputs, named_inputs
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS
from skyrl_train.config import AlgorithmConfig
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.types import TrainingBatch

# Two prompts with two trajectories each: the reward of every sampled token, by turn.
TURNS: list[tuple[str, list[list[float]]]] = [
    ("0", [[0.5, 0.0], [0.25], [0.0, 1.0]]),
    ("0", [[0.0], [0.0, 0.0, -0.5], [0.75]]),
    ("1", [[3.0, 0.0, 0.0], [-1.0], [0.0]]),
    ("1", [[0.0, 0.0], [0.5], [0.0, 0.25]]),
]


def in_one_row() -> TrainingBatch:
    """All turns of a trajectory in one row, separated by observations of two tokens."""
    trajectories = []
    for repetition, (uid, turns) in enumerate(TURNS):
        observed = [[*turn, 0.0, 0.0] for turn in turns]
        rewards = [reward for turn in observed for reward in turn][:-2]
        mask = [is_sampled for turn in turns for is_sampled in (*[1] * len(turn), 0, 0)][:-2]
        total = {"total": sum(rewards)}
        trajectories.append(
            make_trajectory(uid, rewards, loss_mask=mask, repetition=repetition, reward_components=total)
        )
    return build_training_batch(trajectories, pad_token_id=0)


def in_several_rows() -> TrainingBatch:
    """One row per turn, as if the history was rewritten before each."""
    trajectories = []
    for repetition, (uid, turns) in enumerate(TURNS):
        *earlier, last = [make_segment(turn) for turn in turns]
        total = {"total": sum(map(sum, turns))}
        trajectories.append(
            make_trajectory(uid, last.rewards, earlier=earlier, repetition=repetition, reward_components=total)
        )
    return build_training_batch(trajectories, pad_token_id=0)


def with_estimator_inputs(batch: TrainingBatch) -> TrainingBatch:
    """Fill in the inputs of estimators: the n-th sampled token gets the same values in both layouts."""
    generator = torch.Generator().manual_seed(0)
    n_tokens = int(batch.loss_mask.sum())
    for name, values in {
        "values": torch.randn(n_tokens, generator=generator),
        "old_logprobs": -torch.rand(n_tokens, generator=generator),
        "ref_logprobs": -torch.rand(n_tokens, generator=generator),
        "entropies": torch.rand(n_tokens, generator=generator),
        "sum_pi_squared": torch.rand(n_tokens, generator=generator),
    }.items():
        setattr(batch, name, torch.zeros_like(batch.loss_mask).masked_scatter(batch.loss_mask > 0, values))
    batch.greedy_rewards = torch.where(batch.draws == 0, 0.5, -0.5)
    return batch


def estimates(name: str, batch: TrainingBatch, **algorithm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns of all sampled tokens of the batch, in order."""
    view, estimator = TrajectoryView(batch), advantage_estimator(name)
    inputs = estimator_inputs(batch, view, AlgorithmConfig(**algorithm))
    advantages, returns = (view.split(values) for values in estimator(**named_inputs(estimator, inputs)))
    assert not advantages[batch.loss_mask == 0].any()
    return advantages[batch.loss_mask > 0], returns[batch.loss_mask > 0]


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.list_available())
def test_advantages_do_not_depend_on_how_a_trajectory_is_split_into_rows(name: str) -> None:
    one, several = with_estimator_inputs(in_one_row()), with_estimator_inputs(in_several_rows())
    assert (len(one), len(several)) == (4, 12)
    assert TrajectoryView(several).join(several.loss_mask).shape == (4, 7)  # five tokens in three rows
    settings = {"gamma": 0.9, "lambd": 0.8}
    for left, right in zip(estimates(name, one, **settings), estimates(name, several, **settings), strict=True):
        assert left.abs().max() > 0.01
        torch.testing.assert_close(left, right)


def test_a_row_without_trained_tokens_still_counts_for_its_trajectory() -> None:
    batch = in_several_rows()
    batch.loss_mask[2] = 0  # the environment replaced the last action of the first trajectory
    assert batch.rewards is not None
    view = TrajectoryView(batch)
    inputs = estimator_inputs(batch, view, AlgorithmConfig())
    advantages = view.split(advantage_estimator("grpo")(**inputs)[0])
    assert advantages[0, 0] == advantages[1, 0] > 0, "its reward of 1.75 is above its group's mean"
    assert not advantages[2].any()
