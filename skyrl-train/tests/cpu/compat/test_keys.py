"""Aliases: other spellings are read and logged."""

from copy import deepcopy
from typing import Any

import pytest
from omegaconf import OmegaConf

from skyrl_train.config import get_default_config, load_config
from skyrl_train.config.base import as_section, value_at
from skyrl_train.config.dialects import ALIASES, SKYRL, SKYRL_WITHOUT_EFFECT, UNSUPPORTED, VERL
from skyrl_train.config.loading import RL
from skyrl_train.config.problems import FIELDS, show
from skyrl_train.config.sft import SFT
from skyrl_train.errors import ConfigError

NAMED = {"trainer": {"run_name": "run"}}
DEFAULTS = load_config(NAMED)


def put(tree: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    *parents, name = key.split(".")
    section = tree
    for parent in parents:
        section = section.setdefault(parent, {})
    section[name] = value
    return tree


def test_an_alias_names_an_existing_key_and_shadows_none() -> None:
    for schema in (RL, SFT):
        for old, alias in schema.aliases.items():
            for key in (alias.key, *alias.also):
                assert as_section(schema.fields[key].annotation) is None, key
            assert old not in schema.fields


def test_every_mapped_value_is_accepted() -> None:
    with_kl = {"trainer": {"algorithm": {"use_kl_in_reward": True, "use_kl_loss": False}}}
    for old, alias in ALIASES.items():
        for value, new in alias.values.items():
            cfg = load_config(put(deepcopy(with_kl) if alias.only_if else {}, old, value))
            assert value_at(cfg, alias.key) == (value_at(DEFAULTS, alias.key) if new is None else new), old


def test_the_alias_tables_are_disjoint() -> None:
    assert not SKYRL.keys() & VERL.keys()


SPELLINGS = """
data.train_files=train/parquet/train.parquet → data.train_data=[train/parquet/train.parquet]
actor_rollout_ref.rollout.n=8 → generator.n_samples_per_prompt=8
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean → trainer.algorithm.loss_reduction=sequence_mean
actor_rollout_ref.actor.kl_loss_type=low_var_kl → trainer.algorithm.kl_estimator_type=k3
actor_rollout_ref.actor.kl_loss_type=abs → trainer.algorithm.kl_estimator_type=abs
algorithm.adv_estimator=grpo → trainer.algorithm.advantage_estimator=grpo
trainer.test_freq=50 → trainer.eval_interval=50
trainer.max_actor_ckpt_to_keep=null → trainer.max_ckpts_to_keep=-1
generator.inference_engine.num_engines=1 → generator.num_inference_engines=1
trainer.algorithm.use_abs_kl=true → trainer.algorithm.kl_estimator_type=abs
trainer.algorithm.use_abs_kl=false → trainer.algorithm.kl_estimator_type=k3
trainer.algorithm.use_tis=true → trainer.algorithm.off_policy_correction.tis_ratio_type=token
trainer.algorithm.use_tis=false → trainer.algorithm.off_policy_correction.tis_ratio_type=null
trainer.algorithm.tis_imp_ratio_cap=4 → trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=4.0
trainer.algorithm.tis_imp_ratio_cap=-1 → trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0
algorithm.adv_estimator=reinforce_plus_plus_baseline → trainer.algorithm.advantage_estimator=reinforce++-baseline
algorithm.adv_estimator=grpo_passk → trainer.algorithm.advantage_estimator=grpo_passk
algorithm.gamma=0.99 → trainer.algorithm.gamma=0.99
algorithm.lam=0.95 → trainer.algorithm.lambd=0.95
algorithm.filter_groups.enable=true → trainer.algorithm.dynamic_sampling.type=filter
algorithm.filter_groups.max_num_gen_batches=0 → trainer.algorithm.dynamic_sampling.max_sample_batches=-1
actor_rollout_ref.actor.clip_ratio_c=10.0 → trainer.algorithm.clip_ratio_c=10.0
actor_rollout_ref.actor.policy_loss.loss_mode=vanilla → trainer.algorithm.policy_loss_type=dual_clip
actor_rollout_ref.actor.policy_loss.loss_mode=gspo → trainer.algorithm.policy_loss_type=gspo
actor_rollout_ref.actor.entropy_coeff=0.001 → trainer.algorithm.entropy_loss_coef=0.001
actor_rollout_ref.actor.entropy_coeff=0.001 → trainer.algorithm.use_entropy_loss=true
actor_rollout_ref.actor.entropy_coeff=0 → trainer.algorithm.use_entropy_loss=false
actor_rollout_ref.actor.loss_agg_mode=token-sum → trainer.algorithm.loss_reduction=token_sum
actor_rollout_ref.actor.kl_loss_type=low_var_kl+ → trainer.algorithm.kl_estimator_type=k3+
critic.model.path=tiny → trainer.critic.model.path=tiny
critic.optim.lr=1e-05 → trainer.critic.optimizer_config.lr=1e-05
critic.grad_clip=0.5 → trainer.critic.optimizer_config.max_grad_norm=0.5
critic.ppo_mini_batch_size=64 → trainer.critic_mini_batch_size=64
critic.cliprange_value=0.5 → trainer.algorithm.value_clip=0.5
"""


@pytest.mark.parametrize("has_defaults", [False, True])
def test_other_spellings_are_read(has_defaults: bool) -> None:
    source = get_default_config() if has_defaults else OmegaConf.create()
    OmegaConf.set_struct(source, False)
    for case in SPELLINGS.strip().splitlines():
        old, new = case.split(" → ")
        key = new.partition("=")[0]
        cfg = load_config(OmegaConf.merge(source, OmegaConf.from_dotlist([old])))
        assert f"{key}={show(value_at(cfg, key))}" == new


VERL_KL_KEYS = [
    ("algorithm.kl_penalty", "mse", "trainer.algorithm.kl_estimator_type", "k2"),
    ("algorithm.kl_ctrl.type", "adaptive", "trainer.algorithm.kl_ctrl.type", "adaptive"),
    ("algorithm.kl_ctrl.kl_coef", 0.02, "trainer.algorithm.kl_loss_coef", 0.02),
    ("algorithm.kl_ctrl.horizon", 500, "trainer.algorithm.kl_ctrl.horizon", 500),
    ("algorithm.kl_ctrl.target_kl", 0.3, "trainer.algorithm.kl_ctrl.kl_target", 0.3),
]


def test_kl_keys_of_verl_are_read_with_kl_in_the_reward() -> None:
    for switch in ("algorithm.use_kl_in_reward", "trainer.algorithm.use_kl_in_reward"):
        for old, value, new, new_value in VERL_KL_KEYS:
            tree = put(put(put({}, switch, True), "trainer.algorithm.use_kl_loss", False), old, value)
            assert value_at(load_config(tree), new) == new_value, old


def test_without_kl_in_the_reward_kl_keys_of_verl_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for old, value, new, new_value in VERL_KL_KEYS:
        caplog.clear()
        cfg = load_config(put(put({}, old, value), "actor_rollout_ref.actor.use_kl_loss", True))
        assert value_at(cfg, new) == value_at(DEFAULTS, new) != new_value
        assert caplog.messages[0] == f"{old}={value} is not read: trainer.algorithm.use_kl_in_reward is not true"


def test_the_weight_of_the_kl_loss_is_independent_of_the_weight_of_the_penalty() -> None:
    tree = put(put({}, "algorithm.kl_ctrl.kl_coef", 0.0), "actor_rollout_ref.actor.kl_loss_coef", 0.001)
    assert load_config(tree).trainer.algorithm.kl_loss_coef == 0.001


def test_a_key_without_effect_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for key, reason in SKYRL_WITHOUT_EFFECT.items():
        assert key not in FIELDS | ALIASES
        caplog.clear()
        assert load_config(put(deepcopy(NAMED), key, "x")) == DEFAULTS
        assert caplog.messages == [f"{key}=x has no effect: {reason}"]


def test_a_key_for_what_does_not_exist_is_refused_unless_it_asks_for_nothing() -> None:
    for key, (accepted, reason) in UNSUPPORTED.items():
        assert key not in FIELDS | ALIASES | SKYRL_WITHOUT_EFFECT
        for value in accepted:
            assert load_config(put(deepcopy(NAMED), key, value)) == DEFAULTS
        with pytest.raises(ConfigError) as caught:
            load_config(put(deepcopy(NAMED), key, "x"))
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
    tree = deepcopy(NAMED)
    for name, value in {**DEFAULTS_OF_SKYRL, experts: 1}.items():
        put(tree, f"{section}.{name}", value)
    assert load_config(tree) == DEFAULTS


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
