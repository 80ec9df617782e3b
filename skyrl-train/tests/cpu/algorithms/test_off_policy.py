import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.off_policy import ROLLOUT_GAP_METRICS, add_rollout_gap, correction_weights, sequence_mask
from skyrl_train.config.algorithm import OffPolicyCorrectionConfig
from skyrl_train.types import MetricSums

RATIOS = torch.tensor([[1.0, 3.0, 0.5, 1.0], [1.0, 1.0, 0.1, 8.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)


def rollout_gap(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    sums = MetricSums()
    add_rollout_gap(sums, old, rollout, mask)
    return sums.metrics().numbers()


def weight(
    ratios: torch.Tensor, mask: torch.Tensor, **settings: Any
) -> tuple[list[list[float]], dict[str, list[list[float]]]]:
    """Return weights and metrics, as lists, for tokens with the given importance ratios."""
    rollout = torch.full_like(ratios, -3.0)
    config = OffPolicyCorrectionConfig(**settings)
    weights, metrics = correction_weights(rollout + ratios.log(), rollout, mask, config)
    return weights.tolist(), {name: values.tolist() for name, values in metrics.items()}


def approx_rows(rows: list[list[float]]) -> list[Any]:
    return [pytest.approx(row) for row in rows]


@pytest.mark.parametrize(
    ("settings", "expected", "metric", "is_counted"),
    [
        ({}, MASK.tolist(), "off_policy_weight_mean", MASK.tolist()),
        (
            {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.5},
            [[1.0, 2.5, 0.5, 0.0], [1.0, 1.0, 0.1, 2.5]],
            "tis_token_clip_high_ratio",
            [[0, 1, 0, 0], [0, 0, 0, 1]],
        ),
        (
            {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.2},
            [[1.2, 1.2, 1.2, 0.0], [0.8, 0.8, 0.8, 0.8]],  # products 1.5 and 0.8
            "tis_seq_clip_high_ratio",
            [[1, 1, 1, 0], [0, 0, 0, 0]],
        ),
        (
            {"token_mask_is_threshold_low": 0.4, "token_mask_is_threshold_high": 4.0},
            [[1, 1, 1, 0], [1, 1, 0, 0]],
            "token_mask_ratio",
            [[0, 0, 0, 0], [0, 0, 1, 1]],
        ),
    ],
)
def test_weights_of_tokens(
    settings: dict[str, Any], expected: list[list[float]], metric: str, is_counted: list[list[float]]
) -> None:
    weights, metrics = weight(RATIOS, MASK, **settings)
    assert weights == metrics["off_policy_weight_mean"] == approx_rows(expected)
    assert metrics[metric] == is_counted
    assert metrics.keys() == {metric, "off_policy_weight_mean"}


def test_an_outlier_token_masks_its_whole_trajectory() -> None:
    weights, metrics = weight(RATIOS, MASK, outlier_token_is_threshold_low=0.2, outlier_token_is_threshold_high=5.0)
    assert weights == [[1, 1, 1, 0], [0, 0, 0, 0]]
    for side in ("masked", "over_high", "under_low"):
        assert metrics[f"outlier_seq_{side}_ratio"] == [[0, 0, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(("side", "threshold", "other_side"), [("high", 2.0, "under_low"), ("low", 0.3, "over_high")])
def test_one_outlier_threshold_suffices(side: str, threshold: float, other_side: str) -> None:
    _, metrics = weight(RATIOS, MASK, **{f"outlier_token_is_threshold_{side}": threshold})
    is_out = [[1, 1, 1, 0], [1, 1, 1, 1]] if side == "high" else [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert metrics["outlier_seq_masked_ratio"] == is_out
    assert metrics[f"outlier_seq_{other_side}_ratio"] == [[0] * 4, [0] * 4]


@pytest.mark.parametrize(
    ("metric", "low", "high", "under", "over"),
    [
        ("product", 0.7, 2.0, [0, 0], [0, 0]),  # the products are 1.5 and 0.8
        ("product", 0.9, 2.0, [0, 1], [0, 0]),
        ("product", 0.7, 1.4, [0, 0], [1, 0]),
        ("geometric", 0.94, 1.15, [0, 0], [0, 0]),  # 1.5^(1/3) = 1.1447 and 0.8^(1/4) = 0.9457
        ("geometric", 0.94, 1.14, [0, 0], [1, 0]),
        ("geometric", 0.95, 1.15, [0, 1], [0, 0]),
    ],
)
def test_trajectories_are_masked_by_their_product_or_mean(
    metric: str, low: float, high: float, under: list[int], over: list[int]
) -> None:
    name = {"product": "product", "geometric": "geo"}[metric]
    bounds = {f"{name}_mask_low": low, f"{name}_mask_high": high}
    weights, metrics = weight(RATIOS, MASK, sequence_mask_metric=metric, **bounds)
    is_under, is_over = torch.tensor([under, over], dtype=torch.float64)[:, :, None] * MASK
    assert weights == (MASK - is_under - is_over).tolist()
    assert metrics[f"{name}_sequence_mask_under_low_ratio"] == is_under.tolist()
    assert metrics[f"{name}_sequence_mask_over_high_ratio"] == is_over.tolist()
    assert metrics[f"{name}_sequence_mask_masked_ratio"] == (is_under + is_over).tolist()


def test_a_ratio_on_a_threshold_is_inside() -> None:
    log_ratio = torch.tensor([[0.5, 2.0, 0.499, 2.001]], dtype=torch.float64).log()
    config = OffPolicyCorrectionConfig(token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=2.0)
    weights, _ = correction_weights(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio), config)
    assert weights.tolist() == [[1, 1, 0, 0]]


class TestOrder:
    """Each step reads only the tokens that the steps before it kept."""

    def test_outliers_are_found_before_the_token_mask_applies(self) -> None:
        ratios = torch.tensor([[1.0, 50.0]])
        settings = {
            "outlier_token_is_threshold_high": 10.0,
            "token_mask_is_threshold_low": 0.5,
            "token_mask_is_threshold_high": 2.0,
        }
        weights, metrics = weight(ratios, torch.ones(1, 2), **settings)
        assert weights == [[0, 0]]
        assert metrics["outlier_seq_masked_ratio"] == [[1, 1]]
        assert metrics["token_mask_ratio"] == [[0, 0]], "masked once, counted once"

    @pytest.mark.parametrize("ratio_type", ["token", "sequence"])
    def test_masked_tokens_enter_neither_products_nor_counts(self, ratio_type: str) -> None:
        ratios = torch.tensor([[1.5, 50.0, 2.0]])
        settings = {
            "token_mask_is_threshold_low": 0.1,
            "token_mask_is_threshold_high": 10.0,
            "tis_ratio_type": ratio_type,
            "token_tis_ratio_clip_high": 5.0,
            "sequence_tis_ratio_clip_high": 5.0,
            "sequence_mask_metric": "geometric",
            "geo_mask_low": 1.0,
            "geo_mask_high": 1.74,  # above √3, the geometric mean of the remaining ratios
        }
        weights, metrics = weight(ratios, torch.ones(1, 3), **settings)
        assert weights == approx_rows([[1.5, 0.0, 2.0]] if ratio_type == "token" else [[3.0, 0.0, 3.0]])
        name = {"token": "tis_token_clip_high_ratio", "sequence": "tis_seq_clip_high_ratio"}[ratio_type]
        assert metrics[name] == [[0, 0, 0]], "the masked token is above the cap but already removed"

    def test_the_sequence_mask_tests_ratios_before_they_are_capped(self) -> None:
        settings = {
            "tis_ratio_type": "sequence",
            "sequence_tis_ratio_clip_high": 1.5,
            "sequence_mask_metric": "product",
        }
        weights, metrics = weight(torch.tensor([[3.0], [1.9]]), torch.ones(2, 1), **settings)
        assert weights == approx_rows([[0.0], [1.5]])
        assert metrics["tis_seq_clip_high_ratio"] == [[1], [1]], "both are capped before one of them is masked"
        assert metrics["product_sequence_mask_over_high_ratio"] == [[1], [0]]


EVERYTHING = OffPolicyCorrectionConfig(
    tis_ratio_type="sequence",
    sequence_mask_metric="geometric",
    geo_mask_low=0.6,
    geo_mask_high=1.6,
    token_mask_is_threshold_low=0.3,
    token_mask_is_threshold_high=4.0,
    outlier_token_is_threshold_low=0.02,
    outlier_token_is_threshold_high=50.0,
)


def naive_weights(old: list[float], rollout: list[float], mask: list[float]) -> list[float]:
    """Return the weights of one row under `EVERYTHING`, computed in plain loops."""
    ratios = {t: math.exp(old[t] - rollout[t]) for t in range(len(mask)) if mask[t]}
    weights = [0.0] * len(mask)
    if any(ratio < 0.02 or ratio > 50 for ratio in ratios.values()):
        return weights
    ratios = {t: ratio for t, ratio in ratios.items() if 0.3 <= ratio <= 4}
    product = math.prod(ratios.values())
    if not ratios or not 0.6 <= product ** (1 / len(ratios)) <= 1.6:
        return weights
    for t in ratios:
        weights[t] = min(product, 5.0)
    return weights


token = st.tuples(st.sampled_from([-4.5, -1.3, -0.4, -0.1, 0.05, 0.3, 0.7, 1.5, 4.5]), st.booleans())
rows = st.lists(st.lists(token, min_size=4, max_size=4), min_size=1, max_size=6)


def as_tensors(drawn: list[list[tuple[float, bool]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return old log-probs, rollout log-probs and mask, (B, 4) each."""
    log_ratio = torch.tensor([[value for value, _ in row] for row in drawn], dtype=torch.float64)
    mask = torch.tensor([[float(is_trained) for _, is_trained in row] for row in drawn], dtype=torch.float64)
    return log_ratio - 2.0, torch.full_like(log_ratio, -2.0), mask


@given(rows)
def test_weights_equal_those_of_plain_loops(drawn: list[list[tuple[float, bool]]]) -> None:
    old, rollout, mask = as_tensors(drawn)
    weights, _ = correction_weights(old, rollout, mask, EVERYTHING)
    expected = [naive_weights(*(tensor[row].tolist() for tensor in (old, rollout, mask))) for row in range(len(old))]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)


@given(drawn=rows, part_size=st.integers(1, 6))
def test_micro_batches_and_padding_do_not_matter(drawn: list[list[tuple[float, bool]]], part_size: int) -> None:
    old, rollout, mask = as_tensors(drawn)
    whole, metrics = correction_weights(old, rollout, mask, EVERYTHING)
    padded = (torch.nn.functional.pad(tensor, (0, 2)).split(part_size) for tensor in (old, rollout, mask))
    parts = [correction_weights(*part, EVERYTHING) for part in zip(*padded, strict=True)]
    torch.testing.assert_close(torch.cat([weights for weights, _ in parts])[:, :4], whole, atol=1e-6, rtol=0)
    for name, values in metrics.items():
        torch.testing.assert_close(torch.cat([part_metrics[name] for _, part_metrics in parts])[:, :4], values)


@given(drawn=rows, ratio_type=st.sampled_from([None, "token", "sequence"]))
def test_values_outside_the_mask_have_no_effect(
    drawn: list[list[tuple[float, bool]]], ratio_type: Literal["token", "sequence"] | None
) -> None:
    old, rollout, mask = as_tensors(drawn)
    config = EVERYTHING.model_copy(update={"tis_ratio_type": ratio_type})
    for poison in (math.nan, math.inf, 1e4):
        poisoned = old.where(mask > 0, poison).requires_grad_()
        weights, metrics = correction_weights(poisoned, rollout.where(mask > 0, poison), mask, config)
        expected, expected_metrics = correction_weights(old, rollout, mask, config)
        assert not weights.requires_grad
        assert torch.equal(weights, expected)
        assert all(torch.equal(values, expected_metrics[name]) for name, values in metrics.items())
        assert all((values[mask == 0] == 0).all() for values in (weights, *metrics.values()))


def test_extreme_products_stay_finite_and_on_the_right_side_of_the_bounds() -> None:
    log_ratio = torch.full((3, 1000), 500.0)
    log_ratio[1] *= -1
    log_ratio[2, ::2] *= -1  # the product of this row is 1
    rollout, mask = torch.full_like(log_ratio, -600.0), torch.ones_like(log_ratio)
    config = OffPolicyCorrectionConfig(tis_ratio_type="sequence")
    weights, _ = correction_weights(rollout + log_ratio, rollout, mask, config)
    torch.testing.assert_close(weights, torch.tensor([[5.0], [0.0], [1.0]]).expand(3, 1000))
    config = OffPolicyCorrectionConfig(sequence_mask_metric="product")
    _, metrics = correction_weights(rollout + log_ratio, rollout, mask, config)
    assert metrics["product_sequence_mask_over_high_ratio"].mean(dim=1).tolist() == [1, 0, 0]
    assert metrics["product_sequence_mask_under_low_ratio"].mean(dim=1).tolist() == [0, 1, 0]


def test_one_token_changes_a_product_by_at_most_e_to_the_20() -> None:
    log_ratio = torch.tensor([[500.0, -20.0], [-500.0, 20.0]])
    config = OffPolicyCorrectionConfig(tis_ratio_type="sequence")
    weights, _ = correction_weights(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio), config)
    assert weights.tolist() == [[1, 1], [1, 1]]


def test_the_gap_by_hand() -> None:
    old = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, 5.0, -0.5]], dtype=torch.float64, requires_grad=True)
    ratios = torch.tensor([[2.0, 0.5, 1.0], [1.0, 1.0, 4.0]], dtype=torch.float64)
    rollout = old.detach() - ratios.log()
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    log_2 = math.log(2)
    gaps, kept = [log_2, log_2, 0, 2 * log_2], [2.0, 0.5, 1.0, 4.0]
    assert rollout_gap(old, rollout, mask) == pytest.approx(
        {
            "rollout_train_logprobs_abs_diff_mean": log_2,
            "rollout_train_logprobs_abs_diff_std": math.sqrt(sum((gap - log_2) ** 2 for gap in gaps) / 4),
            "rollout_train_logprobs_abs_diff_max": 2 * log_2,
            "rollout_train_logprobs_abs_diff_min": 0.0,
            "is_ratio_mean": 7.5 / 4,
            "is_ratio_std": math.sqrt(sum((ratio - 7.5 / 4) ** 2 for ratio in kept) / 4),
            "is_ratio_max": 4.0,
            "is_ratio_min": 0.5,
            "rollout_train_kl": sum(ratio - math.log(ratio) - 1 for ratio in kept) / 4,
            "is_ratio_ess_share": 7.5**2 / (4 * (4 + 0.25 + 1 + 16)),
        }
    )


def test_the_gap_of_one_token_has_zero_std() -> None:
    metrics = rollout_gap(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1))
    assert metrics.keys() == set(ROLLOUT_GAP_METRICS)  # reserved: a loss must not report them, see test_contract.py
    assert metrics["is_ratio_std"] == 0
    assert metrics["is_ratio_ess_share"] == 1


def test_without_tokens_there_are_no_gap_metrics() -> None:
    assert rollout_gap(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)) == {}


def test_a_huge_gap_gives_finite_metrics() -> None:
    metrics = rollout_gap(torch.tensor([[-1.0, 0.0]]), torch.tensor([[-1.0, -500.0]]), torch.ones(1, 2))
    assert metrics["rollout_train_logprobs_abs_diff_max"] == 500
    assert metrics["is_ratio_max"] == pytest.approx(math.exp(20))
    assert metrics["is_ratio_ess_share"] == pytest.approx(0.5)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("advantage", "drift", "is_kept"),
    [  # drift: decrease of the log-prob since the token was sampled
        (-1.0, 0.3, False),
        (-1.0, 0.15, True),
        (-1.0, -0.3, True),  # a mistake that became likelier stays on policy
        (1.0, 0.3, True),
        (0.0, 0.3, True),
    ],
)
def test_off_policy_mistakes_are_masked(advantage: float, drift: float, is_kept: bool) -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    log_probs = torch.tensor([[-1.0, math.nan, -2.0]], requires_grad=True)
    behavior = torch.tensor([[-1.0 + 1.5 * drift, 7.0, -2.0 + 0.5 * drift]])
    advantages = torch.tensor([[2 * advantage, math.nan, 0.0]])
    kept = sequence_mask(log_probs, behavior, advantages, mask, threshold=0.2)
    assert kept.tolist() == [[float(is_kept), 0.0, float(is_kept)]]
    assert not kept.requires_grad


def test_each_trajectory_is_masked_on_its_own() -> None:
    log_probs = torch.tensor([[-3.0, -3.0], [-1.0, -1.0], [-9.0, -9.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    kept = sequence_mask(log_probs, torch.full((3, 2), -1.0), torch.full((3, 2), -1.0), mask, threshold=0.5)
    assert kept.tolist() == [[0, 0], [1, 0], [0, 0]]
