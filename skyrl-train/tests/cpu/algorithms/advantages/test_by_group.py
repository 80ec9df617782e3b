"""Estimators that compare a trajectory with its group, against numbers worked out by hand, and at their edges."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.advantages import (
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)

Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]

SCORES: list[float] = [1, 0, 0, 1, 2, 3]
UIDS, LENGTHS = ["a", "a", "a", "a", "b", "b"], [2, 3, 1, 4, 2, 2]
KEEPS_ITS_SCORE = {grpo, maxrl}  # as a group of one

scores_and_prompts = st.lists(st.tuples(st.sampled_from("abc"), st.floats(-10, 10)), min_size=1, max_size=9)


def advantage_of_each(
    estimator: Estimator,
    scores: list[float],
    uids: list[str],
    lengths: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> list[float]:
    """One advantage a row, for rewards that stand on the last sampled token; it is the same on each of them."""
    lengths = lengths or [1] * len(scores)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).to(dtype)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(scores)), torch.tensor(lengths) - 1] = torch.tensor(scores, dtype=dtype)
    advantages, returns = estimator(token_level_rewards=rewards, response_mask=mask, index=uids, **settings)
    assert torch.equal(advantages, advantages[:, :1] * mask)
    assert torch.equal(returns, advantages)
    return advantages[:, 0].tolist()


def by_group(scores: list[float], uids: list[str]) -> dict[str, list[float]]:
    return {uid: [score for score, other in zip(scores, uids, strict=True) if other == uid] for uid in uids}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (grpo, [0.866024, -0.866024, -0.866024, 0.866024, -0.707106, 0.707106]),
        (rloo, [2 / 3, -2 / 3, -2 / 3, 2 / 3, -1, 1]),
        (opo, [0.4, -0.6, -0.6, 0.4, -0.5, 0.5]),
        (gpg, [0.75, -0.75, -0.75, 0.75, -0.75, 0.75]),  # 6 trajectories, 4 of them with a score
        (maxrl, [0.999998, -0.999998, -0.999998, 0.999998, -0.2, 0.2]),
        (grpo_passk, [0, 0, 0, 0, 0, 1.414212]),
        (reinforce_plus_plus_baseline, [0.834523, -1.112697, -1.112697, 0.834523, -1.112697, 0.834523]),
    ],
)
def test_golden(estimator: Estimator, expected: list[float]) -> None:
    assert advantage_of_each(estimator, SCORES, UIDS, LENGTHS) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [(grpo, [0.5, -0.5, -0.5, 0.5, -0.5, 0.5]), (grpo_passk, [0, 0, 0, 0, 0, 1])],
)
def test_golden_without_the_standard_deviation(estimator: Estimator, expected: list[float]) -> None:
    assert advantage_of_each(estimator, SCORES, UIDS, LENGTHS, grpo_norm_by_std=False) == expected


@pytest.mark.parametrize("estimator", [rloo, opo, grpo])
def test_a_shift_of_all_scores_changes_nothing(estimator: Estimator) -> None:
    shifted = advantage_of_each(estimator, [score - 2.5 for score in SCORES], UIDS, LENGTHS)
    assert shifted == pytest.approx(advantage_of_each(estimator, SCORES, UIDS, LENGTHS), abs=1e-9)


def test_grpo_by_hand() -> None:
    # Group a: 1, 2, 6 has mean 3 and unbiased variance (4 + 1 + 9) / 2 = 7. Group b: 0, 1 has std 1/√2.
    expected = [-2 / math.sqrt(7), -math.sqrt(0.5), -1 / math.sqrt(7), 3 / math.sqrt(7), math.sqrt(0.5)]
    actual = advantage_of_each(grpo, [1, 0, 2, 6, 1], ["a", "b", "a", "a", "b"])
    assert actual == pytest.approx(expected, rel=5e-6)  # the 1e-6 beside the standard deviation
    centred = advantage_of_each(grpo, [1, 0, 2, 6, 1], ["a", "b", "a", "a", "b"], grpo_norm_by_std=False)
    assert centred == [-2, -0.5, -1, 3, 0.5]


@given(rows=scores_and_prompts)
def test_leave_one_out_is_the_score_less_the_mean_of_the_others(rows: list[tuple[str, float]]) -> None:
    uids, scores = [uid for uid, _ in rows], [score for _, score in rows]
    groups = by_group(scores, uids)
    for advantage, uid, score in zip(advantage_of_each(rloo, scores, uids), uids, scores, strict=True):
        others = groups[uid].copy()
        others.remove(score)
        expected = score - statistics.fmean(others) if others else 0
        assert advantage == pytest.approx(expected, abs=2e-5)  # a group of spread 1e-5 · score counts as flat


@given(rows=scores_and_prompts, by_std=st.booleans())
def test_grpo_is_the_score_in_standard_deviations(rows: list[tuple[str, float]], by_std: bool) -> None:
    uids, scores = [uid for uid, _ in rows], [score for _, score in rows]
    groups = by_group(scores, uids)
    actual = advantage_of_each(grpo, scores, uids, grpo_norm_by_std=by_std)
    for advantage, uid, score in zip(actual, uids, scores, strict=True):
        group = groups[uid]
        if len(group) == 1:
            assert advantage == score
        elif max(group) - min(group) > 1e-2:
            std = statistics.stdev(group) if by_std else 1
            assert advantage == pytest.approx((score - statistics.fmean(group)) / std, rel=2e-3, abs=1e-6)


def test_the_best_of_k_in_both_signs_and_its_ties() -> None:
    uids = ["a", "a", "a", "b", "b", "b"]
    centred = advantage_of_each(grpo_passk, [-1, -4, -2, 5, 1, 5], uids, grpo_norm_by_std=False)
    assert centred == [1, 0, 0, 0, 0, 0]  # two of b are best: neither is missed when it is gone
    normalised = advantage_of_each(grpo_passk, [-1, -4, -2, 5, 1, 5], uids)
    assert normalised == pytest.approx([1 / statistics.stdev([-1, -4, -2]), 0, 0, 0, 0, 0], rel=1e-5)


def test_a_best_that_is_better_by_rounding_only_is_a_tie() -> None:
    assert advantage_of_each(grpo_passk, [1.0, 1.0 + 1e-9, 0.0], ["a"] * 3) == [0, 0, 0]


def test_opo_weighs_by_sampled_tokens_in_both_signs() -> None:
    # (1·-1 + 3·2 + 4·0) / 8 = 0.625
    assert advantage_of_each(opo, [-1, 2, 0], ["a"] * 3, [1, 3, 4]) == [-1.625, 1.375, -0.625]


def test_gpg_counts_only_trajectories_that_are_trained() -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.0], [4.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0], [1.0], [1.0], [0.0]], dtype=torch.float64)
    advantages, _ = gpg(token_level_rewards=rewards, response_mask=mask, index=["a", "a", "b", "b"])
    assert advantages[:, 0].tolist() == [1.5, -1.5, -6, 0]  # α = 3 / 1; the fourth counts in the mean of b


class TestMaxRL:
    def test_rewards_of_zero_and_one_weigh_one_over_p(self) -> None:
        scores: list[float] = [1, 0, 0, 0, 1, 1, 1, 0]
        expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1]
        assert advantage_of_each(maxrl, scores, ["hard"] * 4 + ["easy"] * 4) == pytest.approx(expected, abs=2e-5)

    def test_negative_rewards_do_not_turn_its_sign(self) -> None:
        assert advantage_of_each(maxrl, [-3, -1], ["a", "a"]) == pytest.approx([-1, 1], abs=1e-6)

    def test_a_mean_of_zero_does_not_explode(self) -> None:
        assert advantage_of_each(maxrl, [-1, 1], ["a", "a"]) == pytest.approx([-1, 1], abs=1e-6)

    @given(st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=2, max_size=8))
    def test_the_paper_where_no_reward_is_negative(self, scores: list[float]) -> None:
        mean = statistics.fmean(scores)
        expected = [(score - mean) / mean if mean else 0 for score in scores]
        actual = advantage_of_each(maxrl, scores, ["a"] * len(scores))
        assert actual == pytest.approx(expected, abs=1e-3)  # its denominator has no 1e-6

    @given(st.lists(st.booleans(), min_size=2, max_size=8))
    def test_plus_and_minus_one_are_one_and_zero(self, solved: list[bool]) -> None:
        uids = ["a"] * len(solved)
        signed = advantage_of_each(maxrl, [1 if s else -1 for s in solved], uids)
        assert signed == pytest.approx(advantage_of_each(maxrl, [int(s) for s in solved], uids), abs=1e-4)

    @given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
    def test_bounded_and_of_the_right_sign(self, scores: list[float]) -> None:
        mean, n = statistics.fmean(scores), len(scores)
        for score, advantage in zip(scores, advantage_of_each(maxrl, scores, ["a"] * n), strict=True):
            assert -1 <= advantage <= n - 1
            assert advantage * (score - mean) >= -1e-12

    @given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
    def test_a_better_score_never_gets_less(self, scores: list[float]) -> None:
        actual = advantage_of_each(maxrl, sorted(scores), ["a"] * len(scores))
        assert actual == sorted(actual)


ALL = [grpo, rloo, opo, gpg, maxrl, grpo_passk, reinforce_plus_plus_baseline]


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("reward", [0.1, 0.7, -1.01, 1 / 3, 1e6])
def test_equal_rewards_give_exactly_zero(estimator: Estimator, reward: float) -> None:
    for size in range(2, 8):  # sums of 0.1 do not divide back to 0.1 for every size
        lengths = [1 + row % 3 for row in range(size)]
        advantages = advantage_of_each(estimator, [reward] * size, ["a"] * size, lengths, dtype=torch.float32)
        assert advantages == [0.0] * size


@pytest.mark.parametrize("estimator", ALL)
def test_rewards_that_differ_only_in_the_rounding_of_their_sums_are_equal(estimator: Estimator) -> None:
    """Games of Catch won by different paths: the same rewards in another order."""
    steps = torch.tensor([0.1567, -0.1767, -0.01, 0.1567, 0.82])
    orders = [torch.randperm(5, generator=torch.Generator().manual_seed(seed)) for seed in range(16)]
    rewards = torch.stack([steps[order] for order in orders])  # (16, 5)
    assert len(set(rewards.sum(dim=-1).tolist())) > 1, "all sums round alike; choose other rewards"
    advantages, _ = estimator(token_level_rewards=rewards, response_mask=torch.ones(16, 5), index=["a"] * 16)
    assert not advantages.any()


@pytest.mark.parametrize("estimator", [e for e in ALL if e is not reinforce_plus_plus_baseline])
def test_a_group_of_one(estimator: Estimator) -> None:
    expected = 0.75 if estimator in KEEPS_ITS_SCORE else 0
    assert advantage_of_each(estimator, [0.75, 1, 3], ["alone", "pair", "pair"])[0] == expected
    assert advantage_of_each(estimator, [-0.75, 1, 3], ["alone", "pair", "pair"])[0] == -expected


@pytest.mark.parametrize("estimator", [grpo, rloo, gpg, maxrl])
def test_a_trajectory_that_is_left_out_still_counts_for_its_group(estimator: Estimator) -> None:
    rewards = torch.tensor([[0.0, 2.0], [0.0, 1.0], [0.0, 6.0]], dtype=torch.float64)
    mask = torch.ones_like(rewards)
    with_all, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=["a"] * 3)
    mask[2] = 0
    without_third, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=["a"] * 3)
    assert torch.equal(without_third[:2], with_all[:2])
    assert not without_third[2].any()


def test_the_whole_row_is_the_score_and_every_sampled_token_gets_the_advantage() -> None:
    rewards = torch.tensor([[0.0, 0.5, 0.0, 1.5], [1.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])  # a gap is an observation
    advantages, returns = grpo(
        token_level_rewards=rewards, response_mask=mask, index=["a", "a"], grpo_norm_by_std=False
    )
    assert advantages.tolist() == [[0.5, 0.5, 0.0, 0.5], [-0.5, 0.0, 0.0, 0.0]]
    assert torch.equal(returns, advantages)


@given(rows=scores_and_prompts)
def test_a_group_of_several_sums_to_zero_and_normalised_has_unit_variance(rows: list[tuple[str, float]]) -> None:
    uids, scores = [uid for uid, _ in rows], torch.tensor([score for _, score in rows])
    advantages = torch.tensor(advantage_of_each(grpo, scores.tolist(), uids))
    for uid in set(uids):
        of_group = torch.tensor([other == uid for other in uids])
        if of_group.sum() > 1:
            assert advantages[of_group].sum().item() == pytest.approx(0, abs=1e-3)
            if scores[of_group].double().std() > 0.01:
                assert advantages[of_group].std().item() == pytest.approx(1, rel=1e-3)
