import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from train_kit.trajectories import make_segment, make_trajectory

from skyrl_train.algorithms.filters import leave_out_truncated
from skyrl_train.algorithms.reward_pipeline import (
    penalize_rewards,
    punish_overlong,
    soft_overlong_punishment,
    zero_reward_on_non_stop,
)
from skyrl_train.types import Trajectory, Turn

# The order of the stages is tested in tests/cpu/generators/test_rewards.py.


def test_rewards_of_truncated_trajectories_are_zero() -> None:
    earlier = make_segment([0.0, 0.0, 0.75], loss_mask=[1, 0, 1])
    components = {"right": 1.0, "short": -0.75}
    cut_off = make_trajectory(
        rewards=[0.5, 1.0], earlier=[earlier], stop_reason="max_turns", reward_components=components
    )
    ended = make_trajectory("ended", [0.0, 1.0], earlier=[earlier])
    invalid = make_trajectory("invalid", None, stop_reason="length", error="no answer")
    empty = make_trajectory("empty", [], stop_reason="length")
    zeroed, *others = zero_reward_on_non_stop([cut_off, ended, invalid, empty])
    assert [row.rewards for row in zeroed.segments] == [[0.0, 0.0, 0.0], [0.0, 0.0]]
    assert [row.loss_mask for row in zeroed.segments] == [[1, 0, 1], [1, 1]]
    assert zeroed.reward_components == {"right": 0.0, "short": 0.0}
    assert others == [ended, invalid, empty]


@pytest.mark.parametrize(
    ("n_tokens", "punishment"),
    [(0, 0.0), (700, 0.0), (800, 0.0), (801, -0.005), (900, -0.5), (1000, -1.0), (1200, -1.0)],
)
def test_soft_overlong_punishment(n_tokens: int, punishment: float) -> None:
    assert soft_overlong_punishment(n_tokens, max_tokens=1000, buffer=200, factor=1.0) == pytest.approx(punishment)
    assert soft_overlong_punishment(n_tokens, 1000, 200, factor=0.4) == pytest.approx(0.4 * punishment)


def turns(*edges: tuple[int, int], last: str = "stop") -> tuple[Turn, ...]:
    ended = [Turn(start, end, prompt_length=5, reward=0.0, stop_reason="stop") for start, end in edges]
    return (*ended[:-1], replace(ended[-1], stop_reason=last))


def conversation(rewards: list[float] | None, **fields: Any) -> Trajectory:
    """Turns of 2, 4 and 1 tokens, each but the last followed by an observation of one token."""
    defaults = {"turns": turns((0, 2), (3, 7), (8, 9)), "loss_mask": [1, 1, 0, 1, 1, 1, 1, 0, 1], **fields}
    return make_trajectory("0", rewards, response_ids=list(range(9)), logprobs=None, **defaults)


def test_the_longest_turn_is_punished_on_the_last_sampled_token() -> None:
    (punished,) = punish_overlong([conversation([0, 0.5, 0, 0, 0, 0, 0, 0, 1.0])], 5, buffer=2, factor=0.6)
    assert punished.rewards == pytest.approx([0, 0.5, 0, 0, 0, 0, 0, 0, 0.7])  # turn 2 has 4 tokens: half of 0.6
    (unpunished,) = punish_overlong([conversation([0.0] * 9)], 6, buffer=2, factor=0.6)
    assert unpunished == conversation([0.0] * 9)


@pytest.mark.parametrize("last", ["stop", "length"])
@pytest.mark.parametrize("limit", ["max_turns", "length"])
def test_truncation_is_read_from_the_last_turn_and_not_from_the_stop_reason_of_the_trajectory(
    last: str, limit: str
) -> None:
    t = conversation([1.0] * 9, stop_reason=limit, turns=turns((0, 2), (3, 9), last=last))
    (masked,), (zeroed,) = leave_out_truncated([t]), zero_reward_on_non_stop([t])
    assert (sum(masked.loss_mask) == 0) == (last == "length")
    assert (zeroed.total_reward == 0) == (last == "length")


def test_turn_lengths_are_read_from_turns_even_under_an_empty_loss_mask() -> None:
    cut_off = conversation([0.0] * 9, turns=turns((0, 2), (3, 7), (8, 9), last="length"))
    (masked,) = leave_out_truncated([cut_off])
    assert sum(masked.loss_mask) == 0
    (punished,) = punish_overlong([masked], 5, buffer=2, factor=1.0)
    assert punished.rewards == [0, 0, 0, 0, 0, 0, 0, 0, -0.5]


def test_without_turns_the_sampled_tokens_count() -> None:
    trajectory = make_trajectory("0", [0.0, 0.0, 2.0, 0.0], loss_mask=[1, 0, 1, 0])  # two of four were sampled
    (punished,) = punish_overlong([trajectory], 2, buffer=1, factor=1.0)
    assert punished.rewards == [0.0, 0.0, 1.0, 0.0]
    assert trajectory.rewards == [0.0, 0.0, 2.0, 0.0], "the input is unchanged"


def test_empty_and_invalid_trajectories_are_not_punished() -> None:
    empty = make_trajectory("0", [], stop_reason="length")
    invalid = conversation(None, loss_mask=[1] * 9)
    assert punish_overlong([empty, invalid], 4, buffer=4, factor=1.0) == [empty, invalid]


def test_the_punishment_is_added_to_existing_reward_components() -> None:
    long, short = make_trajectory("0", [0.0, 0.0, 1.0]), make_trajectory("0", [1.0])
    with_components = [replace(t, reward_components={"right": 1.0}) for t in (long, short)]
    punished = punish_overlong(with_components, 4, buffer=2, factor=1.0)
    assert [t.reward_components for t in punished] == [
        {"right": 1.0, "overlong": -0.5},
        {"right": 1.0, "overlong": 0.0},
    ]
    assert [t.total_reward for t in punished] == [sum(t.reward_components.values()) for t in punished]
    assert punish_overlong([long], 4, buffer=2, factor=1.0)[0].reward_components == {}


def test_rewards_less_the_penalty_by_hand() -> None:
    rewards = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 4.0]])
    old = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, -1.0], [-1.0, math.nan, -3.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    penalized, kl = penalize_rewards(rewards, old, ref, mask, 0.1, "k1")
    torch.testing.assert_close(kl, torch.tensor([[0.5, -1.0, 0.0], [0.0, 0.0, 2.0]]))
    torch.testing.assert_close(penalized, torch.tensor([[-0.05, 1.1, 2.0], [3.0, 0.0, 3.8]]))
    assert not penalized.requires_grad
    assert rewards.tolist() == [[0.0, 1.0, 2.0], [3.0, 0.0, 4.0]], "the input is unchanged"
