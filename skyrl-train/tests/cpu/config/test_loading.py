"""load_config: what is filled in, what is refused and with which words, and the way to YAML and back."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from skyrl_train.config import SkyRLConfig, config_dir, get_default_config, load_config, to_yaml, validate_cfg
from skyrl_train.config.base import value_at
from skyrl_train.config.problems import FIELDS
from skyrl_train.errors import ConfigError


def nested(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """`("a.b", 1)` → `{"a": {"b": 1}}`."""
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


def test_nothing_is_the_default_configuration() -> None:
    assert load_config() == load_config(None) == load_config({}) == load_config(get_default_config())


@pytest.mark.parametrize(
    ("pairs", "key", "value"),
    [
        ([("trainer.policy.model.path", "tiny")], "trainer.ref.model.path", "tiny"),
        ([("trainer.policy.model.path", "a"), ("trainer.ref.model.path", "b")], "trainer.ref.model.path", "b"),
        ([("trainer.run_name", "r")], "trainer.ckpt_path", "outputs/skyrl/r/ckpts"),
        ([("trainer.run_name", "r")], "trainer.export_path", "outputs/skyrl/r/export"),
        ([("trainer.ckpt_path", "$HOME/ckpts")], "trainer.ckpt_path", os.path.expanduser("~/ckpts")),
        ([("trainer.output_dir", "~/runs")], "trainer.export_path", os.path.expanduser("~/runs/skyrl/test_run/export")),
        ([("trainer.policy.model.path", "~/model")], "trainer.ref.model.path", os.path.expanduser("~/model")),
        ([("generator.sampling_params.temperature", 0.7)], "trainer.algorithm.temperature", 0.7),
        (
            [("generator.sampling_params.max_generate_length", 7)],
            "generator.eval_sampling_params.max_generate_length",
            7,
        ),
        ([("trainer.max_prompt_length", 100)], "generator.max_input_length", 100),
        ([("generator.max_turns", 3)], "generator.max_input_length", None),
        ([("trainer.max_prompt_length", 100)], "trainer.algorithm.max_seq_len", 1124),
        ([("generator.max_turns", 3)], "trainer.algorithm.max_seq_len", None),
        ([("generator.max_turns", 3), ("generator.max_input_length", 600)], "trainer.algorithm.max_seq_len", 1624),
        ([("trainer.resume_mode", None)], "trainer.resume_mode", "none"),
        ([("trainer.logger", "console")], "trainer.logger", ["console"]),
        ([("data.train_data", "a.parquet")], "data.train_data", ["a.parquet"]),
        ([("generator.sampling_params.stop", "</a>")], "generator.sampling_params.stop", ["</a>"]),
        ([("trainer.policy.optimizer_config.lr", 1)], "trainer.policy.optimizer_config.lr", 1.0),
        (
            [("trainer.policy.optimizer_config.adam_betas", (0.5, 0.6))],
            "trainer.policy.optimizer_config.adam_betas",
            (0.5, 0.6),
        ),
    ],
)
def test_values_are_filled_in_and_normalised(pairs: list[tuple[str, Any]], key: str, value: object) -> None:
    assert value_at(load_config(nested(*pairs)), key) == value


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        # mistyped keys
        (
            "trainer.train_batchsize",
            64,
            "trainer.train_batchsize=64: there is no key trainer.train_batchsize; "
            "did you mean trainer.train_batch_size?",
        ),
        (
            "trainer.lr",
            0.1,
            "trainer.lr=0.1: there is no key trainer.lr; did you mean trainer.policy.optimizer_config.lr?",
        ),
        (
            "trainer.polcy.model.path",
            "x",
            "trainer.polcy.model.path=x: there is no key trainer.polcy.model.path; "
            "did you mean trainer.policy.model.path or trainer.ref.model.path?",
        ),
        ("colour", "red", "colour=red: there is no key colour; remove it"),
        (
            "environment.skyrl_gym.max_env_worker",
            4,
            "environment.skyrl_gym.max_env_worker=4: there is no key environment.skyrl_gym.max_env_worker; "
            "did you mean environment.skyrl_gym.max_env_workers? "
            "(settings for an environment of class max_env_worker are a section: "
            "environment.skyrl_gym.max_env_worker.<name>=<value>)",
        ),
        # wrong types
        ("trainer.epochs", "three", "trainer.epochs=three must be an integer >= 1; the default is trainer.epochs=1"),
        ("trainer.epochs", "3", "trainer.epochs='3' must be an integer >= 1; the default is trainer.epochs=1"),
        ("trainer.epochs", 3.0, "trainer.epochs=3.0 must be an integer >= 1; the default is trainer.epochs=1"),
        ("trainer.epochs", True, "trainer.epochs=true must be an integer >= 1; the default is trainer.epochs=1"),
        ("trainer.epochs", None, "trainer.epochs=null must be an integer >= 1; the default is trainer.epochs=1"),
        ("trainer.bf16", 1, "trainer.bf16=1 must be true or false; the default is trainer.bf16=true"),
        (
            "trainer.run_name",
            5,
            "trainer.run_name=5 must be a non-empty string; the default is trainer.run_name=test_run",
        ),
        (
            "trainer.run_name",
            "",
            "trainer.run_name='' must be a non-empty string; the default is trainer.run_name=test_run",
        ),
        ("trainer", 5, "trainer=5 must be a section; set its keys one by one: trainer.<name>=<value>"),
        (
            "environment.skyrl_gym",
            None,
            "environment.skyrl_gym=null must be a section; "
            "set its keys one by one: environment.skyrl_gym.<name>=<value>",
        ),
        (
            "data.train_data",
            ["a", 1],
            "data.train_data=[a,1] must be a string or a list of strings; "
            "the default is data.train_data=[$HOME/data/gsm8k/train.parquet]",
        ),
        (
            "trainer.policy.optimizer_config.lr",
            True,
            "trainer.policy.optimizer_config.lr=true must be a number >= 0; "
            "the default is trainer.policy.optimizer_config.lr=1e-06",
        ),
        (
            "trainer.policy.optimizer_config.adam_betas",
            [0.9, 1.0],
            "trainer.policy.optimizer_config.adam_betas=[0.9,1.0] must be a list of 2 numbers >= 0 and < 1; "
            "the default is trainer.policy.optimizer_config.adam_betas=[0.9,0.999]",
        ),
        # values out of range
        (
            "trainer.max_ckpts_to_keep",
            0,
            "trainer.max_ckpts_to_keep=0 must be -1 or an integer >= 1; the default is trainer.max_ckpts_to_keep=-1",
        ),
        (
            "trainer.micro_train_batch_size_per_gpu",
            0,
            "trainer.micro_train_batch_size_per_gpu=0 must be an integer >= 1 or null; "
            "the default is trainer.micro_train_batch_size_per_gpu=null",
        ),
        (
            "trainer.max_tokens_per_microbatch",
            -1,
            "trainer.max_tokens_per_microbatch=-1 must be an integer >= 1; "
            "the default is trainer.max_tokens_per_microbatch=16384",
        ),
        (
            "generator.sampling_params.temperature",
            -0.5,
            "generator.sampling_params.temperature=-0.5 must be a number >= 0; "
            "the default is generator.sampling_params.temperature=1.0",
        ),
        (
            "generator.gpu_memory_utilization",
            float("nan"),
            "generator.gpu_memory_utilization=nan must be a number > 0 and <= 1; "
            "the default is generator.gpu_memory_utilization=0.8",
        ),
        (
            "generator.sampling_params.logprobs",
            1,
            "generator.sampling_params.logprobs=1 must be 0 or null; "
            "the default is generator.sampling_params.logprobs=0",
        ),
        (
            "generator.backend",
            "sglang",
            "generator.backend=sglang must be one of auto, hf, vllm; the default is generator.backend=auto",
        ),
        (
            "trainer.logger",
            ["console", "mlflow"],
            "trainer.logger=[console,mlflow] must be one of console, jsonl, tensorboard, wandb, or a list of them; "
            "the default is trainer.logger=[console,tensorboard]",
        ),
        (
            "trainer.resume_mode",
            "newest",
            "trainer.resume_mode=newest must be one of none, latest, from_path, or null (none); "
            "the default is trainer.resume_mode=latest",
        ),
    ],
)
def test_a_wrong_key_or_value_is_answered_in_one_sentence(key: str, value: object, expected: str) -> None:
    assert message((key, value)) == expected


LIMITS = [
    ("trainer.train_batch_size", 0),
    ("trainer.policy_mini_batch_size", 0),
    ("trainer.critic_mini_batch_size", 0),
    ("trainer.micro_forward_batch_size_per_gpu", -1),
    ("trainer.update_epochs_per_batch", 0),
    ("trainer.max_training_steps", 0),
    ("trainer.max_prompt_length", 0),
    ("trainer.eval_batch_size", 0),
    ("trainer.eval_interval", 0),
    ("trainer.ckpt_interval", -2),
    ("trainer.hf_save_interval", 0),
    ("trainer.seed", -1),
    ("trainer.strategy", "megatron"),
    ("trainer.policy.model.dtype", "float16"),
    ("trainer.policy.optimizer_config.lr", -1e-6),
    ("trainer.policy.optimizer_config.lr", float("inf")),
    ("trainer.policy.optimizer_config.weight_decay", -0.1),
    ("trainer.policy.optimizer_config.max_grad_norm", 0.0),
    ("trainer.policy.optimizer_config.num_warmup_steps", -1),
    ("trainer.policy.optimizer_config.scheduler", "triangle"),
    ("trainer.placement.policy_num_gpus_per_node", 0),
    ("trainer.algorithm.loss_reduction", "mean"),
    ("trainer.algorithm.kl_estimator_type", "k4"),
    ("trainer.algorithm.kl_loss_coef", -0.1),
    ("trainer.algorithm.eps_clip_low", 1.5),
    ("trainer.algorithm.eps_clip_high", -0.1),
    ("trainer.algorithm.temperature", 0.0),
    ("trainer.algorithm.max_seq_len", 0),
    ("generator.n_samples_per_prompt", 0),
    ("generator.max_turns", 0),
    ("generator.num_inference_engines", 0),
    ("generator.weight_sync_backend", "delta"),
    ("generator.gpu_memory_utilization", 1.1),
    ("generator.sampling_params.top_p", 0.0),
    ("generator.sampling_params.top_k", 0),
    ("generator.sampling_params.min_p", 1.5),
    ("generator.sampling_params.max_generate_length", 0),
    ("generator.eval_sampling_params.max_generate_length", 0),
    ("environment.skyrl_gym.max_env_workers", -1),
    ("environment.env_class", ""),
]


@pytest.mark.parametrize(("key", "value"), LIMITS)
def test_every_range_has_an_end(key: str, value: object) -> None:
    assert message((key, value)).startswith(f"{key}=")


def test_all_problems_come_in_one_error() -> None:
    text = message(("trainer.epochs", 0), ("trainer.sed", 1), ("generator.total_epochs", 2))
    lines = text.splitlines()
    assert lines[0] == "3 problems in the configuration:"
    assert sorted(line.split("=")[0] for line in lines[1:]) == [
        "  - generator.total_epochs",
        "  - trainer.epochs",
        "  - trainer.sed",
    ]


def test_broken_rules_come_in_one_error_too() -> None:
    text = message(("trainer.policy_mini_batch_size", 48), ("data.train_data", []))
    assert text.startswith("2 problems in the configuration:")


def test_an_unknown_section_is_answered_key_by_key() -> None:
    text = message(("trainer.polcy.model.path", "x"), ("trainer.polcy.optimizer_config.lr", 1.0))
    assert "trainer.polcy.model.path=x" in text
    assert "trainer.polcy.optimizer_config.lr=1.0" in text


def test_a_source_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the configuration is \[1\]; it must be a mapping"):
        load_config([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("???", "trainer.run_name: Missing mandatory value: run_name; set trainer.run_name=<value>"),
        ("${nope}", "trainer.run_name: Interpolation key 'nope' not found; set trainer.run_name=<value>"),
    ],
)
def test_an_interpolation_that_leads_nowhere_names_its_key(value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(OmegaConf.create(nested(("trainer.run_name", value))))
    assert str(caught.value) == expected


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    tree = nested(("trainer.run_name", "${oc.env:WHO}-${trainer.seed}"), ("trainer.seed", 7))
    assert load_config(OmegaConf.create(tree)).trainer.run_name == "me-7"


def test_the_source_is_left_as_it_was() -> None:
    tree = nested(("trainer.total_epochs", 3))
    load_config(tree)
    assert tree == nested(("trainer.total_epochs", 3))


def test_the_file_that_hydra_reads_can_be_read_without_hydra() -> None:
    tree = yaml.safe_load((Path(config_dir) / "ppo_base_config.yaml").read_text(encoding="utf-8"))
    assert {"hydra", "defaults"} <= tree.keys()
    assert load_config(tree) == load_config()


def test_yaml_and_back_is_equal_and_shows_what_was_filled_in() -> None:
    source = nested(
        ("trainer.logger", ["console", "jsonl"]),
        ("trainer.run_name", "épreuve: 1"),
        ("trainer.policy.optimizer_config.lr", 3e-7),
        ("generator.sampling_params.stop", ["</a>", "\n"]),
        ("environment.skyrl_gym.search", {"topk": 3, "url": "http://127.0.0.1:8000"}),
    )
    cfg = load_config(source)
    text = to_yaml(cfg)
    assert "path: Qwen/Qwen2.5-1.5B-Instruct" in text.split("ref:")[1]
    assert load_config(yaml.safe_load(text)) == cfg
    assert load_config(OmegaConf.create(text)) == cfg


@settings(max_examples=30, deadline=None)
@given(
    n_mini=st.integers(1, 8),
    mini=st.integers(1, 64),
    lr=st.floats(0, 1),
    turns=st.integers(1, 5),
    name=st.text(min_size=1, max_size=20),
    path=st.none() | st.text(min_size=1, max_size=20),
)
@example(n_mini=1, mini=1, lr=0.0, turns=1, name="\x85", path=None)  # a line break to PyYAML
@example(n_mini=1, mini=1, lr=0.0, turns=1, name="Läufe", path="~/$HOME/Läufe")
def test_any_configuration_survives_yaml(
    n_mini: int, mini: int, lr: float, turns: int, name: str, path: str | None
) -> None:
    cfg = load_config(
        nested(
            ("trainer.train_batch_size", n_mini * mini),
            ("trainer.policy_mini_batch_size", mini),
            ("trainer.policy.optimizer_config.lr", lr),
            ("trainer.run_name", name),
            ("trainer.ckpt_path", path),
            ("generator.max_turns", turns),
        )
    )
    assert load_config(yaml.safe_load(to_yaml(cfg))) == cfg


def test_validate_cfg_takes_what_hydra_composed_and_the_typed_configuration() -> None:
    composed = get_default_config()
    assert validate_cfg(composed) == load_config(composed) == validate_cfg(load_config(composed))
    composed.trainer.policy_mini_batch_size = 48
    with pytest.raises(ConfigError, match="must divide"):
        validate_cfg(composed)


def test_validate_cfg_fills_in_a_configuration_made_by_hand() -> None:
    assert validate_cfg(SkyRLConfig()) == load_config()


def test_what_is_most_likely_not_meant_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(nested(("generator.n_samples_per_prompt", 1), ("trainer.resume_path", "a/global_step_3")))
    assert [record.message for record in caplog.records] == [
        "generator.n_samples_per_prompt=1 with trainer.algorithm.advantage_estimator=grpo compares every trajectory "
        "with itself only; try generator.n_samples_per_prompt=5",
        "trainer.resume_path=a/global_step_3 is not read when trainer.resume_mode=latest; "
        "set trainer.resume_mode=from_path",
    ]


def test_the_default_configuration_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config()
    assert not caplog.records


def test_the_table_of_limits_names_real_keys() -> None:
    assert {key for key, _ in LIMITS} <= FIELDS.keys()
