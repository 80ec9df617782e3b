from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from train_kit.estimator_inputs import Inputs, inputs

from skyrl_train.algorithms.advantages import gae, gae_per_turn, grpo, grpo_per_turn, rloo, rloo_per_turn, turn_index

Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]

MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0]], dtype=torch.float64)
REWARDS = torch.tensor([[0, 1, 0, 0, 2, 0], [-1, 0, 0, 4, 0, 0], [0, 0, 5, 0, 0, 0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("mask", "turns"),
    [
        ([1, 1, 0, 0, 1, 0], [0, 0, -1, -1, 1, -1]),
        ([0, 1, 0, 1, 1, 1], [-1, 0, -1, 1, 1, 1]),
        ([1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]),
        ([0, 0, 0, 0, 0, 0], [-1, -1, -1, -1, -1, -1]),
    ],
)
def test_a_turn_is_a_contiguous_run_of_sampled_tokens(mask: list[int], turns: list[int]) -> None:
    for dtype in (torch.float32, torch.long, torch.bool):
        assert turn_index(torch.tensor([mask], dtype=dtype)).tolist() == [turns]


def test_grpo_per_turn_by_hand() -> None:
    advantages, returns = grpo_per_turn(
        token_level_rewards=REWARDS, response_mask=MASK, index=["a"] * 3, gamma=0.5, grpo_norm_by_std=False
    )
    # G_1 = 1 + 2/2, -1 + 4/2, 5 with mean 8/3; G_2 = 2 and 4 with mean 3; the third row has one turn only
    first = [2 - 8 / 3, 1 - 8 / 3, 5 - 8 / 3]
    expected = [[first[0]] * 2 + [0] + [-1] * 2 + [0], [first[1], 0, 0, 1, 0, 0], [first[2]] * 3 + [0] * 3]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))
    assert returns.tolist() == [[2, 2, 0, 2, 2, 0], [1, 0, 0, 4, 0, 0], [5, 5, 5, 0, 0, 0]]


@pytest.mark.parametrize("estimator", [grpo_per_turn, rloo_per_turn])
def test_the_only_row_at_a_turn_gets_zero(estimator: Estimator) -> None:
    advantages, _ = estimator(token_level_rewards=REWARDS, response_mask=MASK, index=["a", "b", "b"])
    assert not advantages[0].any()  # the only row of its prompt
    assert advantages[1, 0] != 0
    assert advantages[1, 3] == 0  # the other row has no second turn


@pytest.mark.parametrize(("per_turn", "whole"), [(grpo_per_turn, grpo), (rloo_per_turn, rloo)])
@given(inputs=inputs)
def test_with_one_turn_per_row_it_equals_the_trajectory_estimator(
    per_turn: Estimator, whole: Estimator, inputs: Inputs
) -> None:
    mask = torch.ones_like(inputs["response_mask"])
    one_turn = inputs | {"response_mask": mask}
    advantages, expected = per_turn(**one_turn)[0], whole(**one_turn)[0]
    for i, uid in enumerate(inputs["index"]):
        if inputs["index"].count(uid) > 1:
            torch.testing.assert_close(advantages[i], expected[i])


@pytest.mark.parametrize("estimator", [grpo_per_turn, rloo_per_turn])
@pytest.mark.parametrize("reward", [0.1, -0.7, 1e6])
def test_equal_rewards_give_exactly_zero(estimator: Estimator, reward: float) -> None:
    rewards = torch.zeros(7, 6)
    rewards[:, 5] = reward
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]] * 4 + [[1, 0, 1, 0, 0, 1]] * 3).float()
    assert not estimator(token_level_rewards=rewards, response_mask=mask, index=["a"] * 7)[0].any()


@given(inputs)
def test_turns_of_one_token_have_the_advantages_and_returns_of_gae(inputs: Inputs) -> None:
    is_even = torch.arange(inputs["response_mask"].shape[1]) % 2 == 0
    one_token = inputs | {"response_mask": inputs["response_mask"] * is_even}
    torch.testing.assert_close(gae_per_turn(**one_token), gae(**one_token))
