"""Our functions against those of TorchRL, which receive only the sampled tokens, because TorchRL ignores gaps."""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given
from tensordict import TensorDict
from torchrl.objectives.llm import DAPO, GRPOLoss, k3_kl_token_estimate
from torchrl.objectives.value.functional import generalized_advantage_estimate, reward2go
from train_kit.differential.batches import EXACT, NEAR, Batch, assert_same, batches

from skyrl_train.algorithms.advantages import gae, reward_to_go
from skyrl_train.algorithms.kl import compute_approx_kl
from skyrl_train.algorithms.losses import clipped_surrogate, importance_sampling
from skyrl_train.algorithms.registry import PolicyLoss
from skyrl_train.compat.skyrl.algorithms import reduce_loss
from skyrl_train.config.algorithm import AlgorithmConfig, LossReduction


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
@given(batch=batches())
def test_gae(gamma: float, lambd: float, batch: Batch) -> None:
    """TorchRL does not whiten, so its advantages are whitened before the comparison."""
    advantages, returns = gae(batch.rewards, response_mask=batch.mask, values=batch.values, gamma=gamma, lambd=lambd)
    raw = torch.zeros_like(batch.rewards)
    for row in range(len(batch.mask)):
        sampled = batch.mask[row] > 0
        values = batch.values[row, sampled][:, None]  # (T, 1)
        done = torch.zeros_like(values, dtype=torch.bool)
        done[-1] = True
        their_advantages, their_returns = generalized_advantage_estimate(
            torch.tensor(gamma, dtype=torch.float64),  # a plain number would be rounded to float32
            torch.tensor(lambd, dtype=torch.float64),
            values,
            values.roll(-1, dims=0),  # the last entry, which wraps around, is not read
            batch.rewards[row, sampled][:, None],
            done,
        )
        raw[row, sampled] = their_advantages[:, 0]
        assert_same(returns[row, sampled], their_returns[:, 0], torch.ones(len(values)))
    sampled = raw[batch.mask > 0]
    assert_same(advantages, (raw - sampled.mean()) / (sampled.var() + 1e-8).sqrt(), batch.mask, NEAR)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@given(batch=batches())
def test_reward_to_go(gamma: float, batch: Batch) -> None:
    """TorchRL drops discounts below 1e-7, which seven tokens do not reach."""
    ours = reward_to_go(batch.rewards, batch.mask, gamma)
    for row in range(len(batch.mask)):
        rewards = batch.rewards[row, batch.mask[row] > 0][:, None]  # (T, 1)
        done = torch.zeros_like(rewards, dtype=torch.bool)
        done[-1] = True
        theirs = reward2go(rewards, done, gamma)[:, 0]
        assert_same(ours[row, batch.mask[row] > 0], theirs, torch.ones(len(theirs)))


@given(batch=batches())
def test_k3(batch: Batch) -> None:
    """Log-probs differ by less than 2.5 nats, because we clamp the estimate to 10 beyond that."""
    reference = batch.log_probs + (batch.ref_log_probs - batch.log_probs).clamp(-2.5, 2.5)
    ours = compute_approx_kl(batch.log_probs, reference)
    assert_same(ours, k3_kl_token_estimate(reference, batch.log_probs), torch.ones_like(batch.mask))


@dataclass
class KnownTokens:
    """A distribution with given log-probs, for the loss of TorchRL."""

    log_probs: torch.Tensor
    mask: torch.Tensor

    def log_prob(self, _tokens: torch.Tensor) -> torch.Tensor:
        return self.log_probs


class KnownPolicy(torch.nn.Module):
    """An actor with given log-probs."""

    def __init__(self, log_probs: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__()
        self.known = KnownTokens(log_probs, mask > 0)

    def get_dist(self, _batch: TensorDict, **_: object) -> KnownTokens:
        return self.known


def assert_same_loss(
    batch: Batch, ours: PolicyLoss, config: AlgorithmConfig, reduction: LossReduction, theirs: type[GRPOLoss]
) -> None:
    our_log_probs, their_log_probs = (batch.log_probs.clone().requires_grad_() for _ in range(2))
    loss, _ = ours(our_log_probs, batch.old_log_probs, batch.advantages, config, batch.mask, None)
    our_loss = reduce_loss(loss, batch.mask, reduction)
    aggregation: Literal["token_mean", "prompt_mean"] = "token_mean" if reduction == "token_mean" else "prompt_mean"
    their_module = theirs(
        KnownPolicy(their_log_probs, batch.mask),
        clip_epsilon=(config.eps_clip_low, config.eps_clip_high),
        aggregation=aggregation,
        entropy_bonus=False,
    ).double()
    tokens = torch.zeros_like(batch.mask).long()
    their_loss = their_module(
        TensorDict(
            {
                ("tokens", "full"): tokens,
                ("log_probs", "full"): batch.old_log_probs,
                "advantage": batch.advantages[..., None],
            },
            batch_size=[len(tokens)],
        )
    ).loss_objective.sum()
    torch.testing.assert_close(our_loss, their_loss, rtol=NEAR, atol=NEAR)
    our_gradient = torch.autograd.grad(our_loss, our_log_probs)[0]
    torch.testing.assert_close(our_gradient, torch.autograd.grad(their_loss, their_log_probs)[0], rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("theirs", [GRPOLoss, DAPO])
@given(batch=batches())
def test_clipped_surrogate(theirs: type[GRPOLoss], reduction: LossReduction, batch: Batch) -> None:
    """Every row has a token, because TorchRL counts rows without one; its prompt_mean is our sequence_mean."""
    config = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.28)
    assert_same_loss(batch, clipped_surrogate, config, reduction, theirs)


@given(batch=batches())
def test_importance_sampling(batch: Batch) -> None:
    """TorchRL has no loss of that name, so its clipped loss gets bounds that no ratio reaches."""
    config = AlgorithmConfig(eps_clip_low=1 - EXACT, eps_clip_high=1e9)
    assert_same_loss(batch, importance_sampling, config, "token_mean", GRPOLoss)
