import math
import statistics

import pytest
import torch

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


def test_rewards_reach_earlier_turns_and_observations_are_not_discounted() -> None:
    rewards, mask = row(0, 0, 0, 0, -4), row(1, 1, 0, 0, 1)
    _, returns = reinforce_plus_plus(token_level_rewards=rewards, response_mask=mask, gamma=0.5)
    assert returns.tolist() == [[-1, -2, 0, 0, -4]]


def test_gae_by_hand() -> None:
    values, mask = row(0.1, 0.2, 0.3), row(1, 1, 1)
    advantages, returns = gae(row(0, 0, 1), response_mask=mask, values=values, gamma=1.0, lambd=0.95)
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
    """Answers to one prompt. `logprobs` and `squares` are log π and Σ π² of the sampled tokens."""

    @staticmethod
    def estimate(
        rewards: torch.Tensor, mask: torch.Tensor, logprobs: torch.Tensor, squares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index = ["a"] * len(rewards)
        return optimal_token_baseline(rewards, mask, index, old_log_probs=logprobs, sum_pi_squared=squares)

    def test_by_hand(self) -> None:
        half = math.log(0.5)
        advantages, returns = self.estimate(
            torch.cat([row(0, 3), row(-1, 0)]),
            torch.cat([row(1, 1), row(1, 0)]),
            torch.cat([row(half, half), row(0, 0)]),  # π = 0.5, 0.5 and 1
            torch.cat([row(0.5, 0.3), row(1.25, 9)]),
        )
        # W_1 is 1 - 1 + 0.5 = 0.5 and 1 - 2 + 1.25 = 0.25, so B_1 = (3 · 0.5 - 1 · 0.25) / 0.75 = 5/3
        assert advantages[:, 0].tolist() == pytest.approx([3 - 5 / 3, -1 - 5 / 3], abs=1e-6)
        assert advantages[:, 1].tolist() == [0, 0]  # the only row with a second token
        assert returns.tolist() == [[3, 3], [-1, 0]]

    def test_an_observation_does_not_misalign_the_tokens_after_it(self) -> None:
        for rewards, mask in (
            (torch.cat([row(1, 0, 0, 2), row(0, 5, 0, 0)]), torch.cat([row(1, 0, 0, 1), row(1, 1, 0, 0)])),
            (torch.cat([row(1, 2), row(0, 5)]), torch.ones(2, 2)),
        ):
            advantages, _ = self.estimate(rewards, mask, mask * -1.5, mask * 0.25)
            assert [advantages[i][mask[i] > 0].tolist() for i in range(2)] == [[-1, -1.5], [1, 1.5]]

    def test_certain_tokens_weigh_the_same_and_no_weight_is_negative(self) -> None:
        one, half = torch.ones(2, 1), torch.full((2, 1), 0.5)
        advantages, _ = self.estimate(torch.cat([row(1), row(4)]), one, torch.zeros(2, 1), one)
        assert advantages[:, 0].tolist() == [-1.5, 1.5]
        # Σ π² is at least 1 for the first token, so 0.5 can only be rounding.
        advantages, _ = self.estimate(torch.cat([row(1), row(3)]), one, torch.cat([row(0), row(math.log(0.5))]), half)
        assert advantages[:, 0].tolist() == pytest.approx([-2, 0], abs=1e-6)

    def test_equal_rewards_give_exactly_zero(self) -> None:
        random = torch.Generator().manual_seed(0)
        rewards = torch.zeros(5, 3)
        rewards[:, 2] = 0.1
        logprobs, squares = torch.rand(5, 3, generator=random).log(), torch.rand(5, 3, generator=random)
        assert not self.estimate(rewards, torch.ones(5, 3), logprobs, squares)[0].any()


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
