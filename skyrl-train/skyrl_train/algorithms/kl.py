"""The divergence KL(policy || reference): estimates from the log-probs of sampled tokens, as a loss or in the reward.

Only the tokens that were sampled are known, so every value here is an estimate, and an estimate is two things: a value
and a gradient. They need not be right together. With d = log π_ref - log π of a token sampled from π:

      value              is the mean the divergence?   is the mean of the gradient its gradient?
k1    -d                 yes                           no: it is 0
abs   |d|                no                            no
k2    d² / 2             no                            yes
k3    e^d - d - 1        yes, and it is never below 0  no: it is the gradient of KL(π_ref || π)
k1+, k3+, abs+           as without the +              yes: it is that of k2

That holds where the policy samples its own tokens. Once it has moved on, `importance_weighted_kl` keeps both right.
Sources: Approximating KL Divergence (Schulman, 2020, http://joschu.net/blog/kl-approx.html); On a few pitfalls in KL
divergence gradient estimation for RL (Tang and Munos, 2025, arXiv:2506.09477).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch

from skyrl_train.config.algorithm import AlgorithmConfig, KLEstimator
from skyrl_train.errors import ConfigError


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    kl_estimator_type: KLEstimator = "k3",
) -> torch.Tensor:
    """The KL estimate of each token (B, R), differentiable in `log_probs`; 0 outside the mask, if one is given.

    With d = base - policy: k1 = -d, abs = |d|, k2 = d²/2, k3 = e^d - d - 1, where d is held within ±20 and k3 below 10.
    A `+` keeps the value and takes the gradient of k2. The head of this module says which to take.

    Raises:
        ConfigError: the estimator is unknown.
    """
    d = _masked(log_probs_base - log_probs, loss_mask)
    if kl_estimator_type.endswith("+"):
        value, k2 = _estimate(d, kl_estimator_type.removesuffix("+")), _estimate(d, "k2")
        return value.detach() + (k2 - k2.detach())
    return _estimate(d, kl_estimator_type)


def importance_weighted_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    old_log_probs: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    kl_estimator_type: KLEstimator = "k3",
) -> torch.Tensor:
    """ρ · KL estimate of each token (B, R) with ρ = π / π_old, for tokens that π_old sampled.

    The mean of ρ f over tokens of π_old is the mean of f over tokens of π. So k1, k3 and abs keep their means, and
    their gradients become those of their means, because ρ has a gradient too: for k1 and k3 that of the divergence. k2
    and the estimators with a `+` bring that gradient already; ρ only weighs them and is a constant. The exponent of ρ
    is held within ±20. That the tokens before it have become more or less likely is not accounted for.

    Source: DeepSeek-V3.2 (DeepSeek-AI, 2025, arXiv:2512.02556), section 3.1, for k3.
    """
    ratio = _masked(log_probs - old_log_probs, loss_mask).clamp(-20, 20).exp()
    has_own_gradient = kl_estimator_type == "k2" or kl_estimator_type.endswith("+")
    return (ratio.detach() if has_own_gradient else ratio) * compute_approx_kl(
        log_probs, log_probs_base, loss_mask, kl_estimator_type
    )


@torch.no_grad()
def penalize_rewards(
    rewards: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    loss_mask: torch.Tensor,
    coefficient: float,
    estimator: KLEstimator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards less coefficient · KL of each trained token, and that KL; both (B, R), the KL 0 outside the mask.

    Source: Fine-Tuning Language Models from Human Preferences (Ziegler et al., 2019, arXiv:1909.08593), section 2.
    """
    kl = compute_approx_kl(old_log_probs, ref_log_probs, loss_mask, estimator)
    return rewards - coefficient * kl, kl


def _masked(difference: torch.Tensor, loss_mask: torch.Tensor | None) -> torch.Tensor:
    """0 outside the mask, where every estimate of 0 is 0 and has the gradient 0."""
    return difference if loss_mask is None else torch.where(loss_mask > 0, difference, 0.0)


def _estimate(d: torch.Tensor, estimator: str) -> torch.Tensor:
    match estimator:
        case "k1":
            return -d
        case "abs":
            return d.abs()
        case "k2":
            return d.square() / 2
        case "k3":
            d = d.clamp(-20, 20)
            return (torch.expm1(d) - d).clamp(max=10)  # exp(d) - 1 would lose what is left of a small d
        case _:
            raise ConfigError(f"unknown KL estimator {estimator!r}; there are k1, k2, k3, abs, k1+, k3+ and abs+")


class KLController(Protocol):
    """The weight of the KL penalty in the reward."""

    value: float

    def update(self, current: float, n_steps: int) -> None:
        """Take note of the mean KL per token of a step of `n_steps` trajectories."""
        ...

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs to go on."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a state, also from one that the other kind of controller left."""
        ...


class FixedKLController:
    """A weight that stays as it is configured, in a resumed run too."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, float]:
        """Nothing: the configuration says it all."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Nothing changes."""


class AdaptiveKLController:
    """A weight that rises while the divergence is above its target, and falls while it is below.

    value *= 1 + clip(KL / target - 1, ±0.2) · n / horizon, for n trajectories; n / horizon counts as 1 at most, so that
    no step changes the weight by more than a fifth or turns its sign. A KL that is not a number changes nothing.

    Source: Fine-Tuning Language Models from Human Preferences (Ziegler et al., 2019, arXiv:1909.08593), section 2.2.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        """`target` in nats per token, `horizon` in trajectories; ConfigError if they are not above 0."""
        if target <= 0 or horizon <= 0:
            raise ConfigError(
                f"the adaptive KL controller has target={target}, horizon={horizon}; both must be above 0"
            )
        self.value = init_kl_coef
        self._target = target
        self._horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Take note of the mean KL per token of a step of `n_steps` trajectories."""
        if math.isnan(current):
            return
        error = min(max(current / self._target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(n_steps / self._horizon, 1)

    def state_dict(self) -> dict[str, float]:
        """The weight of now."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a weight; a fixed controller left none, and the configured one is kept."""
        self.value = state.get("value", self.value)


def kl_controller(config: AlgorithmConfig) -> KLController:
    """The controller of `kl_ctrl.type`, which starts from `kl_loss_coef`."""
    if config.kl_ctrl.type == "adaptive":
        return AdaptiveKLController(config.kl_loss_coef, config.kl_ctrl.kl_target, config.kl_ctrl.horizon)
    return FixedKLController(config.kl_loss_coef)
