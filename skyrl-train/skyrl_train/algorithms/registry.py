"""Registries of advantage estimators and policy losses, by name, with the traits that configuration rules read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from skyrl_train.config.algorithm import AlgorithmConfig, LossReduction
from skyrl_train.errors import ConfigError
from skyrl_train.lazy import torch

logger = logging.getLogger(__name__)


class AdvantageEstimator(Protocol):
    """Function that turns rewards into advantages.

    It is called with the keyword arguments in its signature, or with all of them if it takes `**kwargs`. An argument
    without a default is required, so a run that cannot provide it is rejected before it starts.

    token_level_rewards  (B, R) the environment's rewards, minus the KL penalty, if any
    response_mask        (B, R) 1 on sampled tokens
    index                [B] rows with the same entry answer the same prompt
    config               the section `trainer.algorithm`
    gamma, lambd, grpo_norm_by_std   settings of that section, on their own
    values               (B, R) the critic's values, if there is a critic
    old_log_probs        (B, R) of the policy at the start of the update
    ref_log_probs        (B, R) of the reference
    entropies            (B, R) of the distribution that each token was sampled from
    sum_pi_squared       (B, R) Σ_v π(v)² of that distribution
    greedy_rewards       (B,) total reward of a greedy rollout of the row's prompt
    reward_components    name → (B,) total of each component reported by the environment
    """

    def __call__(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns, both (B, R), zero outside the mask."""


class PolicyLoss(Protocol):
    """Function that returns the loss per token. The caller reduces it, so micro-batches do not change the result."""

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

        A scalar is accepted as the loss of the mini-batch, with scalar metrics or the fraction of clipped tokens.
        """


Comparison = Literal["samples", "parts", "baseline", "nothing"]


@dataclass(frozen=True, slots=True)
class EstimatorTraits:
    """Properties of an advantage estimator that its signature does not show.

    None means undeclared. `contract.estimator_traits` then observes the property on an example batch.
    """

    compares: Comparison | None = None
    """Baseline of a reward: the total rewards of the prompt's `samples`, `parts` of these totals (components, turns or
    tokens), an independent `baseline` (a critic, the batch, a greedy rollout), or `nothing`."""

    per_token: bool | None = None
    """True if advantages differ between the tokens of a trajectory."""

    whitens: bool | None = None
    """True if the advantages of a batch have mean 0 and variance 1."""

    @property
    def compares_samples(self) -> bool:
        """True if a trajectory needs other samples of its prompt."""
        return self.compares in ("samples", "parts")


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Properties of a policy loss. The defaults restrict nothing."""

    whole_batch: bool = False
    """True if the loss compares tokens across the mini-batch, so it must see all of it in one call."""

    per_sequence: bool = False
    """True if the loss expects one advantage per trajectory."""

    reads_rollout_logprobs: bool = False
    """True if the loss itself corrects for the engine's log-probs."""

    reads_eps_clip: bool = True
    """True if the loss reads `eps_clip_low` and `eps_clip_high`."""

    loss_reduction: LossReduction | None = None
    """Reduction in the published method, if it matters."""

    @property
    def conflict_with_correction(self) -> str | None:
        """Why the loss cannot go with an off-policy correction, or None."""
        if self.whole_batch:
            return "selects tokens by comparing them all, corrected or not"
        return "reads the engine's log-probs itself and would count them twice" if self.reads_rollout_logprobs else None


Function = TypeVar("Function", bound=Callable[..., Any])
Traits = TypeVar("Traits")


class Registry(Generic[Function, Traits]):
    """Functions by name with their traits, for one configuration key."""

    def __init__(self, kind: str, key: str, default_traits: Traits, reserved: Set[str] = frozenset()) -> None:
        """Let users replace built-in functions, except the `reserved` ones."""
        self._kind = kind
        self._key = key
        self._default_traits = default_traits
        self._reserved = reserved
        self.entries: dict[str, tuple[Function, Traits]] = {}
        """Every function with its traits, by name."""

    def register(self, name: str, function: Function, traits: Traits | None = None) -> None:
        """Add a function, or replace a built-in one that is not reserved.

        Raises:
            ConfigError: the name is reserved, or taken by another custom function.
        """
        if name in self.entries:
            if name in self._reserved or is_built_in(function) or not is_built_in(self.get(name)):
                raise ConfigError(
                    f"{self._kind} {name!r} is already registered as {self.get(name)!r}; choose another name"
                )
            logger.info("%s %r: %r replaces the built-in function", self._kind, name, function)
        self.entries[name] = (function, traits or self._default_traits)

    def unregister(self, name: str) -> None:
        """Remove a function, or raise ConfigError if the name is unknown."""
        self.get(name)
        del self.entries[name]

    def get(self, name: str) -> Function:
        """Return the function registered under `name`, or raise ConfigError with the available names."""
        if name not in self.entries:
            raise ConfigError(f"{self._key}={name!r} is not registered; available: {', '.join(self.list_available())}")
        return self.entries[name][0]

    def traits(self, name: str) -> Traits:
        """Return the traits of the function registered under `name`, or raise ConfigError if it is unknown."""
        self.get(name)
        return self.entries[name][1]

    def list_available(self) -> list[str]:
        """Return every name, sorted."""
        return sorted(self.entries)


def is_built_in(function: Callable[..., Any]) -> bool:
    """Return True for functions of this package."""
    return (getattr(function, "__module__", None) or "").startswith("skyrl_train.")


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator, EstimatorTraits] = Registry(
    "advantage estimator",
    "trainer.algorithm.advantage_estimator",
    EstimatorTraits(),
    reserved={"gae", "grpo", "reinforce++", "rloo"},
)
POLICY_LOSSES: Registry[PolicyLoss, LossTraits] = Registry(
    "policy loss",
    "trainer.algorithm.policy_loss_type",
    LossTraits(),
    reserved={"cispo", "clip_cov", "dual_clip", "gspo", "kl_cov", "regular", "sapo"},
)


def register_advantage_estimator(
    name: str, *, compares: Comparison | None = None, per_token: bool | None = None, whitens: bool | None = None
) -> Callable[[Function], Function]:
    """Make a function available as `trainer.algorithm.advantage_estimator=name`.

    The keyword arguments declare its `EstimatorTraits`. Undeclared ones are observed on an example batch.

    Raises:
        ConfigError: the name is reserved, or another custom estimator has it.
    """

    def decorator(function: Function) -> Function:
        ADVANTAGE_ESTIMATORS.register(name, function, EstimatorTraits(compares, per_token, whitens))
        return function

    return decorator


def register_policy_loss(
    name: str,
    *,
    whole_batch: bool = False,
    per_sequence: bool = False,
    reads_rollout_logprobs: bool = False,
    reads_eps_clip: bool = True,
    loss_reduction: LossReduction | None = None,
) -> Callable[[Function], Function]:
    """Make a function available as `trainer.algorithm.policy_loss_type=name`.

    The keyword arguments declare its `LossTraits`. A loss with `whole_batch` is called once with the whole mini-batch.
    This costs another forward pass if the mini-batch is split into micro-batches or across ranks.

    Raises:
        ConfigError: the name is reserved, or another custom loss has it.
    """
    traits = LossTraits(whole_batch, per_sequence, reads_rollout_logprobs, reads_eps_clip, loss_reduction)

    def decorator(function: Function) -> Function:
        POLICY_LOSSES.register(name, function, traits)
        return function

    return decorator


advantage_estimator = ADVANTAGE_ESTIMATORS.get
policy_loss = POLICY_LOSSES.get
