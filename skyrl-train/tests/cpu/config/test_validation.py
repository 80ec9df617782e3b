"""Every rule, seen failing and seen holding."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from skyrl_train.config import load_config, parse_cli, validate_cfg
from skyrl_train.config.algorithm_rules import ALGORITHM_RULES
from skyrl_train.config.validation import MACHINE_RULES, RULES
from skyrl_train.config.wandb_login import wandb_login_problem
from skyrl_train.errors import ConfigError


def tree(overrides: list[str]) -> dict[str, Any]:
    """`["a.b=1"]` → `{"a": {"b": 1}}`."""
    return OmegaConf.to_container(OmegaConf.from_dotlist(overrides))  # type: ignore[return-value]


CRITIC = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=tiny"]

FAILING = [
    (
        "mini_batches_divide_batch",
        ["trainer.train_batch_size=64", "trainer.policy_mini_batch_size=48"],
        "trainer.policy_mini_batch_size=48 must divide trainer.train_batch_size=64; try 32 or 64",
    ),
    (
        "mini_batches_divide_batch",
        ["trainer.train_batch_size=64"],
        "trainer.policy_mini_batch_size=256 must divide trainer.train_batch_size=64; try 64",
    ),
    (
        "mini_batches_divide_batch",
        [*CRITIC, "trainer.critic_mini_batch_size=100"],
        "trainer.critic_mini_batch_size=100 must divide trainer.train_batch_size=1024; try 64 or 128",
    ),
    (
        "sequence_norm_has_a_length",
        ["trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "generator.max_turns=3"],
        "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by trainer.algorithm.max_seq_len=null, which "
        "cannot be worked out when generator.max_turns=3 and generator.max_input_length=null; "
        "set trainer.algorithm.max_seq_len",
    ),
    (
        "training_temperature_is_positive",
        ["generator.sampling_params.temperature=0.0"],
        "generator.sampling_params.temperature=0.0 (greedy) cannot divide the logits in training, and "
        "trainer.algorithm.temperature=null takes it; try generator.sampling_params.temperature=1.0, or set "
        "trainer.algorithm.temperature=1.0 if rollouts shall be greedy",
    ),
    (
        "input_length_covers_prompts",
        ["generator.max_input_length=600"],
        "generator.max_input_length=600 must equal trainer.max_prompt_length=512 when generator.max_turns=1; "
        "try generator.max_input_length=512, or null",
    ),
    (
        "input_length_covers_prompts",
        ["generator.max_input_length=256", "generator.max_turns=5"],
        "generator.max_input_length=256 must be at least trainer.max_prompt_length=512; "
        "try generator.max_input_length=512 or more, or null for the model's context length",
    ),
    (
        "engines_run_here",
        ["generator.run_engines_locally=false"],
        "generator.run_engines_locally=false asks for engines that another program started, which this version does "
        "not reach; set generator.run_engines_locally=true",
    ),
    (
        "evaluation_has_prompts",
        ["data.val_data=[]"],
        "data.val_data=[] leaves nothing to evaluate every trainer.eval_interval=5 steps; "
        "set data.val_data or trainer.eval_interval=-1",
    ),
    (
        "training_has_prompts",
        ["data.train_data=[]"],
        "data.train_data=[] leaves nothing to train on; set data.train_data=[<file or dataset name>]",
    ),
    (
        "resume_path_is_a_checkpoint",
        ["trainer.resume_mode=from_path"],
        "trainer.resume_mode=from_path needs trainer.resume_path=null to be a folder ending in global_step_<N>; "
        "set it, or trainer.resume_mode=latest",
    ),
    (
        "resume_path_is_a_checkpoint",
        ["trainer.resume_mode=from_path", "trainer.resume_path=ckpts/"],
        "trainer.resume_path=ckpts/ must end in global_step_<N>; try trainer.resume_path=ckpts/global_step_10, "
        "or trainer.resume_mode=latest",
    ),
]


@pytest.mark.parametrize(("rule", "overrides", "expected"), FAILING)
def test_a_broken_rule_says_what_to_do(rule: str, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tree(overrides))
    assert str(caught.value) == expected


def test_every_rule_was_seen_failing() -> None:
    seen = {rule for rule, _, _ in FAILING} | {rule.__name__ for rule in ALGORITHM_RULES}  # test_algorithm_rules.py
    assert {rule.__name__ for rule in RULES} == seen
    assert [rule.__name__ for rule in MACHINE_RULES] == ["wandb_has_a_key"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.train_batch_size=64", "trainer.policy_mini_batch_size=16"],
        ["trainer.micro_train_batch_size_per_gpu=7", "trainer.micro_forward_batch_size_per_gpu=1000"],
        ["trainer.critic_mini_batch_size=48"],
        [*CRITIC, "trainer.critic_mini_batch_size=128"],
        [*CRITIC, "trainer.policy_mini_batch_size=1024", "trainer.critic_mini_batch_size=1"],
        ["trainer.algorithm.loss_reduction=seq_mean_token_sum_norm"],
        [
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm",
            "generator.max_turns=3",
            "trainer.algorithm.max_seq_len=99",
        ],
        ["generator.sampling_params.temperature=0.0", "trainer.algorithm.temperature=1.0"],
        ["generator.max_input_length=512"],
        ["generator.max_input_length=4096", "generator.max_turns=5"],
        ["data.val_data=[]", "trainer.eval_interval=-1"],
        ["trainer.resume_mode=from_path", "trainer.resume_path=ckpts/global_step_10"],
        ["trainer.resume_mode=from_path", "trainer.resume_path=global_step_10/"],
        ["generator.async_engine=false", "generator.batched=false", "generator.backend=vllm"],
        ["generator.batched=true", "generator.max_turns=5"],
        ["trainer.algorithm.advantage_estimator=mine", "trainer.algorithm.policy_loss_type=mine"],
    ],
)
def test_what_is_meant_is_accepted(overrides: list[str]) -> None:
    load_config(tree(overrides))


@pytest.fixture
def no_wandb(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/no/such/netrc")
    return monkeypatch


def test_wandb_without_a_key_stops_a_run_before_it_starts(no_wandb: pytest.MonkeyPatch) -> None:
    for start in (
        lambda: parse_cli(["trainer.logger=[console,wandb]"]),
        lambda: validate_cfg({"trainer": {"logger": ["console", "wandb"]}}),
        lambda: validate_cfg(load_config({"trainer": {"logger": ["console", "wandb"]}})),
    ):
        with pytest.raises(ConfigError) as caught:
            start()
        assert str(caught.value) == wandb_login_problem({})


@pytest.mark.parametrize(
    ("name", "value"),
    [("WANDB_API_KEY", "k"), ("WANDB_MODE", "offline"), ("WANDB_MODE", "disabled"), ("WANDB_MODE", "OFFLINE")],
)
def test_wandb_with_a_key_or_offline_is_accepted(no_wandb: pytest.MonkeyPatch, name: str, value: str) -> None:
    no_wandb.setenv(name, value)
    assert parse_cli(["trainer.logger=wandb"]).trainer.logger == ["wandb"]


def test_a_finished_run_can_be_read_without_its_key(no_wandb: pytest.MonkeyPatch) -> None:
    assert load_config({"trainer": {"logger": "wandb"}}).trainer.logger == ["wandb"]
