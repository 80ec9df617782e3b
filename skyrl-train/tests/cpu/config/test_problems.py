"""Wording of configuration errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from train_kit import golden

from skyrl_train.config import load_config
from skyrl_train.config.base import FREE_VALUE
from skyrl_train.config.problems import FIELDS, config_error, leaves, nearest_keys, raise_problems, show
from skyrl_train.errors import ConfigError


def find_error(override: str) -> str:
    """Return the error of one override, whose value is YAML: '3' is a string, 3 is a number."""
    with pytest.raises(ConfigError) as caught:
        load_config(OmegaConf.from_dotlist([override]))
    return str(caught.value)


MISTYPED_KEYS = """
trainer.train_batchsize=64 trainer.lr=0.1 trainer.polcy.model.path=x colour=red
environment.skyrl_gym.max_env_worker=4
"""
WRONG_TYPES = """
trainer.epochs=three trainer.epochs='3' trainer.epochs=3.0 trainer.epochs=true trainer.epochs=null
trainer.bf16=1 trainer.run_name=5 trainer=5 environment.skyrl_gym=null
data.train_data=[a,1] trainer.policy.optimizer_config.lr=true trainer.policy.optimizer_config.adam_betas=[0.9,1.0]
trainer.critic.model.path='' environment.env_class=''
"""
CUSTOM_KEYS = """
trainer.algorithm.custom=5 trainer.algorithm.custom.tau=.nan
environment.skyrl_gym.search.timeout=.inf trainer.algorithm.gdpo.weights=[0.5]
"""
CHOICES = """
generator.backend=sglan trainer.logger=[console,mlflow] trainer.resume_mode=newest trainer.strategy=deepspeed
trainer.policy.model.dtype=float16 trainer.critic.model.dtype=float16
trainer.policy.optimizer_config.scheduler=triangle
trainer.algorithm.loss_reduction=mean trainer.algorithm.kl_estimator_type=k4 trainer.algorithm.kl_ctrl.type=moving
trainer.algorithm.off_policy_correction.tis_ratio_type=geometric
trainer.algorithm.off_policy_correction.sequence_mask_metric=sum
trainer.algorithm.dynamic_sampling.type=drop trainer.algorithm.dppo.dppo_type=tv
generator.weight_sync_backend=delta generator.weight_sync_check=always generator.sampling_params.logprobs=1
"""
LIMITS = """
trainer.max_ckpts_to_keep=0 trainer.micro_train_batch_size_per_gpu=0 trainer.max_tokens_per_microbatch=0
trainer.train_batch_size=0 trainer.policy_mini_batch_size=0 trainer.critic_mini_batch_size=0
trainer.micro_forward_batch_size_per_gpu=-1 trainer.update_epochs_per_batch=0 trainer.max_training_steps=0
trainer.max_prompt_length=0 trainer.eval_batch_size=0 trainer.eval_interval=0 trainer.ckpt_interval=-2
trainer.hf_save_interval=0 trainer.seed=-1 trainer.seed=9223372036854775808
trainer.policy.megatron_config.tensor_model_parallel_size=0 trainer.placement.policy_num_gpus_per_node=0
trainer.policy.optimizer_config.lr=-1e-6 trainer.policy.optimizer_config.lr=.inf
trainer.critic.optimizer_config.lr=-1.0 trainer.policy.optimizer_config.weight_decay=-0.1
trainer.policy.optimizer_config.max_grad_norm=0.0 trainer.policy.optimizer_config.num_warmup_steps=-1
trainer.algorithm.kl_loss_coef=-0.1 trainer.algorithm.kl_loss_coef=1e30
trainer.algorithm.eps_clip_low=1.5 trainer.algorithm.eps_clip_high=-0.1 trainer.algorithm.temperature=0.0
trainer.algorithm.max_seq_len=0 trainer.algorithm.gamma=1.1 trainer.algorithm.lambd=-0.1
trainer.algorithm.clip_ratio_c=1.0 trainer.algorithm.value_clip=0.0
trainer.algorithm.kl_ctrl.kl_target=0.0 trainer.algorithm.kl_ctrl.horizon=0
trainer.algorithm.top_entropy_quantile=0.0 trainer.algorithm.off_policy_sequence_mask_threshold=0.0
trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=0.0
trainer.algorithm.dynamic_sampling.max_sample_batches=0 trainer.algorithm.dynamic_sampling.min_replace_ratio=1.1
trainer.algorithm.zero_variance_filter_tol=-1e-9
trainer.algorithm.overlong_buffer_len=0 trainer.algorithm.overlong_buffer_penalty_factor=-1.0
trainer.algorithm.cispo.cispo_eps_clip_low=-0.1 trainer.algorithm.sapo.tau_pos=0.0
trainer.algorithm.gmpo.log_ratio_clip=0.0 trainer.algorithm.clip_cov.clip_ratio=0.0
trainer.algorithm.kl_cov.kl_cov_frac=1.1 trainer.algorithm.vespo.k_pos=0.0 trainer.algorithm.dro.beta=-0.1
trainer.algorithm.rollout_is.ratio_high=0.0
generator.n_samples_per_prompt=0 generator.max_turns=0 generator.num_inference_engines=0
generator.engine_start_timeout_seconds=0.0 generator.engine_start_timeout_seconds=1e7
generator.weight_sync_timeout_seconds=0.0 generator.weight_sync_tolerance=0.0
generator.gpu_memory_utilization=1.1 generator.gpu_memory_utilization=.nan
generator.sampling_params.temperature=-0.5 generator.sampling_params.temperature=1e30
generator.eval_sampling_params.temperature=1e30 generator.sampling_params.top_p=0.0
generator.sampling_params.top_k=0 generator.sampling_params.min_p=1.5
generator.sampling_params.max_generate_length=0 generator.eval_sampling_params.max_generate_length=0
environment.skyrl_gym.max_env_workers=-1
"""


def test_wrong_keys_and_values(pytestconfig: pytest.Config) -> None:
    overrides = " ".join([MISTYPED_KEYS, WRONG_TYPES, CUSTOM_KEYS, CHOICES, LIMITS]).split()
    golden.compare("config/wrong_values", {override: [find_error(override)] for override in overrides}, pytestconfig)


def test_tables_of_wrong_values_name_existing_keys() -> None:
    assert {override.partition("=")[0] for override in f"{CHOICES} {LIMITS}".split()} <= FIELDS.keys()


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"custom": {"kind": Path}}, f"custom.kind={Path} must be {FREE_VALUE}"),
        ({"custom": {"a": {"b": [{"c": math.inf}]}}}, f"custom.a={{b:[{{c:inf}}]}} must be {FREE_VALUE}"),
        ({"gdpo": {"weights": {"format": "high", "v1.1": 1}}}, "gdpo.weights.format=high must be a number"),
        ({"gdpo": {"weights": {"v1.1": None}}}, "gdpo.weights.v1.1=null must be a number"),
    ],
)
def test_wrong_values_of_open_sections(algorithm: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"trainer": {"algorithm": algorithm}})
    assert str(caught.value) == f"trainer.algorithm.{sentence}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (0.5, "0.5"),
        ("grpo", "grpo"),
        ("5", "'5'"),
        ("1e-6", "'1e-6'"),
        ("true", "'true'"),
        ("", "''"),
        ("a\nb", "'a\\nb'"),
        (["a", 1, None], "[a,1,null]"),
        ((0.9, 0.99), "[0.9,0.99]"),
        ({"a": {"b": False}}, "{a:{b:false}}"),
    ],
)
def test_a_value_is_shown_in_command_line_syntax(value: object, text: str) -> None:
    assert show(value) == text


UNKNOWN_KEYS = """
trainer.epoch epochs algorithm.kl_loss_coef trainer.algorithm.eps_clip generator.temperature zebra
trainer.algorithm.custm.tau trainer.algorithm.custm.a.b trainer.algorithm.gdpo.weight.format
trainer.algorithm.gpdo.weights.format trainer.algorithm.gdpo.format trainer.algorithm.my_threshold
trainer.algorithm.taupos trainer.algorithm.use_kl trainer.algorithm.tau trainer.lr trainer.algorithm.eps_clip_hgh
trainer.placement.num_gpus_per_node
"""


def test_up_to_three_nearest_keys_are_suggested(pytestconfig: pytest.Config) -> None:
    suggested = {key: nearest_keys(key) for key in UNKNOWN_KEYS.split()}
    assert max(map(len, suggested.values())) == 3
    golden.compare("config/nearest_keys", suggested, pytestconfig)


def test_one_problem_is_a_sentence_and_several_are_a_list() -> None:
    assert str(config_error(["a"])) == "a"
    assert str(config_error(["a", "b", "a"])) == "2 problems in the configuration:\n  - a\n  - b"


def test_an_empty_list_of_problems_raises_nothing() -> None:
    raise_problems([])
    with pytest.raises(ConfigError, match=r"^a$"):
        raise_problems(["a"])


def test_leaves_of_nested_mappings() -> None:
    assert list(leaves({"b": {"c": 1}, "d": {}}, "a")) == [("a.b.c", 1), ("a.d", {})]
