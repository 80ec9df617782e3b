"""Our KL estimates and KL controller against those of verl."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_kit.differential.batches import EXACT, Batch, assert_same, batches
from verl.trainer.ppo import core_algos as verl

from skyrl_train.algorithms.kl import KLController, compute_approx_kl
from skyrl_train.algorithms.reward_pipeline import penalize_rewards
from skyrl_train.config.algorithm import KLEstimator

ESTIMATORS = ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(batch=st.sampled_from([1.0, 30.0]).flatmap(batches))
def test_estimators(estimator: KLEstimator, batch: Batch) -> None:
    """Batches include log-probs tens of nats apart: both sides clamp k3 to the same bounds."""
    our_log_probs, their_log_probs = (batch.log_probs.clone().requires_grad_() for _ in range(2))
    ours = compute_approx_kl(our_log_probs, batch.ref_log_probs, None, estimator)
    theirs = verl.kl_penalty(their_log_probs, batch.ref_log_probs, estimator)
    assert_same(ours, theirs, torch.ones_like(batch.mask))
    our_gradient = torch.autograd.grad(ours.sum(), our_log_probs)[0]
    assert_same(our_gradient, torch.autograd.grad(theirs.sum(), their_log_probs)[0], torch.ones_like(batch.mask))


@given(batch=batches())
def test_penalty_in_the_rewards(batch: Batch) -> None:
    """The estimator is k1, the one in verl's function."""
    ours, _ = penalize_rewards(batch.rewards, batch.log_probs, batch.ref_log_probs, batch.mask, 0.3, "k1")
    theirs = verl.compute_rewards(batch.rewards, batch.log_probs, batch.ref_log_probs, 0.3)
    assert_same(ours, theirs, batch.mask)


@given(
    divergences=st.lists(st.floats(0, 10), min_size=1, max_size=20),
    target=st.floats(0.01, 5),
    n_trajectories=st.integers(1, 1000),
)
def test_adaptive_controller(divergences: list[float], target: float, n_trajectories: int) -> None:
    """Steps have at most as many trajectories as the horizon; beyond it we bound the change of the weight."""
    ours = KLController(0.2, target, horizon=1000)
    theirs = verl.AdaptiveKLController(0.2, target, 1000)
    for divergence in divergences:
        ours.update(divergence, n_trajectories)
        theirs.update(divergence, n_trajectories)
        assert ours.value == pytest.approx(theirs.value, rel=EXACT)
