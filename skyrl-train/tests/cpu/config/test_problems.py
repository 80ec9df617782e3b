"""Wording of configuration errors."""

from __future__ import annotations

import pytest

from skyrl_train.config.problems import config_error, leaves, nearest_keys, raise_problems, show
from skyrl_train.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (0.5, "0.5"),
        ("grpo", "grpo"),
        ("5", "'5'"),
        ("1e-6", "'1e-6'"),
        ("true", "'true'"),
        ("", "''"),
        ("a\nb", "'a\\nb'"),
        (["a", 1, None], "[a,1,null]"),
        ((0.9, 0.99), "[0.9,0.99]"),
        ({"a": {"b": False}}, "{a:{b:false}}"),
    ],
)
def test_a_value_is_shown_in_command_line_syntax(value: object, text: str) -> None:
    assert show(value) == text


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("trainer.epoch", ["trainer.epochs"]),
        ("epochs", ["trainer.epochs"]),
        ("algorithm.kl_loss_coef", ["trainer.algorithm.kl_loss_coef"]),
        ("trainer.algorithm.eps_clip", ["trainer.algorithm.eps_clip_low", "trainer.algorithm.eps_clip_high"]),
        ("generator.temperature", ["generator.sampling_params.temperature"]),
        ("zebra", []),
        ("trainer.algorithm.custm.tau", ["trainer.algorithm.custom.tau"]),
        ("trainer.algorithm.custm.a.b", ["trainer.algorithm.custom.a.b"]),
        ("trainer.algorithm.gdpo.weight.format", ["trainer.algorithm.gdpo.weights.format"]),
        ("trainer.algorithm.gpdo.weights.format", ["trainer.algorithm.gdpo.weights.format"]),
        ("trainer.algorithm.gdpo.format", ["trainer.algorithm.gdpo.weights.format"]),
        ("trainer.algorithm.my_threshold", ["trainer.algorithm.custom.my_threshold"]),
        ("trainer.algorithm.taupos", ["trainer.algorithm.sapo.tau_pos"]),
        ("trainer.algorithm.use_kl", ["trainer.algorithm.use_kl_loss"]),
        (
            "trainer.algorithm.tau",
            ["trainer.algorithm.sapo.tau_pos", "trainer.algorithm.sapo.tau_neg", "trainer.algorithm.custom.tau"],
        ),
        ("trainer.lr", ["trainer.policy.optimizer_config.lr", "trainer.critic.optimizer_config.lr"]),
        ("trainer.algorithm.eps_clip_hgh", ["trainer.algorithm.eps_clip_high", "trainer.algorithm.eps_clip_low"]),
    ],
)
def test_the_nearest_keys_start_with_the_intended_one(key: str, expected: list[str]) -> None:
    assert nearest_keys(key)[: len(expected) or 1] == expected


def test_at_most_three_keys_are_named() -> None:
    assert len(nearest_keys("trainer.placement.num_gpus_per_node")) <= 3


def test_one_problem_is_a_sentence_and_several_are_a_list() -> None:
    assert str(config_error(["a"])) == "a"
    assert str(config_error(["a", "b", "a"])) == "2 problems in the configuration:\n  - a\n  - b"


def test_an_empty_list_of_problems_raises_nothing() -> None:
    raise_problems([])
    with pytest.raises(ConfigError, match=r"^a$"):
        raise_problems(["a"])


def test_leaves_of_nested_mappings() -> None:
    assert list(leaves({"b": {"c": 1}, "d": {}}, "a")) == [("a.b.c", 1), ("a.d", {})]
