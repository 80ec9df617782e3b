"""Terms of the mini-batch loss: none depends on micro-batches, for any loss."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from train_kit.batches import off_policy_batch, random_batch
from train_kit.models import perturbed
from train_kit.workers import (
    KL_COEF,
    config,
    gradients,
    largest_difference,
    make_worker,
    rounding_tolerance,
    score_tokens,
)
from transformers import PreTrainedModel

from skyrl_train.algorithms.reduction import reduce_loss
from skyrl_train.algorithms.registry import POLICY_LOSSES
from skyrl_train.config.algorithm import AlgorithmConfig, LossReduction
from skyrl_train.errors import ConfigError


@pytest.mark.parametrize("reduction", get_args(LossReduction))
def test_micro_batches_of_1_3_and_16_rows_have_the_same_gradient(policy: PreTrainedModel, reduction: str) -> None:
    cfg = config()
    batch = random_batch(4, n_prompts=4, n_samples=4)
    batch.ref_logprobs = score_tokens(perturbed(policy, 0.02, seed=1), batch, cfg.trainer).logprobs
    algorithm = {"loss_reduction": reduction, "max_seq_len": 40, "use_entropy_loss": True}
    results = [
        gradients(make_worker(policy, algorithm=algorithm, **split), batch)
        for split in (
            {"micro_train_batch_size_per_gpu": 16},
            {"micro_train_batch_size_per_gpu": 3},
            {"micro_train_batch_size_per_gpu": 1},
            {"max_tokens_per_microbatch": 50},
        )
    ]
    for other in results[1:]:
        assert largest_difference(results[0], other) < rounding_tolerance(results[0])


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


@pytest.mark.parametrize("name", [*POLICY_LOSSES.list_available(), "user-defined scalar loss"])
def test_no_loss_depends_on_micro_batches(policy: PreTrainedModel, name: str) -> None:
    loss = name if name in POLICY_LOSSES.list_available() else scalar_reinforce
    batch = off_policy_batch(policy, 11)
    results = []
    for split in (16, 3, 1):
        torch.manual_seed(0)  # clip_cov chooses tokens at random
        worker = make_worker(policy, loss, micro_train_batch_size_per_gpu=split)
        results.append((gradients(worker, batch), worker.forward_backward(batch)))
    assert max(gradient.abs().max() for gradient in results[0][0].values()) > 1e-4
    for other, metrics in results[1:]:
        assert largest_difference(results[0][0], other) < rounding_tolerance(results[0][0])
        if name != "clip_cov":  # the second pass chooses other tokens
            assert metrics == pytest.approx(results[0][1], abs=1e-5)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "user-defined mean"])
def test_masked_rows_do_not_matter_to_whole_batch_losses(policy: PreTrainedModel, name: str) -> None:
    def mean(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, float]:
        return (-log_probs * advantages).mean(), 0.0

    batch = off_policy_batch(policy, 17)
    batch.loss_mask[::2] = 0
    chosen = {"clip_cov": {"clip_ratio": 0.2, "clip_cov_lb": -0.5}, "kl_cov": {"kl_cov_frac": 0.2}}
    loss = name if name in chosen else mean
    results = []
    for split in (16, 3):
        torch.manual_seed(0)
        worker = make_worker(policy, loss, algorithm=chosen, micro_train_batch_size_per_gpu=split)
        results.append(gradients(worker, batch))
    assert largest_difference(*results) < rounding_tolerance(results[0])
    if name == "clip_cov":
        torch.manual_seed(1)
        assert largest_difference(gradients(worker, batch), results[0]) > 1e-4, "nothing was chosen at random"


def test_metrics_of_a_loss_do_not_affect_the_kl_loss(policy: PreTrainedModel) -> None:
    def with_metric(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return 0 * log_probs, {"my_kl": log_probs.detach()}

    batch = off_policy_batch(policy, 18)
    kl_gradient = gradients(make_worker(policy, with_metric), batch)
    assert max(gradient.abs().max() for gradient in kl_gradient.values()) > 1e-5
    kl = make_worker(policy, with_metric).forward_backward(batch)
    assert kl["policy/final_loss"] == pytest.approx(KL_COEF * kl["policy/policy_kl"])


def test_a_scalar_metric_is_logged_unchanged_for_any_micro_batch_size(policy: PreTrainedModel) -> None:
    def with_metric(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, float]:
        return -log_probs, 0.25

    batch = off_policy_batch(policy, 18)
    for split in (16, 1):
        worker = make_worker(policy, with_metric, micro_train_batch_size_per_gpu=split)
        assert worker.forward_backward(batch)["policy/ppo_clip_ratio"] == pytest.approx(0.25)


def test_a_scalar_loss_equals_its_per_token_form(policy: PreTrainedModel) -> None:
    batch = off_policy_batch(policy, 12)
    split = {"micro_train_batch_size_per_gpu": 5}
    by_token = make_worker(policy, "policy_gradient", **split)
    scalar = make_worker(policy, scalar_reinforce, **split)
    assert largest_difference(gradients(by_token, batch), gradients(scalar, batch)) < 1e-6
    metrics = scalar.forward_backward(batch)
    assert metrics["policy/ppo_clip_ratio"] == pytest.approx(0.25)
    assert metrics["policy/policy_loss"] == pytest.approx(by_token.forward_backward(batch)["policy/policy_loss"])


@pytest.mark.parametrize(
    "algorithm",
    [
        {"off_policy_correction": {"tis_ratio_type": "token"}},
        {"off_policy_sequence_mask_threshold": 0.001},
        {"top_entropy_quantile": 0.5},
    ],
    ids=lambda algorithm: next(iter(algorithm)),
)
def test_token_weights_refuse_a_scalar_loss_and_ignore_micro_batches(
    policy: PreTrainedModel, algorithm: dict[str, Any]
) -> None:
    batch = off_policy_batch(policy, 13)
    with pytest.raises(ConfigError, match="returns a scalar"):
        make_worker(policy, scalar_reinforce, algorithm=algorithm)
    plain = gradients(make_worker(policy), batch)
    weighted = [
        gradients(make_worker(policy, algorithm=algorithm, micro_train_batch_size_per_gpu=n), batch) for n in (16, 3)
    ]
    assert largest_difference(*weighted) < 1e-6
    assert largest_difference(weighted[0], plain) > 1e-5


def test_truncated_importance_sampling_weights_tokens_by_the_capped_ratio(policy: PreTrainedModel) -> None:
    batch = off_policy_batch(policy, 14)
    assert batch.old_logprobs is not None
    batch.rollout_logprobs = batch.old_logprobs - 10  # every ratio is far above its cap
    plain = gradients(make_worker(policy, algorithm={"use_kl_loss": False}), batch)
    correction = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 3.0}
    algorithm = {"use_kl_loss": False, "off_policy_correction": correction}
    tripled = gradients(make_worker(policy, algorithm=algorithm), batch)
    assert largest_difference(tripled, {name: 3 * gradient for name, gradient in plain.items()}) < 1e-5


def test_a_correction_without_rollout_log_probs_is_refused(policy: PreTrainedModel) -> None:
    batch = off_policy_batch(policy, 15)
    batch.rollout_logprobs = None
    worker = make_worker(policy, algorithm={"off_policy_correction": {"tis_ratio_type": "token"}})
    with pytest.raises(ConfigError, match="log-probs of the engine"):
        worker.forward_backward(batch)


def test_the_reference_enters_the_loss_only_with_use_kl_loss(policy: PreTrainedModel) -> None:
    batch = off_policy_batch(policy, 16)
    in_reward = {"use_kl_loss": False, "use_kl_in_reward": True}
    with_metric = make_worker(policy, algorithm=in_reward)
    ours = gradients(with_metric, batch)
    assert with_metric.forward_backward(batch)["policy/policy_kl"] > 0
    batch.ref_logprobs = None
    assert largest_difference(ours, gradients(with_metric, batch)) == 0
