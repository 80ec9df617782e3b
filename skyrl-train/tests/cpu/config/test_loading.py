import os
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from train_kit import golden
from train_kit.rules import nested, show_values

from skyrl_train.config import SkyRLConfig, changed_settings, get_default_config, load_config, to_yaml, validate_cfg
from skyrl_train.config.base import value_at
from skyrl_train.errors import ConfigError


def test_values_are_filled_in_and_normalized(pytestconfig: pytest.Config) -> None:
    printed = {}
    for overrides, expected in golden.read("config/filled_in").items():
        values = show_values(load_config(OmegaConf.from_dotlist(overrides.split())), expected)
        printed[overrides] = [value.replace(os.path.expanduser("~"), "…") for value in values]
    golden.compare("config/filled_in", printed, pytestconfig)


def test_tuples_and_keys_that_are_no_texts_are_normalized() -> None:
    betas, custom = "trainer.policy.optimizer_config.adam_betas", "trainer.algorithm.custom"
    cfg = load_config(nested((betas, (0.5, 0.6)), (custom, {3: (1, "x")})))
    assert (value_at(cfg, betas), value_at(cfg, custom)) == ((0.5, 0.6), {"3": [1, "x"]})


def test_a_source_that_is_not_a_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the configuration is \[1\], but it must be a mapping"):
        load_config([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "reason"),
    [("???", "Missing mandatory value: run_name"), ("${nope}", "Interpolation key 'nope' not found")],
)
def test_a_failed_interpolation_names_its_key(value: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(OmegaConf.create(nested(("trainer.run_name", value))))
    assert str(caught.value) == f"trainer.run_name: {reason}; set trainer.run_name=<value>"


def test_the_source_is_not_changed() -> None:
    tree = nested(("trainer.total_epochs", 3))
    load_config(tree)
    assert tree == nested(("trainer.total_epochs", 3))


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
    composed, named = get_default_config(), nested(("trainer.run_name", "r"))  # the default contains the time
    composed.trainer.run_name = "r"
    loaded = load_config(named)
    assert validate_cfg(composed) == load_config(composed) == validate_cfg(loaded) == loaded
    assert validate_cfg(SkyRLConfig.model_validate(named)) == loaded
    composed.trainer.policy_mini_batch_size = 48
    with pytest.raises(ConfigError, match="must divide"):
        validate_cfg(composed)


def test_likely_mistakes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    load_config(nested(("generator.n_samples_per_prompt", 1), ("trainer.resume_path", "a/global_step_3")))
    keys = ["generator.n_samples_per_prompt=1", "trainer.resume_path=a/global_step_3"]
    assert [line.partition(" ")[0] for line in caplog.messages] == keys
    caplog.clear()
    load_config()
    assert not caplog.records


@pytest.mark.parametrize(
    ("source", "key", "fix"),
    [
        ({"trainer.total_epochs": 3}, "trainer.total_epochs=3", "trainer: {total_epochs: 3}"),
        (
            {"trainer": {"algorithm.eps_clip_low": 0.3}},
            "trainer.algorithm.eps_clip_low=0.3",
            "trainer: {algorithm: {eps_clip_low: 0.3}}",
        ),
    ],
)
def test_names_with_dots_are_refused(source: dict[str, Any], key: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .* nest the sections: {fix}$"):
        load_config(source)
