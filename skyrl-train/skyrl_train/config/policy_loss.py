"""Settings of each policy loss, `trainer.algorithm.<name>.*`, and `trainer.algorithm.off_policy_correction.*`."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from skyrl_train.config.base import Section

Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]


class CispoConfig(Section):
    """`policy_loss_type=cispo`: the detached weight of each token is its ratio, clipped."""

    cispo_eps_clip_low: NonNegative = 1.0
    """The weight is at least 1 minus this: 1 is no lower bound."""

    cispo_eps_clip_high: NonNegative = 4.0
    """The weight is at most 1 plus this."""


class SapoConfig(Section):
    """`policy_loss_type=sapo`: a sigmoid gate in place of the clip."""

    tau_pos: Positive = 1.0
    """Steepness of the gate where the advantage is positive."""

    tau_neg: Positive = 1.05
    """Steepness of the gate elsewhere; a larger one reduces the weight of bad tokens faster."""


class GmpoConfig(Section):
    """`policy_loss_type=gmpo`: the geometric mean of a trajectory's clipped ratios."""

    log_ratio_clip: Positive = 0.4
    """The log-ratio of a token is clipped at this, on the side that the advantage pushes it to."""


class ClipCovConfig(Section):
    """`policy_loss_type=clip_cov`: a few tokens of high covariance are left out."""

    clip_ratio: Share = 2e-4
    """Share of the mini-batch's tokens to leave out, at least one."""

    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of log-prob and advantage of tokens to leave out."""

    clip_cov_ub: float = 5.0
    """Upper bound of the same."""


class KLCovConfig(Section):
    """`policy_loss_type=kl_cov`: a KL penalty on the tokens of highest covariance."""

    kl_cov_frac: Share = 0.2
    """Share of the mini-batch's tokens with the penalty, at least one."""

    ppo_kl_coef: NonNegative = 1.0
    """Weight of the penalty |log π − log π_old|."""


class DppoConfig(Section):
    """`policy_loss_type=dppo`: a trust region in probability instead of in ratio."""

    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """Distance between the two Bernoulli distributions "this token or another": total variation or KL divergence."""

    delta_low: NonNegative = 0.2
    """A token of negative advantage is left out if its probability fell by a distance of more than this."""

    delta_high: NonNegative = 0.2
    """A token of positive advantage is left out if its probability rose by a distance of more than this."""

    max_ratio: Positive = 20.0
    """Upper bound of the probability ratio that weighs a token."""


class VespoConfig(Section):
    """`policy_loss_type=vespo`: a smooth weight w^k e^(λ(1 − w)) of the whole trajectory's ratio w."""

    k_pos: Positive = 2.0
    """k where the advantage is not negative."""

    lambda_pos: Positive = 3.0
    """λ where the advantage is not negative."""

    k_neg: Positive = 3.0
    """k where the advantage is negative."""

    lambda_neg: Positive = 2.0
    """λ where the advantage is negative."""


class DroConfig(Section):
    """`policy_loss_type=dro`: a quadratic penalty on the log-ratio in place of a clip."""

    beta: NonNegative = 0.1
    """Weight of the penalty."""


class RolloutIsConfig(Section):
    """`policy_loss_type=rollout_is`: the ratio to the policy that sampled, zero outside of an interval."""

    ratio_low: NonNegative = 0.5
    """Tokens whose ratio is below this are left out."""

    ratio_high: Positive = 2.0
    """Tokens whose ratio is above this are left out."""


class OffPolicyCorrectionConfig(Section):
    """Correction for κ = π_old / π_rollout, the ratio of the trainer's probability of a token to the engine's.

    All off by default; metrics of κ are always logged. Each row of a step-wise trajectory is corrected separately.
    """

    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Truncated importance sampling: multiply the policy loss by min(κ, cap), per token or by the product over the
    trajectory."""

    token_tis_ratio_clip_high: Positive = 2.0
    """The cap when `tis_ratio_type=token`."""

    sequence_tis_ratio_clip_high: Positive = 5.0
    """The cap when `tis_ratio_type=sequence`."""

    sequence_mask_metric: Literal["product", "geometric"] | None = None
    """Leave out trajectories whose product, or geometric mean, of κ is outside of its interval."""

    product_mask_low: Positive = 0.5
    """Lower end of the interval for `product`."""

    product_mask_high: Positive = 2.0
    """Upper end of the interval for `product`."""

    geo_mask_low: Positive = 0.99
    """Lower end of the interval for `geometric`."""

    geo_mask_high: Positive = 1.01
    """Upper end of the interval for `geometric`."""

    token_mask_is_threshold_low: Positive | None = None
    """Leave out tokens whose κ is below this; needs `token_mask_is_threshold_high`."""

    token_mask_is_threshold_high: Positive | None = None
    """Leave out tokens whose κ is above this; needs `token_mask_is_threshold_low`."""

    outlier_token_is_threshold_low: Positive | None = None
    """Leave out trajectories with a token whose κ is below this."""

    outlier_token_is_threshold_high: Positive | None = None
    """Leave out trajectories with a token whose κ is above this."""

    @property
    def switches(self) -> dict[str, object]:
        """Settings that turn a part of the correction on."""
        optional = [name for name, field in type(self).model_fields.items() if field.default is None]
        return {name: value for name in optional if (value := getattr(self, name)) is not None}

    @property
    def is_on(self) -> bool:
        """True if anything is corrected."""
        return bool(self.switches)
