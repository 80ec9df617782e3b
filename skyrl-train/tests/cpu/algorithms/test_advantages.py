"""GRPO against numbers worked out by hand, and what must not change them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.advantages import group_statistics, grpo
from skyrl_train.config.algorithm import AlgorithmConfig

NORMALISED = AlgorithmConfig(grpo_norm_by_std=True)
CENTRED = AlgorithmConfig(grpo_norm_by_std=False)  # Dr. GRPO


def advantage_of_each(
    scores: list[float], uids: list[str], config: AlgorithmConfig = NORMALISED, dtype: torch.dtype = torch.float64
) -> list[float]:
    """One advantage a row, for rewards that stand on the only token."""
    rewards = torch.tensor(scores, dtype=dtype)[:, None]
    advantages, _ = grpo(
        token_level_rewards=rewards, response_mask=torch.ones_like(rewards), index=uids, values=None, config=config
    )
    return advantages[:, 0].tolist()


def test_normalised_by_hand() -> None:
    # Group a: 1, 2, 6 has mean 3 and unbiased variance (4 + 1 + 9) / 2 = 7. Group b: 0, 1 has std 1/√2.
    expected = [-2 / math.sqrt(7), -math.sqrt(0.5), -1 / math.sqrt(7), 3 / math.sqrt(7), math.sqrt(0.5)]
    actual = advantage_of_each([1, 0, 2, 6, 1], ["a", "b", "a", "a", "b"])
    assert actual == pytest.approx(expected, rel=5e-6)  # the 1e-6 beside the standard deviation


def test_centred_by_hand() -> None:
    assert advantage_of_each([1, 0, 2, 6, 1], ["a", "b", "a", "a", "b"], CENTRED) == [-2, -0.5, -1, 3, 0.5]


@pytest.mark.parametrize("config", [NORMALISED, CENTRED])
def test_a_group_of_one_keeps_its_score(config: AlgorithmConfig) -> None:
    assert advantage_of_each([0.75, 1, 3], ["alone", "pair", "pair"], config)[0] == 0.75


@pytest.mark.parametrize("config", [NORMALISED, CENTRED])
@pytest.mark.parametrize("reward", [0.1, 0.7, -1.01, 1 / 3, 1e6])
def test_equal_rewards_give_exactly_zero(reward: float, config: AlgorithmConfig) -> None:
    for size in range(2, 8):  # sums of 0.1 do not divide back to 0.1 for every size
        assert advantage_of_each([reward] * size, ["a"] * size, config, dtype=torch.float32) == [0.0] * size


def test_a_trajectory_scores_the_sum_of_its_rewards_on_every_sampled_token() -> None:
    rewards = torch.tensor([[0.0, 0.5, 0.0, 1.5], [1.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])  # a gap is an observation
    advantages, returns = grpo(
        token_level_rewards=rewards, response_mask=mask, index=["a", "a"], values=None, config=CENTRED
    )
    assert advantages.tolist() == [[0.5, 0.5, 0.0, 0.5], [-0.5, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(returns, advantages)


def test_statistics_of_groups_that_stand_apart() -> None:
    scores = torch.tensor([1.0, 5.0, 2.0, 7.0, 6.0])
    mean, std, size = group_statistics(scores, ["a", "b", "a", "alone", "a"])
    assert mean.tolist() == [3, 5, 3, 7, 3]
    assert std.tolist() == pytest.approx([math.sqrt(7), 0, math.sqrt(7), 0, math.sqrt(7)])
    assert size.tolist() == [3, 1, 3, 1, 3]


groups = st.lists(st.tuples(st.sampled_from("abc"), st.floats(-10, 10)), min_size=1, max_size=9)


@given(rows=groups, data=st.data(), config=st.sampled_from([NORMALISED, CENTRED]))
def test_the_order_of_rows_does_not_matter(
    rows: list[tuple[str, float]], data: st.DataObject, config: AlgorithmConfig
) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    uids, scores = [uid for uid, _ in rows], [score for _, score in rows]
    expected = advantage_of_each(scores, uids, config)
    shuffled = advantage_of_each([scores[row] for row in order], [uids[row] for row in order], config)
    assert shuffled == pytest.approx([expected[row] for row in order], rel=1e-6, abs=1e-6)


@given(rows=groups, n_padding=st.integers(1, 5))
def test_padding_does_not_matter(rows: list[tuple[str, float]], n_padding: int) -> None:
    uids = [uid for uid, _ in rows]
    rewards = torch.tensor([[score / 2, score / 2] for _, score in rows], dtype=torch.float64)
    padding = torch.zeros(len(rows), n_padding, dtype=torch.float64)
    mask = torch.ones_like(rewards)
    expected, _ = grpo(token_level_rewards=rewards, response_mask=mask, index=uids, values=None, config=NORMALISED)
    padded, _ = grpo(
        token_level_rewards=torch.cat([rewards, padding], dim=1),
        response_mask=torch.cat([mask, padding], dim=1),
        index=uids,
        values=None,
        config=NORMALISED,
    )
    assert (padded[:, 2:] == 0).all()
    torch.testing.assert_close(padded[:, :2], expected)


@given(rows=groups)
def test_a_group_of_several_sums_to_zero_and_normalised_has_unit_variance(rows: list[tuple[str, float]]) -> None:
    uids, scores = [uid for uid, _ in rows], torch.tensor([score for _, score in rows])
    advantages = torch.tensor(advantage_of_each(scores.tolist(), uids))
    for uid in set(uids):
        of_group = torch.tensor([other == uid for other in uids])
        if of_group.sum() > 1:
            assert advantages[of_group].sum().item() == pytest.approx(0, abs=1e-3)
            if scores[of_group].double().std() > 0.01:
                assert advantages[of_group].std().item() == pytest.approx(1, rel=1e-3)


def test_rewards_that_differ_only_in_the_rounding_of_their_sums_are_equal() -> None:
    """Games of Catch won by different paths: the same rewards in another order."""
    steps = torch.tensor([0.1567, -0.1767, -0.01, 0.1567, 0.82])
    orders = [torch.randperm(5, generator=torch.Generator().manual_seed(seed)) for seed in range(16)]
    rewards = torch.stack([steps[order] for order in orders])  # (16, 5)
    assert len(set(rewards.sum(dim=-1).tolist())) > 1, "all sums round alike; choose other rewards"
    for config in (NORMALISED, CENTRED):
        advantages, _ = grpo(
            token_level_rewards=rewards, response_mask=torch.ones(16, 5), index=["a"] * 16, values=None, config=config
        )
        assert not advantages.any()
