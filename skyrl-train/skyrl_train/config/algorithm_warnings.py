"""Warnings about `trainer.algorithm.*`: what is allowed, but most likely not meant."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config.base import value_at
from skyrl_train.config.built_in import (
    CLIP_LIKE_PPO,
    COMPARE_ELSEWHERE,
    ESTIMATORS,
    LOSSES,
    READ_VALUES,
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
    """Where rewards are compared with something else than their group, no group is useless."""
    algorithm = cfg.trainer.algorithm
    if algorithm.advantage_estimator not in COMPARE_ELSEWHERE:
        return
    for key, off in (("dynamic_sampling.type", None), ("zero_variance_filter", False)):
        value = value_at(algorithm, key)
        if value != off:
            yield (
                f"trainer.algorithm.{key}={show(value)} leaves groups of equal rewards out, from which "
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
            "trainer.algorithm.policy_loss_type=reinforce"
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
)
