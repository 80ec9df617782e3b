"""`trainer.algorithm.*`: advantages, policy loss, KL and entropy terms."""

from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from skyrl_train.config.base import (
    Allowed,
    Count,
    CountOrMinusOne,
    FreeValue,
    OptionalCount,
    Resolved,
    Section,
    Text,
    resolved_later,
)

Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]
Coefficient = Annotated[float, Ge(0), Le(1000)]
Discount = Annotated[float, Ge(0), Le(1)]
LossReduction = Literal[
    "token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum", "token_sum"
]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


class KLControllerConfig(Section):
    """Schedule of the KL penalty's weight in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` keeps `kl_loss_coef` constant. `adaptive` raises it while the KL divergence is above `kl_target` and
    lowers it otherwise."""

    kl_target: Annotated[float, Gt(0)] = 0.1
    """Target KL divergence per token for `adaptive`, in nats."""

    horizon: Count = 10000
    """Number of trajectories over which `adaptive` reacts. Larger values react more slowly."""


class DynamicSamplingConfig(Section):
    """Resample or replace groups of equal rewards, because their advantages are 0 and they teach nothing."""

    type: Literal["filter", "replace"] | None = None
    """`filter` keeps sampling prompts until `trainer.train_batch_size` of them have groups with unequal rewards (DAPO).
    `replace` overwrites groups of equal rewards with copies of good groups. A step draws as many batches of prompts as
    it needs, so a run may pass over the data more than `trainer.epochs` times."""

    max_sample_batches: CountOrMinusOne = 30
    """Maximum number of batches sampled in one step. The run fails if they are not enough. -1 removes the limit."""

    min_replace_ratio: Annotated[float, Ge(0), Le(1)] = 0.3
    """`replace` resamples until more than this fraction of the groups is good."""


class GdpoConfig(Section):
    """`advantage_estimator=gdpo`: each named component of the reward is normalized separately."""

    weights: Annotated[dict[str, float], Allowed("a section of component=weight")] = Field(default={})
    """Weight of each reward component, e.g. `trainer.algorithm.gdpo.weights.format=0.5`. Defaults to 1 for each."""


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


class OverlongBuffer(NamedTuple):
    """The soft overlong penalty, under the names that SkyRL trainers read."""

    len: int | None
    penalty_factor: float


class AlgorithmConfig(Section):
    """Advantages, policy loss, KL and entropy terms."""

    advantage_estimator: Text = "grpo"
    """Name of a registered advantage estimator, built-in or custom."""

    gamma: Discount = 1.0
    """Discount factor per sampled token (per turn in per-turn estimators)."""

    lambd: Discount = 1.0
    """λ of generalized advantage estimation: 1 uses full returns, 0 only the critic's one-step estimate."""

    grpo_norm_by_std: bool = True
    """Divide GRPO's advantages by the standard deviation of the group's rewards. `false` is Dr. GRPO."""

    gdpo: GdpoConfig = GdpoConfig()

    advantage_batch_normalize: bool = False
    """Normalize advantages over all sampled tokens of a batch to mean 0 and variance 1."""

    policy_loss_type: Text = "regular"
    """Name of a registered policy loss, built-in or custom. `regular` is PPO's clipped loss."""

    loss_reduction: LossReduction = "token_mean"
    """How token losses are reduced over a mini-batch. `token_mean` averages over all tokens. `sequence_mean` and
    `prompt_mean` average each sequence's (prompt's) token mean. `seq_mean_token_sum` averages each sequence's token
    sum, and `seq_mean_token_sum_norm` also divides it by `max_seq_len` (Dr. GRPO). `token_sum` is the plain sum."""

    max_seq_len: OptionalCount = None
    """Divisor of `loss_reduction=seq_mean_token_sum_norm`, in tokens. Defaults to `generator.max_input_length` +
    `generator.sampling_params.max_generate_length` if both are known."""

    eps_clip_low: Annotated[float, Ge(0), Le(1)] = 0.2
    """Lower clip of the probability ratio: 1 - `eps_clip_low`."""

    eps_clip_high: Annotated[float, Ge(0)] = 0.2
    """Upper clip of the probability ratio: 1 + `eps_clip_high`."""

    clip_ratio_c: Annotated[float, Gt(1)] = 3.0
    """Upper bound of the ratio on tokens with negative advantage, for `policy_loss_type=dual_clip`."""

    cispo: CispoConfig = CispoConfig()
    sapo: SapoConfig = SapoConfig()
    gmpo: GmpoConfig = GmpoConfig()
    clip_cov: ClipCovConfig = ClipCovConfig()
    kl_cov: KLCovConfig = KLCovConfig()
    dppo: DppoConfig = DppoConfig()
    vespo: VespoConfig = VespoConfig()
    dro: DroConfig = DroConfig()
    rollout_is: RolloutIsConfig = RolloutIsConfig()

    value_clip: Annotated[float, Gt(0)] | None = 0.2
    """Clip range of the critic's loss: maximum change of a value within one update. null disables clipping."""

    use_kl_loss: bool = True
    """Add the KL divergence from the reference to the loss. Loads the reference."""

    use_kl_in_reward: bool = False
    """Instead, subtract the KL divergence from the reference from each token's reward. Loads the reference."""

    kl_loss_coef: Coefficient = 0.001
    """Weight of the KL divergence, in the loss or in the reward."""

    kl_estimator_type: KLEstimator = "k3"
    """KL estimator, computed from the log-probs of sampled tokens. Estimators with a `+` keep the value but use k2's
    gradient, which is unbiased on policy."""

    use_bias_correction_kl: bool = False
    """Weight each token's KL loss by its probability ratio, to keep the gradient unbiased off policy."""

    kl_ctrl: KLControllerConfig = KLControllerConfig()

    use_entropy_loss: bool = False
    """Subtract the policy's entropy from the loss, to encourage exploration."""

    entropy_loss_coef: Coefficient = 0.01
    """Weight of the entropy term."""

    top_entropy_quantile: Annotated[float, Gt(0), Le(1)] = 1.0
    """Train only on this fraction of a mini-batch's tokens, picked by highest entropy. 1 trains on all tokens."""

    off_policy_correction: OffPolicyCorrectionConfig = OffPolicyCorrectionConfig()

    off_policy_sequence_mask_threshold: Annotated[float, Gt(0)] | None = None
    """Mask trajectories with negative advantage whose log-probs fell by more than this many nats per token since
    sampling, on average. null masks none. Each row of a step-wise trajectory is checked separately."""

    router_replay: bool = False
    """Use the engine's choice of experts in the trainer (R3), so that rounding cannot flip nearly tied experts of a
    mixture-of-experts model."""

    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    zero_variance_filter: bool = False
    """Exclude groups of equal rewards from the loss and from its divisor."""

    zero_variance_filter_tol: Annotated[float, Ge(0), Lt(1)] = 1e-6
    """A group's rewards count as equal if their standard deviation is at most this. Also used by dynamic sampling."""

    overlong_buffer_len: OptionalCount = None
    """DAPO's soft overlong penalty, in tokens. Responses that reach the last `overlong_buffer_len` tokens before
    `generator.sampling_params.max_generate_length` lose up to `overlong_buffer_penalty_factor` reward. null disables
    it."""

    overlong_buffer_penalty_factor: Resolved[Coefficient] = resolved_later()
    """Overlong penalty for a response of maximum length. Defaults to 1."""

    temperature: Resolved[Annotated[float, Gt(0), Le(100)]] = resolved_later()
    """Temperature for the log-probs of policy and reference. Defaults to `generator.sampling_params.temperature`, so
    that trainer and engine agree. Must be set if rollouts are greedy."""

    custom: Annotated[dict[str, FreeValue], Allowed("a section of custom keys")] = Field(default={})
    """Settings for custom estimators and losses. They read `trainer.algorithm.custom.tau=0.3` as
    `config.custom["tau"]`."""

    @property
    def overlong_buffer(self) -> OverlongBuffer:
        """The overlong penalty under SkyRL's names, `overlong_buffer.len` and `overlong_buffer.penalty_factor`."""
        return OverlongBuffer(self.overlong_buffer_len, self.overlong_buffer_penalty_factor)

    @property
    def compares_with_reference(self) -> bool:
        """True if the KL divergence from the reference is in the loss or in the reward."""
        return self.use_kl_loss or self.use_kl_in_reward
