"""Other spellings: read, logged, and refused where they contradict ours."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from omegaconf import OmegaConf

from skyrl_train.config import get_default_config, load_config
from skyrl_train.config.aliases import ALIASES, SKYRL, VERL, apply_aliases
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
def test_an_alias_leads_to_a_key_and_hides_none(old: str) -> None:
    assert as_section(FIELDS[ALIASES[old].key].annotation) is None
    assert old not in FIELDS


@pytest.mark.parametrize("old", ALIASES)
def test_every_value_that_is_mapped_is_accepted(old: str) -> None:
    for value, new in ALIASES[old].values.items():
        cfg = load_config(put({}, old, value))
        default = value_at(load_config(), ALIASES[old].key)
        assert value_at(cfg, ALIASES[old].key) == (default if new is None else new)


def test_no_spelling_is_in_both_tables() -> None:
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
        ("generator.inference_engine.num_engines", 4, "generator.num_inference_engines", 4),
        ("trainer.algorithm.use_abs_kl", True, "trainer.algorithm.kl_estimator_type", "abs"),
        ("trainer.algorithm.use_abs_kl", False, "trainer.algorithm.kl_estimator_type", "k3"),
    ],
)
@pytest.mark.parametrize("source", ["alone", "beside every default"])
def test_other_spellings_are_read(old: str, value: object, new: str, new_value: object, source: str) -> None:
    tree: Any = {} if source == "alone" else OmegaConf.to_container(get_default_config())
    assert value_at(load_config(put(tree, old, value)), new) == new_value


def test_each_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config({"actor_rollout_ref": {"actor": {"kl_loss_type": "mse"}}})
    assert [record.message for record in caplog.records] == [
        "actor_rollout_ref.actor.kl_loss_type=mse is read as trainer.algorithm.kl_estimator_type=k2"
    ]


def test_two_spellings_with_two_values_contradict_each_other() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"trainer": {"total_epochs": 3, "epochs": 2}})
    assert str(caught.value) == (
        "trainer.total_epochs=3 means trainer.epochs=3, but trainer.epochs=2 was set too; remove one of them"
    )


def test_two_spellings_with_one_value_agree() -> None:
    assert load_config({"trainer": {"total_epochs": 3, "epochs": 3}}).trainer.epochs == 3


def test_a_wrong_value_is_reported_under_our_key() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.epochs=many must be an integer >= 1"):
        load_config({"trainer": {"total_epochs": "many"}})


def test_what_is_left_of_a_foreign_section_is_unknown() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"actor_rollout_ref": {"rollout": {"n": 4, "dtype": "half"}}})
    assert str(caught.value) == (
        "actor_rollout_ref.rollout.dtype=half: there is no key actor_rollout_ref.rollout.dtype; "
        "did you mean trainer.policy.model.dtype?"
    )


def test_a_tree_without_other_spellings_is_left_alone() -> None:
    tree = {"trainer": {"epochs": 2}, "actor_rollout_ref": 5, "generator": {"inference_engine": {}}}
    before = {"trainer": {"epochs": 2}, "actor_rollout_ref": 5, "generator": {"inference_engine": {}}}
    assert apply_aliases(tree) == []
    assert tree == before
