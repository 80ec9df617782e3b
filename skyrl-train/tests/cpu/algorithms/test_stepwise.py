"""Rows of one trajectory share its reward and its advantage."""

from __future__ import annotations

import torch
from trajectories import make_trajectory

from skyrl_train.algorithms.advantages import grpo
from skyrl_train.algorithms.stepwise import of_all_rows
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.types import Segment, TrainingBatch


def segment(rewards: list[float], n_prompt: int = 2) -> Segment:
    n = len(rewards)
    return Segment([7] * n_prompt, [8] * n, [1] * n, [-0.5] * n, rewards)


def two_prompts() -> TrainingBatch:
    """Prompt a: a trajectory of three rows and one of a single row; prompt b: two and one."""
    many = [
        make_trajectory("a", [0.0, 1.0], earlier=(segment([0.5, 0.0]), segment([0.25]))),
        make_trajectory("a", [0.0], repetition=1),
        make_trajectory("b", [-1.0], earlier=(segment([3.0, 0.0, 0.0]),)),
        make_trajectory("b", [0.0, 0.0], repetition=1),
    ]
    return build_training_batch(many, pad_token_id=0)


def test_the_last_row_has_the_reward_of_all_rows() -> None:
    batch = two_prompts()
    assert batch.uids == ["a"] * 4 + ["b"] * 3
    assert batch.is_last_row is not None
    assert batch.is_last_row.tolist() == [False, False, True, True, False, True, True]
    assert batch.rewards.sum(dim=-1).tolist() == [0, 0, 1.75, 0, 0, 2.0, 0]
    assert batch.rewards[2].tolist() == [0.0, 1.75, 0.0]
    assert batch.rollout_logprobs is not None


def test_a_batch_of_single_rows_is_what_it_always_was() -> None:
    assert build_training_batch([make_trajectory("a", [1.0])], 0).is_last_row is None


def test_all_rows_get_the_advantage_of_their_trajectory() -> None:
    batch = two_prompts()
    assert batch.is_last_row is not None
    last = batch.select(batch.is_last_row.nonzero()[:, 0].tolist())
    per_last, _ = grpo(last.rewards, response_mask=last.loss_mask, index=last.uids)
    spread = of_all_rows(per_last, last.loss_mask, batch.is_last_row, batch.loss_mask)
    trajectory_of_row = [0, 0, 0, 1, 2, 2, 3]
    for row, trajectory in enumerate(trajectory_of_row):
        (value,) = per_last[trajectory][last.loss_mask[trajectory] > 0].unique()
        assert torch.equal(spread[row], torch.where(batch.loss_mask[row] > 0, value, 0.0))
    assert spread[0, 0] > 0 > spread[3, 0]


def test_a_last_row_that_nothing_is_learned_from_still_says_what_the_trajectory_is_worth() -> None:
    batch = two_prompts()
    assert batch.is_last_row is not None
    batch.loss_mask[2] = 0  # the environment replaced the last action of the first trajectory
    last = batch.select(batch.is_last_row.nonzero()[:, 0].tolist())
    mask = last.attention_mask[:, -last.response_length :].float()
    per_last, _ = grpo(last.rewards, response_mask=mask, index=last.uids)
    spread = of_all_rows(per_last, mask, batch.is_last_row, batch.loss_mask)
    assert spread[0, 0] == spread[1, 0] == per_last[0, 0] > 0
    assert spread[2].tolist() == [0.0] * batch.response_length


def test_mini_batches_keep_the_rows_of_a_prompt_together() -> None:
    chunks = two_prompts().chunk(1)
    assert [len(chunk) for chunk in chunks] == [4, 3]
    assert chunks[1].is_last_row is not None
    assert chunks[1].is_last_row.tolist() == [False, True, True]
