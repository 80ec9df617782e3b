"""Our policy losses against those of verl: value over the batch and gradient in the log-probs, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_kit.differential.batches import EXACT, NEAR, Batch, batches
from train_kit.differential.verl import AGGREGATION, actor, assert_same_loss, clips, our_loss, their_loss
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos as verl

from skyrl_train.algorithms.losses import clipped_surrogate, value_loss
from skyrl_train.algorithms.off_policy import correction_weights
from skyrl_train.algorithms.reduction import reduce_loss
from skyrl_train.config.algorithm import AlgorithmConfig, LossReduction
from skyrl_train.config.policy_loss import (
    CispoConfig,
    ClipCovConfig,
    DppoConfig,
    DroConfig,
    GmpoConfig,
    KLCovConfig,
    OffPolicyCorrectionConfig,
    RolloutIsConfig,
)

LOW, HIGH = 0.2, 0.28
OURS = AlgorithmConfig(eps_clip_low=LOW, eps_clip_high=HIGH, clip_ratio_c=3.0)
THEIRS = clips(LOW, HIGH, clip_ratio_c=3.0)
FAR = 10.0  # nats per token: some log-ratios exceed the ±20 to which both sides clamp them

drifts = st.sampled_from([1.0, FAR]).flatmap(lambda drift: batches(drift))


@pytest.mark.parametrize("reduction", AGGREGATION)
@given(batch=drifts)
def test_dual_clip_in_every_reduction(reduction: LossReduction, batch: Batch) -> None:
    ours = our_loss("dual_clip", batch, batch.advantages, OURS, reduction)
    theirs = their_loss("vanilla", batch, batch.advantages, THEIRS, reduction)
    assert_same_loss(ours, theirs, NEAR if reduction == "sequence_mean" else EXACT)


@given(batch=drifts)
def test_regular(batch: Batch) -> None:
    """verl always applies the dual clip, so its bound is set to a value that no ratio reaches."""
    theirs = their_loss("vanilla", batch, batch.advantages, clips(LOW, HIGH, clip_ratio_c=1e30))
    assert_same_loss(our_loss("regular", batch, batch.advantages, OURS), theirs, EXACT)


@given(batch=drifts)
def test_importance_sampling(batch: Batch) -> None:
    """verl has no loss of that name, so its clipped loss gets bounds that no ratio reaches."""
    theirs = their_loss("vanilla", batch, batch.advantages, clips(1.0, 1e30, clip_ratio_c=1e30))
    assert_same_loss(our_loss("importance_sampling", batch, batch.advantages, OURS), theirs, EXACT)


@given(batch=drifts)
def test_reinforce(batch: Batch) -> None:
    """This loss is called gpg in verl."""
    theirs = their_loss("gpg", batch, batch.advantages, THEIRS)
    assert_same_loss(our_loss("policy_gradient", batch, batch.advantages, OURS), theirs, EXACT)


@given(batch=drifts)
def test_cispo(batch: Batch) -> None:
    ours = AlgorithmConfig(cispo=CispoConfig(cispo_eps_clip_low=LOW, cispo_eps_clip_high=HIGH))
    theirs = their_loss("cispo", batch, batch.advantages, THEIRS)
    assert_same_loss(our_loss("cispo", batch, batch.advantages, ours), theirs, EXACT)


@given(batch=drifts)
def test_sapo(batch: Batch) -> None:
    theirs = their_loss("sapo", batch, batch.advantages, THEIRS, "sequence_mean")
    assert_same_loss(our_loss("sapo", batch, batch.advantages, OURS, "sequence_mean"), theirs, NEAR)


@given(batch=batches())
def test_gspo(batch: Batch) -> None:
    """verl has the form of gspo_token, which equals gspo if all tokens of a row have the same advantage."""
    theirs = their_loss("gspo", batch, batch.row_advantages, THEIRS, "sequence_mean")
    assert_same_loss(our_loss("gspo", batch, batch.row_advantages, OURS, "sequence_mean"), theirs, NEAR)


@given(batch=drifts)
def test_gspo_token(batch: Batch) -> None:
    theirs = their_loss("gspo", batch, batch.advantages, THEIRS, "sequence_mean")
    assert_same_loss(our_loss("gspo_token", batch, batch.advantages, OURS, "sequence_mean"), theirs, NEAR)


@given(batch=batches())
def test_gmpo(batch: Batch) -> None:
    """Every row has a token, because verl counts rows without one; ratios stay below e^10, where we clamp them."""
    ours = AlgorithmConfig(gmpo=GmpoConfig(log_ratio_clip=0.4))
    theirs = their_loss("geo_mean", batch, batch.row_advantages, clips(0.4, 0.4))
    assert_same_loss(our_loss("gmpo", batch, batch.row_advantages, ours, "sequence_mean"), theirs, NEAR)


@given(batch=drifts)
def test_dro(batch: Batch) -> None:
    theirs = their_loss("dro", batch, batch.advantages, actor({"dro_beta": 0.3}))
    assert_same_loss(our_loss("dro", batch, batch.advantages, AlgorithmConfig(dro=DroConfig(beta=0.3))), theirs, EXACT)


@pytest.mark.parametrize(("distance", "name"), [("binary_tv", "dppo_tv"), ("binary_kl", "dppo_kl")])
@given(batch=drifts)
def test_dppo(distance: str, name: str, batch: Batch) -> None:
    """The bound of the ratio is `clip_ratio_c` in verl and `max_ratio` here."""
    settings = DppoConfig(dppo_type=distance, delta_low=LOW, delta_high=HIGH, max_ratio=5.0)
    theirs = their_loss(name, batch, batch.advantages, clips(LOW, HIGH, clip_ratio_c=5.0))
    assert_same_loss(our_loss("dppo", batch, batch.advantages, AlgorithmConfig(dppo=settings)), theirs, EXACT)


@given(batch=batches(), share=st.sampled_from([0.01, 0.2, 1.0]))
def test_kl_cov(batch: Batch, share: float) -> None:
    """Log-ratios stay below 20, where we clamp them and verl does not."""
    ours = AlgorithmConfig(kl_cov=KLCovConfig(kl_cov_frac=share, ppo_kl_coef=0.7))
    theirs = their_loss("kl_cov", batch, batch.advantages, actor({"kl_cov_ratio": share, "ppo_kl_coef": 0.7}))
    assert_same_loss(our_loss("kl_cov", batch, batch.advantages, ours), theirs, EXACT)


@given(batch=batches())
def test_clip_cov_of_all_candidates(batch: Batch) -> None:
    """The share is 1, because smaller shares are sampled; log-ratios stay below 20, where we clamp them."""
    ours, theirs = _clip_cov(share=1.0)
    assert_same_loss(
        our_loss("clip_cov", batch, batch.advantages, ours),
        their_loss("clip_cov", batch, batch.advantages, theirs),
        EXACT,
    )


@given(batch=batches(), share=st.sampled_from([0.01, 0.2, 0.5]))
def test_clip_cov_masks_as_many_tokens(batch: Batch, share: float) -> None:
    """For shares below 1, compare only the number of tokens without a gradient."""
    ours, theirs = _clip_cov(share)
    _, our_gradient = our_loss("clip_cov", batch, batch.advantages, ours)
    _, their_gradient = their_loss("clip_cov", batch, batch.advantages, theirs)
    assert (our_gradient == 0).sum() == (their_gradient == 0).sum()


def _clip_cov(share: float) -> tuple[AlgorithmConfig, object]:
    settings = ClipCovConfig(clip_ratio=share, clip_cov_lb=0.1, clip_cov_ub=1.0)
    their_settings = {"clip_cov_ratio": share, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0}
    theirs = actor(their_settings, clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH)
    return AlgorithmConfig(eps_clip_low=LOW, eps_clip_high=HIGH, clip_cov=settings), theirs


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
        (ours, torch.autograd.grad(ours, our_values)[0]),
        (theirs, torch.autograd.grad(theirs, their_values)[0]),
        EXACT,
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
