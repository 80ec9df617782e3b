"""Declared traits of estimators and losses against their behavior."""

from typing import Any

import pytest
import torch

from skyrl_train.algorithms import policy_loss
from skyrl_train.algorithms.advantages import group_statistics
from skyrl_train.algorithms.contract import estimator_traits, example_mask, observe_estimator
from skyrl_train.algorithms.inputs import readable_inputs
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, EstimatorTraits, Registry
from skyrl_train.config import AlgorithmConfig, GdpoConfig

MASK = example_mask()


def package_names(registry: Registry) -> list[str]:
    """Return the names that the package registers, without those of other tests."""
    functions = {name: registry.get(name) for name in registry.list_available()}
    return [name for name, function in functions.items() if function.__module__.startswith("skyrl_train.algorithms")]


ESTIMATORS, LOSSES = package_names(ADVANTAGE_ESTIMATORS), package_names(POLICY_LOSSES)


@pytest.mark.parametrize("weights", [{}, {"answer": 0.5, "style": 2.0}])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_declared_traits_of_an_estimator_are_observed(name: str, weights: dict[str, float]) -> None:
    config = AlgorithmConfig(advantage_estimator=name, gdpo=GdpoConfig(weights=weights))
    assert observe_estimator(ADVANTAGE_ESTIMATORS.get(name), config) == ADVANTAGE_ESTIMATORS.traits(name)


def test_readable_inputs_are_the_named_parameters_or_all_for_kwargs_only() -> None:
    def few(token_level_rewards: int, mine: int = 0, **_: Any) -> Any: ...
    def everything(**kwargs: Any) -> Any: ...

    assert readable_inputs(few) == {"token_level_rewards"}
    assert {"token_level_rewards", "values", "ref_log_probs", "greedy_rewards"} <= readable_inputs(everything)
    assert "kwargs" not in readable_inputs(everything)


def test_declared_traits_take_precedence_over_observed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "entries", dict(ADVANTAGE_ESTIMATORS.entries))
    config = AlgorithmConfig(advantage_estimator="mine")
    ADVANTAGE_ESTIMATORS.register("mine", ADVANTAGE_ESTIMATORS.get("reinforce++"), EstimatorTraits(whitens=False))
    assert estimator_traits(config) == EstimatorTraits(compares="baseline", per_token=True, whitens=False)


def test_an_estimator_with_zero_advantages_does_not_compare_samples() -> None:
    def mine(token_level_rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_level_rewards * 0, token_level_rewards

    assert observe_estimator(mine, AlgorithmConfig()) == EstimatorTraits("baseline", per_token=False, whitens=False)


def test_comparing_component_sums_compares_samples_and_a_critic_is_a_baseline() -> None:
    def sum_of_components(
        response_mask: torch.Tensor, index: list[str], reward_components: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.stack(list(reward_components.values())).sum(dim=0)
        advantages = (scores - group_statistics(scores, index)[0])[:, None] * response_mask
        return advantages, advantages

    def minus_values(token_level_rewards: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_level_rewards - values, token_level_rewards

    assert observe_estimator(sum_of_components, AlgorithmConfig()).compares == "samples"
    assert observe_estimator(minus_values, AlgorithmConfig()).compares == "baseline"


def fixed_loss(name: str, rollout: torch.Tensor | None = None, **config: Any) -> torch.Tensor:
    """Return the loss (B, R) of a built-in function on fixed tokens."""
    noise = torch.Generator().manual_seed(2)
    log_probs = -torch.rand(MASK.shape, generator=noise) * 2
    sampled = log_probs + torch.randn(MASK.shape, generator=noise)
    advantages = torch.tensor([[1.0], [-1.0], [2.0], [-0.5]]).expand(MASK.shape)
    torch.manual_seed(0)  # clip_cov draws tokens
    arguments = (AlgorithmConfig(**config), MASK, sampled if rollout is None else rollout)
    return policy_loss(name)(log_probs, sampled, advantages, *arguments)[0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_declares_what_it_reads(name: str) -> None:
    loss, traits = fixed_loss(name)[MASK > 0], POLICY_LOSSES.traits(name)
    wide = fixed_loss(name, eps_clip_low=0.9, eps_clip_high=5.0, clip_ratio_c=10.0)[MASK > 0]
    assert torch.equal(loss, wide) != traits.reads_eps_clip
    other = -torch.rand(MASK.shape, generator=torch.Generator().manual_seed(3))
    assert torch.equal(loss, fixed_loss(name, rollout=other)[MASK > 0]) != traits.reads_rollout_logprobs


@pytest.mark.parametrize("name", LOSSES)
def test_per_sequence_is_declared_correctly(name: str) -> None:
    """With one ratio per trajectory, the log-prob of a token changes the loss of the other tokens."""
    log_probs = torch.full((1, 3), -0.5, requires_grad=True)
    old, ones = torch.full((1, 3), -0.6), torch.ones(1, 3)
    loss, _ = policy_loss(name)(log_probs, old, ones, AlgorithmConfig(), ones, old)
    (gradient,) = torch.autograd.grad(loss[0, 0], log_probs)
    assert bool(gradient[0, 1:].any()) == (POLICY_LOSSES.traits(name).per_sequence and name != "vespo")


def test_losses_published_with_a_sequence_mean() -> None:
    published = {name: POLICY_LOSSES.traits(name).loss_reduction for name in LOSSES}
    means = {"gspo", "gspo_token", "gmpo", "luspo", "sapo"}
    assert published == {name: "sequence_mean" if name in means else None for name in LOSSES}
