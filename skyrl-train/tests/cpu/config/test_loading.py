"""`load_config`: derived values, errors, and the round trip through YAML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from skyrl_train.config import (
    SkyRLConfig,
    changed_settings,
    config_dir,
    get_default_config,
    load_config,
    to_yaml,
    validate_cfg,
)
from skyrl_train.config.base import value_at
from skyrl_train.config.problems import show
from skyrl_train.errors import ConfigError

TEMPLATE = "generator.chat_template.name_or_path"


def nested(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """Return a nested mapping: `("a.b", 1)` → `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for key, value in pairs:
        *parents, name = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return tree


def message(*pairs: tuple[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(nested(*pairs))
    return str(caught.value)


def test_without_a_source_the_default_configuration_is_loaded() -> None:
    named = {"trainer": {"run_name": "r"}}
    assert load_config(named) == load_config(OmegaConf.merge(get_default_config(), named))
    assert load_config().trainer.epochs == load_config(None).trainer.epochs == load_config({}).trainer.epochs


HOME = os.path.expanduser("~")
FILLED_IN = f"""
trainer.policy.model.path=tiny → trainer.ref.model.path=tiny
trainer.policy.model.path=a trainer.ref.model.path=b → trainer.ref.model.path=b
trainer.policy.model.path=~/model → trainer.ref.model.path={HOME}/model
trainer.policy.model.path=~/model → trainer.critic.model.path=null
trainer.algorithm.advantage_estimator=gae trainer.critic.model.path=$HOME/c → trainer.critic.model.path={HOME}/c
trainer.policy.model.lora.lora_path=~/a → trainer.policy.model.lora.lora_path={HOME}/a
trainer.critic.model.lora.lora_path=$HOME/a → trainer.critic.model.lora.lora_path={HOME}/a
generator.chat_template.source=file {TEMPLATE}=~/chat.jinja → {TEMPLATE}={HOME}/chat.jinja
trainer.run_name=r → trainer.ckpt_path=outputs/skyrl/r/ckpts
trainer.run_name=r → trainer.export_path=outputs/skyrl/r/export
trainer.ckpt_path=$HOME/ckpts → trainer.ckpt_path={HOME}/ckpts
trainer.output_dir=~/runs trainer.run_name=r → trainer.export_path={HOME}/runs/skyrl/r/export
trainer.algorithm.gdpo.weights.a=1 → trainer.algorithm.gdpo.weights={{a:1.0}}
generator.sampling_params.temperature=0.7 → trainer.algorithm.temperature=0.7
generator.sampling_params.max_generate_length=7 → generator.eval_sampling_params.max_generate_length=7
trainer.max_prompt_length=100 → generator.max_input_length=100
generator.max_turns=3 → generator.max_input_length=null
trainer.max_prompt_length=100 → trainer.algorithm.max_seq_len=1124
generator.max_turns=3 → trainer.algorithm.max_seq_len=null
generator.max_turns=3 generator.max_input_length=600 → trainer.algorithm.max_seq_len=1624
trainer.resume_mode=null → trainer.resume_mode=none
trainer.logger=console → trainer.logger=[console]
data.train_data=a.parquet → data.train_data=[a.parquet]
generator.sampling_params.stop=</a> → generator.sampling_params.stop=[</a>]
trainer.policy.optimizer_config.lr=1 → trainer.policy.optimizer_config.lr=1.0
"""


@pytest.mark.parametrize("case", FILLED_IN.strip().splitlines())
def test_values_are_filled_in_and_normalized(case: str) -> None:
    overrides, _, expected = case.partition(" → ")
    key = expected.partition("=")[0]
    assert f"{key}={show(value_at(load_config(OmegaConf.from_dotlist(overrides.split())), key))}" == expected


def test_tuples_and_keys_that_are_no_texts_are_normalized() -> None:
    betas, custom = "trainer.policy.optimizer_config.adam_betas", "trainer.algorithm.custom"
    cfg = load_config(nested((betas, (0.5, 0.6)), (custom, {3: (1, "x")})))
    assert (value_at(cfg, betas), value_at(cfg, custom)) == ((0.5, 0.6), {"3": [1, "x"]})


def test_all_problems_are_in_one_error() -> None:
    text = message(("trainer.epochs", 0), ("trainer.sed", 1), ("generator.total_epochs", 2))
    lines = text.splitlines()
    assert lines[0] == "3 problems in the configuration:"
    assert sorted(line.split("=")[0] for line in lines[1:]) == [
        "  - generator.total_epochs",
        "  - trainer.epochs",
        "  - trainer.sed",
    ]


def test_an_unknown_section_is_reported_key_by_key() -> None:
    text = message(("trainer.polcy.model.path", "x"), ("trainer.polcy.optimizer_config.lr", 1.0))
    assert "trainer.polcy.model.path=x" in text
    assert "trainer.polcy.optimizer_config.lr=1.0" in text


def test_a_source_that_is_not_a_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the configuration is \[1\]; it must be a mapping"):
        load_config([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("???", "trainer.run_name: Missing mandatory value: run_name; set trainer.run_name=<value>"),
        ("${nope}", "trainer.run_name: Interpolation key 'nope' not found; set trainer.run_name=<value>"),
    ],
)
def test_a_failed_interpolation_names_its_key(value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(OmegaConf.create(nested(("trainer.run_name", value))))
    assert str(caught.value) == expected


def test_the_source_is_not_changed() -> None:
    tree = nested(("trainer.total_epochs", 3))
    load_config(tree)
    assert tree == nested(("trainer.total_epochs", 3))


def test_the_yaml_file_for_hydra_can_be_read_without_hydra() -> None:
    tree = yaml.safe_load((Path(config_dir) / "ppo_base_config.yaml").read_text(encoding="utf-8"))
    assert {"hydra", "defaults"} <= tree.keys()
    assert load_config(tree) == load_config()


def test_a_yaml_round_trip_is_equal_and_includes_derived_values() -> None:
    source = nested(
        ("trainer.logger", ["console", "jsonl"]),
        ("trainer.run_name", "épreuve: 1"),
        ("trainer.policy.optimizer_config.lr", 3e-7),
        ("generator.sampling_params.stop", ["</a>", "\n"]),
        ("environment.skyrl_gym.search", {"topk": 3, "url": "http://127.0.0.1:8000"}),
        ("trainer.algorithm.custom", {"tau": 0.3, "names": ["a", None, True], "inner": {"1": "2", "e": 1e-9}}),
        ("trainer.algorithm.gdpo.weights", {"format": 0.5, "exact match": 2}),
    )
    cfg = load_config(source)
    text = to_yaml(cfg)
    assert "path: Qwen/Qwen2.5-1.5B-Instruct" in text.split("ref:")[1]
    assert load_config(yaml.safe_load(text)) == cfg
    assert load_config(OmegaConf.create(text)) == cfg


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def test_changed_custom_keys_are_listed() -> None:
    before = load_config(nested(("trainer.algorithm.custom", {"tau": 0.3, "gone": 1, "deep": {"a": 1}})))
    after = load_config(nested(("trainer.algorithm.custom", {"tau": 0.4, "new": 2, "deep": {"a": 2}})))
    assert changed_settings(before.model_dump(mode="json"), after.model_dump(mode="json")) == [
        "trainer.algorithm.custom.tau: 0.3 -> 0.4",
        "trainer.algorithm.custom.gone: 1 -> null",
        "trainer.algorithm.custom.deep.a: 1 -> 2",
        "trainer.algorithm.custom.new: null -> 2",
    ]


@settings(max_examples=15, deadline=None)
@given(
    lr=st.floats(0, 1),
    name=st.text(min_size=1, max_size=20).filter(lambda name: name.isprintable() and "." not in name),
    path=st.none() | st.text(min_size=1, max_size=20),
    custom=st.dictionaries(st.text(), PLAIN, max_size=3),
    weights=st.dictionaries(st.text(), st.floats(-9, 9)),
)
@example(lr=0.0, name="Läufe", path="\x85", custom={}, weights={})  # PyYAML reads it as a line break
@example(lr=0.0, name="Läufe", path="~/$HOME/Läufe", custom={}, weights={})
def test_any_configuration_survives_a_yaml_round_trip(
    lr: float, name: str, path: str | None, custom: dict[str, Any], weights: dict[str, float]
) -> None:
    cfg = load_config(
        nested(
            ("trainer.policy.optimizer_config.lr", lr),
            ("trainer.run_name", name),
            ("trainer.ckpt_path", path),
            ("trainer.algorithm.custom", custom),
            ("trainer.algorithm.gdpo.weights", weights),
        )
    )
    assert (cfg.trainer.algorithm.custom, cfg.trainer.algorithm.gdpo.weights) == (custom, weights)
    assert load_config(yaml.safe_load(to_yaml(cfg))) == cfg


def test_validate_cfg_accepts_hydra_and_typed_configurations() -> None:
    composed = get_default_config()
    composed.trainer.run_name = "r"  # the default contains the time
    assert validate_cfg(composed) == load_config(composed) == validate_cfg(load_config(composed))
    composed.trainer.policy_mini_batch_size = 48
    with pytest.raises(ConfigError, match="must divide"):
        validate_cfg(composed)


def test_validate_cfg_fills_in_a_typed_configuration() -> None:
    named = nested(("trainer.run_name", "run"))
    assert validate_cfg(SkyRLConfig.model_validate(named)) == load_config(named)


def test_likely_mistakes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    load_config(nested(("generator.n_samples_per_prompt", 1), ("trainer.resume_path", "a/global_step_3")))
    assert [line.partition(" ")[0] for line in caplog.messages] == [
        "generator.n_samples_per_prompt=1",
        "trainer.resume_path=a/global_step_3",
    ]


def test_the_default_configuration_logs_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    load_config()
    assert not caplog.records


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({"trainer.total_epochs": 3}, "trainer.total_epochs=3: .* nest the sections: trainer: {total_epochs: 3}"),
        (
            {"trainer": {"algorithm.eps_clip_low": 0.3}},
            "trainer.algorithm.eps_clip_low=0.3: .*: trainer: {algorithm: {eps_clip_low: 0.3}}",
        ),
    ],
)
def test_names_with_dots_are_refused(source: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        load_config(source)
