"""Names for advantage estimators and policy losses: two plain dicts and their decorators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError


class AdvantageEstimator(Protocol):
    """Turns rewards into advantages. Take what you need by name and swallow the rest with `**kwargs`."""

    def __call__(
        self,
        *,
        token_level_rewards: torch.Tensor,  # (B, R)
        response_mask: torch.Tensor,  # (B, R) 1 on sampled tokens
        index: list[str],  # [B] rows with the same entry answer the same prompt
        values: torch.Tensor | None,  # (B, R) of a critic
        config: AlgorithmConfig,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns, both (B, R), zero outside the mask."""
        ...


class PolicyLoss(Protocol):
    """Scores a micro-batch token by token; reducing to a scalar is the caller's business."""

    def __call__(
        self,
        log_probs: torch.Tensor,  # (B, R) of the policy, with gradient
        old_log_probs: torch.Tensor,  # (B, R) at the start of the update
        advantages: torch.Tensor,  # (B, R)
        config: AlgorithmConfig,
        loss_mask: torch.Tensor,  # (B, R)
        rollout_logprobs: torch.Tensor | None,  # (B, R) of the engine, if it reports them
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of each token (B, R), and metrics (B, R) that are averaged over trained tokens."""
        ...


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}
POLICY_LOSSES: dict[str, PolicyLoss] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def register_advantage_estimator(name: str) -> Callable[[Function], Function]:
    """Make a function available as `trainer.algorithm.advantage_estimator=name`.

    Raises:
        ConfigError: the name is taken.
    """
    return _register(ADVANTAGE_ESTIMATORS, "advantage estimator", name)


def register_policy_loss(name: str) -> Callable[[Function], Function]:
    """Make a function available as `trainer.algorithm.policy_loss_type=name`.

    Raises:
        ConfigError: the name is taken.
    """
    return _register(POLICY_LOSSES, "policy loss", name)


def advantage_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered under `name`; ConfigError lists the names there are."""
    return _look_up(ADVANTAGE_ESTIMATORS, "trainer.algorithm.advantage_estimator", name)


def policy_loss(name: str) -> PolicyLoss:
    """The policy loss registered under `name`; ConfigError lists the names there are."""
    return _look_up(POLICY_LOSSES, "trainer.algorithm.policy_loss_type", name)


def _register(registry: dict[str, Any], kind: str, name: str) -> Callable[[Function], Function]:
    def decorator(function: Function) -> Function:
        if name in registry:
            raise ConfigError(f"{kind} {name!r} is already registered as {registry[name]!r}; choose another name")
        registry[name] = function
        return function

    return decorator


def _look_up(registry: Mapping[str, Any], key: str, name: str) -> Any:
    if name not in registry:
        raise ConfigError(f"{key}={name!r} is not registered; available: {', '.join(sorted(registry))}")
    return registry[name]
