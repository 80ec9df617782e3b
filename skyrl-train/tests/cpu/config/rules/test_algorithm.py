import pytest
from train_kit.rules import CORRECTION_SWITCHES, GAE, RuleContract, find_refusal, load

from skyrl_train.config import OffPolicyCorrectionConfig
from skyrl_train.config.problems import FIELDS
from skyrl_train.config.rules import algorithm
from skyrl_train.config.rules.algorithm import INTERVALS


class TestAlgorithm(RuleContract):
    module = algorithm
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
