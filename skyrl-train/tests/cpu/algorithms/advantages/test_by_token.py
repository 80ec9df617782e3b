import math
import statistics

import pytest
import torch
from train_kit.estimator_inputs import Inputs

from skyrl_train.algorithms.advantages import (
    gae,
    on_policy_distillation,
    optimal_token_baseline,
    reinforce_plus_plus,
    remax,
    token_rewards,
)


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def sampled(inputs: Inputs, name: str, i: int) -> list[float]:
    """Return the values of the sampled tokens of row i."""
    return inputs[name][i][inputs["response_mask"][i] > 0].tolist()


class TestReinforcePlusPlus:
    def test_rewards_reach_earlier_turns_and_observations_are_not_discounted(self) -> None:
        rewards, mask = row(0, 0, 0, 0, -4), row(1, 1, 0, 0, 1)
        _, returns = reinforce_plus_plus(token_level_rewards=rewards, response_mask=mask, gamma=0.5)
        assert returns.tolist() == [[-1, -2, 0, 0, -4]]


class TestGae:
    def test_values_by_hand(self) -> None:
        advantages, returns = gae(
            token_level_rewards=row(0, 0, 1),
            response_mask=row(1, 1, 1),
            values=row(0.1, 0.2, 0.3),
            gamma=1.0,
            lambd=0.95,
        )
        assert returns[0].tolist() == pytest.approx([0.92675, 0.965, 1.0], abs=1e-9)
        raw = [0.82675, 0.765, 0.7]
        mean, std = statistics.fmean(raw), statistics.stdev(raw)
        assert advantages[0].tolist() == pytest.approx([(a - mean) / std for a in raw], abs=1e-5)


def test_remax_by_hand() -> None:
    rewards, mask = torch.cat([row(0, 1, 2), row(0, -1, 0)]), torch.cat([row(1, 1, 1), row(1, 1, 0)])
    advantages, returns = remax(
        token_level_rewards=rewards, response_mask=mask, greedy_rewards=torch.tensor([2.0, -3.0]), gamma=0.5
    )
    assert returns.tolist() == [[1, 2, 2], [-0.5, -1, 0]]
    assert advantages.tolist() == [[-1, 0, 0], [2.5, 2, 0]]


class TestOptimalTokenBaseline:
    def test_by_hand(self) -> None:
        """Two answers to one prompt; the second is one token shorter."""
        half = math.log(0.5)
        advantages, returns = optimal_token_baseline(
            token_level_rewards=torch.cat([row(0, 3), row(-1, 0)]),
            response_mask=torch.cat([row(1, 1), row(1, 0)]),
            index=["a", "a"],
            old_log_probs=torch.cat([row(half, half), row(0, 0)]),  # π = 0.5, 0.5 and 1
            sum_pi_squared=torch.cat([row(0.5, 0.3), row(1.25, 9)]),
        )
        # W_1 is 1 - 1 + 0.5 = 0.5 and 1 - 2 + 1.25 = 0.25, so B_1 = (3 · 0.5 - 1 · 0.25) / 0.75 = 5/3
        assert advantages[:, 0].tolist() == pytest.approx([3 - 5 / 3, -1 - 5 / 3], abs=1e-6)
        assert advantages[:, 1].tolist() == [0, 0]  # the only row with a second token
        assert returns.tolist() == [[3, 3], [-1, 0]]

    def test_an_observation_does_not_misalign_the_tokens_after_it(self) -> None:
        def estimate(rewards: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
            advantages, _ = optimal_token_baseline(
                token_level_rewards=rewards,
                response_mask=mask,
                index=["a", "a"],
                old_log_probs=mask * -1.5,
                sum_pi_squared=mask * 0.25,
            )
            return [advantages[i][mask[i] > 0].tolist() for i in range(2)]

        with_observations = estimate(
            torch.cat([row(1, 0, 0, 2), row(0, 5, 0, 0)]), torch.cat([row(1, 0, 0, 1), row(1, 1, 0, 0)])
        )
        without_observations = estimate(torch.cat([row(1, 2), row(0, 5)]), torch.ones(2, 2))
        assert with_observations == without_observations == [[-1, -1.5], [1, 1.5]]

    def test_tokens_of_probability_one_are_weighted_equally(self) -> None:
        advantages, _ = optimal_token_baseline(
            token_level_rewards=torch.cat([row(1), row(4)]),
            response_mask=torch.ones(2, 1),
            index=["a", "a"],
            old_log_probs=torch.zeros(2, 1),
            sum_pi_squared=torch.ones(2, 1),
        )
        assert advantages[:, 0].tolist() == [-1.5, 1.5]

    def test_a_sum_of_squares_below_its_minimum_gives_no_negative_weight(self) -> None:
        advantages, _ = optimal_token_baseline(
            token_level_rewards=torch.cat([row(1), row(3)]),
            response_mask=torch.ones(2, 1),
            index=["a", "a"],
            old_log_probs=torch.cat([row(0), row(math.log(0.5))]),
            sum_pi_squared=torch.cat([row(0.5), row(0.5)]),  # at least 1 for the first
        )
        assert advantages[:, 0].tolist() == pytest.approx([-2, 0], abs=1e-6)

    def test_equal_rewards_give_exactly_zero(self) -> None:
        random = torch.Generator().manual_seed(0)
        rewards = torch.zeros(5, 3)
        rewards[:, 2] = 0.1
        advantages, _ = optimal_token_baseline(
            token_level_rewards=rewards,
            response_mask=torch.ones(5, 3),
            index=["a"] * 5,
            old_log_probs=torch.rand(5, 3, generator=random).log(),
            sum_pi_squared=torch.rand(5, 3, generator=random),
        )
        assert not advantages.any()


def test_distillation_prefers_tokens_that_are_likelier_under_the_teacher() -> None:
    advantages, returns = on_policy_distillation(
        token_level_rewards=row(5, 5, 5),
        response_mask=row(1, 1, 0),
        old_log_probs=row(-1, -2, -3),
        ref_log_probs=row(-0.5, -4, -1),
    )
    assert advantages.tolist() == returns.tolist() == [[0.5, -2, 0]]


def test_token_rewards_are_the_rewards_of_the_sampled_tokens() -> None:
    advantages, returns = token_rewards(token_level_rewards=row(1, -2, 3), response_mask=row(1, 1, 0))
    assert advantages.tolist() == returns.tolist() == [[1, -2, 0]]
