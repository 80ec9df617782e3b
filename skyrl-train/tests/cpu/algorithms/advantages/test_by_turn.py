"""Per-turn estimators against values computed by hand and by loops over turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import groupby

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_kit.estimator_inputs import Inputs, inputs

from skyrl_train.algorithms.advantages import gae_per_turn, grpo, grpo_per_turn, rloo, rloo_per_turn, turn_index

Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]

MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0]], dtype=torch.float64)
REWARDS = torch.tensor([[0, 1, 0, 0, 2, 0], [-1, 0, 0, 4, 0, 0], [0, 0, 5, 0, 0, 0]], dtype=torch.float64)


def turns_of(inputs: Inputs, i: int) -> list[list[int]]:
    """Return the token positions of each turn in row i."""
    is_sampled = inputs["response_mask"][i].tolist()
    runs = groupby(range(len(is_sampled)), key=lambda t: is_sampled[t])
    return [list(positions) for sampled, positions in runs if sampled]


def returns_to_go(inputs: Inputs, i: int) -> list[float]:
    rewards = [inputs["token_level_rewards"][i][turn].sum().item() for turn in turns_of(inputs, i)]
    return [sum(inputs["gamma"] ** n * r for n, r in enumerate(rewards[k:])) for k in range(len(rewards))]


def assert_on_turns(actual: torch.Tensor, expected: list[list[float]], inputs: Inputs) -> None:
    expected_tokens = torch.zeros_like(actual)
    for i, numbers in enumerate(expected):
        for turn, number in zip(turns_of(inputs, i), numbers, strict=True):
            expected_tokens[i, turn] = number
    torch.testing.assert_close(actual, expected_tokens, atol=1e-6, rtol=0)
    assert not actual[inputs["response_mask"] == 0].any()


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


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_turns_against_a_loop(mask: list[bool]) -> None:
    expected, turn, before = [], -1, False
    for is_sampled in mask:
        turn += is_sampled and not before
        expected.append(turn if is_sampled else -1)
        before = is_sampled
    assert turn_index(torch.tensor([mask])).tolist() == [expected]


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
def test_against_a_loop(inputs: Inputs) -> None:
    returns = [returns_to_go(inputs, i) for i in range(len(inputs["index"]))]
    normalized: list[list[float]] = []
    left_out: list[list[float]] = []
    for i, row_returns in enumerate(returns):
        normalized.append([])
        left_out.append([])
        for k, value in enumerate(row_returns):
            peers = [
                r[k] for r, uid in zip(returns, inputs["index"], strict=True) if uid == inputs["index"][i] and r[k:]
            ]
            others = peers.copy()
            others.remove(value)
            left_out[i].append(value - statistics.fmean(others) if others else 0.0)
            spread = statistics.stdev(peers) + 1e-6 if others and inputs["grpo_norm_by_std"] else 1.0
            normalized[i].append((value - statistics.fmean(peers)) / spread)
    assert_on_turns(grpo_per_turn(**inputs)[0], normalized, inputs)
    assert_on_turns(rloo_per_turn(**inputs)[0], left_out, inputs)
    assert_on_turns(rloo_per_turn(**inputs)[1], returns, inputs)


@given(inputs)
def test_gae_per_turn_against_a_loop(inputs: Inputs) -> None:
    """A_k is the sum of the discounted δ of turn k and every later turn."""
    gamma, decay = inputs["gamma"], inputs["gamma"] * inputs["lambd"]
    raw, returns = [], []
    for i in range(len(inputs["index"])):
        turns = turns_of(inputs, i)
        rewards = [inputs["token_level_rewards"][i][turn].sum().item() for turn in turns]
        values = [inputs["values"][i][turn[0]].item() for turn in turns]
        deltas = [r + gamma * after - v for r, after, v in zip(rewards, [*values[1:], 0.0], values, strict=False)]
        raw.append([sum(decay**n * d for n, d in enumerate(deltas[k:])) for k in range(len(deltas))])
        returns.append([a + v for a, v in zip(raw[-1], values, strict=True)])
    tokens = [a for i, row in enumerate(raw) for a, turn in zip(row, turns_of(inputs, i), strict=True) for _ in turn]
    mean = statistics.fmean(tokens) if tokens else 0.0
    scale = (statistics.variance(tokens) + 1e-8) ** 0.5 if len(tokens) > 1 else 1.0
    advantages, actual_returns = gae_per_turn(**inputs)
    assert_on_turns(advantages, [[(a - mean) / scale for a in row] for row in raw], inputs)
    assert_on_turns(actual_returns, returns, inputs)
