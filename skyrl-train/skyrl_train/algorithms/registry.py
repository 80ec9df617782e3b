"""Names for advantage estimators and policy losses: two registries and their decorators."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError


class AdvantageEstimator(Protocol):
    """Turns rewards into advantages.

    It is called with the keyword arguments that its signature names, or with all of them if it takes `**kwargs`. One
    without a default is a requirement: a run that cannot provide it is refused before it starts.

    token_level_rewards  (B, R) rewards of the environment, less the KL penalty if there is one
    response_mask        (B, R) 1 on sampled tokens
    index                [B] rows with the same entry answer the same prompt
    config               the section `trainer.algorithm`; also on their own: gamma, lambd, grpo_norm_by_std
    values               (B, R) of the critic, when there is one
    old_log_probs        (B, R) of the policy that the update starts from
    ref_log_probs        (B, R) of the reference
    entropies            (B, R) of the distribution that each token was sampled from
    sum_pi_squared       (B, R) Σ_v π(v)² of that distribution
    greedy_rewards       (B,) total reward of a greedy rollout of the row's prompt
    reward_components    name → (B,) total of each component that the environment reports
    """

    def __call__(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns, both (B, R), zero outside the mask."""
        ...


class PolicyLoss(Protocol):
    """Scores tokens; reducing to a scalar is best left to the caller, and then never depends on micro-batches."""

    def __call__(
        self,
        log_probs: torch.Tensor,  # (B, R) of the policy, with gradient
        old_log_probs: torch.Tensor,  # (B, R) at the start of the update
        advantages: torch.Tensor,  # (B, R)
        config: AlgorithmConfig,
        loss_mask: torch.Tensor,  # (B, R)
        rollout_logprobs: torch.Tensor | None,  # (B, R) of the engine, if it reports them
    ) -> tuple[torch.Tensor, Any]:
        """Return the loss of each token (B, R), and metrics (B, R) by name that are averaged over trained tokens.

        A scalar loss, with scalar metrics or the share of clipped tokens, is taken as the loss of the mini-batch.
        """
        ...


Function = TypeVar("Function", bound=Callable[..., Any])


class Registry(Generic[Function]):
    """Functions by name, for one configuration key."""

    def __init__(self, kind: str, key: str) -> None:
        self._kind = kind
        self._key = key
        self._functions: dict[str, Function] = {}

    def register(self, name: str, function: Function) -> None:
        """Add a function; ConfigError if the name is taken."""
        if name in self._functions:
            there = self._functions[name]
            raise ConfigError(f"{self._kind} {name!r} is already registered as {there!r}; choose another name")
        self._functions[name] = function

    def unregister(self, name: str) -> None:
        """Remove a function; ConfigError if there is none."""
        self.get(name)
        del self._functions[name]

    def get(self, name: str) -> Function:
        """The function registered under `name`; ConfigError lists the names there are."""
        if name not in self._functions:
            raise ConfigError(f"{self._key}={name!r} is not registered; available: {', '.join(self.list_available())}")
        return self._functions[name]

    def list_available(self) -> list[str]:
        """Every name, sorted."""
        return sorted(self._functions)


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator", "trainer.algorithm.advantage_estimator"
)
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", "trainer.algorithm.policy_loss_type")


def register_advantage_estimator(name: str) -> Callable[[Function], Function]:
    """Make a function available as `trainer.algorithm.advantage_estimator=name`.

    Raises:
        ConfigError: the name is taken.
    """

    def decorator(function: Function) -> Function:
        ADVANTAGE_ESTIMATORS.register(name, function)
        return function

    return decorator


def register_policy_loss(name: str, *, whole_batch: bool = False) -> Callable[[Function], Function]:
    """Make a function available as `trainer.algorithm.policy_loss_type=name`.

    `whole_batch` is for a loss that compares tokens across the mini-batch: it is called once with all of it, at the
    price of one more forward pass where the mini-batch is worked through in several parts.

    Raises:
        ConfigError: the name is taken.
    """

    def decorator(function: Function) -> Function:
        POLICY_LOSSES.register(name, function)
        if whole_batch:
            function.reads_whole_batch = True  # type: ignore[attr-defined]
        return function

    return decorator


def reads_whole_batch(loss: PolicyLoss) -> bool:
    """Whether a loss was registered with `whole_batch`."""
    return getattr(loss, "reads_whole_batch", False)


def call_policy_loss(loss: PolicyLoss, *inputs: Any) -> tuple[torch.Tensor, Any]:
    """The loss of its six arguments in their order, or of as many of the first as it takes."""
    parameters = inspect.signature(loss).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return loss(*inputs)
    n_taken = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return loss(*inputs[:n_taken])


advantage_estimator = ADVANTAGE_ESTIMATORS.get
policy_loss = POLICY_LOSSES.get
