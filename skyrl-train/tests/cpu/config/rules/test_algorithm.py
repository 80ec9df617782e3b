from __future__ import annotations

import pytest
from train_kit.rules import (
    ALGORITHM,
    CORRECTION,
    CORRECTION_SWITCHES,
    GAE,
    KL_IN_REWARD,
    Cases,
    RuleContract,
    find_refusal,
    load,
)

from skyrl_train.config import OffPolicyCorrectionConfig
from skyrl_train.config.problems import FIELDS
from skyrl_train.config.rules import algorithm
from skyrl_train.config.rules.algorithm import INTERVALS

DISTILLATION = f"{ALGORITHM}.advantage_estimator=on_policy_distillation"
ONE_SAMPLE = "generator.n_samples_per_prompt=1"
ONE_TOKEN = "generator.sampling_params.max_generate_length=1"

REFUSED: Cases = {
    # mini_batches_divide_batch
    "trainer.train_batch_size=64 trainer.policy_mini_batch_size=48": ["trainer.policy_mini_batch_size=16"],
    "trainer.train_batch_size=64": ["trainer.policy_mini_batch_size=64"],
    f"{GAE} trainer.critic_mini_batch_size=100": ["trainer.critic_mini_batch_size=128"],
    # sequence_norm_has_a_length
    f"{ALGORITHM}.loss_reduction=seq_mean_token_sum_norm generator.max_turns=3": [
        "generator.max_turns=1",
        f"{ALGORITHM}.max_seq_len=99",
    ],
    # training_temperature_is_positive
    "generator.sampling_params.temperature=0.0": [],
    # distillation_has_a_teacher
    f"{DISTILLATION} trainer.policy.model.path=my/model": ["trainer.ref.model.path=teacher"],
    f"{DISTILLATION} trainer.ref.model.path=teacher trainer.update_ref_every_epoch=true": [],
    # reference_can_follow
    "trainer.policy.model.lora.lora_path=adapter trainer.update_ref_every_epoch=true": [],
    # filter_has_a_group
    f"{ALGORITHM}.dynamic_sampling.type=filter {ONE_SAMPLE}": ["generator.n_samples_per_prompt=2"],
    f"{ALGORITHM}.zero_variance_filter=true {ONE_SAMPLE}": ["generator.n_samples_per_prompt=2"],
    # kl_in_reward_is_possible
    f"{ALGORITHM}.use_kl_in_reward=true": [f"{ALGORITHM}.use_kl_loss=false", f"{ALGORITHM}.use_kl_in_reward=false"],
    f"{KL_IN_REWARD} {ALGORITHM}.kl_estimator_type=k3+": [
        f"{ALGORITHM}.use_kl_in_reward=false {ALGORITHM}.use_kl_loss=true"
    ],
    # kl_settings_have_a_kl_term
    f"{ALGORITHM}.kl_ctrl.type=adaptive": [],
    f"{KL_IN_REWARD} {ALGORITHM}.kl_ctrl.type=adaptive {ALGORITHM}.kl_loss_coef=0": [f"{ALGORITHM}.kl_ctrl.type=fixed"],
    f"{KL_IN_REWARD} {ALGORITHM}.use_bias_correction_kl=true": [
        f"{ALGORITHM}.use_kl_in_reward=false {ALGORITHM}.use_kl_loss=true"
    ],
    # intervals_are_not_empty
    f"{CORRECTION}.token_mask_is_threshold_low=0.5": [f"{CORRECTION}.token_mask_is_threshold_high=5.0"],
    f"{CORRECTION}.token_mask_is_threshold_high=5.0": [f"{CORRECTION}.token_mask_is_threshold_low=0.1"],
    f"{CORRECTION}.geo_mask_low=1.01": [f"{CORRECTION}.geo_mask_low=1.0099", f"{CORRECTION}.geo_mask_high=1.1"],
    # bounds_leave_room
    f"{ALGORITHM}.policy_loss_type=dual_clip {ALGORITHM}.eps_clip_high=0.28 {ALGORITHM}.clip_ratio_c=1.28": [
        f"{ALGORITHM}.clip_ratio_c=1.3",
        f"{ALGORITHM}.policy_loss_type=regular",
    ],
    f"{ALGORITHM}.overlong_buffer_len=1024": [
        f"{ALGORITHM}.overlong_buffer_len=1023",
        "generator.sampling_params.max_generate_length=1025",
    ],
    f"{ALGORITHM}.overlong_buffer_len=1 {ONE_TOKEN}": ["generator.sampling_params.max_generate_length=2"],
}
WARNED: Cases = {
    # rewards_are_compared
    ONE_SAMPLE: ["generator.n_samples_per_prompt=2", f"{ALGORITHM}.advantage_estimator=reinforce++"],
    f"{ALGORITHM}.dynamic_sampling.type=filter {ALGORITHM}.zero_variance_filter=true": [
        f"{ALGORITHM}.dynamic_sampling.type=replace",
        f"{ALGORITHM}.dynamic_sampling.type=null",
        f"{ALGORITHM}.zero_variance_filter=false",
    ],
    f"generator.zero_reward_on_non_stop=true {ONE_TOKEN}": ["generator.sampling_params.max_generate_length=2"],
    f"generator.apply_overlong_filtering=true {ONE_TOKEN}": ["generator.sampling_params.max_generate_length=2"],
    # loss_learns_from_rewards
    f"{ALGORITHM}.policy_loss_type=cross_entropy": [],
    f"{ALGORITHM}.kl_estimator_type=k1": [f"{ALGORITHM}.use_kl_loss=false", f"{ALGORITHM}.use_bias_correction_kl=true"],
    # coefficients_are_unusual
    f"{ALGORITHM}.kl_loss_coef=100": [f"{ALGORITHM}.kl_loss_coef=1", f"{ALGORITHM}.use_kl_loss=false"],
}


class TestAlgorithm(RuleContract):
    module, refused, warned = algorithm, REFUSED, WARNED
    tested_elsewhere = ("group_filters",)  # it yields settings


def test_sizes_that_no_rule_restricts() -> None:
    load("trainer.critic_mini_batch_size=48")  # without a critic
    load(f"{GAE} trainer.policy_mini_batch_size=1024 trainer.critic_mini_batch_size=1")
    load("trainer.micro_train_batch_size_per_gpu=7 trainer.micro_forward_batch_size_per_gpu=1000")


@pytest.mark.parametrize(("low", "high"), INTERVALS)
def test_empty_intervals_are_refused(low: str, high: str) -> None:
    for upper in (1.5, 1.25):
        assert f"{low}=1.5 must be below {high}={upper}" in find_refusal(f"{low}=1.5 {high}={upper}")
    load(f"{low}=1.5 {high}=1.75")


def test_every_interval_is_checked() -> None:
    assert {key for pair in INTERVALS for key in pair} <= FIELDS.keys()
    lower_ends = ("_mask_low", "_threshold_low", "_lb", ".ratio_low")
    assert {key for key in FIELDS if key.endswith(lower_ends)} == {low for low, _ in INTERVALS}


def test_each_switch_enables_the_correction() -> None:
    fields = OffPolicyCorrectionConfig.model_fields.items()
    assert CORRECTION_SWITCHES.keys() == {name for name, field in fields if not field.default}
    for settings in CORRECTION_SWITCHES.values():
        assert load(settings).trainer.algorithm.off_policy_correction.is_on
    assert not load("").trainer.algorithm.off_policy_correction.is_on
