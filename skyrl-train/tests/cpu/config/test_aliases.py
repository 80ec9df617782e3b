"""Aliases: other spellings are read and logged."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import pytest
from omegaconf import OmegaConf

from skyrl_train.config import get_default_config, load_config
from skyrl_train.config.aliases import ALIASES, SKYRL, SKYRL_WITHOUT_EFFECT, UNSUPPORTED, VERL
from skyrl_train.config.base import as_section, value_at
from skyrl_train.config.problems import FIELDS
from skyrl_train.errors import ConfigError


def put(tree: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    *parents, name = key.split(".")
    section = tree
    for parent in parents:
        section = section.setdefault(parent, {})
    section[name] = value
    return tree


@pytest.mark.parametrize("old", ALIASES)
def test_an_alias_names_an_existing_key_and_shadows_none(old: str) -> None:
    assert as_section(FIELDS[ALIASES[old].key].annotation) is None
    assert old not in FIELDS


@pytest.mark.parametrize("old", ALIASES)
def test_every_mapped_value_is_accepted(old: str) -> None:
    for value, new in ALIASES[old].values.items():
        tree = (
            {"trainer": {"algorithm": {"use_kl_in_reward": True, "use_kl_loss": False}}} if ALIASES[old].only_if else {}
        )
        cfg = load_config(put(tree, old, value))
        default = value_at(load_config(), ALIASES[old].key)
        assert value_at(cfg, ALIASES[old].key) == (default if new is None else new)


def test_the_alias_tables_are_disjoint() -> None:
    assert not SKYRL.keys() & VERL.keys()


@pytest.mark.parametrize(
    ("old", "value", "new", "new_value"),
    [
        ("data.train_files", "train/parquet/train.parquet", "data.train_data", ["train/parquet/train.parquet"]),
        ("actor_rollout_ref.rollout.n", 8, "generator.n_samples_per_prompt", 8),
        (
            "actor_rollout_ref.actor.loss_agg_mode",
            "seq-mean-token-mean",
            "trainer.algorithm.loss_reduction",
            "sequence_mean",
        ),
        ("actor_rollout_ref.actor.kl_loss_type", "low_var_kl", "trainer.algorithm.kl_estimator_type", "k3"),
        ("actor_rollout_ref.actor.kl_loss_type", "abs", "trainer.algorithm.kl_estimator_type", "abs"),
        ("algorithm.adv_estimator", "grpo", "trainer.algorithm.advantage_estimator", "grpo"),
        ("trainer.test_freq", 50, "trainer.eval_interval", 50),
        ("trainer.max_actor_ckpt_to_keep", None, "trainer.max_ckpts_to_keep", -1),
        ("generator.inference_engine.num_engines", 1, "generator.num_inference_engines", 1),
        ("trainer.algorithm.use_abs_kl", True, "trainer.algorithm.kl_estimator_type", "abs"),
        ("trainer.algorithm.use_abs_kl", False, "trainer.algorithm.kl_estimator_type", "k3"),
        ("trainer.algorithm.use_tis", True, "trainer.algorithm.off_policy_correction.tis_ratio_type", "token"),
        ("trainer.algorithm.use_tis", False, "trainer.algorithm.off_policy_correction.tis_ratio_type", None),
        (
            "trainer.algorithm.tis_imp_ratio_cap",
            4,
            "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
            4.0,
        ),
        (
            "trainer.algorithm.tis_imp_ratio_cap",
            -1,
            "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
            2.0,
        ),
        (
            "algorithm.adv_estimator",
            "reinforce_plus_plus_baseline",
            "trainer.algorithm.advantage_estimator",
            "reinforce++-baseline",
        ),
        ("algorithm.adv_estimator", "grpo_passk", "trainer.algorithm.advantage_estimator", "grpo_passk"),
        ("algorithm.gamma", 0.99, "trainer.algorithm.gamma", 0.99),
        ("algorithm.lam", 0.95, "trainer.algorithm.lambd", 0.95),
        ("algorithm.filter_groups.enable", True, "trainer.algorithm.dynamic_sampling.type", "filter"),
        (
            "algorithm.filter_groups.max_num_gen_batches",
            0,
            "trainer.algorithm.dynamic_sampling.max_sample_batches",
            -1,
        ),
        ("actor_rollout_ref.actor.clip_ratio_c", 10.0, "trainer.algorithm.clip_ratio_c", 10.0),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla", "trainer.algorithm.policy_loss_type", "dual_clip"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo", "trainer.algorithm.policy_loss_type", "gspo"),
        ("actor_rollout_ref.actor.entropy_coeff", 0.001, "trainer.algorithm.entropy_loss_coef", 0.001),
        ("actor_rollout_ref.actor.entropy_coeff", 0.001, "trainer.algorithm.use_entropy_loss", True),
        ("actor_rollout_ref.actor.entropy_coeff", 0, "trainer.algorithm.use_entropy_loss", False),
        ("actor_rollout_ref.actor.loss_agg_mode", "token-sum", "trainer.algorithm.loss_reduction", "token_sum"),
        ("actor_rollout_ref.actor.kl_loss_type", "low_var_kl+", "trainer.algorithm.kl_estimator_type", "k3+"),
        ("critic.model.path", "tiny", "trainer.critic.model.path", "tiny"),
        ("critic.optim.lr", 1e-5, "trainer.critic.optimizer_config.lr", 1e-5),
        ("critic.grad_clip", 0.5, "trainer.critic.optimizer_config.max_grad_norm", 0.5),
        ("critic.ppo_mini_batch_size", 64, "trainer.critic_mini_batch_size", 64),
        ("critic.cliprange_value", 0.5, "trainer.algorithm.value_clip", 0.5),
    ],
)
@pytest.mark.parametrize("source", ["empty", "all defaults"])
def test_other_spellings_are_read(old: str, value: object, new: str, new_value: object, source: str) -> None:
    tree: Any = {} if source == "empty" else OmegaConf.to_container(get_default_config())
    assert value_at(load_config(put(tree, old, value)), new) == new_value


def test_each_alias_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config({"actor_rollout_ref": {"actor": {"kl_loss_type": "mse"}}})
    assert [record.message for record in caplog.records] == [
        "actor_rollout_ref.actor.kl_loss_type=mse is read as trainer.algorithm.kl_estimator_type=k2"
    ]


VERL_KL_KEYS = [
    ("algorithm.kl_penalty", "mse", "trainer.algorithm.kl_estimator_type", "k2"),
    ("algorithm.kl_ctrl.type", "adaptive", "trainer.algorithm.kl_ctrl.type", "adaptive"),
    ("algorithm.kl_ctrl.kl_coef", 0.02, "trainer.algorithm.kl_loss_coef", 0.02),
    ("algorithm.kl_ctrl.horizon", 500, "trainer.algorithm.kl_ctrl.horizon", 500),
    ("algorithm.kl_ctrl.target_kl", 0.3, "trainer.algorithm.kl_ctrl.kl_target", 0.3),
]


@pytest.mark.parametrize("switch", ["algorithm.use_kl_in_reward", "trainer.algorithm.use_kl_in_reward"])
@pytest.mark.parametrize(("old", "value", "new", "new_value"), VERL_KL_KEYS)
def test_kl_keys_of_verl_are_read_with_kl_in_the_reward(
    old: str, value: object, new: str, new_value: object, switch: str
) -> None:
    tree = put(put(put({}, switch, True), "trainer.algorithm.use_kl_loss", False), old, value)
    assert value_at(load_config(tree), new) == new_value


@pytest.mark.parametrize(("old", "value", "new", "new_value"), VERL_KL_KEYS)
def test_without_kl_in_the_reward_kl_keys_of_verl_are_ignored_with_a_warning(
    old: str, value: object, new: str, new_value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        cfg = load_config(put(put({}, old, value), "actor_rollout_ref.actor.use_kl_loss", True))
    assert value_at(cfg, new) == value_at(load_config(), new) != new_value
    assert caplog.records[0].message == f"{old}={value} is not read: trainer.algorithm.use_kl_in_reward is not true"


def test_the_weight_of_the_kl_loss_is_independent_of_the_weight_of_the_penalty() -> None:
    tree = put(put({}, "algorithm.kl_ctrl.kl_coef", 0.0), "actor_rollout_ref.actor.kl_loss_coef", 0.001)
    assert load_config(tree).trainer.algorithm.kl_loss_coef == 0.001


@pytest.mark.parametrize("key", SKYRL_WITHOUT_EFFECT)
def test_a_key_without_effect_is_accepted_with_a_warning(key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert key not in FIELDS | ALIASES
    with caplog.at_level(logging.WARNING):
        named = put({}, "trainer.run_name", "run")
        assert load_config(put(deepcopy(named), key, "x")) == load_config(named)
    assert [record.message for record in caplog.records] == [f"{key}=x has no effect: {SKYRL_WITHOUT_EFFECT[key]}"]


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_a_key_for_what_does_not_exist_is_refused_unless_it_asks_for_nothing(key: str) -> None:
    accepted, reason = UNSUPPORTED[key]
    assert key not in FIELDS | ALIASES | SKYRL_WITHOUT_EFFECT
    named = put({}, "trainer.run_name", "run")
    for value in accepted:
        assert load_config(put(deepcopy(named), key, value)) == load_config(named)
    with pytest.raises(ConfigError) as caught:
        load_config(put(deepcopy(named), key, "x"))
    assert str(caught.value) == f"{key}=x: {reason}; remove the key"


DEFAULTS_OF_SKYRL = {
    "model_name": "Qwen/Qwen2.5-1.5B-Instruct",
    "model_dtype": "bfloat16",
    "override_existing_update_group": "auto",
    "enable_http_endpoint": False,
    "http_endpoint_host": "127.0.0.1",
    "http_endpoint_port": 8000,
}


@pytest.mark.parametrize(
    ("section", "experts"),
    [("generator", "inference_engine_expert_parallel_size"), ("generator.inference_engine", "expert_parallel_size")],
)
def test_the_defaults_of_skyrl_for_engines_are_accepted(section: str, experts: str) -> None:
    named = put({}, "trainer.run_name", "run")
    tree = deepcopy(named)
    for name, value in {**DEFAULTS_OF_SKYRL, experts: 1}.items():
        put(tree, f"{section}.{name}", value)
    assert load_config(tree) == load_config(named)


@pytest.mark.parametrize("key", sorted({key for alias in ALIASES.values() for key in alias.also}))
def test_also_names_existing_keys(key: str) -> None:
    assert as_section(FIELDS[key].annotation) is None


def test_a_switch_is_read_before_the_keys_that_depend_on_it() -> None:
    order = [alias.key for alias in ALIASES.values()]
    for index, alias in enumerate(ALIASES.values()):
        assert alias.only_if is None or alias.only_if in order[:index]


def test_a_wrong_value_is_reported_under_our_key() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.epochs=many must be an integer >= 1"):
        load_config({"trainer": {"total_epochs": "many"}})


def test_unmapped_keys_of_a_foreign_section_are_unknown() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"actor_rollout_ref": {"rollout": {"n": 4, "dtype": "half"}}})
    assert str(caught.value) == (
        "actor_rollout_ref.rollout.dtype=half: there is no key actor_rollout_ref.rollout.dtype; "
        "did you mean generator.reward_model.dtype or trainer.policy.model.dtype or trainer.critic.model.dtype?"
    )
