"""Our policy losses against those of verl: value over the batch and gradient in the log-probs, in float64."""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_kit.differential.batches import EXACT, NEAR, Batch, batches
from train_kit.differential.verl import AGGREGATION, actor, assert_same_loss, clips, our_loss, their_loss
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos as verl
from verl.workers.config import ActorConfig

from skyrl_train.algorithms.losses import clipped_surrogate, value_loss
from skyrl_train.algorithms.off_policy import correction_weights
from skyrl_train.compat.skyrl.algorithms import reduce_loss
from skyrl_train.config.algorithm import (
    AlgorithmConfig,
    CispoConfig,
    ClipCovConfig,
    DppoConfig,
    DroConfig,
    GmpoConfig,
    KLCovConfig,
    LossReduction,
    OffPolicyCorrectionConfig,
    RolloutIsConfig,
)

LOW, HIGH = 0.2, 0.28
OURS = AlgorithmConfig(eps_clip_low=LOW, eps_clip_high=HIGH, clip_ratio_c=3.0)
THEIRS = clips(LOW, HIGH, clip_ratio_c=3.0)
FAR = 10.0  # nats per token: some log-ratios exceed the ±20 to which both sides clamp them

drifts = st.sampled_from([1.0, FAR]).flatmap(lambda drift: batches(drift))


@dataclass(frozen=True)
class Case:
    """A loss by our name and settings, and by those of verl."""

    loss: str
    ours: AlgorithmConfig
    their_loss: str
    theirs: ActorConfig
    reduction: LossReduction = "token_mean"
    tolerance: float = EXACT
    by_row: bool = False  # all tokens of a row have the same advantage
    is_near: bool = False  # log-ratios stay below the bound to which only we clamp them


def covariance_clip(share: float) -> Case:
    settings = ClipCovConfig(clip_ratio=share, clip_cov_lb=0.1, clip_cov_ub=1.0)
    their_settings = {"clip_cov_ratio": share, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0}
    theirs = actor(their_settings, clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH)
    ours = AlgorithmConfig(eps_clip_low=LOW, eps_clip_high=HIGH, clip_cov=settings)
    return Case("clip_cov", ours, "clip_cov", theirs, is_near=True)


def covariance_penalty(share: float) -> Case:
    ours = AlgorithmConfig(kl_cov=KLCovConfig(kl_cov_frac=share, ppo_kl_coef=0.7))
    return Case("kl_cov", ours, "kl_cov", actor({"kl_cov_ratio": share, "ppo_kl_coef": 0.7}), is_near=True)


def divergence(distance: Literal["binary_tv", "binary_kl"], name: str) -> Case:
    """The bound of the ratio is `clip_ratio_c` in verl and `max_ratio` here."""
    settings = DppoConfig(dppo_type=distance, delta_low=LOW, delta_high=HIGH, max_ratio=5.0)
    return Case("dppo", AlgorithmConfig(dppo=settings), name, clips(LOW, HIGH, clip_ratio_c=5.0))


OUR_CISPO = AlgorithmConfig(cispo=CispoConfig(cispo_eps_clip_low=LOW, cispo_eps_clip_high=HIGH))
UNREACHED = 1e30  # a bound that no ratio reaches
CASES = {
    **{
        f"dual clip, {reduction}": Case(
            "dual_clip", OURS, "vanilla", THEIRS, reduction, NEAR if reduction == "sequence_mean" else EXACT
        )
        for reduction in AGGREGATION
    },
    "regular": Case("regular", OURS, "vanilla", clips(LOW, HIGH, clip_ratio_c=UNREACHED)),
    "importance sampling": Case("importance_sampling", OURS, "vanilla", clips(1.0, UNREACHED, clip_ratio_c=UNREACHED)),
    "REINFORCE": Case("policy_gradient", OURS, "gpg", THEIRS),
    "CISPO": Case("cispo", OUR_CISPO, "cispo", THEIRS),
    "SAPO": Case("sapo", OURS, "sapo", THEIRS, "sequence_mean", NEAR),
    # verl has the form of gspo_token, which equals gspo if all tokens of a row have the same advantage
    "GSPO": Case("gspo", OURS, "gspo", THEIRS, "sequence_mean", NEAR, by_row=True, is_near=True),
    "GSPO by token": Case("gspo_token", OURS, "gspo", THEIRS, "sequence_mean", NEAR),
    "GMPO": Case(
        "gmpo",
        AlgorithmConfig(gmpo=GmpoConfig(log_ratio_clip=0.4)),
        "geo_mean",
        clips(0.4, 0.4),
        "sequence_mean",
        NEAR,
        by_row=True,
        is_near=True,
    ),
    "DRO": Case("dro", AlgorithmConfig(dro=DroConfig(beta=0.3)), "dro", actor({"dro_beta": 0.3})),
    "DPPO, total variation": divergence("binary_tv", "dppo_tv"),
    "DPPO, KL": divergence("binary_kl", "dppo_kl"),
    "KL-Cov, 1%": covariance_penalty(0.01),
    "KL-Cov, 20%": covariance_penalty(0.2),
    "KL-Cov, 100%": covariance_penalty(1.0),
    "Clip-Cov, 100%": covariance_clip(1.0),  # smaller shares are sampled
}


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_losses(name: str, data: st.DataObject) -> None:
    """Every row has a token, because verl counts rows without one."""
    case = CASES[name]
    batch = data.draw(batches() if case.is_near else drifts)
    advantages = batch.row_advantages if case.by_row else batch.advantages
    ours = our_loss(case.loss, batch, advantages, case.ours, case.reduction)
    theirs = their_loss(case.their_loss, batch, advantages, case.theirs, case.reduction)
    assert_same_loss(ours, theirs, case.tolerance)


@given(batch=batches(), share=st.sampled_from([0.01, 0.2, 0.5]))
def test_clip_cov_masks_as_many_tokens(batch: Batch, share: float) -> None:
    """For shares below 1, compare only the number of tokens without a gradient."""
    case = covariance_clip(share)
    _, our_gradient = our_loss("clip_cov", batch, batch.advantages, case.ours)
    _, their_gradient = their_loss("clip_cov", batch, batch.advantages, case.theirs)
    assert (our_gradient == 0).sum() == (their_gradient == 0).sum()


@given(batch=batches())
def test_rollout_is(batch: Batch) -> None:
    """This is REINFORCE of verl in bypass mode; a token is on policy, because verl divides by 0 if all are masked."""
    batch.log_probs[0, 0] = batch.old_log_probs[0, 0]
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold="0.5_2.0", bypass_mode=True, loss_type="reinforce"
    )
    theirs = actor({"loss_mode": "bypass_mode", "rollout_correction": correction})
    ours = AlgorithmConfig(rollout_is=RolloutIsConfig(ratio_low=0.5, ratio_high=2.0))
    assert_same_loss(
        our_loss("rollout_is", batch, batch.advantages, ours),
        their_loss("bypass_mode", batch, batch.advantages, theirs),
        EXACT,
    )


@given(batch=drifts)
def test_truncated_importance_sampling_on_a_loss(batch: Batch) -> None:
    """Apply our weights of the old policy relative to the engine to both losses."""
    weights, _ = correction_weights(
        batch.old_log_probs, batch.ref_log_probs, batch.mask, OffPolicyCorrectionConfig(tis_ratio_type="token")
    )
    our_log_probs, their_log_probs = (batch.log_probs.clone().requires_grad_() for _ in range(2))
    loss, _ = clipped_surrogate(our_log_probs, batch.old_log_probs, batch.advantages, OURS, batch.mask, None)
    ours = reduce_loss(loss * weights, batch.mask, "token_mean")
    theirs, _ = verl.compute_policy_loss_vanilla(
        batch.old_log_probs,
        their_log_probs,
        batch.advantages,
        batch.mask,
        config=clips(LOW, HIGH, clip_ratio_c=1e30),
        rollout_is_weights=weights,
    )
    assert_same_loss(
        (ours, torch.autograd.grad(ours, our_log_probs)[0]),
        (theirs, torch.autograd.grad(theirs, their_log_probs)[0]),
        EXACT,
    )


@given(batch=batches(), value_clip=st.sampled_from([0.05, 0.2, 1.0]))
def test_value_loss(batch: Batch, value_clip: float) -> None:
    returns, old_values = batch.rewards, batch.values + batch.advantages / 4
    our_values, their_values = (batch.values.clone().requires_grad_() for _ in range(2))
    loss, _ = value_loss(our_values, old_values, returns, value_clip)
    ours = reduce_loss(loss, batch.mask, "token_mean")
    theirs, _ = verl.compute_value_loss(their_values, returns, old_values, batch.mask, value_clip)
    assert_same_loss(
        (ours, torch.autograd.grad(ours, our_values)[0]), (theirs, torch.autograd.grad(theirs, their_values)[0]), EXACT
    )


@pytest.mark.parametrize("reduction", AGGREGATION)
@given(batch=batches(), n_empty_rows=st.integers(0, 2))
def test_reduction(reduction: LossReduction, batch: Batch, n_empty_rows: int) -> None:
    """Batches include rows without tokens, which neither side counts."""
    mask = batch.mask.clone()
    mask[1 : 1 + n_empty_rows] = 0
    ours = reduce_loss(batch.advantages, mask, reduction, max_seq_len=100)
    theirs = verl.agg_loss(batch.advantages, mask, AGGREGATION[reduction], loss_scale_factor=100)
    torch.testing.assert_close(ours, theirs, rtol=NEAR, atol=NEAR)
