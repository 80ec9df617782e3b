"""Aliases: other spellings are read and logged."""

from functools import partial

import pytest
from omegaconf import OmegaConf
from train_kit import golden
from train_kit.rules import nested, show_values

from skyrl_train.config import get_default_config, load_config
from skyrl_train.config.base import as_section, value_at
from skyrl_train.config.dialects import ALIASES, SKYRL, SKYRL_WITHOUT_EFFECT, UNSUPPORTED, VERL
from skyrl_train.config.loading import RL
from skyrl_train.config.problems import FIELDS
from skyrl_train.config.supervised import SFT
from skyrl_train.errors import ConfigError

NAMED = ("trainer.run_name", "run")
DEFAULTS = load_config(nested(NAMED))


def test_an_alias_names_an_existing_key_and_shadows_none() -> None:
    for schema in (RL, SFT):
        for old, alias in schema.aliases.items():
            for key in (alias.key, *alias.also):
                assert as_section(schema.fields[key].annotation) is None, key
            assert old not in schema.fields


def test_every_mapped_value_is_accepted() -> None:
    with_kl = [("trainer.algorithm.use_kl_in_reward", True), ("trainer.algorithm.use_kl_loss", False)]
    for old, alias in ALIASES.items():
        for value, new in alias.values.items():
            cfg = load_config(nested(*(with_kl if alias.only_if else []), (old, value)))
            assert value_at(cfg, alias.key) == (value_at(DEFAULTS, alias.key) if new is None else new), old


def test_the_alias_tables_are_disjoint() -> None:
    assert not SKYRL.keys() & VERL.keys()


@pytest.mark.parametrize("has_defaults", [False, True])
def test_other_spellings_are_read(has_defaults: bool, pytestconfig: pytest.Config) -> None:
    source = get_default_config() if has_defaults else OmegaConf.create()
    OmegaConf.set_struct(source, False)
    printed = {}
    for case, settings in golden.read("compat/spellings").items():
        printed[case] = show_values(load_config(OmegaConf.merge(source, OmegaConf.from_dotlist([case]))), settings)
    golden.compare("compat/spellings", printed, pytestconfig)


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
            tree = nested((switch, True), ("trainer.algorithm.use_kl_loss", False), (old, value))
            assert value_at(load_config(tree), new) == new_value, old


def test_without_kl_in_the_reward_kl_keys_of_verl_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for old, value, new, new_value in VERL_KL_KEYS:
        caplog.clear()
        cfg = load_config(nested((old, value), ("actor_rollout_ref.actor.use_kl_loss", True)))
        assert value_at(cfg, new) == value_at(DEFAULTS, new) != new_value
        assert caplog.messages[0] == f"{old}={value} is not read: trainer.algorithm.use_kl_in_reward is not true"


def test_the_weight_of_the_kl_loss_is_independent_of_the_weight_of_the_penalty() -> None:
    tree = nested(("algorithm.kl_ctrl.kl_coef", 0.0), ("actor_rollout_ref.actor.kl_loss_coef", 0.001))
    assert load_config(tree).trainer.algorithm.kl_loss_coef == 0.001


def test_a_key_without_effect_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for key, reason in SKYRL_WITHOUT_EFFECT.items():
        assert key not in FIELDS | ALIASES
        caplog.clear()
        assert load_config(nested(NAMED, (key, "x"))) == DEFAULTS
        assert caplog.messages == [f"{key}=x has no effect: {reason}"]


def test_a_key_for_what_does_not_exist_is_refused_unless_it_asks_for_nothing() -> None:
    for key, (accepted, reason) in UNSUPPORTED.items():
        assert key not in FIELDS | ALIASES | SKYRL_WITHOUT_EFFECT
        for value in accepted:
            assert load_config(nested(NAMED, (key, value))) == DEFAULTS
        error = golden.catch(ConfigError, partial(load_config, nested(NAMED, (key, "x"))))
        assert error == f"{key}=x: {reason}; remove the key"


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
    values = {**DEFAULTS_OF_SKYRL, experts: 1}.items()
    assert load_config(nested(NAMED, *((f"{section}.{name}", value) for name, value in values))) == DEFAULTS


def test_a_switch_is_read_before_the_keys_that_depend_on_it() -> None:
    order = [alias.key for alias in ALIASES.values()]
    for index, alias in enumerate(ALIASES.values()):
        assert alias.only_if is None or alias.only_if in order[:index]
