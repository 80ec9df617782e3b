"""Estimators and losses of `make bench-algorithms`, with their changes to the recipe.

The recipe of `make catch` is GRPO with PPO's clipped loss and a KL loss coefficient of 0.03. A pair changes only the
keys that its algorithm needs. No other key was tuned unless a comment says so.
"""

from dataclasses import dataclass

ESTIMATOR = "trainer.algorithm.advantage_estimator"
LOSS = "trainer.algorithm.policy_loss_type"
MODEL, TEACHER = "<model>", "<teacher>"
"""Placeholders in a pair's keys for the warm-started model and for the model trained with GRPO."""


@dataclass(frozen=True)
class Pair:
    """A row of the table."""

    name: str
    overrides: tuple[str, ...] = ()


def _estimator(name: str, *overrides: str) -> Pair:
    return Pair(name, (f"{ESTIMATOR}={name}", *overrides))


def _loss(name: str, *overrides: str, label: str | None = None) -> Pair:
    return Pair(label or name, (f"{LOSS}={name}", *overrides))


CRITIC = (
    f"trainer.critic.model.path={MODEL}",
    "trainer.critic_mini_batch_size=4",
    "trainer.critic.optimizer_config.lr=5e-4",
    "trainer.algorithm.lambd=0.3",  # the rewards are dense, and the critic is inaccurate
)
SEQUENCE_MEAN = "trainer.algorithm.loss_reduction=sequence_mean"

GROUPS_OF_FOUR = (
    "trainer.train_batch_size=128",
    "trainer.policy_mini_batch_size=32",
    "generator.n_samples_per_prompt=4",
)

ESTIMATORS = (
    _estimator("grpo"),
    Pair(
        "grpo, not divided by std (Dr. GRPO)",
        (
            "trainer.algorithm.grpo_norm_by_std=false",
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm",
            "trainer.algorithm.max_seq_len=5",  # sampled tokens of a game
        ),
    ),
    _estimator("rloo"),
    _estimator("reinforce++"),
    _estimator("reinforce++-baseline"),
    _estimator("gae", *CRITIC),
    _estimator("remax"),
    _estimator("opo"),
    _estimator("gpg", f"{LOSS}=policy_gradient"),
    _estimator("maxrl"),
    _estimator("grpo_passk", *GROUPS_OF_FOUR),  # with sixteen games, random play nearly always wins one
    _estimator("optimal_token_baseline"),
    _estimator("gdpo"),
    _estimator("grpo_per_turn"),
    _estimator("rloo_per_turn"),
    _estimator("gae_per_turn", *CRITIC),
    _estimator(
        "on_policy_distillation",
        f"{LOSS}=importance_sampling",
        f"trainer.ref.model.path={TEACHER}",
        "trainer.algorithm.use_kl_loss=false",
    ),
)

LOSSES = (
    _loss("dual_clip"),
    _loss("gspo", SEQUENCE_MEAN),
    _loss("gspo_token", SEQUENCE_MEAN),
    _loss("cispo"),
    _loss("sapo", SEQUENCE_MEAN),
    _loss("gmpo", SEQUENCE_MEAN),
    _loss("luspo", SEQUENCE_MEAN),
    _loss("clip_cov", "trainer.algorithm.clip_cov.clip_ratio=0.01"),  # 6 of the 640 tokens of a mini-batch
    _loss("kl_cov", "trainer.algorithm.kl_cov.kl_cov_frac=0.01"),
    _loss("dppo", "trainer.algorithm.dppo.dppo_type=binary_tv", label="dppo, total variation"),
    _loss("dppo", "trainer.algorithm.dppo.dppo_type=binary_kl", label="dppo, KL"),
    _loss("vespo", SEQUENCE_MEAN),
    _loss("dro"),
    _loss("importance_sampling"),
    _loss("rollout_is"),
    _loss("policy_gradient"),
)

RECIPES = (
    Pair(
        "DAPO",
        (
            f"{LOSS}=dual_clip",
            "trainer.algorithm.clip_ratio_c=10",
            "trainer.algorithm.dynamic_sampling.type=filter",
            "generator.sampling_params.max_generate_length=4",  # so that a reply can end or be truncated
            "generator.apply_overlong_filtering=true",
            "trainer.algorithm.overlong_buffer_len=2",
        ),
    ),
    Pair("KL in the reward", ("trainer.algorithm.use_kl_loss=false", "trainer.algorithm.use_kl_in_reward=true")),
    Pair("truncated importance sampling", ("trainer.algorithm.off_policy_correction.tis_ratio_type=token",)),
    Pair("top 20% of entropy", ("trainer.algorithm.top_entropy_quantile=0.2",)),
)

SECTIONS = {
    "Advantage estimators": ESTIMATORS,
    "Policy losses, with the advantages of grpo": LOSSES,
    "Recipes": RECIPES,
}
"""Sections of the table. `cross_entropy` is missing because it imitates every rollout regardless of its reward."""
