"""A single wrong key or value, and the error for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import load_config
from skyrl_train.config.problems import FIELDS
from skyrl_train.errors import ConfigError


def message(key: str, value: object) -> str:
    tree: Any = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    return str(caught.value)


FREE_VALUE = "a finite number, a string, true, false, null, or a list or section of these"


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
            "trainer.lr=0.1: there is no key trainer.lr; did you mean trainer.policy.optimizer_config.lr or "
            "trainer.critic.optimizer_config.lr?",
        ),
        (
            "trainer.polcy.model.path",
            "x",
            "trainer.polcy.model.path=x: there is no key trainer.polcy.model.path; "
            "did you mean trainer.policy.model.path or trainer.ref.model.path or trainer.critic.model.path?",
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
            "trainer.run_name=5 must be a non-empty string or null; the default is trainer.run_name=null",
        ),
        (
            "trainer.run_name",
            "",
            "trainer.run_name='' must be a non-empty string or null; the default is trainer.run_name=null",
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
            "trainer.policy.optimizer_config.lr=true must be a number >= 0 and <= 1000; "
            "the default is trainer.policy.optimizer_config.lr=1e-06",
        ),
        (
            "trainer.policy.optimizer_config.adam_betas",
            [0.9, 1.0],
            "trainer.policy.optimizer_config.adam_betas=[0.9,1.0] must be a list of 2 numbers >= 0 and < 1; "
            "the default is trainer.policy.optimizer_config.adam_betas=[0.9,0.999]",
        ),
        # custom keys
        (
            "trainer.algorithm.custom",
            5,
            "trainer.algorithm.custom=5 must be a section of keys of your own; "
            "the default is trainer.algorithm.custom={}",
        ),
        (
            "trainer.algorithm.custom.tau",
            float("nan"),
            f"trainer.algorithm.custom.tau=nan must be {FREE_VALUE}",
        ),
        (
            "trainer.algorithm.custom.a.b",
            [{"c": float("inf")}],
            f"trainer.algorithm.custom.a={{b:[{{c:inf}}]}} must be {FREE_VALUE}",
        ),
        (
            "trainer.algorithm.custom.kind",
            Path,
            f"trainer.algorithm.custom.kind={Path} must be {FREE_VALUE}",
        ),
        (
            "environment.skyrl_gym.search.timeout",
            float("inf"),
            f"environment.skyrl_gym.search.timeout=inf must be {FREE_VALUE}",
        ),
        (
            "trainer.algorithm.gdpo.weights",
            [0.5],
            "trainer.algorithm.gdpo.weights=[0.5] must be a section of component=weight; "
            "the default is trainer.algorithm.gdpo.weights={}",
        ),
        (
            "trainer.algorithm.gdpo.weights",
            {"format": "high", "v1.1": 1},
            "trainer.algorithm.gdpo.weights.format=high must be a number",
        ),
        ("trainer.algorithm.gdpo.weights", {"v1.1": None}, "trainer.algorithm.gdpo.weights.v1.1=null must be a number"),
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
            0,
            "trainer.max_tokens_per_microbatch=0 must be an integer >= 1 or null; "
            "the default is trainer.max_tokens_per_microbatch=null",
        ),
        (
            "generator.sampling_params.temperature",
            -0.5,
            "generator.sampling_params.temperature=-0.5 must be a number >= 0 and <= 100; "
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
            "sglan",
            "generator.backend=sglan must be one of auto, hf, vllm, sglang; the default is generator.backend=auto",
        ),
        (
            "trainer.logger",
            ["console", "mlflow"],
            "trainer.logger=[console,mlflow] must be one of console, jsonl, tensorboard, wandb, or a list of them; "
            "the default is trainer.logger=[tensorboard]",
        ),
        (
            "trainer.resume_mode",
            "newest",
            "trainer.resume_mode=newest must be one of none, latest, from_path, or null (none); "
            "the default is trainer.resume_mode=latest",
        ),
    ],
)
def test_a_wrong_key_or_value_is_refused_in_one_sentence(key: str, value: object, expected: str) -> None:
    assert message(key, value) == expected


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
    ("trainer.strategy", "deepspeed"),
    ("trainer.policy.megatron_config.tensor_model_parallel_size", 0),
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
    ("trainer.algorithm.gamma", 1.1),
    ("trainer.algorithm.lambd", -0.1),
    ("trainer.algorithm.clip_ratio_c", 1.0),
    ("trainer.algorithm.value_clip", 0.0),
    ("trainer.algorithm.kl_ctrl.type", "moving"),
    ("trainer.algorithm.kl_ctrl.kl_target", 0.0),
    ("trainer.algorithm.kl_ctrl.horizon", 0),
    ("trainer.algorithm.top_entropy_quantile", 0.0),
    ("trainer.algorithm.off_policy_sequence_mask_threshold", 0.0),
    ("trainer.algorithm.off_policy_correction.tis_ratio_type", "geometric"),
    ("trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high", 0.0),
    ("trainer.algorithm.off_policy_correction.sequence_mask_metric", "sum"),
    ("trainer.algorithm.dynamic_sampling.type", "drop"),
    ("trainer.algorithm.dynamic_sampling.max_sample_batches", 0),
    ("trainer.algorithm.dynamic_sampling.min_replace_ratio", 1.1),
    ("trainer.algorithm.zero_variance_filter_tol", -1e-9),
    ("trainer.algorithm.overlong_buffer_len", 0),
    ("trainer.algorithm.overlong_buffer_penalty_factor", -1.0),
    ("trainer.algorithm.cispo.cispo_eps_clip_low", -0.1),
    ("trainer.algorithm.sapo.tau_pos", 0.0),
    ("trainer.algorithm.gmpo.log_ratio_clip", 0.0),
    ("trainer.algorithm.clip_cov.clip_ratio", 0.0),
    ("trainer.algorithm.kl_cov.kl_cov_frac", 1.1),
    ("trainer.algorithm.dppo.dppo_type", "tv"),
    ("trainer.algorithm.vespo.k_pos", 0.0),
    ("trainer.algorithm.dro.beta", -0.1),
    ("trainer.algorithm.rollout_is.ratio_high", 0.0),
    ("trainer.critic.model.path", ""),
    ("trainer.critic.model.dtype", "float16"),
    ("trainer.critic.optimizer_config.lr", -1.0),
    ("generator.n_samples_per_prompt", 0),
    ("generator.max_turns", 0),
    ("generator.num_inference_engines", 0),
    ("generator.engine_start_timeout_seconds", 0.0),
    ("generator.engine_start_timeout_seconds", 1e7),
    ("generator.weight_sync_backend", "delta"),
    ("generator.weight_sync_check", "always"),
    ("generator.weight_sync_timeout_seconds", 0.0),
    ("generator.weight_sync_tolerance", 0.0),
    ("generator.gpu_memory_utilization", 1.1),
    ("generator.sampling_params.top_p", 0.0),
    ("generator.sampling_params.top_k", 0),
    ("generator.sampling_params.min_p", 1.5),
    ("generator.sampling_params.max_generate_length", 0),
    ("generator.eval_sampling_params.max_generate_length", 0),
    ("environment.skyrl_gym.max_env_workers", -1),
    ("environment.env_class", ""),
    ("trainer.seed", 2**63),
    ("trainer.algorithm.kl_loss_coef", 1e30),
    ("generator.sampling_params.temperature", 1e30),
    ("generator.eval_sampling_params.temperature", 1e30),
]


@pytest.mark.parametrize(("key", "value"), LIMITS)
def test_values_out_of_range_are_refused(key: str, value: object) -> None:
    assert message(key, value).startswith(f"{key}=")


def test_the_table_of_limits_names_existing_keys() -> None:
    assert {key for key, _ in LIMITS} <= FIELDS.keys()
