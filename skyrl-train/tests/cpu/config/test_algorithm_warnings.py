"""Every warning: what gives rise to it, in which words, and the nearest that does not."""

from __future__ import annotations

import logging

import pytest
from omegaconf import OmegaConf

from skyrl_train.config import load_config
from skyrl_train.config.algorithm_warnings import ALGORITHM_WARNINGS
from skyrl_train.config.built_in import (
    CLIP_LIKE_PPO,
    COMPARE_ELSEWHERE,
    COMPARE_PARTS,
    LOSSES,
    SEQUENCE_MEAN_LOSSES,
    WHITEN,
)
from skyrl_train.config.validation import find_warnings

ALGORITHM = "trainer.algorithm"
CRITIC = "trainer.critic.model.path=tiny"
SEQUENCE_MEAN = f"{ALGORITHM}.loss_reduction=sequence_mean"


def warnings(overrides: list[str]) -> list[str]:
    return find_warnings(load_config(OmegaConf.from_dotlist(overrides)))


def estimator(name: str) -> list[str]:
    return [f"{ALGORITHM}.advantage_estimator={name}", *([CRITIC] if name.startswith("gae") else [])]


def loss(name: str) -> str:
    return f"{ALGORITHM}.policy_loss_type={name}"


SEQUENCE_MEAN = f"{ALGORITHM}.loss_reduction=sequence_mean"

CASES: list[tuple[str, list[str], str, list[list[str]]]] = [
    (
        "k1_in_the_loss_is_noise",
        [f"{ALGORITHM}.kl_estimator_type=k1"],
        "trainer.algorithm.kl_estimator_type=k1 with trainer.algorithm.use_kl_loss=true has a gradient of 0 on "
        "average, which is noise; try trainer.algorithm.kl_estimator_type=k1+ or k3",
        [
            [f"{ALGORITHM}.kl_estimator_type=k1+"],
            [f"{ALGORITHM}.kl_estimator_type=k1", f"{ALGORITHM}.use_kl_loss=false"],
            [f"{ALGORITHM}.kl_estimator_type=k1", f"{ALGORITHM}.use_bias_correction_kl=true"],
        ],
    ),
    (
        "token_weights_meet_a_trajectory",
        [loss("gmpo"), SEQUENCE_MEAN, f"{ALGORITHM}.off_policy_correction.tis_ratio_type=token"],
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token weighs single tokens, and "
        "trainer.algorithm.policy_loss_type=gmpo has one ratio for all tokens of a trajectory; try "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence, or trainer.algorithm.policy_loss_type=gspo",
        [
            [loss("gmpo"), SEQUENCE_MEAN, f"{ALGORITHM}.off_policy_correction.tis_ratio_type=sequence"],
            [loss("gspo"), SEQUENCE_MEAN, f"{ALGORITHM}.off_policy_correction.tis_ratio_type=token"],
        ],
    ),
    (
        "grpo_compares_one",
        ["generator.n_samples_per_prompt=1"],
        "generator.n_samples_per_prompt=1 with trainer.algorithm.advantage_estimator=grpo compares every trajectory "
        "with itself only; try generator.n_samples_per_prompt=5",
        [["generator.n_samples_per_prompt=2"], ["generator.n_samples_per_prompt=1", *estimator("reinforce++")]],
    ),
    (
        "equal_rewards_teach",
        [*estimator("reinforce++"), f"{ALGORITHM}.dynamic_sampling.type=filter"],
        "trainer.algorithm.dynamic_sampling.type=filter leaves groups of equal total rewards out, from which "
        "trainer.algorithm.advantage_estimator=reinforce++ learns too; trainer.algorithm.dynamic_sampling.type=null "
        "keeps them",
        [estimator("reinforce++"), [*estimator("rloo"), f"{ALGORITHM}.dynamic_sampling.type=filter"]],
    ),
    (
        "equal_rewards_teach",
        [*estimator("remax"), f"{ALGORITHM}.zero_variance_filter=true"],
        "trainer.algorithm.zero_variance_filter=true leaves groups of equal total rewards out, from which "
        "trainer.algorithm.advantage_estimator=remax learns too; trainer.algorithm.zero_variance_filter=false keeps "
        "them",
        [estimator("remax"), [*estimator("mine"), f"{ALGORITHM}.zero_variance_filter=true"]],
    ),
    (
        "nothing_is_left_to_filter",
        [f"{ALGORITHM}.dynamic_sampling.type=filter", f"{ALGORITHM}.zero_variance_filter=true"],
        "trainer.algorithm.zero_variance_filter=true finds no group of equal rewards, for "
        "trainer.algorithm.dynamic_sampling.type=filter has dropped them; leave one of the two out",
        [
            [f"{ALGORITHM}.dynamic_sampling.type=replace", f"{ALGORITHM}.zero_variance_filter=true"],
            [f"{ALGORITHM}.dynamic_sampling.type=filter"],
            [f"{ALGORITHM}.zero_variance_filter=true"],
        ],
    ),
    (
        "critic_is_not_read",
        [CRITIC],
        "trainer.critic.model.path=tiny trains a critic whose values trainer.algorithm.advantage_estimator=grpo does "
        "not read; set trainer.critic.model.path=null, or trainer.algorithm.advantage_estimator=gae",
        [estimator("gae"), estimator("gae_per_turn"), [CRITIC, *estimator("mine")]],
    ),
    (
        "advantages_are_normalised_already",
        [*estimator("gdpo"), f"{ALGORITHM}.advantage_batch_normalize=true"],
        "trainer.algorithm.advantage_batch_normalize=true does what trainer.algorithm.advantage_estimator=gdpo has "
        "done already; set trainer.algorithm.advantage_batch_normalize=false",
        [estimator("gdpo"), [*estimator("rloo"), f"{ALGORITHM}.advantage_batch_normalize=true"]],
    ),
    (
        "cross_entropy_reads_no_rewards",
        [loss("cross_entropy")],
        "trainer.algorithm.policy_loss_type=cross_entropy imitates every rollout, whatever its reward; try "
        "trainer.algorithm.policy_loss_type=policy_gradient",
        [[loss("policy_gradient")]],
    ),
    (
        "loss_means_over_sequences",
        [loss("gspo")],
        "trainer.algorithm.policy_loss_type=gspo was published as a mean over trajectories, and "
        "trainer.algorithm.loss_reduction=token_mean weighs them otherwise; set "
        "trainer.algorithm.loss_reduction=sequence_mean",
        [[loss("gspo"), SEQUENCE_MEAN], [loss("cispo")], [loss("vespo")]],
    ),
    (
        "clip_is_not_read",
        [loss("cispo"), f"{ALGORITHM}.eps_clip_high=0.28"],
        "trainer.algorithm.eps_clip_high=0.28 is not read by trainer.algorithm.policy_loss_type=cispo; its settings "
        "are trainer.algorithm.cispo.cispo_eps_clip_low, trainer.algorithm.cispo.cispo_eps_clip_high",
        [
            [loss("cispo"), f"{ALGORITHM}.eps_clip_high=0.2"],
            [loss("regular"), f"{ALGORITHM}.eps_clip_high=0.28"],
            [loss("mine"), f"{ALGORITHM}.eps_clip_high=0.28"],
        ],
    ),
    (
        "clip_is_not_read",
        [loss("policy_gradient"), f"{ALGORITHM}.eps_clip_low=0.1"],
        "trainer.algorithm.eps_clip_low=0.1 is not read by trainer.algorithm.policy_loss_type=policy_gradient, "
        "which clips nothing",
        [[loss("dual_clip"), f"{ALGORITHM}.eps_clip_low=0.1"]],
    ),
    (
        "one_token_never_stops",
        ["generator.zero_reward_on_non_stop=true", "generator.sampling_params.max_generate_length=1"],
        "generator.zero_reward_on_non_stop=true looks for replies that ended by themselves, and with "
        "generator.sampling_params.max_generate_length=1 next to none does: nearly every reward becomes 0; set "
        "generator.zero_reward_on_non_stop=false",
        [
            ["generator.zero_reward_on_non_stop=true", "generator.sampling_params.max_generate_length=2"],
            ["generator.sampling_params.max_generate_length=1"],
        ],
    ),
    (
        "one_token_never_stops",
        ["generator.apply_overlong_filtering=true", "generator.sampling_params.max_generate_length=1"],
        "generator.apply_overlong_filtering=true looks for replies that ended by themselves, and with "
        "generator.sampling_params.max_generate_length=1 next to none does: nearly every trajectory is left out of the "
        "loss; set generator.apply_overlong_filtering=false",
        [["generator.apply_overlong_filtering=true"]],
    ),
]


@pytest.mark.parametrize(("name", "overrides", "expected"), [case[:3] for case in CASES])
def test_a_warning_says_what_to_do(name: str, overrides: list[str], expected: str) -> None:
    assert warnings(overrides) == [expected]


@pytest.mark.parametrize("overrides", [quiet for case in CASES for quiet in case[3]])
def test_what_is_nearest_to_it_is_quiet(overrides: list[str]) -> None:
    assert warnings(overrides) == []


def test_every_warning_was_seen() -> None:
    assert {warning.__name__ for warning in ALGORITHM_WARNINGS} == {name for name, *_ in CASES}


def test_a_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(OmegaConf.from_dotlist([loss("cross_entropy")]))
    assert [record.message for record in caplog.records] == warnings([loss("cross_entropy")])


@pytest.mark.parametrize("name", sorted(COMPARE_ELSEWHERE | COMPARE_PARTS))
def test_estimators_that_learn_from_equal_rewards(name: str) -> None:
    assert len(warnings([*estimator(name), f"{ALGORITHM}.zero_variance_filter=true"])) == 1


@pytest.mark.parametrize("name", sorted(WHITEN))
def test_estimators_that_normalise(name: str) -> None:
    assert len(warnings([*estimator(name), f"{ALGORITHM}.advantage_batch_normalize=true"])) == 1


@pytest.mark.parametrize("name", sorted(SEQUENCE_MEAN_LOSSES))
@pytest.mark.parametrize("reduction", ["token_mean", "prompt_mean", "seq_mean_token_sum", "token_sum"])
def test_losses_that_are_means_over_sequences(name: str, reduction: str) -> None:
    assert len(warnings([loss(name), f"{ALGORITHM}.loss_reduction={reduction}"])) == 1
    assert not warnings([loss(name), SEQUENCE_MEAN])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_that_have_bounds_of_their_own(name: str) -> None:
    clips = [f"{ALGORITHM}.eps_clip_low=0.1", f"{ALGORITHM}.eps_clip_high=0.3"]
    n_about_clips = sum("is not read by" in sentence for sentence in warnings([loss(name), SEQUENCE_MEAN, *clips]))
    assert n_about_clips == (0 if name in CLIP_LIKE_PPO else 2)
