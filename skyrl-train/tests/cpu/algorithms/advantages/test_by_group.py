import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.advantages import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from skyrl_train.config.algorithm import AlgorithmConfig, GdpoConfig
from skyrl_train.errors import ConfigError

Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]

SCORES: list[float] = [1, 0, 0, 1, 2, 3]
UIDS, LENGTHS = ["a", "a", "a", "a", "b", "b"], [2, 3, 1, 4, 2, 2]
KEEPS_ITS_SCORE = {grpo, maxrl}  # in a group of one


def row_advantages(
    estimator: Estimator,
    scores: list[float],
    uids: list[str],
    lengths: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> list[float]:
    """Return the advantage of each row, with its reward on the last sampled token; all its tokens share it."""
    lengths = lengths or [1] * len(scores)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).to(dtype)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(scores)), torch.tensor(lengths) - 1] = torch.tensor(scores, dtype=dtype)
    advantages, returns = estimator(token_level_rewards=rewards, response_mask=mask, index=uids, **settings)
    assert torch.equal(advantages, advantages[:, :1] * mask)
    assert torch.equal(returns, advantages)
    return advantages[:, 0].tolist()


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
def test_values_by_hand(estimator: Estimator, expected: list[float]) -> None:
    assert row_advantages(estimator, SCORES, UIDS, LENGTHS) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"), [(grpo, [0.5, -0.5, -0.5, 0.5, -0.5, 0.5]), (grpo_passk, [0, 0, 0, 0, 0, 1])]
)
def test_values_by_hand_without_the_standard_deviation(estimator: Estimator, expected: list[float]) -> None:
    assert row_advantages(estimator, SCORES, UIDS, LENGTHS, grpo_norm_by_std=False) == expected


def test_grpo_passk_rewards_a_unique_best_of_either_sign() -> None:
    uids = ["a", "a", "a", "b", "b", "b"]
    centred = row_advantages(grpo_passk, [-1, -4, -2, 5, 1, 5], uids, grpo_norm_by_std=False)
    assert centred == [1, 0, 0, 0, 0, 0]  # group b has a tie for the best
    normalized = row_advantages(grpo_passk, [-1, -4, -2, 5, 1, 5], uids)
    assert normalized == pytest.approx([1 / statistics.stdev([-1, -4, -2]), 0, 0, 0, 0, 0], rel=1e-5)
    assert row_advantages(grpo_passk, [1.0, 1.0 + 1e-9, 0.0], ["a"] * 3) == [0, 0, 0], "a tie, but for rounding"


def test_opo_weights_scores_of_either_sign_by_sampled_tokens() -> None:
    # (1·-1 + 3·2 + 4·0) / 8 = 0.625
    assert row_advantages(opo, [-1, 2, 0], ["a"] * 3, [1, 3, 4]) == [-1.625, 1.375, -0.625]


def test_gpg_counts_only_trained_trajectories() -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.0], [4.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0], [1.0], [1.0], [0.0]], dtype=torch.float64)
    advantages, _ = gpg(token_level_rewards=rewards, response_mask=mask, index=["a", "a", "b", "b"])
    assert advantages[:, 0].tolist() == [1.5, -1.5, -6, 0]  # α = 3 / 1; the fourth row still counts in the mean of b


class TestMaxRL:
    def test_the_denominator_is_positive_if_the_mean_is_not(self) -> None:
        assert row_advantages(maxrl, [-3, -1], ["a", "a"]) == pytest.approx([-1, 1], abs=1e-6)
        assert row_advantages(maxrl, [-1, 1], ["a", "a"]) == pytest.approx([-1, 1], abs=1e-6)

    @given(st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=2, max_size=8))
    def test_the_formula_of_the_paper_for_rewards_without_negatives(self, scores: list[float]) -> None:
        mean = statistics.fmean(scores)
        expected = [(score - mean) / mean if mean else 0 for score in scores]
        actual = row_advantages(maxrl, scores, ["a"] * len(scores))
        assert actual == pytest.approx(expected, abs=1e-3)  # its denominator has no 1e-6

    @given(st.lists(st.booleans(), min_size=2, max_size=8))
    def test_rewards_of_plus_and_minus_one_equal_one_and_zero(self, solved: list[bool]) -> None:
        uids = ["a"] * len(solved)
        signed = row_advantages(maxrl, [1 if s else -1 for s in solved], uids)
        assert signed == pytest.approx(row_advantages(maxrl, [int(s) for s in solved], uids), abs=1e-4)


ALL = [grpo, rloo, opo, gpg, maxrl, grpo_passk, reinforce_plus_plus_baseline]


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("reward", [0.1, 0.7, -1.01, 1 / 3, 1e6])
def test_equal_rewards_give_exactly_zero(estimator: Estimator, reward: float) -> None:
    for size in range(2, 8):  # the mean of n times 0.1 is not exactly 0.1 for every n
        lengths = [1 + row % 3 for row in range(size)]
        advantages = row_advantages(estimator, [reward] * size, ["a"] * size, lengths, dtype=torch.float32)
        assert advantages == [0.0] * size


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("total", [0.9467, 0.0])
def test_rewards_that_differ_only_by_rounding_are_equal(estimator: Estimator, total: float) -> None:
    """Games of Catch won on different paths have the same rewards in a different order."""
    steps = torch.tensor([0.1567, -0.1767, -0.01, 0.1567, total - 0.1267])
    orders = [torch.randperm(5, generator=torch.Generator().manual_seed(seed)) for seed in range(16)]
    rewards = torch.stack([steps[order] for order in orders])  # (16, 5)
    assert len(set(rewards.sum(dim=-1).tolist())) > 1, "all sums round alike; choose other rewards"
    advantages, _ = estimator(token_level_rewards=rewards, response_mask=torch.ones(16, 5), index=["a"] * 16)
    assert not advantages.any()


@pytest.mark.parametrize("estimator", [e for e in ALL if e is not reinforce_plus_plus_baseline])
def test_a_group_of_one(estimator: Estimator) -> None:
    expected = 0.75 if estimator in KEEPS_ITS_SCORE else 0
    assert row_advantages(estimator, [0.75, 1, 3], ["alone", "pair", "pair"])[0] == expected
    assert row_advantages(estimator, [-0.75, 1, 3], ["alone", "pair", "pair"])[0] == -expected


@pytest.mark.parametrize("estimator", [grpo, rloo, gpg, maxrl])
def test_a_masked_trajectory_still_counts_for_its_group(estimator: Estimator) -> None:
    rewards = torch.tensor([[0.0, 2.0], [0.0, 1.0], [0.0, 6.0]], dtype=torch.float64)
    mask = torch.ones_like(rewards)
    with_all, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=["a"] * 3)
    mask[2] = 0
    without_third, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=["a"] * 3)
    assert torch.equal(without_third[:2], with_all[:2])
    assert not without_third[2].any()


def test_the_score_is_the_row_sum_and_every_sampled_token_gets_the_advantage() -> None:
    rewards = torch.tensor([[0.0, 0.5, 0.0, 1.5], [1.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])  # a gap is an observation
    advantages, returns = grpo(
        token_level_rewards=rewards, response_mask=mask, index=["a", "a"], grpo_norm_by_std=False
    )
    assert advantages.tolist() == [[0.5, 0.5, 0.0, 0.5], [-0.5, 0.0, 0.0, 0.0]]
    assert torch.equal(returns, advantages)


MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], dtype=torch.float64)
PAIRS = ["a", "a", "b", "b"]
COMPONENTS = {
    "answer": torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
    "format": torch.tensor([0.1, 0.3, -0.2, -0.2], dtype=torch.float64),
}


def whitened(
    components: dict[str, torch.Tensor], mask: torch.Tensor, uids: list[str], **weights: float
) -> torch.Tensor:
    """Return the advantages of `gdpo`."""
    config = AlgorithmConfig(gdpo=GdpoConfig(weights=weights))
    advantages, returns = gdpo(response_mask=mask, index=uids, reward_components=components, config=config)
    assert torch.equal(advantages, returns)
    return advantages


def expected(answer_weight: float, format_weight: float) -> torch.Tensor:
    """In group a the components disagree; in b the format is constant. The std of each pair of 0 and 1 is 0.7071."""
    unit = 0.5**0.5
    answer, form = [unit, -unit, -unit, unit], [-unit, unit, 0, 0]
    total = [answer_weight * a + format_weight * f for a, f in zip(answer, form, strict=True)]
    tokens = [x for x, mask in zip(total, MASK, strict=True) for _ in range(int(mask.sum()))]
    whitened = [(x - statistics.fmean(tokens)) / statistics.stdev(tokens) for x in total]
    return torch.tensor(whitened, dtype=torch.float64)[:, None] * MASK


@pytest.mark.parametrize(
    ("weights", "answer_weight", "format_weight"),
    [({}, 1, 1), ({"format": 0.5}, 1, 0.5), ({"answer": -2.0, "format": 0.0}, -2, 0)],
)
def test_components_are_normalized_separately_and_weighted(
    weights: dict[str, float], answer_weight: float, format_weight: float
) -> None:
    actual = whitened(COMPONENTS, MASK, PAIRS, **weights)
    torch.testing.assert_close(actual, expected(answer_weight, format_weight), atol=1e-5, rtol=0)  # std(format) + 1e-6


def test_equal_components_give_exactly_zero_in_gdpo() -> None:
    for size in range(2, 8):  # the mean of n times 0.1 is not exactly 0.1 for every n
        components = {
            "answer": torch.tensor([0.1] * size + [0.7] * size),
            "format": torch.tensor([-0.3] * size + [0.1] * size),
        }
        assert not whitened(components, torch.ones(2 * size, 2), ["a"] * size + ["b"] * size).any()


def test_components_that_nearly_cancel_keep_their_precision() -> None:
    answer = torch.tensor([0.1, 0.7, 0.4, 0.9])
    components = {"answer": answer, "format": 2 - 3 * answer + torch.tensor([0.0, 1e-3, 0.0, -1e-3])}
    in_single = whitened(components, MASK.float(), ["a"] * 4)
    in_double = whitened({name: scores.double() for name, scores in components.items()}, MASK, ["a"] * 4)
    assert in_single.dtype == torch.float32
    torch.testing.assert_close(in_single.double(), in_double, atol=1e-6, rtol=0)


def test_unknown_and_missing_components_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gdpo\.weights names anwser,.* the components are: answer, format$"):
        whitened(COMPONENTS, MASK, PAIRS, anwser=1.0)
    with pytest.raises(ConfigError, match="needs reward components"):
        whitened({}, MASK, PAIRS)
