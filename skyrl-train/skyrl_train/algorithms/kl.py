"""KL(policy || reference) as a loss or in the reward, estimated from the log-probs of sampled tokens.

An estimator can have the right value and the wrong gradient, or vice versa. With d = log π_ref - log π of a
token sampled from π:

      value              is its mean the KL?           is its mean gradient the gradient of the KL?
k1    -d                 yes                           no: it is 0
abs   |d|                no                            no
k2    d² / 2             no                            yes
k3    e^d - d - 1        yes, and it is never below 0  no: it is the gradient of KL(π_ref || π)
k1+, k3+, abs+           as without the +              yes: they take the gradient of k2

This holds for tokens sampled from the current policy. After an update they come from an older policy, so
`importance_weighted_kl` corrects for that.

Sources: Approximating KL Divergence (Schulman, 2020, http://joschu.net/blog/kl-approx.html). On a few pitfalls in KL
divergence gradient estimation for RL (Tang and Munos, 2025, arXiv:2506.09477).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from skyrl_train.config.algorithm import AlgorithmConfig, KLEstimator
from skyrl_train.errors import ConfigError
from skyrl_train.lazy import torch


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    kl_estimator_type: KLEstimator = "k3",
) -> torch.Tensor:
    """Return the KL estimate of each token (B, R), differentiable in `log_probs` and 0 outside the mask.

    With d = base - policy: k1 = -d, abs = |d|, k2 = d²/2, k3 = e^d - d - 1 (with d clamped to ±20, k3 to 10). A
    `+` keeps the value and takes the gradient of k2. The module docstring compares them. No mask means all tokens.

    The policy gives a token the probability 0.5, the reference 0.25:

    >>> policy, base = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    >>> [round(compute_approx_kl(policy, base, kl_estimator_type=name).item(), 3) for name in ("k1", "k2", "k3")]
    [0.693, 0.24, 0.193]

    Raises:
        ConfigError: the estimator is unknown.
    """
    d = _within_mask(log_probs_base - log_probs, loss_mask)
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
    """Return ρ · KL estimate of each token (B, R) with ρ = π / π_old, for tokens that π_old sampled.

    The mean of ρ·f over tokens of π_old is the mean of f over tokens of π, so k1, k3 and abs keep their means. Since ρ
    also has a gradient, the gradient of the mean is correct as well: for k1 and k3 it is the gradient of the KL. k2 and
    the estimators with a `+` have that gradient without ρ, so their ρ is detached. The exponent of ρ is clamped to ±20,
    and the ratios of earlier tokens are ignored.

    Source: DeepSeek-V3.2 (DeepSeek-AI, 2025, arXiv:2512.02556), section 3.1, for k3.
    """
    ratio = _within_mask(log_probs - old_log_probs, loss_mask).clamp(-20, 20).exp()
    has_own_gradient = kl_estimator_type == "k2" or kl_estimator_type.endswith("+")
    return (ratio.detach() if has_own_gradient else ratio) * compute_approx_kl(
        log_probs, log_probs_base, loss_mask, kl_estimator_type
    )


def _within_mask(difference: torch.Tensor, loss_mask: torch.Tensor | None) -> torch.Tensor:
    """Return the difference within the mask and 0 outside, so every estimate and its gradient are 0 there."""
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
            return (torch.expm1(d) - d).clamp(max=10)  # e^d - 1 would lose the digits of a small d
        case _:
            raise ConfigError(f"unknown KL estimator {estimator!r}; use k1, k2, k3, abs, k1+, k3+ or abs+")


class KLController:
    """The coefficient of the KL penalty in the reward: constant, or adaptive if it has a target.

    An adaptive coefficient rises while the KL is above its target, and falls while it is below:
    value *= 1 + clip(KL / target - 1, ±0.2) · min(n / horizon, 1), for a step of n trajectories. So no step changes the
    coefficient by more than a fifth or flips its sign. A NaN is ignored.

    >>> controller = KLController(0.1, target=0.02, horizon=1000)
    >>> controller.update(current=0.03, n_trajectories=100)  # 50% above the target: clipped to 20%, times 100 / 1000
    >>> round(controller.value, 6)
    0.102

    Source: Fine-Tuning Language Models from Human Preferences (Ziegler et al., 2019, arXiv:1909.08593), section 2.2.
    """

    def __init__(self, value: float, target: float | None = None, horizon: int = 1) -> None:
        """Start at `value`, with `target` in nats per token (None: constant) and `horizon` in trajectories.

        Raises:
            ConfigError: target or horizon is not above 0.
        """
        if horizon <= 0 or (target is not None and target <= 0):
            raise ConfigError(
                f"kl_ctrl.kl_target={target} and kl_ctrl.horizon={horizon} of an adaptive controller must be above 0"
            )
        self.value = value
        self._target = target
        self._horizon = horizon

    def update(self, current: float, n_trajectories: int) -> None:
        """Adapt the coefficient to `current`, the mean KL per token of a step of `n_trajectories`."""
        if self._target is not None and not math.isnan(current):
            error = min(max(current / self._target - 1, -0.2), 0.2)
            self.value *= 1 + error * min(n_trajectories / self._horizon, 1)

    def state_dict(self) -> dict[str, float]:
        """Return an adaptive coefficient. A resumed run reads a constant one from its configuration."""
        return {} if self._target is None else {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore an adaptive coefficient, if the state has one. A constant one ignores the state."""
        if self._target is not None:
            self.value = state.get("value", self.value)


def kl_controller(config: AlgorithmConfig) -> KLController:
    """Return the controller for `kl_ctrl.type`, with `kl_loss_coef` as its first value."""
    is_adaptive = config.kl_ctrl.type == "adaptive"
    return KLController(config.kl_loss_coef, config.kl_ctrl.kl_target if is_adaptive else None, config.kl_ctrl.horizon)
