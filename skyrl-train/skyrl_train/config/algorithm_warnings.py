"""Warnings about `trainer.algorithm.*`: what is allowed, but most likely not meant."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config.base import value_at
from skyrl_train.config.built_in import (
    CLIP_LIKE_PPO,
    COMPARE_ELSEWHERE,
    COMPARE_PARTS,
    ESTIMATORS,
    LOSSES,
    READ_VALUES,
    SEQUENCE_LOSSES,
    SEQUENCE_MEAN_LOSSES,
    WHITEN,
)
from skyrl_train.config.problems import FIELDS, Rule, show
from skyrl_train.config.root import SkyRLConfig


def grpo_compares_one(cfg: SkyRLConfig) -> Iterator[str]:
    """GRPO gives a group of one its reward as advantage."""
    if cfg.generator.n_samples_per_prompt == 1 and cfg.trainer.algorithm.advantage_estimator == "grpo":
        yield (
            "generator.n_samples_per_prompt=1 with trainer.algorithm.advantage_estimator=grpo compares every "
            "trajectory with itself only; try generator.n_samples_per_prompt=5"
        )


def equal_rewards_teach(cfg: SkyRLConfig) -> Iterator[str]:
    """Where more than the totals of a group are compared, one of equal totals is not useless."""
    algorithm = cfg.trainer.algorithm
    if algorithm.advantage_estimator not in COMPARE_ELSEWHERE | COMPARE_PARTS:
        return
    for key, off in (("dynamic_sampling.type", None), ("zero_variance_filter", False)):
        value = value_at(algorithm, key)
        if value != off:
            yield (
                f"trainer.algorithm.{key}={show(value)} leaves groups of equal total rewards out, from which "
                f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator} learns too; "
                f"trainer.algorithm.{key}={show(off)} keeps them"
            )


def nothing_is_left_to_filter(cfg: SkyRLConfig) -> Iterator[str]:
    """Dynamic sampling has dropped what the filter would leave out."""
    algorithm = cfg.trainer.algorithm
    if algorithm.dynamic_sampling.type == "filter" and algorithm.zero_variance_filter:
        yield (
            "trainer.algorithm.zero_variance_filter=true finds no group of equal rewards, for "
            "trainer.algorithm.dynamic_sampling.type=filter has dropped them; leave one of the two out"
        )


def critic_is_not_read(cfg: SkyRLConfig) -> Iterator[str]:
    """A critic costs memory and time. One's own estimator may read it."""
    path, estimator = cfg.trainer.critic.model.path, cfg.trainer.algorithm.advantage_estimator
    if path is not None and estimator in ESTIMATORS - READ_VALUES:
        yield (
            f"trainer.critic.model.path={show(path)} trains a critic whose values "
            f"trainer.algorithm.advantage_estimator={estimator} does not read; set trainer.critic.model.path=null, or "
            "trainer.algorithm.advantage_estimator=gae"
        )


def advantages_are_normalised_already(cfg: SkyRLConfig) -> Iterator[str]:
    """Whitening twice changes nothing but the time it takes."""
    algorithm = cfg.trainer.algorithm
    if algorithm.advantage_batch_normalize and algorithm.advantage_estimator in WHITEN:
        yield (
            "trainer.algorithm.advantage_batch_normalize=true does what "
            f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator} has done already; set "
            "trainer.algorithm.advantage_batch_normalize=false"
        )


def cross_entropy_reads_no_rewards(cfg: SkyRLConfig) -> Iterator[str]:
    """Imitation of everything that was sampled."""
    if cfg.trainer.algorithm.policy_loss_type == "cross_entropy":
        yield (
            "trainer.algorithm.policy_loss_type=cross_entropy imitates every rollout, whatever its reward; try "
            "trainer.algorithm.policy_loss_type=policy_gradient"
        )


def loss_means_over_sequences(cfg: SkyRLConfig) -> Iterator[str]:
    """Other reductions give some trajectories more weight than the method does."""
    algorithm = cfg.trainer.algorithm
    if algorithm.policy_loss_type in SEQUENCE_MEAN_LOSSES and algorithm.loss_reduction != "sequence_mean":
        yield (
            f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type} was published as a mean over "
            f"trajectories, and trainer.algorithm.loss_reduction={algorithm.loss_reduction} weighs them otherwise; set "
            "trainer.algorithm.loss_reduction=sequence_mean"
        )


def clip_is_not_read(cfg: SkyRLConfig) -> Iterator[str]:
    """Other losses than PPO's have bounds of their own, or none."""
    algorithm = cfg.trainer.algorithm
    for name in ("eps_clip_low", "eps_clip_high"):
        value = getattr(algorithm, name)
        is_set = value != FIELDS[f"trainer.algorithm.{name}"].get_default()
        if is_set and algorithm.policy_loss_type in LOSSES - CLIP_LIKE_PPO:
            yield (
                f"trainer.algorithm.{name}={value} is not read by "
                f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type}{_own_bounds(algorithm.policy_loss_type)}"
            )


def _own_bounds(loss: str) -> str:
    keys = [key for key in FIELDS if key.startswith(f"trainer.algorithm.{loss}.")]
    return f"; its settings are {', '.join(keys)}" if keys else ", which clips nothing"


def one_token_never_stops(cfg: SkyRLConfig) -> Iterator[str]:
    """A reply of one token is cut off unless that token ends it."""
    for name, effect in (
        ("zero_reward_on_non_stop", "nearly every reward becomes 0"),
        ("apply_overlong_filtering", "nearly every trajectory is left out of the loss"),
    ):
        if getattr(cfg.generator, name) and cfg.generator.sampling_params.max_generate_length == 1:
            yield (
                f"generator.{name}=true looks for replies that ended by themselves, and with "
                f"generator.sampling_params.max_generate_length=1 next to none does: {effect}; set "
                f"generator.{name}=false"
            )


def k1_in_the_loss_is_noise(cfg: SkyRLConfig) -> Iterator[str]:
    """The gradient of k1 is 0 on average where the policy samples its own tokens."""
    algorithm = cfg.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.kl_estimator_type == "k1" and not algorithm.use_bias_correction_kl:
        yield (
            "trainer.algorithm.kl_estimator_type=k1 with trainer.algorithm.use_kl_loss=true has a gradient of 0 on "
            "average, which is noise; try trainer.algorithm.kl_estimator_type=k1+ or k3"
        )


def token_weights_meet_a_trajectory(cfg: SkyRLConfig) -> Iterator[str]:
    """The gradient of a loss of whole trajectories runs through all tokens, the ones that are left out too."""
    algorithm = cfg.trainer.algorithm
    correction = algorithm.off_policy_correction
    if algorithm.policy_loss_type not in SEQUENCE_LOSSES:
        return
    for key, value in (
        ("tis_ratio_type", correction.tis_ratio_type if correction.tis_ratio_type == "token" else None),
        ("token_mask_is_threshold_high", correction.token_mask_is_threshold_high),
    ):
        if value is not None:
            yield (
                f"trainer.algorithm.off_policy_correction.{key}={show(value)} weighs single tokens, and "
                f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type} has one ratio for all tokens of a "
                "trajectory; try trainer.algorithm.off_policy_correction.tis_ratio_type=sequence, or "
                "trainer.algorithm.policy_loss_type=gspo"
            )


ALGORITHM_WARNINGS: tuple[Rule, ...] = (
    grpo_compares_one,
    equal_rewards_teach,
    nothing_is_left_to_filter,
    critic_is_not_read,
    advantages_are_normalised_already,
    cross_entropy_reads_no_rewards,
    loss_means_over_sequences,
    clip_is_not_read,
    one_token_never_stops,
    k1_in_the_loss_is_noise,
    token_weights_meet_a_trajectory,
)
