"""Declared traits of estimators and losses against what these do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyrl_train.algorithms import policy_loss
from skyrl_train.algorithms.advantages import group_statistics
from skyrl_train.algorithms.contract import MASK, estimator_traits, observe_estimator
from skyrl_train.algorithms.inputs import readable_inputs, required_inputs
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, EstimatorTraits, Registry
from skyrl_train.config import AlgorithmConfig, GdpoConfig


def names_of_the_package(registry: Registry) -> list[str]:
    """Without those that another test registered."""
    functions = {name: registry.get(name) for name in registry.list_available()}
    return [name for name, function in functions.items() if function.__module__.startswith("skyrl_train.algorithms")]


ESTIMATORS, LOSSES = names_of_the_package(ADVANTAGE_ESTIMATORS), names_of_the_package(POLICY_LOSSES)


@pytest.mark.parametrize("weights", [{}, {"answer": 0.5, "style": 2.0}])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_is_observed_as_it_is_declared(name: str, weights: dict[str, float]) -> None:
    config = AlgorithmConfig(advantage_estimator=name, gdpo=GdpoConfig(weights=weights))
    assert observe_estimator(ADVANTAGE_ESTIMATORS.get(name), config) == ADVANTAGE_ESTIMATORS.traits(name)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_inputs_that_an_estimator_reads(name: str) -> None:
    estimator, traits = ADVANTAGE_ESTIMATORS.get(name), ADVANTAGE_ESTIMATORS.traits(name)
    required, readable = required_inputs(estimator), readable_inputs(estimator)
    assert ("values" in required) == ("values" in readable) == (name in {"gae", "gae_per_turn"})
    assert ("index" in required) == traits.compares_samples
    assert ("token_level_rewards" not in readable) == (name in {"gdpo", "on_policy_distillation"})
    assert ("ref_log_probs" in required) == (name == "on_policy_distillation")


def test_readable_inputs_are_those_that_the_signature_names_unless_it_takes_any() -> None:
    def few(token_level_rewards: int, mine: int = 0, **_: Any) -> Any: ...
    def everything(**kwargs: Any) -> Any: ...

    assert readable_inputs(few) == {"token_level_rewards"}
    assert {"token_level_rewards", "values", "ref_log_probs", "greedy_rewards"} <= readable_inputs(everything)
    assert "kwargs" not in readable_inputs(everything)


def test_what_is_declared_is_not_observed_and_what_is_not_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_entries", dict(ADVANTAGE_ESTIMATORS._entries))
    config = AlgorithmConfig(advantage_estimator="mine")
    ADVANTAGE_ESTIMATORS.register("mine", ADVANTAGE_ESTIMATORS.get("reinforce++"), EstimatorTraits(whitens=False))
    assert estimator_traits(config) == EstimatorTraits(compares="baseline", per_token=True, whitens=False)


def test_an_estimator_without_a_signal_in_the_example_compares_no_samples() -> None:
    def mine(token_level_rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_level_rewards * 0, token_level_rewards

    assert observe_estimator(mine, AlgorithmConfig()) == EstimatorTraits("baseline", per_token=False, whitens=False)


def test_the_sum_of_components_is_the_total_of_samples_and_a_critic_is_a_baseline() -> None:
    def sum_of_components(
        response_mask: torch.Tensor, index: list[str], reward_components: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.stack(list(reward_components.values())).sum(dim=0)
        advantages = (scores - group_statistics(scores, index)[0])[:, None] * response_mask
        return advantages, advantages

    def less_values(token_level_rewards: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_level_rewards - values, token_level_rewards

    assert observe_estimator(sum_of_components, AlgorithmConfig()).compares == "samples"
    assert observe_estimator(less_values, AlgorithmConfig()).compares == "baseline"


def loss_of(name: str, rollout: torch.Tensor | None = None, **config: Any) -> torch.Tensor:
    """(B, R) of a loss of the package on fixed tokens."""
    noise = torch.Generator().manual_seed(2)
    log_probs = -torch.rand(MASK.shape, generator=noise) * 2
    sampled = log_probs + torch.randn(MASK.shape, generator=noise)
    advantages = torch.tensor([[1.0], [-1.0], [2.0], [-0.5]]).expand(MASK.shape)
    torch.manual_seed(0)  # clip_cov draws tokens
    arguments = (AlgorithmConfig(**config), MASK, sampled if rollout is None else rollout)
    return policy_loss(name)(log_probs, sampled, advantages, *arguments)[0]


@pytest.mark.parametrize("name", LOSSES)
def test_whether_a_loss_reads_the_bounds_of_ppo(name: str) -> None:
    clipped, wide = loss_of(name), loss_of(name, eps_clip_low=0.9, eps_clip_high=5.0, clip_ratio_c=10.0)
    is_read = not torch.equal(clipped[MASK > 0], wide[MASK > 0])
    assert is_read == POLICY_LOSSES.traits(name).reads_eps_clip


@pytest.mark.parametrize("name", LOSSES)
def test_whether_a_loss_reads_the_engines_log_probs(name: str) -> None:
    other = -torch.rand(MASK.shape, generator=torch.Generator().manual_seed(3))
    is_read = not torch.equal(loss_of(name)[MASK > 0], loss_of(name, rollout=other)[MASK > 0])
    assert is_read == POLICY_LOSSES.traits(name).reads_rollout_logprobs


@pytest.mark.parametrize("name", LOSSES)
def test_whether_a_loss_has_one_ratio_for_a_trajectory(name: str) -> None:
    """Then a token's log-prob moves the loss of the others, in proportion to their advantages."""
    log_probs = torch.full((1, 3), -0.5, requires_grad=True)
    arguments = (
        torch.full((1, 3), -0.6),
        torch.ones(1, 3),
        AlgorithmConfig(),
        torch.ones(1, 3),
        torch.full((1, 3), -0.6),
    )
    loss, _ = policy_loss(name)(log_probs, *arguments)
    (gradient,) = torch.autograd.grad(loss[0, 0], log_probs)
    assert bool(gradient[0, 1:].any()) == (POLICY_LOSSES.traits(name).per_sequence and name != "vespo")


def test_losses_that_compare_tokens_across_the_mini_batch() -> None:
    assert [name for name in LOSSES if POLICY_LOSSES.traits(name).whole_batch] == ["clip_cov", "kl_cov"]


def test_losses_that_were_published_as_a_mean_over_trajectories() -> None:
    published = {name: POLICY_LOSSES.traits(name).loss_reduction for name in LOSSES}
    means = {"gspo", "gspo_token", "gmpo", "luspo", "sapo"}
    assert published == {name: "sequence_mean" if name in means else None for name in LOSSES}
