"""`trainer.algorithm.*`: the mathematics of one update."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from skyrl_train.config.base import OptionalCount, Resolved, Section, Text, resolved_later

Coefficient = Annotated[float, Ge(0)]


class AlgorithmConfig(Section):
    """Advantages, policy loss, KL and entropy terms."""

    advantage_estimator: Text = "grpo"
    """How rewards become advantages: a registered name, yours included."""

    policy_loss_type: Text = "regular"
    """The policy loss: a registered name, yours included. `regular` is PPO's clipped loss."""

    loss_reduction: Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm"] = "token_mean"
    """How token losses become one number, over the whole mini-batch: the mean over tokens; the mean over sequences of
    each one's token mean; or the mean over sequences of each one's token sum divided by `max_seq_len` (Dr. GRPO)."""

    max_seq_len: OptionalCount = None
    """The constant that `seq_mean_token_sum_norm` divides by, in tokens; null takes `generator.max_input_length` plus
    `generator.sampling_params.max_generate_length` when both are known."""

    use_kl_loss: bool = True
    """Add the KL divergence from the reference to the loss; this loads the reference."""

    kl_loss_coef: Coefficient = 0.001
    """Weight of the KL loss."""

    kl_estimator_type: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the KL divergence from the log-probs of the sampled tokens."""

    use_entropy_loss: bool = False
    """Subtract the policy's entropy from the loss, which rewards exploration."""

    entropy_loss_coef: Coefficient = 0.01
    """Weight of the entropy term."""

    grpo_norm_by_std: bool = True
    """Divide GRPO's advantages by the standard deviation of the group's rewards; false is Dr. GRPO."""

    eps_clip_low: Annotated[float, Ge(0), Le(1)] = 0.2
    """The probability ratio is clipped from below at 1 minus this."""

    eps_clip_high: Annotated[float, Ge(0)] = 0.2
    """The probability ratio is clipped from above at 1 plus this."""

    temperature: Resolved[Annotated[float, Gt(0)]] = resolved_later()
    """Logits are divided by this in the policy and the reference, as they were in the engine; null takes
    `generator.sampling_params.temperature`."""
