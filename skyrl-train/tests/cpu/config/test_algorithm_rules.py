"""Every rule of `trainer.algorithm.*`: what it refuses, in which words, and the nearest that it accepts."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from skyrl_train.config import load_config
from skyrl_train.config.algorithm_rules import ALGORITHM_RULES, INTERVALS, SWITCHES
from skyrl_train.config.base import value_at
from skyrl_train.config.built_in import (
    CHOOSE_TOKENS,
    COMPARE_NOTHING,
    COMPARE_SAMPLES,
    PER_TOKEN,
    READ_ROLLOUT_LOGPROBS,
    READ_VALUES,
    SEQUENCE_LOSSES,
)
from skyrl_train.config.problems import FIELDS
from skyrl_train.errors import ConfigError

ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
KL_IN_REWARD = [f"{ALGORITHM}.use_kl_loss=false", f"{ALGORITHM}.use_kl_in_reward=true"]
TEACHER = "trainer.ref.model.path=teacher"
ONE_SAMPLE = "generator.n_samples_per_prompt=1"
CRITIC = "trainer.critic.model.path=tiny"


def refusal(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(OmegaConf.from_dotlist(overrides))
    return str(caught.value)


def estimator(name: str) -> str:
    return f"{ALGORITHM}.advantage_estimator={name}"


def loss(name: str) -> str:
    return f"{ALGORITHM}.policy_loss_type={name}"


CASES: list[tuple[str, list[str], str, list[list[str]]]] = [
    (
        "estimator_has_a_critic",
        [estimator("gae"), "trainer.policy.model.path=my/model"],
        "trainer.algorithm.advantage_estimator=gae reads the values of a critic, and trainer.critic.model.path=null "
        "trains none; set trainer.critic.model.path=my/model, or trainer.algorithm.advantage_estimator=grpo",
        [[estimator("gae"), CRITIC], [estimator("gae_per_turn"), CRITIC], [estimator("reinforce++")]],
    ),
    (
        "steps_share_one_advantage",
        [estimator("reinforce++"), "generator.step_wise_trajectories=true"],
        "generator.step_wise_trajectories=true gives all rows of a trajectory one advantage, and those of "
        "trainer.algorithm.advantage_estimator=reinforce++ differ from token to token; try grpo, or leave "
        "step_wise_trajectories out: by default, too, a trajectory's turns are learned from together",
        [[estimator("reinforce++")], [estimator("rloo"), "generator.step_wise_trajectories=true"]],
    ),
    (
        "steps_share_one_advantage",
        [*KL_IN_REWARD, "generator.step_wise_trajectories=true"],
        "generator.step_wise_trajectories=true takes the rewards of a trajectory's last row, and "
        "trainer.algorithm.use_kl_in_reward=true puts penalties on all of them; set "
        "trainer.algorithm.use_kl_in_reward=false trainer.algorithm.use_kl_loss=true",
        [KL_IN_REWARD],
    ),
    (
        "distillation_has_a_teacher",
        [estimator("on_policy_distillation"), "trainer.policy.model.path=my/model"],
        "trainer.algorithm.advantage_estimator=on_policy_distillation learns from trainer.ref.model.path=my/model, "
        "which is trainer.policy.model.path=my/model itself; set trainer.ref.model.path=<the teacher>",
        [[estimator("on_policy_distillation"), TEACHER], [estimator("grpo")]],
    ),
    (
        "estimator_has_a_group",
        [estimator("rloo"), ONE_SAMPLE],
        "trainer.algorithm.advantage_estimator=rloo compares the samples of one prompt, and "
        "generator.n_samples_per_prompt=1 leaves nothing to compare; try generator.n_samples_per_prompt=5, or "
        "trainer.algorithm.advantage_estimator=reinforce++",
        [
            [estimator("rloo"), "generator.n_samples_per_prompt=2"],
            [estimator("grpo"), ONE_SAMPLE],
            [estimator("reinforce++"), ONE_SAMPLE],
            [estimator("remax"), ONE_SAMPLE],
            [estimator("gae"), CRITIC, ONE_SAMPLE],
            [estimator("on_policy_distillation"), TEACHER, ONE_SAMPLE],
            [estimator("mine"), ONE_SAMPLE],
        ],
    ),
    (
        "filter_has_a_group",
        [f"{ALGORITHM}.dynamic_sampling.type=filter", ONE_SAMPLE],
        "trainer.algorithm.dynamic_sampling.type=filter compares the rewards of one prompt's samples, and "
        "generator.n_samples_per_prompt=1 leaves nothing to compare; try generator.n_samples_per_prompt=5, or "
        "trainer.algorithm.dynamic_sampling.type=null",
        [[f"{ALGORITHM}.dynamic_sampling.type=filter", "generator.n_samples_per_prompt=2"]],
    ),
    (
        "filter_has_a_group",
        [f"{ALGORITHM}.zero_variance_filter=true", ONE_SAMPLE],
        "trainer.algorithm.zero_variance_filter=true compares the rewards of one prompt's samples, and "
        "generator.n_samples_per_prompt=1 leaves nothing to compare; try generator.n_samples_per_prompt=5, or "
        "trainer.algorithm.zero_variance_filter=false",
        [[f"{ALGORITHM}.zero_variance_filter=true", "generator.n_samples_per_prompt=2"]],
    ),
    (
        "filter_leaves_out_what_teaches_nothing",
        [f"{ALGORITHM}.dynamic_sampling.type=replace", estimator("on_policy_distillation"), TEACHER],
        "trainer.algorithm.dynamic_sampling.type=replace leaves groups of equal rewards out, but "
        "trainer.algorithm.advantage_estimator=on_policy_distillation compares no rewards and learns as much from "
        "them; set trainer.algorithm.dynamic_sampling.type=null",
        [
            [f"{ALGORITHM}.dynamic_sampling.type=replace", estimator("grpo")],
            [f"{ALGORITHM}.dynamic_sampling.type=filter", estimator("mine")],
            [f"{ALGORITHM}.dynamic_sampling.type=filter", estimator("reinforce++")],
        ],
    ),
    (
        "filter_leaves_out_what_teaches_nothing",
        [f"{ALGORITHM}.zero_variance_filter=true", estimator("token_rewards")],
        "trainer.algorithm.zero_variance_filter=true leaves groups of equal rewards out, but "
        "trainer.algorithm.advantage_estimator=token_rewards compares no rewards and learns as much from them; set "
        "trainer.algorithm.zero_variance_filter=false",
        [[estimator("token_rewards")], [f"{ALGORITHM}.zero_variance_filter=true", estimator("gae"), CRITIC]],
    ),
    (
        "sequence_loss_has_one_advantage",
        [loss("gmpo"), estimator("grpo_per_turn")],
        "trainer.algorithm.policy_loss_type=gmpo takes one advantage for each trajectory, and "
        "trainer.algorithm.advantage_estimator=grpo_per_turn gives each token its own; try "
        "trainer.algorithm.policy_loss_type=gspo or dual_clip, or trainer.algorithm.advantage_estimator=grpo",
        [
            [loss("gmpo"), estimator("rloo")],
            [loss("gmpo"), estimator("rloo"), *KL_IN_REWARD],
            [loss("vespo"), estimator("reinforce++-baseline")],
            [loss("gspo"), estimator("grpo_per_turn")],
            [loss("dual_clip"), estimator("gae"), CRITIC],
            [loss("mine"), estimator("gae"), CRITIC],
            [loss("gmpo"), estimator("mine")],
        ],
    ),
    (
        "kl_is_in_one_place",
        [f"{ALGORITHM}.use_kl_in_reward=true"],
        "trainer.algorithm.use_kl_loss=true and trainer.algorithm.use_kl_in_reward=true would count the KL divergence "
        "twice; set one of them to false",
        [KL_IN_REWARD, [f"{ALGORITHM}.use_kl_loss=false"], [f"{ALGORITHM}.use_kl_loss=true"]],
    ),
    (
        "reward_kl_is_read",
        [*KL_IN_REWARD, estimator("gdpo")],
        "trainer.algorithm.use_kl_in_reward=true changes the rewards of tokens, which "
        "trainer.algorithm.advantage_estimator=gdpo does not read; set trainer.algorithm.use_kl_in_reward=false, and "
        "trainer.algorithm.use_kl_loss=true for a KL loss",
        [
            [*KL_IN_REWARD, estimator("token_rewards")],
            [*KL_IN_REWARD, estimator("mine")],
            [estimator("gdpo")],
        ],
    ),
    (
        "reward_kl_needs_no_gradient",
        [*KL_IN_REWARD, f"{ALGORITHM}.kl_estimator_type=k3+"],
        "trainer.algorithm.kl_estimator_type=k3+ differs from k3 by its gradient, and with "
        "trainer.algorithm.use_kl_in_reward=true there is none; set trainer.algorithm.kl_estimator_type=k3",
        [[*KL_IN_REWARD, f"{ALGORITHM}.kl_estimator_type=k3"], [f"{ALGORITHM}.kl_estimator_type=k3+"]],
    ),
    (
        "kl_control_has_a_reward",
        [f"{ALGORITHM}.kl_ctrl.type=adaptive"],
        "trainer.algorithm.kl_ctrl.type=adaptive controls the KL penalty in the reward, and "
        "trainer.algorithm.use_kl_in_reward=false leaves nothing to control; set "
        "trainer.algorithm.use_kl_in_reward=true and trainer.algorithm.use_kl_loss=false, or "
        "trainer.algorithm.kl_ctrl.type=fixed",
        [[*KL_IN_REWARD, f"{ALGORITHM}.kl_ctrl.type=adaptive"], [f"{ALGORITHM}.kl_ctrl.type=fixed"]],
    ),
    (
        "kl_control_has_a_start",
        [*KL_IN_REWARD, f"{ALGORITHM}.kl_ctrl.type=adaptive", f"{ALGORITHM}.kl_loss_coef=0"],
        "trainer.algorithm.kl_loss_coef=0.0 stays 0 whatever trainer.algorithm.kl_ctrl.type=adaptive multiplies it by; "
        "try trainer.algorithm.kl_loss_coef=0.001",
        [[*KL_IN_REWARD, f"{ALGORITHM}.kl_loss_coef=0"]],
    ),
    (
        "kl_correction_has_a_loss",
        [*KL_IN_REWARD, f"{ALGORITHM}.use_bias_correction_kl=true"],
        "trainer.algorithm.use_bias_correction_kl=true weighs the KL loss, and trainer.algorithm.use_kl_loss=false "
        "leaves none; set trainer.algorithm.use_kl_loss=true, or trainer.algorithm.use_bias_correction_kl=false",
        [[f"{ALGORITHM}.use_bias_correction_kl=true"], KL_IN_REWARD],
    ),
    (
        "reference_update_has_a_reference",
        ["trainer.update_ref_every_epoch=true", f"{ALGORITHM}.use_kl_loss=false"],
        "trainer.update_ref_every_epoch=true updates a reference that nothing reads, with "
        "trainer.algorithm.use_kl_loss=false and trainer.algorithm.use_kl_in_reward=false; set one of them to true, or "
        "trainer.update_ref_every_epoch=false",
        [
            ["trainer.update_ref_every_epoch=true"],
            ["trainer.update_ref_every_epoch=true", *KL_IN_REWARD],
            ["trainer.update_ref_every_epoch=true", f"{ALGORITHM}.use_kl_loss=false", estimator("mine")],
        ],
    ),
    (
        "reference_update_has_a_reference",
        ["trainer.update_ref_every_epoch=true", estimator("on_policy_distillation"), TEACHER],
        "trainer.update_ref_every_epoch=true would replace the teacher of "
        "trainer.algorithm.advantage_estimator=on_policy_distillation by its pupil; set "
        "trainer.update_ref_every_epoch=false",
        [[estimator("on_policy_distillation"), TEACHER]],
    ),
    (
        "correction_suits_the_loss",
        [f"{CORRECTION}.tis_ratio_type=token", loss("clip_cov")],
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token cannot go with "
        "trainer.algorithm.policy_loss_type=clip_cov, which chooses tokens by comparing them all, corrected or not; "
        "set trainer.algorithm.off_policy_correction.tis_ratio_type=null, or "
        "trainer.algorithm.policy_loss_type=dual_clip",
        [
            [f"{CORRECTION}.tis_ratio_type=token", loss("gspo")],
            [f"{CORRECTION}.tis_ratio_type=token", loss("mine")],
            [loss("clip_cov")],
            [f"{ALGORITHM}.off_policy_sequence_mask_threshold=0.1", loss("clip_cov")],
        ],
    ),
    (
        "correction_suits_the_loss",
        [f"{CORRECTION}.outlier_token_is_threshold_high=100", loss("dppo")],
        "trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high=100.0 cannot go with "
        "trainer.algorithm.policy_loss_type=dppo, which reads the engine's log-probs itself, so that they would count "
        "twice; set trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high=null, or "
        "trainer.algorithm.policy_loss_type=dual_clip",
        [[loss("dppo")], [f"{CORRECTION}.token_tis_ratio_clip_high=3.0", loss("rollout_is")]],
    ),
    (
        "token_mask_has_two_ends",
        [f"{CORRECTION}.token_mask_is_threshold_low=0.5"],
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=null must be set too when "
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.5: tokens are left out on both sides; "
        "set trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=2.0, or "
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=null",
        [[f"{CORRECTION}.token_mask_is_threshold_low=0.5", f"{CORRECTION}.token_mask_is_threshold_high=5.0"]],
    ),
    (
        "token_mask_has_two_ends",
        [f"{CORRECTION}.token_mask_is_threshold_high=5.0"],
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=null must be set too when "
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=5.0: tokens are left out on both sides; "
        "set trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.5, or "
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=null",
        [
            [f"{CORRECTION}.outlier_token_is_threshold_high=100.0"],
            [f"{CORRECTION}.outlier_token_is_threshold_low=0.01"],
        ],
    ),
    (
        "intervals_are_not_empty",
        [f"{CORRECTION}.geo_mask_low=1.01"],
        "trainer.algorithm.off_policy_correction.geo_mask_low=1.01 must be below "
        "trainer.algorithm.off_policy_correction.geo_mask_high=1.01, or nothing lies between them; lower the first or "
        "raise the second",
        [[f"{CORRECTION}.geo_mask_low=1.0099"], [f"{CORRECTION}.geo_mask_low=1.01", f"{CORRECTION}.geo_mask_high=1.1"]],
    ),
    (
        "dual_clip_is_beyond_the_clip",
        [loss("dual_clip"), f"{ALGORITHM}.clip_ratio_c=1.28", f"{ALGORITHM}.eps_clip_high=0.28"],
        "trainer.algorithm.clip_ratio_c=1.28 must be above 1.28, that is 1 plus trainer.algorithm.eps_clip_high=0.28, "
        "or trainer.algorithm.policy_loss_type=dual_clip clips what it should not; try "
        "trainer.algorithm.clip_ratio_c=3.28",
        [
            [loss("dual_clip"), f"{ALGORITHM}.clip_ratio_c=1.3", f"{ALGORITHM}.eps_clip_high=0.28"],
            [loss("regular"), f"{ALGORITHM}.clip_ratio_c=1.1"],
        ],
    ),
    (
        "overlong_buffer_leaves_room",
        [f"{ALGORITHM}.overlong_buffer_len=1024"],
        "trainer.algorithm.overlong_buffer_len=1024 must be below generator.sampling_params.max_generate_length=1024, "
        "or every response is punished for its length; try trainer.algorithm.overlong_buffer_len=256 or "
        "trainer.algorithm.overlong_buffer_len=null",
        [
            [f"{ALGORITHM}.overlong_buffer_len=1023"],
            [f"{ALGORITHM}.overlong_buffer_len=1024", "generator.sampling_params.max_generate_length=1025"],
        ],
    ),
    (
        "overlong_buffer_leaves_room",
        [f"{ALGORITHM}.overlong_buffer_len=1", "generator.sampling_params.max_generate_length=1"],
        "trainer.algorithm.overlong_buffer_len=1 must be below generator.sampling_params.max_generate_length=1, or "
        "every response is punished for its length; try trainer.algorithm.overlong_buffer_len=null",
        [[f"{ALGORITHM}.overlong_buffer_len=1", "generator.sampling_params.max_generate_length=2"]],
    ),
]


@pytest.mark.parametrize(("rule", "overrides", "expected"), [case[:3] for case in CASES])
def test_a_broken_rule_says_what_to_do(rule: str, overrides: list[str], expected: str) -> None:
    assert refusal(overrides) == expected


@pytest.mark.parametrize("overrides", [accepted for case in CASES for accepted in case[3]])
def test_what_is_nearest_to_it_is_accepted(overrides: list[str]) -> None:
    load_config(OmegaConf.from_dotlist(overrides))


def test_every_rule_was_seen_failing() -> None:
    assert {rule.__name__ for rule in ALGORITHM_RULES} == {rule for rule, *_ in CASES}


@pytest.mark.parametrize("name", sorted(COMPARE_SAMPLES - {"grpo"}))
def test_no_estimator_compares_one_sample(name: str) -> None:
    assert f"advantage_estimator={name} compares the samples of one prompt" in refusal([estimator(name), ONE_SAMPLE])
    load_config(OmegaConf.from_dotlist([estimator(name)]))


@pytest.mark.parametrize("name", sorted(READ_VALUES))
def test_no_estimator_reads_values_of_nobody(name: str) -> None:
    assert refusal([estimator(name)]).startswith(f"trainer.algorithm.advantage_estimator={name} reads the values")


@pytest.mark.parametrize("name", sorted(PER_TOKEN))
@pytest.mark.parametrize("of_sequence", sorted(SEQUENCE_LOSSES))
def test_no_loss_of_a_sequence_gets_advantages_of_tokens(name: str, of_sequence: str) -> None:
    models = [CRITIC, TEACHER]
    assert "takes one advantage" in refusal([estimator(name), loss(of_sequence), *models])
    load_config(OmegaConf.from_dotlist([estimator(name), loss("dual_clip"), *models]))


@pytest.mark.parametrize("name", sorted(COMPARE_NOTHING))
@pytest.mark.parametrize(
    "switch", ["dynamic_sampling.type=filter", "dynamic_sampling.type=replace", "zero_variance_filter=true"]
)
def test_nothing_is_filtered_where_nothing_is_compared(name: str, switch: str) -> None:
    assert "compares no rewards" in refusal([estimator(name), TEACHER, f"{ALGORITHM}.{switch}"])


PARTS = {
    "tis_ratio_type": "sequence",
    "sequence_mask_metric": "product",
    "token_mask_is_threshold_low": 0.5,
    "token_mask_is_threshold_high": 2.0,
    "outlier_token_is_threshold_low": 0.1,
    "outlier_token_is_threshold_high": 10.0,
}


@pytest.mark.parametrize("name", sorted(CHOOSE_TOKENS | READ_ROLLOUT_LOGPROBS))
@pytest.mark.parametrize("part", SWITCHES)
def test_no_part_of_the_correction_goes_with_a_loss_that_it_does_not_suit(name: str, part: str) -> None:
    correction = f"{CORRECTION}.{part}={PARTS[part]}"
    assert f"{correction} cannot go with {loss(name)}" in refusal([loss(name), correction])


def test_the_switches_are_what_turns_the_correction_on() -> None:
    assert PARTS.keys() == set(SWITCHES)
    thresholds = [f"{CORRECTION}.token_mask_is_threshold_{end}" for end in ("low=0.5", "high=2.0")]
    for part, value in PARTS.items():
        overrides = thresholds if part.startswith("token_mask") else [f"{CORRECTION}.{part}={value}"]
        assert load_config(OmegaConf.from_dotlist(overrides)).trainer.algorithm.off_policy_correction.is_on
    assert not load_config().trainer.algorithm.off_policy_correction.is_on


@pytest.mark.parametrize(("low", "high"), INTERVALS)
@pytest.mark.parametrize("width", [0.0, -0.25])
def test_no_interval_is_empty(low: str, high: str, width: float) -> None:
    assert f"{low}=1.5 must be below {high}={1.5 + width}" in refusal([f"{low}=1.5", f"{high}={1.5 + width}"])
    load_config(OmegaConf.from_dotlist([f"{low}=1.5", f"{high}=1.75"]))


def test_every_pair_of_ends_is_checked() -> None:
    assert {key for pair in INTERVALS for key in pair} <= FIELDS.keys()
    lower_ends = ("_mask_low", "_threshold_low", "_lb", ".ratio_low")
    assert {key for key in FIELDS if key.endswith(lower_ends)} == {low for low, _ in INTERVALS}


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ([f"{ALGORITHM}.overlong_buffer_len=2000"], [f"{ALGORITHM}.overlong_buffer_len=256"]),
        ([loss("dual_clip"), f"{ALGORITHM}.clip_ratio_c=1.1"], [f"{ALGORITHM}.clip_ratio_c=3.2"]),
        ([estimator("gae")], ["trainer.critic.model.path=Qwen/Qwen2.5-1.5B-Instruct"]),
        ([f"{ALGORITHM}.kl_ctrl.type=adaptive"], KL_IN_REWARD),
    ],
)
def test_the_advice_is_good_advice(overrides: list[str], fix: list[str]) -> None:
    text = refusal(overrides)
    assert all(setting in text for setting in fix)
    cfg = load_config(OmegaConf.from_dotlist([*overrides, *fix]))
    key = fix[0].partition("=")[0]
    assert value_at(cfg, key) != FIELDS[key].get_default()


def test_names_of_ones_own_are_bound_by_no_rule_of_the_names_that_come_with_the_package() -> None:
    settings = ["dynamic_sampling.type=filter", "zero_variance_filter=true", "use_kl_loss=false"]
    load_config(
        OmegaConf.from_dotlist([estimator("mine"), loss("mine"), *(f"{ALGORITHM}.{setting}" for setting in settings)])
    )
