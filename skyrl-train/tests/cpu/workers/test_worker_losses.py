"""Terms of the mini-batch loss: none depends on micro-batches, for any loss."""

from typing import Any

import pytest
import torch
from train_kit.batches import off_policy_batch
from train_kit.workers import KL_COEF, gradients, largest_difference, make_worker, rounding_tolerance
from transformers import PreTrainedModel

from skyrl_train.algorithms.registry import PolicyLoss
from skyrl_train.compat.skyrl.algorithms import reduce_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError
from skyrl_train.types import TrainingBatch

N_ROWS = 9


@pytest.fixture
def batch(policy: PreTrainedModel) -> TrainingBatch:
    return off_policy_batch(policy, seed=11)


def train(
    policy: PreTrainedModel,
    batch: TrainingBatch,
    loss: str | PolicyLoss = "regular",
    n_rows: int = N_ROWS,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradient and the metrics of a mini-batch, computed `n_rows` at a time."""
    torch.manual_seed(0)  # clip_cov chooses tokens at random
    worker = make_worker(policy, loss, micro_train_batch_size_per_gpu=n_rows, algorithm=options)
    policy.zero_grad()
    metrics = worker.forward_backward(batch)
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}, metrics


def assert_same_gradients(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert max(gradient.abs().max() for gradient in left.values()) > 1e-5
    assert largest_difference(left, right) < rounding_tolerance(left)


def scalar_reinforce(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float]:
    """A policy loss in the style of SkyRL scripts: a scalar and a number."""
    return reduce_loss(-advantages * log_probs, loss_mask, config.loss_reduction, config.max_seq_len), 0.25


def test_a_scalar_loss_equals_its_per_token_form_and_does_not_depend_on_micro_batches(
    policy: PreTrainedModel, batch: TrainingBatch
) -> None:
    """The gradient specification has the losses of the package."""
    whole, metrics = train(policy, batch, scalar_reinforce)
    by_token, token_metrics = train(policy, batch, "policy_gradient", 5)
    assert_same_gradients(by_token, whole)
    assert metrics["policy/ppo_clip_ratio"] == pytest.approx(0.25)
    assert metrics["policy/policy_loss"] == pytest.approx(token_metrics["policy/policy_loss"])
    for n_rows in (4, 1):
        divided, other_metrics = train(policy, batch, scalar_reinforce, n_rows)
        assert_same_gradients(whole, divided)
        assert other_metrics == pytest.approx(metrics, abs=1e-5)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "user-defined mean"])
def test_masked_rows_do_not_matter_to_whole_batch_losses(
    policy: PreTrainedModel, batch: TrainingBatch, name: str
) -> None:
    def mean(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, float]:
        return (-log_probs * advantages).mean(), 0.0

    batch.loss_mask[::2] = 0
    chosen = {"clip_cov": {"clip_ratio": 0.2, "clip_cov_lb": -0.5}, "kl_cov": {"kl_cov_frac": 0.2}}
    loss = name if name in chosen else mean
    assert_same_gradients(*(train(policy, batch, loss, n_rows, **chosen)[0] for n_rows in (N_ROWS, 2)))
    if name == "clip_cov":
        worker = make_worker(policy, loss, algorithm=chosen)
        results = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            results.append(gradients(worker, batch))
        assert largest_difference(*results) > 1e-4, "nothing was chosen at random"


def test_metrics_of_a_loss_do_not_affect_the_kl_loss(policy: PreTrainedModel, batch: TrainingBatch) -> None:
    def with_metric(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return 0 * log_probs, {"my_kl": log_probs.detach()}

    gradient, metrics = train(policy, batch, with_metric)
    assert max(values.abs().max() for values in gradient.values()) > 1e-5
    assert metrics["policy/final_loss"] == pytest.approx(KL_COEF * metrics["policy/policy_kl"])


def test_a_correction_without_rollout_log_probs_is_refused(policy: PreTrainedModel, batch: TrainingBatch) -> None:
    batch.rollout_logprobs = None
    with pytest.raises(ConfigError, match="needs the engine's log-probs"):
        train(policy, batch, off_policy_correction={"tis_ratio_type": "token"})


def test_the_reference_enters_the_loss_only_with_use_kl_loss(policy: PreTrainedModel, batch: TrainingBatch) -> None:
    in_reward = {"use_kl_loss": False, "use_kl_in_reward": True}
    gradient, metrics = train(policy, batch, **in_reward)
    assert metrics["policy/policy_kl"] > 0
    batch.ref_logprobs = None
    assert largest_difference(gradient, train(policy, batch, **in_reward)[0]) == 0
