"""What the rules know of the estimators and losses that come with the package, by name.

A name that is in none of these sets is a user's own, of which nothing is known.
"""

from __future__ import annotations

from skyrl_train.config.algorithm import AlgorithmConfig

READ_VALUES = frozenset({"gae", "gae_per_turn"})
"""Estimators that need a critic."""

COMPARE_SAMPLES = frozenset(
    {
        "grpo",
        "grpo_passk",
        "grpo_per_turn",
        "rloo",
        "rloo_per_turn",
        "reinforce++-baseline",
        "opo",
        "gpg",
        "maxrl",
        "gdpo",
        "optimal_token_baseline",
    }
)
"""Estimators that compare the samples of one prompt with each other."""

COMPARE_ELSEWHERE = frozenset({"gae", "gae_per_turn", "reinforce++", "remax"})
"""Estimators that compare rewards with something else, so that a group of equal rewards still teaches."""

COMPARE_PARTS = frozenset({"gdpo", "grpo_per_turn", "rloo_per_turn", "optimal_token_baseline"})
"""Of those, the ones that tell trajectories of equal total reward apart: by component, turn or token."""

COMPARE_NOTHING = frozenset({"on_policy_distillation", "token_rewards"})
"""Estimators that compare no rewards."""

PER_TOKEN = frozenset(
    {
        "gae",
        "gae_per_turn",
        "grpo_per_turn",
        "rloo_per_turn",
        "reinforce++",
        "remax",
        "optimal_token_baseline",
        "on_policy_distillation",
        "token_rewards",
    }
)
"""Estimators whose advantages differ within a trajectory."""

WHITEN = frozenset({"gae", "gae_per_turn", "reinforce++", "reinforce++-baseline", "gdpo"})
"""Estimators that bring the advantages of a batch to mean 0 and variance 1 themselves."""

READ_NO_TOKEN_REWARDS = frozenset({"gdpo", "on_policy_distillation"})
"""Estimators that learn from something else than the rewards of tokens."""

ESTIMATORS = COMPARE_SAMPLES | COMPARE_ELSEWHERE | COMPARE_NOTHING
"""Every estimator that comes with the package."""

SEQUENCE_LOSSES = frozenset({"gmpo", "luspo", "vespo"})
"""Losses of whole trajectories, which take one advantage for each."""

SEQUENCE_MEAN_LOSSES = frozenset({"gspo", "gspo_token", "gmpo", "luspo", "sapo"})
"""Losses whose papers take the mean over trajectories, `loss_reduction=sequence_mean`."""

CLIP_LIKE_PPO = frozenset({"regular", "dual_clip", "gspo", "gspo_token", "luspo", "clip_cov"})
"""Losses that read `eps_clip_low` and `eps_clip_high`."""

CHOOSE_TOKENS = frozenset({"clip_cov", "kl_cov"})
"""Losses that choose tokens by comparing them across the mini-batch."""

LOSSES = (
    SEQUENCE_LOSSES
    | SEQUENCE_MEAN_LOSSES
    | CLIP_LIKE_PPO
    | frozenset(
        {"cispo", "cross_entropy", "dppo", "dro", "importance_sampling", "kl_cov", "policy_gradient", "rollout_is"}
    )
)
"""Every policy loss that comes with the package."""

READ_ROLLOUT_LOGPROBS = frozenset({"dppo", "rollout_is"})
"""Losses that measure the policy against the engine's log-probs."""


def reads_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether anything that comes with the package reads the reference's log-probs."""
    return algorithm.compares_with_reference or algorithm.advantage_estimator == "on_policy_distillation"
