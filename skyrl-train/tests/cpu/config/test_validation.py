"""Every rule, seen failing and seen holding."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from skyrl_train.config import load_config, parse_cli, validate_batch_sizes, validate_cfg
from skyrl_train.config.algorithm_rules import ALGORITHM_RULES
from skyrl_train.config.validation import MACHINE_RULES, RULES
from skyrl_train.config.wandb_login import wandb_login_problem
from skyrl_train.errors import ConfigError


def tree(overrides: list[str]) -> dict[str, Any]:
    """`["a.b=1"]` → `{"a": {"b": 1}}`."""
    return OmegaConf.to_container(OmegaConf.from_dotlist(overrides))  # type: ignore[return-value]


CRITIC = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=tiny"]
NO_KL_LOSS = "trainer.algorithm.use_kl_loss=false"

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
        "policy_and_ref_share_gpus",
        ["trainer.placement.colocate_all=false", "trainer.placement.policy_num_gpus_per_node=4"],
        "trainer.placement.ref_num_gpus_per_node=1 must equal trainer.placement.policy_num_gpus_per_node=4 when "
        "trainer.placement.colocate_policy_ref=true; set trainer.placement.ref_num_gpus_per_node=4 or "
        "trainer.placement.colocate_policy_ref=false",
    ),
    (
        "policy_and_ref_share_gpus",
        ["trainer.placement.colocate_all=false", "trainer.placement.ref_num_nodes=2"],
        "trainer.placement.ref_num_nodes=2 must equal trainer.placement.policy_num_nodes=1 when "
        "trainer.placement.colocate_policy_ref=true; set trainer.placement.ref_num_nodes=1 or "
        "trainer.placement.colocate_policy_ref=false",
    ),
    (
        "policy_and_ref_share_gpus",
        [
            *["trainer.placement.colocate_all=false", "trainer.placement.ref_num_nodes=2", NO_KL_LOSS],
            "trainer.algorithm.use_kl_in_reward=true",
        ],
        "trainer.placement.ref_num_nodes=2 must equal trainer.placement.policy_num_nodes=1 when "
        "trainer.placement.colocate_policy_ref=true; set trainer.placement.ref_num_nodes=1 or "
        "trainer.placement.colocate_policy_ref=false",
    ),
    (
        "policy_and_ref_share_gpus",
        [
            *["trainer.placement.colocate_all=false", "trainer.placement.ref_num_nodes=2", NO_KL_LOSS],
            *["trainer.algorithm.advantage_estimator=on_policy_distillation", "trainer.ref.model.path=teacher"],
        ],
        "trainer.placement.ref_num_nodes=2 must equal trainer.placement.policy_num_nodes=1 when "
        "trainer.placement.colocate_policy_ref=true; set trainer.placement.ref_num_nodes=1 or "
        "trainer.placement.colocate_policy_ref=false",
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
        ["trainer.placement.policy_num_gpus_per_node=4", "generator.num_inference_engines=2"],
        [
            "trainer.placement.colocate_all=false",
            "trainer.placement.colocate_policy_ref=false",
            "trainer.placement.policy_num_gpus_per_node=4",
        ],
        [
            "trainer.placement.colocate_all=false",
            "trainer.placement.policy_num_gpus_per_node=4",
            "trainer.algorithm.use_kl_loss=false",
        ],
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


THREE_MODELS = [*CRITIC, "trainer.train_batch_size=12", "trainer.policy_mini_batch_size=12"]


@pytest.mark.parametrize(
    ("overrides", "workers", "expected"),
    [
        (
            ["trainer.train_batch_size=12", "trainer.policy_mini_batch_size=3"],
            {"policy_dp": 4, "ref_dp": 4},
            "trainer.policy_mini_batch_size=3 times generator.n_samples_per_prompt=5 is 15 trajectories, which do not "
            "split evenly over 4 policy workers; try trainer.policy_mini_batch_size=4 or "
            "generator.n_samples_per_prompt=8",
        ),
        (
            ["trainer.train_batch_size=3", "trainer.policy_mini_batch_size=3", "generator.n_samples_per_prompt=1"],
            {"policy_dp": 2},
            "trainer.policy_mini_batch_size=3 times generator.n_samples_per_prompt=1 is 3 trajectories, which do not "
            "split evenly over 2 policy workers; try generator.n_samples_per_prompt=2",
        ),
        (
            ["trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=2"],
            {"policy_dp": 4, "ref_dp": 3},
            "trainer.train_batch_size=2 times generator.n_samples_per_prompt=2 is 4 trajectories, fewer than 12, the "
            "least common multiple of 4 policy workers and 3 reference workers; try trainer.train_batch_size=6",
        ),
        (
            [*THREE_MODELS, "trainer.critic_mini_batch_size=3"],
            {"policy_dp": 4, "ref_dp": 4, "critic_dp": 2},
            "trainer.critic_mini_batch_size=3 times generator.n_samples_per_prompt=5 is 15 trajectories, which do not "
            "split evenly over 2 critic workers; try trainer.critic_mini_batch_size=2 or 4 or "
            "generator.n_samples_per_prompt=6",
        ),
    ],
)
def test_batches_must_fill_the_workers(overrides: list[str], workers: dict[str, int], expected: str) -> None:
    cfg = load_config(tree(overrides))
    validate_batch_sizes(cfg)
    with pytest.raises(ConfigError) as caught:
        validate_batch_sizes(cfg, **workers)
    assert str(caught.value) == expected


def test_without_a_reference_its_workers_do_not_count() -> None:
    sizes = ["trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=2"]
    validate_batch_sizes(load_config(tree([*sizes, NO_KL_LOSS])), policy_dp=4, ref_dp=3)
    for reading in (
        [NO_KL_LOSS, "trainer.algorithm.use_kl_in_reward=true"],
        [NO_KL_LOSS, "trainer.algorithm.advantage_estimator=on_policy_distillation", "trainer.ref.model.path=teacher"],
    ):
        with pytest.raises(ConfigError, match="3 reference workers"):
            validate_batch_sizes(load_config(tree([*sizes, *reading])), policy_dp=4, ref_dp=3)


def test_without_a_critic_its_workers_do_not_count() -> None:
    sizes = ["trainer.train_batch_size=12", "trainer.policy_mini_batch_size=12", "trainer.critic_mini_batch_size=5"]
    validate_batch_sizes(load_config(tree(sizes)), policy_dp=4, ref_dp=4, critic_dp=7)


def test_the_advice_for_workers_is_good_advice() -> None:
    sizes = ["trainer.train_batch_size=12", "trainer.policy_mini_batch_size=3"]
    for fix in (["trainer.policy_mini_batch_size=4"], ["generator.n_samples_per_prompt=8"]):
        validate_batch_sizes(load_config(tree([*sizes, *fix])), policy_dp=4, ref_dp=4)
    for size in (2, 4):
        cfg = load_config(tree([*THREE_MODELS, f"trainer.critic_mini_batch_size={size}"]))
        validate_batch_sizes(cfg, policy_dp=4, ref_dp=4, critic_dp=2)


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
