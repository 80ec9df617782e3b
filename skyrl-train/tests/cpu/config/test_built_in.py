"""What the rules believe of estimators and losses, against what these do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from skyrl_train.algorithms import advantage_estimator, policy_loss
from skyrl_train.algorithms.inputs import named_inputs, settings
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, reads_whole_batch
from skyrl_train.config import AlgorithmConfig, load_config
from skyrl_train.config.built_in import (
    CHOOSE_TOKENS,
    CLIP_LIKE_PPO,
    COMPARE_ELSEWHERE,
    COMPARE_NOTHING,
    COMPARE_SAMPLES,
    ESTIMATORS,
    LOSSES,
    PER_TOKEN,
    READ_NO_TOKEN_REWARDS,
    READ_ROLLOUT_LOGPROBS,
    READ_VALUES,
    SEQUENCE_LOSSES,
    SEQUENCE_MEAN_LOSSES,
    WHITEN,
    reads_reference,
)

PACKAGE = "skyrl_train.algorithms"
B, R = 4, 6
MASK = torch.tensor([[1.0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 1, 1], [1, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
INDEX = ["a", "a", "b", "b"]


def names_of_the_package(registry: Any) -> set[str]:
    """Without those that another test registered."""
    return {name for name in registry.list_available() if registry.get(name).__module__.startswith(PACKAGE)}


def advantages(name: str, rewards: torch.Tensor) -> torch.Tensor:
    """(B, R) of an estimator of the package; everything but the rewards is fixed."""
    noise = torch.Generator().manual_seed(0)
    tokens = -torch.rand(B, R, generator=noise)
    inputs = settings(AlgorithmConfig()) | {
        "token_level_rewards": rewards,
        "response_mask": MASK,
        "index": INDEX,
        "values": torch.rand(B, R, generator=noise),
        "old_log_probs": tokens,
        "ref_log_probs": tokens - torch.rand(B, R, generator=noise),
        "entropies": -tokens,
        "sum_pi_squared": tokens.exp(),
        "greedy_rewards": torch.full((B,), 0.25),
        "reward_components": {"reward": rewards.sum(dim=-1)},
    }
    estimator = advantage_estimator(name)
    return estimator(**named_inputs(estimator, inputs))[0]


def token_rewards() -> torch.Tensor:
    """Rewards on several tokens of each trajectory."""
    return torch.rand(B, R, generator=torch.Generator().manual_seed(1)) * MASK


def test_the_sets_name_what_is_registered() -> None:
    assert names_of_the_package(ADVANTAGE_ESTIMATORS) == ESTIMATORS
    assert names_of_the_package(POLICY_LOSSES) == LOSSES
    assert PER_TOKEN | WHITEN | READ_VALUES | READ_NO_TOKEN_REWARDS <= ESTIMATORS
    assert SEQUENCE_LOSSES | SEQUENCE_MEAN_LOSSES | CLIP_LIKE_PPO | CHOOSE_TOKENS | READ_ROLLOUT_LOGPROBS <= LOSSES
    assert len(ESTIMATORS) == len(COMPARE_SAMPLES) + len(COMPARE_ELSEWHERE) + len(COMPARE_NOTHING)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_what_an_estimator_reads(name: str) -> None:
    parameters = inspect.signature(advantage_estimator(name)).parameters
    assert ("values" in parameters) == (name in READ_VALUES)
    assert ("index" in parameters) == (name in COMPARE_SAMPLES)
    assert ("token_level_rewards" not in parameters) == (name in READ_NO_TOKEN_REWARDS)
    algorithm = AlgorithmConfig(use_kl_loss=False, advantage_estimator=name)
    assert ("ref_log_probs" in parameters) == reads_reference(algorithm)


def test_the_reference_is_read_for_a_kl_divergence() -> None:
    assert reads_reference(AlgorithmConfig())
    assert reads_reference(AlgorithmConfig(use_kl_loss=False, use_kl_in_reward=True))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_whether_advantages_differ_within_a_trajectory(name: str) -> None:
    result = advantages(name, token_rewards())
    spread = torch.stack([row[mask > 0].max() - row[mask > 0].min() for row, mask in zip(result, MASK, strict=True)])
    assert bool((spread > 1e-4).any()) == (name in PER_TOKEN)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_whether_advantages_come_normalised(name: str) -> None:
    on_tokens = advantages(name, token_rewards())[MASK > 0]
    is_normal = abs(on_tokens.mean()) < 1e-4 and abs(on_tokens.std() - 1) < 1e-3
    assert bool(is_normal) == (name in WHITEN)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_whether_a_group_of_equal_rewards_teaches(name: str) -> None:
    rewards = torch.zeros(B, R)
    rewards[:, 0] = torch.tensor([1.0, 1.0, 0.5, 0.5])
    teaches = bool((advantages(name, rewards)[MASK > 0].abs() > 1e-4).any())
    assert teaches == (name not in COMPARE_SAMPLES)


def loss_of(name: str, old: torch.Tensor | None = None, rollout: torch.Tensor | None = None, **config: Any) -> Any:
    """(B, R) of a loss of the package on fixed tokens."""
    noise = torch.Generator().manual_seed(2)
    log_probs = -torch.rand(B, R, generator=noise) * 2
    sampled = log_probs + torch.randn(B, R, generator=noise)
    advantage = torch.tensor([[1.0], [-1.0], [2.0], [-0.5]]).expand(B, R)
    torch.manual_seed(0)  # clip_cov draws lots
    arguments = (AlgorithmConfig(**config), MASK, sampled if rollout is None else rollout)
    return policy_loss(name)(log_probs, sampled if old is None else old, advantage, *arguments)[0]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_whether_a_loss_clips_like_ppo(name: str) -> None:
    clipped, wide = loss_of(name), loss_of(name, eps_clip_low=0.9, eps_clip_high=5.0, clip_ratio_c=10.0)
    is_read = not torch.equal(clipped[MASK > 0], wide[MASK > 0])
    assert is_read == (name in CLIP_LIKE_PPO)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_whether_a_loss_reads_the_engines_log_probs(name: str) -> None:
    other = -torch.rand(B, R, generator=torch.Generator().manual_seed(3))
    is_read = not torch.equal(loss_of(name)[MASK > 0], loss_of(name, rollout=other)[MASK > 0])
    assert is_read == (name in READ_ROLLOUT_LOGPROBS)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_whether_a_loss_compares_tokens_across_the_mini_batch(name: str) -> None:
    assert reads_whole_batch(policy_loss(name)) == (name in CHOOSE_TOKENS)


def test_a_reference_is_told_from_the_loaded_configuration() -> None:
    assert reads_reference(load_config().trainer.algorithm)
