"""Settings of each policy loss, `trainer.algorithm.<name>.*`, and `trainer.algorithm.off_policy_correction.*`."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from skyrl_train.config.base import Section

Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]


class CispoConfig(Section):
    """`policy_loss_type=cispo`: weight each token by its clipped, detached ratio."""

    cispo_eps_clip_low: NonNegative = 1.0
    """The weight is at least 1 - `cispo_eps_clip_low`. At 1 there is no lower bound."""

    cispo_eps_clip_high: NonNegative = 4.0
    """The weight is at most 1 + `cispo_eps_clip_high`."""


class SapoConfig(Section):
    """`policy_loss_type=sapo`: a sigmoid gate instead of the clip."""

    tau_pos: Positive = 1.0
    """Steepness of the gate for positive advantages."""

    tau_neg: Positive = 1.05
    """Steepness of the gate for all other advantages. Larger values down-weight bad tokens faster."""


class GmpoConfig(Section):
    """`policy_loss_type=gmpo`: the geometric mean of a trajectory's clipped ratios."""

    log_ratio_clip: Positive = 0.4
    """Clip of a token's log-ratio, on the side the advantage pushes it to."""


class ClipCovConfig(Section):
    """`policy_loss_type=clip_cov`: mask a few tokens with high covariance of log-prob and advantage."""

    clip_ratio: Share = 2e-4
    """Fraction of the mini-batch's tokens to mask, at least one token."""

    clip_cov_lb: float = 1.0
    """Minimum covariance of masked tokens."""

    clip_cov_ub: float = 5.0
    """Maximum covariance of masked tokens."""


class KLCovConfig(Section):
    """`policy_loss_type=kl_cov`: a KL penalty on the tokens with the highest covariance."""

    kl_cov_frac: Share = 0.2
    """Fraction of the mini-batch's tokens that are penalized, at least one token."""

    ppo_kl_coef: NonNegative = 1.0
    """Weight of the penalty |log π − log π_old|."""


class DppoConfig(Section):
    """`policy_loss_type=dppo`: a trust region on probabilities instead of ratios."""

    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """Distance between the old and new Bernoulli distributions "this token or any other": total variation or KL."""

    delta_low: NonNegative = 0.2
    """Mask tokens with negative advantage whose probability fell by more than this distance."""

    delta_high: NonNegative = 0.2
    """Mask tokens with positive advantage whose probability rose by more than this distance."""

    max_ratio: Positive = 20.0
    """Upper bound of the probability ratio that weights a token."""


class VespoConfig(Section):
    """`policy_loss_type=vespo`: the smooth weight w^k e^(λ(1 − w)), where w is the whole trajectory's ratio."""

    k_pos: Positive = 2.0
    """Exponent k for advantages ≥ 0."""

    lambda_pos: Positive = 3.0
    """Decay λ for advantages ≥ 0."""

    k_neg: Positive = 3.0
    """Exponent k for negative advantages."""

    lambda_neg: Positive = 2.0
    """Decay λ for negative advantages."""


class DroConfig(Section):
    """`policy_loss_type=dro`: a quadratic penalty on the log-ratio instead of a clip."""

    beta: NonNegative = 0.1
    """Weight of the penalty."""


class RolloutIsConfig(Section):
    """`policy_loss_type=rollout_is`: the ratio to the rollout policy, masked outside [`ratio_low`, `ratio_high`]."""

    ratio_low: NonNegative = 0.5
    """Mask tokens whose ratio is below this."""

    ratio_high: Positive = 2.0
    """Mask tokens whose ratio is above this."""


class OffPolicyCorrectionConfig(Section):
    """Corrections based on κ = π_old / π_rollout: the trainer's probability of a token divided by the engine's.

    All are off by default. Metrics of κ are always logged. Each row of a step-wise trajectory is corrected separately.
    """

    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Truncated importance sampling: multiply the policy loss by min(κ, cap), with κ per token or multiplied over the
    sequence."""

    token_tis_ratio_clip_high: Positive = 2.0
    """Cap on κ for `tis_ratio_type=token`."""

    sequence_tis_ratio_clip_high: Positive = 5.0
    """Cap on κ for `tis_ratio_type=sequence`."""

    sequence_mask_metric: Literal["product", "geometric"] | None = None
    """Mask trajectories whose κ, as a product or a geometric mean over tokens, is outside the bounds below."""

    product_mask_low: Positive = 0.5
    """Minimum κ for `sequence_mask_metric=product`."""

    product_mask_high: Positive = 2.0
    """Maximum κ for `sequence_mask_metric=product`."""

    geo_mask_low: Positive = 0.99
    """Minimum κ for `sequence_mask_metric=geometric`."""

    geo_mask_high: Positive = 1.01
    """Maximum κ for `sequence_mask_metric=geometric`."""

    token_mask_is_threshold_low: Positive | None = None
    """Mask tokens whose κ is below this. Needs `token_mask_is_threshold_high`."""

    token_mask_is_threshold_high: Positive | None = None
    """Mask tokens whose κ is above this. Needs `token_mask_is_threshold_low`."""

    outlier_token_is_threshold_low: Positive | None = None
    """Mask trajectories that contain a token with κ below this."""

    outlier_token_is_threshold_high: Positive | None = None
    """Mask trajectories that contain a token with κ above this."""

    @property
    def switches(self) -> dict[str, object]:
        """Settings that enable a correction."""
        optional = [name for name, field in type(self).model_fields.items() if field.default is None]
        return {name: value for name in optional if (value := getattr(self, name)) is not None}

    @property
    def is_on(self) -> bool:
        """True if any correction is enabled."""
        return bool(self.switches)
