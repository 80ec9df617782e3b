"""Our corrections for the rollout–policy mismatch against verl's rollout correction.

verl's rejection uses k1 = log(π_rollout / π_old), so its thresholds are bounds of 1/κ: [low, high] here is
[1/high, 1/low] there.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_kit.differential.batches import EXACT, NEAR, Batch, assert_same, batches
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

from skyrl_train.algorithms.off_policy import add_rollout_gap, correction_weights
from skyrl_train.config.algorithm import OffPolicyCorrectionConfig
from skyrl_train.types import MetricSums

LOW, HIGH = 0.6, 1.5


def ours(batch: Batch, **settings: object) -> torch.Tensor:
    config = OffPolicyCorrectionConfig.model_validate(settings)
    return correction_weights(batch.log_probs, batch.old_log_probs, batch.mask, config)[0]


def truncated(batch: Batch, level: str) -> torch.Tensor:
    log_ratio = batch.log_probs - batch.old_log_probs
    return compute_rollout_correction_weights(log_ratio, batch.mask, level, 1.5)[0]


def rejected(batch: Batch, by: str, thresholds: str) -> torch.Tensor:
    log_ratio = batch.log_probs - batch.old_log_probs
    return compute_rollout_rejection_mask(log_ratio, batch.mask, by, thresholds)[0]


def all_tokens(batch: Batch) -> torch.Tensor:
    return torch.ones_like(batch.mask)


@given(batch=st.sampled_from([0.1, 1.0, 10.0]).flatmap(batches))
def test_truncated_importance_sampling_of_tokens(batch: Batch) -> None:
    """Batches include log-ratios of tens of nats: both sides clamp them to ±20."""
    theirs = truncated(batch, "token")
    assert_same(ours(batch, tis_ratio_type="token", token_tis_ratio_clip_high=1.5), theirs, all_tokens(batch))


@given(batch=batches())
def test_truncated_importance_sampling_of_sequences(batch: Batch) -> None:
    """Trajectories are less than 20 nats apart; beyond that verl clamps the sum, and we the log-ratio of each token."""
    theirs = truncated(batch, "sequence")
    assert_same(ours(batch, tis_ratio_type="sequence", sequence_tis_ratio_clip_high=1.5), theirs, all_tokens(batch))


@given(batch=batches())
def test_token_mask(batch: Batch) -> None:
    theirs = rejected(batch, "token_k1", f"{1 / HIGH}_{1 / LOW}")
    settings = {"token_mask_is_threshold_low": LOW, "token_mask_is_threshold_high": HIGH}
    assert_same(ours(batch, **settings), theirs, all_tokens(batch))


@pytest.mark.parametrize(
    ("metric", "statistic", "prefix"), [("product", "seq_sum_k1", "product"), ("geometric", "seq_mean_k1", "geo")]
)
@given(batch=batches())
def test_sequence_mask(metric: str, statistic: str, prefix: str, batch: Batch) -> None:
    theirs = rejected(batch, statistic, f"{1 / HIGH}_{1 / LOW}")
    settings = {"sequence_mask_metric": metric, f"{prefix}_mask_low": LOW, f"{prefix}_mask_high": HIGH}
    assert_same(ours(batch, **settings), theirs, all_tokens(batch))


@given(batch=batches())
def test_outlier_tokens(batch: Batch) -> None:
    """The bounds are symmetric around 1 in log space, because verl bounds the largest ½ log² κ of a trajectory."""
    theirs = rejected(batch, "seq_max_k2", str(math.log(2.5) ** 2 / 2))
    settings = {"outlier_token_is_threshold_low": 1 / 2.5, "outlier_token_is_threshold_high": 2.5}
    assert_same(ours(batch, **settings), theirs, all_tokens(batch))


@given(batch=batches())
def test_metrics(batch: Batch) -> None:
    """The threshold of verl's weights is out of reach, so its statistics include all of them."""
    sums = MetricSums()
    add_rollout_gap(sums, batch.log_probs, batch.old_log_probs, batch.mask)
    gap = sums.metrics().numbers()
    theirs = compute_offpolicy_metrics(batch.log_probs, batch.old_log_probs, batch.mask)
    assert gap["rollout_train_kl"] == pytest.approx(theirs["k3_kl"], rel=NEAR, abs=NEAR)
    log_ratio = batch.log_probs - batch.old_log_probs
    _, weights = compute_rollout_correction_weights(log_ratio, batch.mask, "token", 1e9)
    for name, their_name in (
        ("is_ratio_mean", "rollout_is_mean"),
        ("is_ratio_min", "rollout_is_min"),
        ("is_ratio_max", "rollout_is_max"),
        ("is_ratio_ess_share", "rollout_is_eff_sample_size"),
    ):
        assert gap[name] == pytest.approx(weights[their_name], rel=NEAR, abs=EXACT)
