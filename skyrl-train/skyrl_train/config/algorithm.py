"""`trainer.algorithm.*`: the mathematics of one update."""

from __future__ import annotations

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
from skyrl_train.config.policy_loss import (
    CispoConfig,
    ClipCovConfig,
    DppoConfig,
    DroConfig,
    GmpoConfig,
    KLCovConfig,
    OffPolicyCorrectionConfig,
    RolloutIsConfig,
    SapoConfig,
    VespoConfig,
)

Coefficient = Annotated[float, Ge(0), Le(1000)]
Discount = Annotated[float, Ge(0), Le(1)]
LossReduction = Literal[
    "token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum", "token_sum"
]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


class KLControllerConfig(Section):
    """The weight of the KL penalty in the reward over time."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` keeps `kl_loss_coef`; `adaptive` raises it while the divergence is above `kl_target`, and lowers it
    below."""

    kl_target: Annotated[float, Gt(0)] = 0.1
    """Divergence per token that `adaptive` aims at, in nats."""

    horizon: Count = 10000
    """Trajectories over which `adaptive` reacts: the larger, the slower."""


class DynamicSamplingConfig(Section):
    """Replacement of groups whose rewards are all equal, which have advantages of 0."""

    type: Literal["filter", "replace"] | None = None
    """`filter` samples more prompts until `trainer.train_batch_size` of them have groups of unequal rewards (DAPO);
    `replace` replaces the other groups with copies of good ones. A step draws as many batches of prompts as it needs,
    so a run may pass over the data more than `trainer.epochs` times."""

    max_sample_batches: CountOrMinusOne = 30
    """Maximum number of batches in one step, after which the run fails; -1 is no limit."""

    min_replace_ratio: Annotated[float, Ge(0), Le(1)] = 0.3
    """`replace` samples again until more than this fraction of the groups is good."""


class GdpoConfig(Section):
    """`advantage_estimator=gdpo`: each named component of the reward is normalized separately."""

    weights: Annotated[dict[str, float], Allowed("a section of component=weight")] = Field(default={})
    """Weight of each component, by its name: `trainer.algorithm.gdpo.weights.format=0.5`; 1 by default."""


class OverlongBuffer(NamedTuple):
    """The soft overlong penalty, as trainers of SkyRL read it."""

    len: int | None
    penalty_factor: float


class AlgorithmConfig(Section):
    """Advantages, policy loss, KL and entropy terms."""

    advantage_estimator: Text = "grpo"
    """Name of a registered advantage estimator, built-in or custom."""

    gamma: Discount = 1.0
    """Discount of later rewards, per sampled token, or per turn in per-turn estimators."""

    lambd: Discount = 1.0
    """λ of generalized advantage estimation: 1 uses the rewards alone, 0 relies on the critic."""

    grpo_norm_by_std: bool = True
    """Divide GRPO's advantages by the standard deviation of the group's rewards; false is Dr. GRPO."""

    gdpo: GdpoConfig = GdpoConfig()
    """Settings of the estimator `gdpo`."""

    advantage_batch_normalize: bool = False
    """Shift and scale the advantages of a batch's sampled tokens to mean 0 and variance 1."""

    policy_loss_type: Text = "regular"
    """Name of a registered policy loss, built-in or custom. `regular` is PPO's clipped loss."""

    loss_reduction: LossReduction = "token_mean"
    """Reduction of token losses over the whole mini-batch, to the mean over tokens; over sequences of each one's token
    mean; over prompts of each one's token mean; over sequences of each one's token sum, divided by `max_seq_len` (Dr.
    GRPO) or not; or to the plain sum."""

    max_seq_len: OptionalCount = None
    """The constant that `seq_mean_token_sum_norm` divides by, in tokens; null takes `generator.max_input_length` plus
    `generator.sampling_params.max_generate_length` when both are known."""

    eps_clip_low: Annotated[float, Ge(0), Le(1)] = 0.2
    """The probability ratio is clipped from below at 1 minus this."""

    eps_clip_high: Annotated[float, Ge(0)] = 0.2
    """The probability ratio is clipped from above at 1 plus this."""

    clip_ratio_c: Annotated[float, Gt(1)] = 3.0
    """`policy_loss_type=dual_clip`: upper bound of the ratio of tokens of negative advantage."""

    cispo: CispoConfig = CispoConfig()
    """Settings of the loss `cispo`."""

    sapo: SapoConfig = SapoConfig()
    """Settings of the loss `sapo`."""

    gmpo: GmpoConfig = GmpoConfig()
    """Settings of the loss `gmpo`."""

    clip_cov: ClipCovConfig = ClipCovConfig()
    """Settings of the loss `clip_cov`."""

    kl_cov: KLCovConfig = KLCovConfig()
    """Settings of the loss `kl_cov`."""

    dppo: DppoConfig = DppoConfig()
    """Settings of the loss `dppo`."""

    vespo: VespoConfig = VespoConfig()
    """Settings of the loss `vespo`."""

    dro: DroConfig = DroConfig()
    """Settings of the loss `dro`."""

    rollout_is: RolloutIsConfig = RolloutIsConfig()
    """Settings of the loss `rollout_is`."""

    value_clip: Annotated[float, Gt(0)] | None = 0.2
    """Maximum change of a critic's value in an update before its loss is clipped; null disables clipping."""

    use_kl_loss: bool = True
    """Add the KL divergence from the reference to the loss. Loads the reference."""

    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference from each token's reward instead. Loads the reference."""

    kl_loss_coef: Coefficient = 0.001
    """Weight of the KL divergence, in the loss or in the reward."""

    kl_estimator_type: KLEstimator = "k3"
    """Estimator of the KL divergence from the log-probs of the sampled tokens. A `+` keeps the value and takes the
    gradient of k2, which is unbiased on policy."""

    use_bias_correction_kl: bool = False
    """Weigh the KL loss of each token by its probability ratio, which keeps its gradient unbiased off policy."""

    kl_ctrl: KLControllerConfig = KLControllerConfig()
    """The weight of the KL penalty in the reward over time."""

    use_entropy_loss: bool = False
    """Subtract the policy's entropy from the loss, which rewards exploration."""

    entropy_loss_coef: Coefficient = 0.01
    """Weight of the entropy term."""

    top_entropy_quantile: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of a mini-batch's tokens in the policy loss, those of highest entropy; 1 is all tokens."""

    off_policy_correction: OffPolicyCorrectionConfig = OffPolicyCorrectionConfig()
    """Correction of the gap between the engine that sampled and the policy that is trained."""

    off_policy_sequence_mask_threshold: Annotated[float, Gt(0)] | None = None
    """Leave out trajectories of negative advantage whose tokens are now less likely than when they were sampled, by
    more than this many nats on average; null leaves out none. Rows of a step-wise trajectory are judged separately."""

    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Sampling until enough groups have unequal rewards."""

    zero_variance_filter: bool = False
    """Leave groups of equal rewards out of the loss, and out of its divisor."""

    zero_variance_filter_tol: Annotated[float, Ge(0), Lt(1)] = 1e-6
    """Rewards whose standard deviation is at most this count as equal, in the filter and in dynamic sampling."""

    overlong_buffer_len: OptionalCount = None
    """Soft overlong penalty (DAPO): this many tokens before `generator.sampling_params.max_generate_length` cost up
    to `overlong_buffer_penalty_factor`; null disables it."""

    overlong_buffer_penalty_factor: Resolved[Coefficient] = resolved_later()
    """Penalty of a response of maximum length; null takes 1."""

    temperature: Resolved[Annotated[float, Gt(0), Le(100)]] = resolved_later()
    """Logits are divided by this in the policy and the reference, as in the engine; null takes
    `generator.sampling_params.temperature`."""

    custom: Annotated[dict[str, FreeValue], Allowed("a section of keys of your own")] = Field(default={})
    """Settings of custom estimators and losses, which read `trainer.algorithm.custom.tau=0.3` as
    `config.custom["tau"]`."""

    @property
    def overlong_buffer(self) -> OverlongBuffer:
        """The penalty under SkyRL's names, `overlong_buffer.len` and `overlong_buffer.penalty_factor`."""
        return OverlongBuffer(self.overlong_buffer_len, self.overlong_buffer_penalty_factor)

    @property
    def compares_with_reference(self) -> bool:
        """True if the KL divergence from the reference is in the loss or in the reward."""
        return self.use_kl_loss or self.use_kl_in_reward
