"""Validation rules of the configuration alone: the message of each, and similar configurations that pass."""

from __future__ import annotations

import logging

import pytest
from omegaconf import OmegaConf
from rule_coverage import (
    ALGORITHM,
    CORRECTION,
    KL_IN_REWARD,
    ONE_SAMPLE,
    PARTS,
    TEACHER,
    Case,
    estimator,
    loss,
    sentences_of,
    sentences_seen,
)

from skyrl_train.config import OffPolicyCorrectionConfig, SkyRLConfig, load_config, parse_cli, validate_cfg
from skyrl_train.config.base import value_at
from skyrl_train.config.problems import FIELDS
from skyrl_train.config.rules import algorithm, data, engine, placement, run
from skyrl_train.config.rules.algorithm import INTERVALS
from skyrl_train.config.rules.run import wandb_login_problem
from skyrl_train.config.validation import RULES, WARNINGS, find_problems
from skyrl_train.errors import ConfigError

MEGATRON = "trainer.policy.megatron_config"
GAE = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=tiny"]


def load(overrides: list[str]) -> SkyRLConfig:
    return load_config(OmegaConf.from_dotlist(overrides))


def warnings(overrides: list[str]) -> list[str]:
    return find_problems(load(overrides), WARNINGS)


def refusal(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    return str(caught.value)


ASYNC = "trainer.fully_async.enabled=true"
SERVER = [
    "generator.backend=vllm",
    "generator.run_engines_locally=false",
    "generator.remote_inference_engine_urls=[gpu:8000]",
]
TWO_GPUS = ["generator.inference_engine_tensor_parallel_size=2", "generator.backend=vllm"]
REMOTE = [
    "generator.run_engines_locally=false",
    "generator.remote_inference_engine_urls=[gpu:8000]",
    "generator.backend=vllm",
]

PROBLEMS: list[Case] = [
    (
        ["trainer.train_batch_size=64", "trainer.policy_mini_batch_size=48"],
        "trainer.policy_mini_batch_size=48 must divide trainer.train_batch_size=64; try 32 or 64",
        [],
    ),
    (
        ["trainer.train_batch_size=64"],
        "trainer.policy_mini_batch_size=256 must divide trainer.train_batch_size=64; try 64",
        [],
    ),
    (
        [*GAE, "trainer.critic_mini_batch_size=100"],
        "trainer.critic_mini_batch_size=100 must divide trainer.train_batch_size=1024; try 64 or 128",
        [],
    ),
    (
        ["trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "generator.max_turns=3"],
        "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by trainer.algorithm.max_seq_len=null, which "
        "cannot be computed with generator.max_turns=3 and generator.max_input_length=null; "
        "set trainer.algorithm.max_seq_len",
        [],
    ),
    (
        ["generator.sampling_params.temperature=0.0"],
        "generator.sampling_params.temperature=0.0 (greedy) cannot divide the logits in training, but "
        "trainer.algorithm.temperature=null uses it; try generator.sampling_params.temperature=1.0, or set "
        "trainer.algorithm.temperature=1.0 if rollouts should be greedy",
        [],
    ),
    (
        ["generator.max_input_length=600"],
        "generator.max_input_length=600 must equal trainer.max_prompt_length=512 when generator.max_turns=1; "
        "try generator.max_input_length=512, or null",
        [],
    ),
    (
        ["generator.max_input_length=256", "generator.max_turns=5"],
        "generator.max_input_length=256 must be at least trainer.max_prompt_length=512; "
        "try generator.max_input_length=512 or more, or null for the model's context length",
        [],
    ),
    (
        ["trainer.placement.policy_num_gpus_per_node=8", "trainer.placement.launcher=inline"],
        "trainer.placement.policy_num_gpus_per_node=8 takes several processes, but trainer.placement.launcher=inline "
        "is one; set trainer.placement.launcher=ray, or trainer.placement.policy_num_gpus_per_node=1",
        [
            ["trainer.placement.policy_num_gpus_per_node=8", "trainer.placement.launcher=ray"],
            ["trainer.placement.launcher=inline"],
        ],
    ),
    (
        ["trainer.placement.colocate_all=false", "trainer.placement.launcher=inline"],
        "trainer.placement.colocate_all=false: trainer.placement.launcher=inline trains and samples on one device; "
        "set trainer.placement.launcher=ray, or trainer.placement.colocate_all=true",
        [["trainer.placement.colocate_all=false"], ["trainer.placement.launcher=inline"]],
    ),
    (
        ["trainer.placement.offload_idle=true", "trainer.placement.colocate_all=false"],
        "trainer.placement.offload_idle=true frees devices for an engine with a copy of the weights, and "
        "trainer.placement.colocate_all=false reserves others for it; set trainer.placement.offload_idle=auto, or "
        "trainer.placement.colocate_all=true",
        [
            ["trainer.placement.offload_idle=auto", "trainer.placement.colocate_all=false"],
            ["trainer.placement.offload_idle=true", "trainer.placement.launcher=ray"],
        ],
    ),
    (
        ["trainer.placement.offload_idle=true"],
        "trainer.placement.offload_idle=true frees devices for an engine with a copy of the weights, and "
        "generator.backend=auto generates with the policy's own tensors in one process; set "
        "trainer.placement.offload_idle=auto, or trainer.placement.launcher=ray",
        [["trainer.placement.offload_idle=true", "generator.backend=vllm"], ["trainer.placement.offload_idle=false"]],
    ),
    (
        ["trainer.placement.offload_idle=true", ASYNC],
        "trainer.placement.offload_idle=true frees devices for an engine with a copy of the weights, and "
        "trainer.fully_async.enabled=true leaves none idle; set trainer.placement.offload_idle=auto, or "
        "trainer.fully_async.enabled=false",
        [["trainer.placement.offload_idle=auto", ASYNC]],
    ),
    (
        [ASYNC, "trainer.placement.launcher=ray"],
        "trainer.fully_async.enabled=true trains and generates at the same time, and "
        "trainer.placement.colocate_all=true places both on the same GPUs; set trainer.placement.colocate_all=false, "
        "or trainer.fully_async.enabled=false",
        [
            [ASYNC],
            [ASYNC, "trainer.placement.launcher=ray", "trainer.placement.colocate_all=false"],
            [ASYNC, "trainer.placement.launcher=ray", *SERVER],
        ],
    ),
    (
        ["trainer.placement.offload_idle=true", *SERVER],
        "trainer.placement.offload_idle=true frees devices for an engine with a copy of the weights, and "
        "generator.run_engines_locally=false uses servers; set trainer.placement.offload_idle=auto, or "
        "generator.run_engines_locally=true",
        [SERVER],
    ),
    (
        [f"{MEGATRON}.tensor_model_parallel_size=2"],
        f"{MEGATRON}.tensor_model_parallel_size=2 needs trainer.strategy=megatron, not fsdp2; remove "
        f"{MEGATRON}.tensor_model_parallel_size, or set trainer.strategy=megatron",
        [["trainer.strategy=megatron", f"{MEGATRON}.tensor_model_parallel_size=2"]],
    ),
    (
        ["trainer.strategy=megatron", "trainer.ref.fsdp_config.cpu_offload=true"],
        "trainer.ref.fsdp_config.cpu_offload=true needs trainer.strategy=fsdp2, not megatron; remove "
        "trainer.ref.fsdp_config.cpu_offload, or set trainer.strategy=fsdp2",
        [["trainer.ref.fsdp_config.cpu_offload=true"]],
    ),
    (
        [*GAE, "trainer.strategy=megatron"],
        "trainer.critic.model.path=tiny: Megatron-Core has no critic; set trainer.strategy=fsdp2, or an "
        "advantage_estimator without a critic",
        [["trainer.strategy=megatron", "trainer.policy.model.lora.rank=8"]],
    ),
    (
        ["trainer.strategy=megatron", "trainer.policy.sequence_parallel_size=2"],
        "trainer.policy.sequence_parallel_size=2 needs trainer.strategy=fsdp2, not megatron; remove it, and set "
        f"{MEGATRON}.context_parallel_size=2",
        [["trainer.strategy=megatron"]],
    ),
    (
        ["trainer.strategy=megatron", "trainer.critic.sequence_parallel_size=2"],
        "trainer.critic.sequence_parallel_size=2 needs trainer.strategy=fsdp2, not megatron; remove it",
        [["trainer.strategy=megatron"]],
    ),
    (
        ["trainer.strategy=megatron", f"{MEGATRON}.sequence_parallel=true"],
        f"{MEGATRON}.sequence_parallel=true divides tokens among the ranks that share a matrix, and "
        f"{MEGATRON}.tensor_model_parallel_size=1 has none; set {MEGATRON}.tensor_model_parallel_size=2",
        [
            [
                "trainer.strategy=megatron",
                f"{MEGATRON}.sequence_parallel=true",
                f"{MEGATRON}.tensor_model_parallel_size=2",
            ]
        ],
    ),
    (
        [*GAE, "trainer.placement.critic_num_gpus_per_node=2"],
        "trainer.placement.critic_num_gpus_per_node=2 must equal trainer.placement.policy_num_gpus_per_node=1 with "
        "trainer.placement.colocate_all=true; remove it, or set trainer.placement.colocate_all=false",
        [
            [*GAE, "trainer.placement.policy_num_gpus_per_node=2"],
            [*GAE, "trainer.placement.critic_num_gpus_per_node=2", "trainer.placement.colocate_all=false"],
        ],
    ),
    (
        ["generator.num_inference_engines=2"],
        "generator.num_inference_engines=2 needs Ray, which starts a process for each engine; set "
        "generator.num_inference_engines=1, or trainer.placement.launcher=ray",
        [["generator.num_inference_engines=1"]],
    ),
    (
        ["generator.num_inference_engines=3", "trainer.placement.policy_num_gpus_per_node=2"],
        "generator.num_inference_engines=3 is more than one engine on each of the 1 × 2 GPUs of the policy, which they "
        "share with trainer.placement.colocate_all=true; try generator.num_inference_engines=2, or set "
        "trainer.placement.colocate_all=false",
        [
            ["generator.num_inference_engines=2", "trainer.placement.policy_num_gpus_per_node=2"],
            ["generator.num_inference_engines=3", "trainer.placement.colocate_all=false"],
        ],
    ),
    (
        ["generator.weight_sync_backend=cuda_ipc", "trainer.placement.colocate_all=false"],
        "generator.weight_sync_backend=cuda_ipc reaches engines on the GPUs of the policy, and "
        "trainer.placement.colocate_all=false reserves others; set generator.weight_sync_backend=nccl, or "
        "trainer.placement.colocate_all=true",
        [
            ["generator.weight_sync_backend=nccl", "trainer.placement.colocate_all=false"],
            ["generator.weight_sync_backend=cuda_ipc", "trainer.placement.launcher=ray"],
        ],
    ),
    (
        [*REMOTE, "generator.weight_sync_backend=cuda_ipc"],
        "generator.weight_sync_backend=cuda_ipc reaches engines on the GPUs of the policy, and "
        "generator.run_engines_locally=false uses servers; set generator.weight_sync_backend=auto",
        [[*REMOTE, "generator.weight_sync_backend=nccl"]],
    ),
    (
        [
            "generator.weight_sync_backend=nccl",
            "generator.weight_sync_delta=true",
            "trainer.placement.launcher=ray",
        ],
        "generator.weight_sync_delta=true compares weights in host memory, and generator.weight_sync_backend=nccl "
        "sends them from GPU to GPU; set generator.weight_sync_backend=auto, or generator.weight_sync_delta=false",
        [["generator.weight_sync_backend=nccl", "trainer.placement.launcher=ray"]],
    ),
    (
        ["generator.weight_sync_delta=true"],
        "generator.weight_sync_delta=true sends changes to another process, and this run has one; set "
        "generator.weight_sync_delta=false, or trainer.placement.launcher=ray",
        [
            ["generator.weight_sync_delta=true", "trainer.placement.launcher=ray"],
            ["generator.weight_sync_delta=true", ASYNC],
            [*REMOTE, "generator.weight_sync_delta=true"],
        ],
    ),
    (
        ["generator.engine_init_kwargs.block_size=32"],
        "generator.engine_init_kwargs={block_size:32} are options of vLLM or SGLang, and generator.backend=auto is the "
        "embedded engine; remove them, or set generator.backend=vllm",
        [
            ["generator.engine_init_kwargs.block_size=32", "generator.backend=vllm"],
            ["generator.engine_init_kwargs.chat_template=x.jinja"],
        ],
    ),
    (
        ["generator.enforce_eager=false"],
        "generator.enforce_eager=false: generator.backend=auto is the embedded engine, which captures no CUDA graphs; "
        "set generator.enforce_eager=true, or generator.backend=vllm",
        [["generator.enforce_eager=false", "generator.backend=vllm"]],
    ),
    (
        ["generator.enable_prefix_caching=false"],
        "generator.enable_prefix_caching=false: generator.backend=auto is the embedded engine, which keeps keys and "
        "values of a session until it ends; set generator.enable_prefix_caching=true, or generator.backend=vllm",
        [["generator.enable_prefix_caching=false", "generator.backend=vllm"]],
    ),
    (
        ["generator.sampling_params.top_p=0.9", "generator.backend=sglang"],
        "generator.sampling_params.top_p=0.9: generator.backend=sglang cannot report the log-probs of what this "
        "samples; remove generator.sampling_params.top_p, or set generator.backend=vllm",
        [["generator.backend=sglang"], ["generator.sampling_params.top_p=0.9", "generator.backend=vllm"]],
    ),
    (
        ["generator.inference_engine_tensor_parallel_size=2"],
        "generator.inference_engine_tensor_parallel_size=2: generator.backend=auto is the embedded engine, which "
        "computes on one device; set generator.inference_engine_tensor_parallel_size=1, or generator.backend=vllm",
        [],
    ),
    (
        ["generator.inference_engine_tensor_parallel_size=2", "generator.backend=vllm"],
        "generator.inference_engine_tensor_parallel_size=2: without Ray, vLLM computes on one device; set "
        "generator.inference_engine_tensor_parallel_size=1, or trainer.placement.policy_num_gpus_per_node=2, whose "
        "GPUs it then shares",
        [
            ["generator.inference_engine_tensor_parallel_size=2", "generator.backend=sglang"],
            [*TWO_GPUS, "trainer.placement.policy_num_gpus_per_node=2"],
        ],
    ),
    (
        [*TWO_GPUS, "generator.inference_engine_data_parallel_size=2", "trainer.placement.policy_num_gpus_per_node=2"],
        "generator.inference_engine_tensor_parallel_size=2 × generator.inference_engine_data_parallel_size=2: an "
        "engine of 4 GPUs does not fit on one node with the 1 × 2 GPUs of the policy (nodes × GPUs), which they share "
        "with trainer.placement.colocate_all=true; try 2 or less, trainer.placement.policy_num_gpus_per_node=4, or set "
        "trainer.placement.colocate_all=false",
        [
            [*TWO_GPUS, "trainer.placement.policy_num_gpus_per_node=2"],
            [*TWO_GPUS, "trainer.placement.policy_num_gpus_per_node=4"],
            [*TWO_GPUS, "trainer.placement.colocate_all=false"],
        ],
    ),
    (
        [
            *TWO_GPUS,
            "generator.num_inference_engines=3",
            "trainer.placement.policy_num_nodes=2",
            "trainer.placement.policy_num_gpus_per_node=3",
        ],
        "generator.num_inference_engines=3 of 2 GPUs each do not fit on the 2 × 3 GPUs of the policy, which they share "
        "with trainer.placement.colocate_all=true: 1 of them fit on a node; try generator.num_inference_engines=2, or "
        "set trainer.placement.colocate_all=false",
        [[*TWO_GPUS, "generator.num_inference_engines=3", "trainer.placement.colocate_all=false"]],
    ),
    (
        ["generator.remote_inference_engine_urls=[gpu:8000]"],
        "generator.remote_inference_engine_urls=[gpu:8000] is not read with generator.run_engines_locally=true; set "
        "generator.run_engines_locally=false, or remove it",
        [[*REMOTE]],
    ),
    (
        ["generator.run_engines_locally=false", "generator.backend=vllm"],
        "generator.remote_inference_engine_urls=[]: generator.run_engines_locally=false needs the address of each "
        "server; set generator.remote_inference_engine_urls=[127.0.0.1:8000]",
        [[*REMOTE]],
    ),
    (
        [*REMOTE, "generator.remote_inference_engine_urls=[gpu:8000,gpu:8001]"],
        "generator.num_inference_engines=1 must be the number of servers in "
        "generator.remote_inference_engine_urls=[gpu:8000,gpu:8001]; set generator.num_inference_engines=2",
        [
            [
                *REMOTE,
                "generator.remote_inference_engine_urls=[gpu:8000,gpu:8001]",
                "generator.num_inference_engines=2",
            ]
        ],
    ),
    (
        [*REMOTE, "generator.remote_inference_engine_urls=[gpu:8000,gpu:8000]", "generator.num_inference_engines=2"],
        "generator.remote_inference_engine_urls=[gpu:8000,gpu:8000] names a server twice; remove one of them and "
        "lower generator.num_inference_engines",
        [],
    ),
    (
        ["generator.run_engines_locally=false", "generator.remote_inference_engine_urls=[gpu:8000]"],
        "generator.backend=auto: generator.run_engines_locally=false needs the kind of the server; set "
        "generator.backend=vllm or generator.backend=sglang",
        [[*REMOTE]],
    ),
    (
        [*REMOTE, "generator.max_num_seqs=8"],
        "generator.max_num_seqs=8 is an option of an engine that the run starts, and "
        "generator.run_engines_locally=false uses a running server; remove generator.max_num_seqs, and start the "
        "server with it",
        [[*REMOTE], [*REMOTE, "generator.engine_init_kwargs.chat_template=x.jinja"]],
    ),
    (
        ["data.custom_cls.path=x.py"],
        "data.custom_cls.path=x.py needs data.custom_cls.name too: a dataset class is the name of a class and the path "
        "of its file",
        [["data.custom_cls.path=x.py", "data.custom_cls.name=X", "data.train_data=[]", "data.val_data=[]"]],
    ),
    (
        ["data.custom_cls.config.n=3"],
        "data.custom_cls.config={n:3} has no class to configure; set data.custom_cls.path and data.custom_cls.name",
        [],
    ),
    (
        ["data.custom_cls.path=x.py", "data.custom_cls.name=X", "data.mixture.min_per_batch=1"],
        "data.mixture reads all rows before training, and data.custom_cls.path=x.py creates them when they are drawn; "
        "remove one of them",
        [],
    ),
    (
        ["custom_reward_function.path=x.py", "environment.env_class=aime"],
        "custom_reward_function.path=x.py scores replies in place of environment.env_class=aime; remove one of them",
        [["custom_reward_function.path=x.py"]],
    ),
    (
        ["custom_reward_function.path=x.py", "generator.max_turns=2"],
        "custom_reward_function.path=x.py scores one reply, so generator.max_turns=2 has no effect; set "
        "generator.max_turns=1",
        [],
    ),
    (
        ["data.train_data=[]"],
        "data.train_data=[] leaves nothing to train on; set data.train_data=[<file or dataset name>]",
        [],
    ),
    (
        ["trainer.wandb_artifacts=true"],
        "trainer.wandb_artifacts=true needs wandb in trainer.logger=[tensorboard]; add it, or set "
        "trainer.wandb_artifacts=false",
        [["trainer.wandb_artifacts=true", "trainer.logger=[jsonl,wandb]"], ["trainer.logger=tensorboard"]],
    ),
    (
        ["trainer.wandb_environment=[GAME_TYPES]"],
        "trainer.wandb_environment=[GAME_TYPES] needs wandb in trainer.logger=[tensorboard]; add it, or set "
        "trainer.wandb_environment=[]",
        [["trainer.wandb_environment=[GAME_TYPES]", "trainer.logger=[jsonl,wandb]"]],
    ),
    (
        ["trainer.wandb_environment=[HF_TOKEN]", "trainer.logger=wandb"],
        "trainer.wandb_environment=[HF_TOKEN] looks like a secret, which it would upload; remove HF_TOKEN",
        [],
    ),
    (
        ["trainer.remote_ckpt_url=my-bucket"],
        "trainer.remote_ckpt_url=my-bucket must be a URL, e.g. trainer.remote_ckpt_url=s3://my-bucket, or null to "
        "upload nothing",
        [["trainer.remote_ckpt_url=s3://my-bucket"]],
    ),
    (
        ["trainer.remote_ckpt_url=s3://my-bucket", "trainer.ckpt_interval=-1"],
        "trainer.remote_ckpt_url=s3://my-bucket needs checkpoints, but trainer.ckpt_interval=-1 writes none; set "
        "trainer.ckpt_interval=10, or trainer.remote_ckpt_url=null",
        [],
    ),
    (
        ["trainer.remote_trajectory_url=s3://my-bucket", "trainer.dump_eval_results=false"],
        "trainer.remote_trajectory_url=s3://my-bucket uploads what trainer.dump_eval_results=false does not write; set "
        "trainer.dump_eval_results=true",
        [],
    ),
    (
        ["trainer.resume_mode=from_path"],
        "trainer.resume_mode=from_path needs trainer.resume_path=null to be a folder ending in global_step_<N>; "
        "set it, or trainer.resume_mode=latest",
        [],
    ),
    (
        ["trainer.resume_mode=from_path", "trainer.resume_path=ckpts/"],
        "trainer.resume_path=ckpts/ must end in global_step_<N>; try trainer.resume_path=ckpts/global_step_10, "
        "or trainer.resume_mode=latest",
        [],
    ),
    (
        [estimator("on_policy_distillation"), "trainer.policy.model.path=my/model"],
        "trainer.algorithm.advantage_estimator=on_policy_distillation learns from trainer.ref.model.path=my/model, "
        "which is trainer.policy.model.path=my/model itself; set trainer.ref.model.path=<the teacher>",
        [[estimator("on_policy_distillation"), TEACHER], [estimator("grpo")]],
    ),
    (
        [f"{ALGORITHM}.dynamic_sampling.type=filter", ONE_SAMPLE],
        "trainer.algorithm.dynamic_sampling.type=filter compares the rewards of one prompt's samples, and "
        "generator.n_samples_per_prompt=1 leaves nothing to compare; try generator.n_samples_per_prompt=5, or "
        "trainer.algorithm.dynamic_sampling.type=null",
        [[f"{ALGORITHM}.dynamic_sampling.type=filter", "generator.n_samples_per_prompt=2"]],
    ),
    (
        [f"{ALGORITHM}.zero_variance_filter=true", ONE_SAMPLE],
        "trainer.algorithm.zero_variance_filter=true compares the rewards of one prompt's samples, and "
        "generator.n_samples_per_prompt=1 leaves nothing to compare; try generator.n_samples_per_prompt=5, or "
        "trainer.algorithm.zero_variance_filter=false",
        [[f"{ALGORITHM}.zero_variance_filter=true", "generator.n_samples_per_prompt=2"]],
    ),
    (
        [f"{ALGORITHM}.use_kl_in_reward=true"],
        "trainer.algorithm.use_kl_loss=true and trainer.algorithm.use_kl_in_reward=true would count the KL divergence "
        "twice; set one of them to false",
        [KL_IN_REWARD, [f"{ALGORITHM}.use_kl_loss=false"], [f"{ALGORITHM}.use_kl_loss=true"]],
    ),
    (
        [*KL_IN_REWARD, f"{ALGORITHM}.kl_estimator_type=k3+"],
        "trainer.algorithm.kl_estimator_type=k3+ differs from k3 only in its gradient, which "
        "trainer.algorithm.use_kl_in_reward=true does not use; set trainer.algorithm.kl_estimator_type=k3",
        [[*KL_IN_REWARD, f"{ALGORITHM}.kl_estimator_type=k3"], [f"{ALGORITHM}.kl_estimator_type=k3+"]],
    ),
    (
        [f"{ALGORITHM}.kl_ctrl.type=adaptive"],
        "trainer.algorithm.kl_ctrl.type=adaptive controls the KL penalty in the reward, but "
        "trainer.algorithm.use_kl_in_reward=false disables it; set "
        "trainer.algorithm.use_kl_in_reward=true and trainer.algorithm.use_kl_loss=false, or "
        "trainer.algorithm.kl_ctrl.type=fixed",
        [[*KL_IN_REWARD, f"{ALGORITHM}.kl_ctrl.type=adaptive"], [f"{ALGORITHM}.kl_ctrl.type=fixed"]],
    ),
    (
        [*KL_IN_REWARD, f"{ALGORITHM}.kl_ctrl.type=adaptive", f"{ALGORITHM}.kl_loss_coef=0"],
        "trainer.algorithm.kl_ctrl.type=adaptive multiplies trainer.algorithm.kl_loss_coef=0.0, which stays 0; "
        "try trainer.algorithm.kl_loss_coef=0.001",
        [[*KL_IN_REWARD, f"{ALGORITHM}.kl_loss_coef=0"]],
    ),
    (
        [*KL_IN_REWARD, f"{ALGORITHM}.use_bias_correction_kl=true"],
        "trainer.algorithm.use_bias_correction_kl=true weighs the KL loss, but trainer.algorithm.use_kl_loss=false "
        "disables it; set trainer.algorithm.use_kl_loss=true, or trainer.algorithm.use_bias_correction_kl=false",
        [[f"{ALGORITHM}.use_bias_correction_kl=true"], KL_IN_REWARD],
    ),
    (
        ["trainer.update_ref_every_epoch=true", estimator("on_policy_distillation"), TEACHER],
        "trainer.update_ref_every_epoch=true would replace the teacher of "
        "trainer.algorithm.advantage_estimator=on_policy_distillation by the policy; set "
        "trainer.update_ref_every_epoch=false",
        [[estimator("on_policy_distillation"), TEACHER]],
    ),
    (
        [f"{CORRECTION}.token_mask_is_threshold_low=0.5"],
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=null must be set too when "
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.5: tokens are left out on both sides; "
        "set trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=2.0, or "
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=null",
        [[f"{CORRECTION}.token_mask_is_threshold_low=0.5", f"{CORRECTION}.token_mask_is_threshold_high=5.0"]],
    ),
    (
        [f"{CORRECTION}.token_mask_is_threshold_high=5.0"],
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=null must be set too when "
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=5.0: tokens are left out on both sides; "
        "set trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.5, or "
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=null",
        [
            [f"{CORRECTION}.outlier_token_is_threshold_high=100.0"],
            [f"{CORRECTION}.outlier_token_is_threshold_low=0.01"],
        ],
    ),
    (
        [f"{CORRECTION}.geo_mask_low=1.01"],
        "trainer.algorithm.off_policy_correction.geo_mask_low=1.01 must be below "
        "trainer.algorithm.off_policy_correction.geo_mask_high=1.01, or nothing lies between them; lower the first or "
        "raise the second",
        [[f"{CORRECTION}.geo_mask_low=1.0099"], [f"{CORRECTION}.geo_mask_low=1.01", f"{CORRECTION}.geo_mask_high=1.1"]],
    ),
    (
        [loss("dual_clip"), f"{ALGORITHM}.clip_ratio_c=1.28", f"{ALGORITHM}.eps_clip_high=0.28"],
        "trainer.algorithm.clip_ratio_c=1.28 must be above 1.28, i.e. 1 plus trainer.algorithm.eps_clip_high=0.28; "
        "otherwise trainer.algorithm.policy_loss_type=dual_clip clips inside the range of PPO; try "
        "trainer.algorithm.clip_ratio_c=3.28",
        [
            [loss("dual_clip"), f"{ALGORITHM}.clip_ratio_c=1.3", f"{ALGORITHM}.eps_clip_high=0.28"],
            [loss("regular"), f"{ALGORITHM}.clip_ratio_c=1.1"],
        ],
    ),
    (
        [f"{ALGORITHM}.overlong_buffer_len=1024"],
        "trainer.algorithm.overlong_buffer_len=1024 must be below generator.sampling_params.max_generate_length=1024, "
        "or every response is penalized for its length; try trainer.algorithm.overlong_buffer_len=256 or "
        "trainer.algorithm.overlong_buffer_len=null",
        [
            [f"{ALGORITHM}.overlong_buffer_len=1023"],
            [f"{ALGORITHM}.overlong_buffer_len=1024", "generator.sampling_params.max_generate_length=1025"],
        ],
    ),
    (
        [f"{ALGORITHM}.overlong_buffer_len=1", "generator.sampling_params.max_generate_length=1"],
        "trainer.algorithm.overlong_buffer_len=1 must be below generator.sampling_params.max_generate_length=1, or "
        "every response is penalized for its length; try trainer.algorithm.overlong_buffer_len=null",
        [[f"{ALGORITHM}.overlong_buffer_len=1", "generator.sampling_params.max_generate_length=2"]],
    ),
]

PROBLEMS += [
    (
        ["generator.step_wise_trajectories=true", "generator.use_conversation_multi_turn=false"],
        "generator.use_conversation_multi_turn=false has no effect with generator.step_wise_trajectories=true, where "
        "the chat template renders every turn; set generator.use_conversation_multi_turn=true, or "
        "generator.step_wise_trajectories=false",
        [["generator.step_wise_trajectories=true"], ["generator.use_conversation_multi_turn=false"]],
    ),
    (
        ["generator.merge_stepwise_output=true"],
        "generator.merge_stepwise_output=true joins the rows of generator.step_wise_trajectories=true, which is false; "
        "set it to true, or generator.merge_stepwise_output=false",
        [["generator.merge_stepwise_output=true", "generator.step_wise_trajectories=true"]],
    ),
    (
        ["generator.sampling_params.min_tokens=8", "generator.sampling_params.max_generate_length=4"],
        "generator.sampling_params.min_tokens=8 must be at most generator.sampling_params.max_generate_length=4; try "
        "generator.sampling_params.min_tokens=0",
        [["generator.sampling_params.min_tokens=4", "generator.sampling_params.max_generate_length=4"]],
    ),
    (
        ["trainer.policy.optimizer_config.weight_decay=1e6"],
        "trainer.policy.optimizer_config.weight_decay=1e+06 times trainer.policy.optimizer_config.lr=1e-06 must be "
        "below 1, or a step erases the weights; try trainer.policy.optimizer_config.weight_decay=0.01",
        [["trainer.policy.optimizer_config.weight_decay=1.0"]],
    ),
    (
        ["trainer.critic.optimizer_config.num_warmup_steps=3", "trainer.critic.optimizer_config.warmup_ratio=0.1"],
        "trainer.critic.optimizer_config.num_warmup_steps=3 and trainer.critic.optimizer_config.warmup_ratio=0.1 both "
        "set the warm-up; set one of them to 0",
        [["trainer.policy.optimizer_config.warmup_ratio=0.1"]],
    ),
    (
        ["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.dropout=0.1"],
        "trainer.policy.model.lora.dropout=0.1 would make the log-probs of training random, unlike those of sampling; "
        "set trainer.policy.model.lora.dropout=0",
        [["trainer.policy.model.lora.rank=4"]],
    ),
    (
        ["trainer.critic.model.lora.lora_path=adapter", "trainer.critic.model.lora.target_modules=[q_proj]"],
        "trainer.critic.model.lora.target_modules=[q_proj]: the adapter in trainer.critic.model.lora.lora_path=adapter "
        "has its own matrices; remove trainer.critic.model.lora.target_modules",
        [["trainer.critic.model.lora.rank=4", "trainer.critic.model.lora.target_modules=[q_proj]"]],
    ),
    (
        ["environment.skyrl_gym.python=python3.12"],
        "environment.skyrl_gym.python=python3.12 is used only by environments in separate processes, but "
        "environment.skyrl_gym.isolation=thread runs them in the trainer; set "
        "environment.skyrl_gym.isolation=process, or environment.skyrl_gym.python=null",
        [["environment.skyrl_gym.python=python3.12", "environment.skyrl_gym.isolation=process"]],
    ),
    (
        ["trainer.run_name=a/../b"],
        "trainer.run_name=a/../b must be the name of a folder, in printable characters; try trainer.run_name=catch",
        [["trainer.run_name=a.b"], ["trainer.run_name=sweep/lr_1e-6"]],
    ),
    (
        ["trainer.run_name='a::b'"],
        "trainer.run_name=a::b would be a chain of URLs in remote storage; try trainer.run_name=a-b",
        [["trainer.run_name='a:b'"]],
    ),
    (
        ["trainer.project_name='a::b'", "trainer.run_name=c"],
        "trainer.project_name=a::b would be a chain of URLs in remote storage; try trainer.project_name=a-b",
        [["trainer.project_name=a-b"]],
    ),
    (
        ["data.val_data=[a.jsonl,b.jsonl,./a.jsonl]"],
        "data.val_data has ./a.jsonl twice, so its rows would count twice; name it once",
        [["data.val_data=[a.jsonl,b.jsonl]"]],
    ),
]

DOUBTS: list[Case] = [
    (
        ["trainer.placement.critic_num_gpus_per_node=4"],
        "trainer.placement.critic_num_gpus_per_node=4 has no effect, because the run has no critic; remove it",
        [
            ["trainer.placement.critic_num_gpus_per_node=4", "trainer.placement.colocate_all=false", *GAE],
            [
                "trainer.placement.policy_num_gpus_per_node=4",
                "trainer.placement.critic_num_gpus_per_node=4",
                "generator.num_inference_engines=4",
            ],
        ],
    ),
    (
        ["trainer.fully_async.max_staleness_steps=2"],
        "trainer.fully_async.max_staleness_steps=2 has no effect without trainer.fully_async.enabled=true or a "
        "FullyAsyncRayPPOTrainer; set trainer.fully_async.enabled=true, or remove "
        "trainer.fully_async.max_staleness_steps",
        [["trainer.fully_async.max_staleness_steps=2", ASYNC]],
    ),
    (
        ["trainer.placement.colocate_policy_ref=false"],
        "trainer.placement.colocate_policy_ref=false has no effect with trainer.placement.colocate_all=true, which "
        "places all models on the same GPUs; remove it, or set trainer.placement.colocate_all=false",
        [["trainer.placement.colocate_policy_ref=false", "trainer.placement.colocate_all=false"]],
    ),
    (
        ["trainer.strategy=megatron"],
        "trainer.strategy=megatron has no effect with a single rank of the policy, which holds the whole model; set "
        "trainer.placement.policy_num_gpus_per_node=2 or more, or trainer.strategy=fsdp2",
        [
            [
                "trainer.strategy=megatron",
                "trainer.placement.policy_num_gpus_per_node=2",
                "generator.num_inference_engines=2",
            ]
        ],
    ),
    (
        ["generator.async_engine=false"],
        "generator.async_engine=false has no effect: engines are always asynchronous",
        [["generator.async_engine=true"]],
    ),
    (
        ["trainer.flash_attn=false"],
        "trainer.flash_attn=false has no effect: attention is always PyTorch's SDPA, which uses a flash kernel on a "
        "GPU where it can",
        [["trainer.flash_attn=true"]],
    ),
    (
        ["trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=4", *TWO_GPUS],
        "generator.num_inference_engines=1 leaves 6 of the 2 × 4 GPUs of the policy (nodes × GPUs) idle during "
        "rollouts; set generator.num_inference_engines=4",
        [
            ["trainer.placement.policy_num_gpus_per_node=4", "generator.num_inference_engines=4"],
            ["trainer.placement.policy_num_gpus_per_node=2", *TWO_GPUS],
            ["trainer.placement.policy_num_gpus_per_node=3", *TWO_GPUS],
            ["trainer.placement.policy_num_gpus_per_node=4", "trainer.placement.colocate_all=false"],
            ["trainer.placement.policy_num_gpus_per_node=4", *REMOTE],
        ],
    ),
    (
        ["generator.eval_n_samples_per_prompt=8"],
        "generator.eval_n_samples_per_prompt=8 samples the same greedy reply 8 times, because "
        "generator.eval_sampling_params.temperature=0.0; try generator.eval_sampling_params.temperature=1.0, or "
        "generator.eval_n_samples_per_prompt=1",
        [["generator.eval_n_samples_per_prompt=8", "generator.eval_sampling_params.temperature=1.0"]],
    ),
    (
        ["generator.eval_sampling_params.temperature=50"],
        "generator.eval_sampling_params.temperature=50 samples nearly at random; try "
        "generator.eval_sampling_params.temperature=1.0",
        [["generator.eval_sampling_params.temperature=1.5"]],
    ),
    (
        ["environment.skyrl_gym.call_timeout_seconds=0.01"],
        "environment.skyrl_gym.call_timeout_seconds=0.01 is so short that most rollouts may be invalid; try "
        "environment.skyrl_gym.call_timeout_seconds=300",
        [["environment.skyrl_gym.call_timeout_seconds=5"]],
    ),
    (
        [f"{ALGORITHM}.kl_loss_coef=100"],
        "trainer.algorithm.kl_loss_coef=100 is so large that rewards hardly matter; try "
        "trainer.algorithm.kl_loss_coef=0.01",
        [[f"{ALGORITHM}.kl_loss_coef=100", f"{ALGORITHM}.use_kl_loss=false"]],
    ),
    (
        ["data.val_data=[]"],
        "data.val_data=[] leaves nothing to evaluate every trainer.eval_interval=5 steps, so there are no evaluations; "
        "set data.val_data, or trainer.eval_interval=-1",
        [["data.val_data=[]", "trainer.eval_interval=-1"]],
    ),
    (
        ["data.train_data=[a.jsonl,./a.jsonl]"],
        "data.train_data has ./a.jsonl twice, so an epoch trains on its rows twice; name it once",
        [["data.train_data=[a.jsonl,b.jsonl]"]],
    ),
    (
        ["trainer.policy.model.lora.alpha=32"],
        "trainer.policy.model.lora.alpha=32 has no effect, because trainer.policy.model.lora.rank=0 turns the adapter "
        "off; set trainer.policy.model.lora.rank=32, or remove trainer.policy.model.lora.alpha",
        [["trainer.policy.model.lora.alpha=32", "trainer.policy.model.lora.rank=8"]],
    ),
    (
        ["trainer.resume_path=ckpts/global_step_10"],
        "trainer.resume_path=ckpts/global_step_10 is not read when trainer.resume_mode=latest; set "
        "trainer.resume_mode=from_path",
        [],
    ),
    (
        [f"{ALGORITHM}.kl_estimator_type=k1"],
        "trainer.algorithm.kl_estimator_type=k1 with trainer.algorithm.use_kl_loss=true has a gradient of 0 on "
        "average, which is noise; try trainer.algorithm.kl_estimator_type=k1+ or k3",
        [
            [f"{ALGORITHM}.kl_estimator_type=k1+"],
            [f"{ALGORITHM}.kl_estimator_type=k1", f"{ALGORITHM}.use_kl_loss=false"],
            [f"{ALGORITHM}.kl_estimator_type=k1", f"{ALGORITHM}.use_bias_correction_kl=true"],
        ],
    ),
    (
        ["generator.n_samples_per_prompt=1"],
        "generator.n_samples_per_prompt=1 with trainer.algorithm.advantage_estimator=grpo compares every trajectory "
        "with itself only; try generator.n_samples_per_prompt=5",
        [["generator.n_samples_per_prompt=2"], ["generator.n_samples_per_prompt=1", estimator("reinforce++")]],
    ),
    (
        [f"{ALGORITHM}.dynamic_sampling.type=filter", f"{ALGORITHM}.zero_variance_filter=true"],
        "trainer.algorithm.zero_variance_filter=true has no effect, because "
        "trainer.algorithm.dynamic_sampling.type=filter already drops groups of equal rewards; remove one of them",
        [
            [f"{ALGORITHM}.dynamic_sampling.type=replace", f"{ALGORITHM}.zero_variance_filter=true"],
            [f"{ALGORITHM}.dynamic_sampling.type=filter"],
            [f"{ALGORITHM}.zero_variance_filter=true"],
        ],
    ),
    (
        [loss("cross_entropy")],
        "trainer.algorithm.policy_loss_type=cross_entropy imitates every rollout, whatever its reward; try "
        "trainer.algorithm.policy_loss_type=policy_gradient",
        [[loss("policy_gradient")]],
    ),
    (
        ["generator.zero_reward_on_non_stop=true", "generator.sampling_params.max_generate_length=1"],
        "generator.zero_reward_on_non_stop=true keeps replies that end with the EOS token, but almost none does "
        "with generator.sampling_params.max_generate_length=1: nearly every reward becomes 0; set "
        "generator.zero_reward_on_non_stop=false",
        [
            ["generator.zero_reward_on_non_stop=true", "generator.sampling_params.max_generate_length=2"],
            ["generator.sampling_params.max_generate_length=1"],
        ],
    ),
    (
        ["generator.apply_overlong_filtering=true", "generator.sampling_params.max_generate_length=1"],
        "generator.apply_overlong_filtering=true keeps replies that end with the EOS token, but almost none does "
        "with generator.sampling_params.max_generate_length=1: nearly every trajectory is left out of the loss; "
        "set generator.apply_overlong_filtering=false",
        [["generator.apply_overlong_filtering=true"]],
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), [case[:2] for case in PROBLEMS])
def test_a_broken_rule_is_reported_with_a_fix(overrides: list[str], expected: str) -> None:
    assert refusal(overrides) == expected


@pytest.mark.parametrize("overrides", [accepted for case in PROBLEMS for accepted in case[2]])
def test_similar_configurations_are_accepted(overrides: list[str]) -> None:
    load(overrides)


@pytest.mark.parametrize(("overrides", "expected"), [case[:2] for case in DOUBTS])
def test_a_warning_includes_a_fix(overrides: list[str], expected: str) -> None:
    assert warnings(overrides) == [expected]


@pytest.mark.parametrize("sharing", ["true", "false"])
def test_gpus_of_a_critic_that_does_not_exist_start_no_processes(sharing: str) -> None:
    count = "trainer.placement.critic_num_gpus_per_node=4"
    overrides = [count, f"trainer.placement.colocate_all={sharing}"]
    assert warnings(overrides) == [f"{count} has no effect, because the run has no critic; remove it"]
    assert load(overrides).trainer.placement.uses_ray == (sharing == "false")


@pytest.mark.parametrize("overrides", [quiet for case in DOUBTS for quiet in case[2]])
def test_similar_configurations_have_no_warning(overrides: list[str]) -> None:
    assert warnings(overrides) == []


def test_every_message_has_a_test() -> None:
    seen = [sentences_seen(RULES + WARNINGS, overrides) for overrides, *_ in PROBLEMS + DOUBTS]
    assert set().union(*seen) == sentences_of(
        *(algorithm, data, engine, placement, run),
        without=[
            "_adapters",
            "_optimizers",
            "engine_is_installed",
            "_fsdp_problems",  # in test_sft.py
            "_megatron_problems",  # in test_sft.py
            "group_filters",
            "megatron_is_installed",
            "ray_is_installed",
            "wandb_can_start",
            "wandb_login_problem",
        ],
    )


def test_a_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(OmegaConf.from_dotlist([loss("cross_entropy")]))
    assert [record.message for record in caplog.records] == warnings([loss("cross_entropy")])


def test_each_switch_enables_the_correction() -> None:
    assert PARTS.keys() == {name for name, field in OffPolicyCorrectionConfig.model_fields.items() if not field.default}
    thresholds = [f"{CORRECTION}.token_mask_is_threshold_{end}" for end in ("low=0.5", "high=2.0")]
    for part, value in PARTS.items():
        overrides = thresholds if part.startswith("token_mask") else [f"{CORRECTION}.{part}={value}"]
        assert load_config(OmegaConf.from_dotlist(overrides)).trainer.algorithm.off_policy_correction.is_on
    assert not load_config().trainer.algorithm.off_policy_correction.is_on


@pytest.mark.parametrize(("low", "high"), INTERVALS)
@pytest.mark.parametrize("width", [0.0, -0.25])
def test_empty_intervals_are_refused(low: str, high: str, width: float) -> None:
    assert f"{low}=1.5 must be below {high}={1.5 + width}" in refusal([f"{low}=1.5", f"{high}={1.5 + width}"])
    load_config(OmegaConf.from_dotlist([f"{low}=1.5", f"{high}=1.75"]))


def test_every_interval_is_checked() -> None:
    assert {key for pair in INTERVALS for key in pair} <= FIELDS.keys()
    lower_ends = ("_mask_low", "_threshold_low", "_lb", ".ratio_low")
    assert {key for key in FIELDS if key.endswith(lower_ends)} == {low for low, _ in INTERVALS}


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ([f"{ALGORITHM}.overlong_buffer_len=2000"], [f"{ALGORITHM}.overlong_buffer_len=256"]),
        ([loss("dual_clip"), f"{ALGORITHM}.clip_ratio_c=1.1"], [f"{ALGORITHM}.clip_ratio_c=3.2"]),
        ([f"{ALGORITHM}.kl_ctrl.type=adaptive"], KL_IN_REWARD),
    ],
)
def test_the_suggested_fix_is_accepted(overrides: list[str], fix: list[str]) -> None:
    text = refusal(overrides)
    assert all(setting in text for setting in fix)
    cfg = load_config(OmegaConf.from_dotlist([*overrides, *fix]))
    key = fix[0].partition("=")[0]
    assert value_at(cfg, key) != FIELDS[key].get_default()


def test_names_of_custom_functions_are_accepted() -> None:
    settings = ["dynamic_sampling.type=filter", "zero_variance_filter=true", "use_kl_loss=false"]
    load([estimator("mine"), loss("mine"), *(f"{ALGORITHM}.{setting}" for setting in settings)])


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.train_batch_size=64", "trainer.policy_mini_batch_size=16"],
        ["trainer.micro_train_batch_size_per_gpu=7", "trainer.micro_forward_batch_size_per_gpu=1000"],
        ["trainer.critic_mini_batch_size=48"],
        [*GAE, "trainer.critic_mini_batch_size=128"],
        [*GAE, "trainer.policy_mini_batch_size=1024", "trainer.critic_mini_batch_size=1"],
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
def test_valid_configurations_are_accepted(overrides: list[str]) -> None:
    load(overrides)


@pytest.fixture
def no_wandb(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/no/such/netrc")
    return monkeypatch


def test_wandb_without_a_key_is_refused_before_a_run_starts(no_wandb: pytest.MonkeyPatch) -> None:
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
