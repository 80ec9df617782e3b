"""Aliases of keys, from other versions of SkyRL and from verl.

Only keys of the same meaning are listed. A value map translates values with another spelling; it passes other values
unchanged, and a value that it maps to None does not set the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Alias:
    """The key that an alias sets, and its value map."""

    key: str
    values: Mapping[Any, Any] = field(default_factory=dict)

    also: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Other keys that the alias sets, each with a function of its value."""

    only_if: str | None = None
    """A key that must be true; otherwise the alias has no effect, as in its own framework."""

    @property
    def is_synonym(self) -> bool:
        """True if it always sets its key, and nothing else."""
        return not self.also and self.only_if is None and None not in self.values.values()

    def readings(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the keys to set, with their values."""
        main = self.translate(value)
        if main is not None or value is None:
            yield self.key, main
        yield from ((key, function(value)) for key, function in self.also.items())

    def translate(self, value: Any) -> Any:
        """Return the value in this configuration; None if the key is not set."""
        try:
            return self.values.get(value, value)
        except TypeError:  # lists and mappings are not hashable
            return value


MODELS = ("policy", "critic", "ref")
ROPE = ("rope_scaling", "rope_theta")
ENGINE_SECTIONS = ("generator", "generator.inference_engine")

SKYRL = {
    "generator.inference_engine.backend": Alias("generator.backend"),
    "generator.inference_engine.run_engines_locally": Alias("generator.run_engines_locally"),
    "generator.inference_engine.num_engines": Alias("generator.num_inference_engines"),
    "generator.inference_engine.tensor_parallel_size": Alias("generator.inference_engine_tensor_parallel_size"),
    "generator.inference_engine.pipeline_parallel_size": Alias("generator.inference_engine_pipeline_parallel_size"),
    "generator.inference_engine.data_parallel_size": Alias("generator.inference_engine_data_parallel_size"),
    "generator.inference_engine.external_server_urls": Alias("generator.remote_inference_engine_urls"),
    "generator.inference_engine.enable_prefix_caching": Alias("generator.enable_prefix_caching"),
    "generator.inference_engine.enable_chunked_prefill": Alias("generator.enable_chunked_prefill"),
    "generator.inference_engine.max_num_batched_tokens": Alias("generator.max_num_batched_tokens"),
    "generator.inference_engine.engine_init_kwargs": Alias("generator.engine_init_kwargs"),
    "generator.inference_engine.weight_sync_backend": Alias("generator.weight_sync_backend"),
    "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB": Alias(
        "generator.weight_transfer_threshold_cuda_ipc_GB"
    ),
    "generator.inference_engine.async_engine": Alias("generator.async_engine"),
    "generator.inference_engine.gpu_memory_utilization": Alias("generator.gpu_memory_utilization"),
    "generator.inference_engine.max_num_seqs": Alias("generator.max_num_seqs"),
    "generator.inference_engine.enforce_eager": Alias("generator.enforce_eager"),
    **{
        f"trainer.{role}.fsdp_config.mixed_precision.param_dtype": Alias(
            f"trainer.{role}.fsdp_config.param_dtype", {"bf16": "bfloat16", "fp32": "float32"}
        )
        for role in MODELS
    },
    "trainer.target_modules": Alias("trainer.policy.model.lora.target_modules", {None: "all-linear"}),
    "trainer.exclude_modules": Alias("trainer.policy.model.lora.exclude_modules"),
    "trainer.policy.model.lora.init": Alias("trainer.policy.model.lora.init_method"),
    "trainer.critic.model.lora.init": Alias("trainer.critic.model.lora.init_method"),
    "trainer.algorithm.use_kl_estimator_k3": Alias("trainer.algorithm.kl_estimator_type", {True: "k3", False: None}),
    "trainer.algorithm.use_abs_kl": Alias("trainer.algorithm.kl_estimator_type", {True: "abs", False: None}),
    "trainer.algorithm.overlong_buffer.len": Alias("trainer.algorithm.overlong_buffer_len"),
    "trainer.algorithm.overlong_buffer.penalty_factor": Alias("trainer.algorithm.overlong_buffer_penalty_factor"),
    "trainer.algorithm.use_tis": Alias(
        "trainer.algorithm.off_policy_correction.tis_ratio_type", {True: "token", False: None}
    ),
    "trainer.algorithm.tis_imp_ratio_cap": Alias(
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high", {-1.0: None}
    ),
}

KL_IN_REWARD = "trainer.algorithm.use_kl_in_reward"
VERL_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
VERL_SCHEDULERS = {"constant": "constant_with_warmup"}
VERL_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
CORRECTION = "trainer.algorithm.off_policy_correction"

VERL = {
    "data.train_files": Alias("data.train_data"),
    "data.val_files": Alias("data.val_data"),
    "data.train_batch_size": Alias("trainer.train_batch_size"),
    "data.val_batch_size": Alias("trainer.eval_batch_size"),
    "data.max_prompt_length": Alias("trainer.max_prompt_length"),
    "data.max_response_length": Alias("generator.sampling_params.max_generate_length"),
    "data.seed": Alias("trainer.seed"),
    "data.apply_chat_template_kwargs": Alias("generator.chat_template_kwargs"),
    "algorithm.adv_estimator": Alias(
        "trainer.algorithm.advantage_estimator",
        {
            "reinforce_plus_plus": "reinforce++",
            "reinforce_plus_plus_baseline": "reinforce++-baseline",
            "grpo_vectorized": "grpo",
            "rloo_vectorized": "rloo",
        },
    ),
    "algorithm.norm_adv_by_std_in_grpo": Alias("trainer.algorithm.grpo_norm_by_std"),
    "algorithm.gamma": Alias("trainer.algorithm.gamma"),
    "algorithm.lam": Alias("trainer.algorithm.lambd"),
    "algorithm.use_kl_in_reward": Alias("trainer.algorithm.use_kl_in_reward"),
    "algorithm.kl_penalty": Alias("trainer.algorithm.kl_estimator_type", VERL_KL, only_if=KL_IN_REWARD),
    "algorithm.kl_ctrl.type": Alias("trainer.algorithm.kl_ctrl.type", only_if=KL_IN_REWARD),
    "algorithm.kl_ctrl.kl_coef": Alias("trainer.algorithm.kl_loss_coef", only_if=KL_IN_REWARD),
    "algorithm.kl_ctrl.horizon": Alias("trainer.algorithm.kl_ctrl.horizon", only_if=KL_IN_REWARD),
    "algorithm.kl_ctrl.target_kl": Alias("trainer.algorithm.kl_ctrl.kl_target", only_if=KL_IN_REWARD),
    "algorithm.filter_groups.enable": Alias("trainer.algorithm.dynamic_sampling.type", {True: "filter", False: None}),
    "algorithm.filter_groups.max_num_gen_batches": Alias(
        "trainer.algorithm.dynamic_sampling.max_sample_batches", {0: -1}
    ),
    "algorithm.rollout_correction.rollout_is": Alias(f"{CORRECTION}.tis_ratio_type"),
    "algorithm.rollout_correction.rollout_is_threshold": Alias(
        f"{CORRECTION}.token_tis_ratio_clip_high",
        also={f"{CORRECTION}.sequence_tis_ratio_clip_high": lambda value: value},
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": Alias(f"{CORRECTION}.outlier_token_is_threshold_low"),
    "actor_rollout_ref.model.path": Alias("trainer.policy.model.path"),
    "actor_rollout_ref.model.lora_rank": Alias("trainer.policy.model.lora.rank"),
    "actor_rollout_ref.model.lora_alpha": Alias("trainer.policy.model.lora.alpha"),
    "actor_rollout_ref.model.target_modules": Alias("trainer.policy.model.lora.target_modules"),
    "actor_rollout_ref.model.exclude_modules": Alias("trainer.policy.model.lora.exclude_modules"),
    "actor_rollout_ref.model.lora_adapter_path": Alias("trainer.policy.model.lora.lora_path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Alias("trainer.gradient_checkpointing"),
    "actor_rollout_ref.actor.strategy": Alias("trainer.strategy"),
    "actor_rollout_ref.actor.fsdp_config.param_offload": Alias("trainer.policy.fsdp_config.cpu_offload"),
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": Alias(
        "trainer.policy.fsdp_config.reshard_after_forward"
    ),
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": Alias("trainer.policy.fsdp_config.fsdp_size"),
    "actor_rollout_ref.actor.fsdp_config.offload_policy": Alias(
        "trainer.policy.fsdp_config.cpu_offload", {False: None}
    ),
    "actor_rollout_ref.actor.fsdp_config.model_dtype": Alias("trainer.policy.model.dtype", VERL_DTYPES),
    "actor_rollout_ref.ref.fsdp_config.param_offload": Alias("trainer.ref.fsdp_config.cpu_offload"),
    "actor_rollout_ref.ref.fsdp_config.reshard_after_forward": Alias("trainer.ref.fsdp_config.reshard_after_forward"),
    "actor_rollout_ref.ref.fsdp_config.fsdp_size": Alias("trainer.ref.fsdp_config.fsdp_size"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": Alias("trainer.policy.sequence_parallel_size"),
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": Alias("trainer.ref.sequence_parallel_size"),
    "actor_rollout_ref.actor.optim.lr": Alias("trainer.policy.optimizer_config.lr"),
    "actor_rollout_ref.actor.optim.weight_decay": Alias("trainer.policy.optimizer_config.weight_decay"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": Alias(
        "trainer.policy.optimizer_config.num_warmup_steps", {-1: None}
    ),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": Alias("trainer.policy.optimizer_config.warmup_ratio"),
    "actor_rollout_ref.actor.optim.warmup_style": Alias("trainer.policy.optimizer_config.scheduler", VERL_SCHEDULERS),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": Alias(
        "trainer.policy.optimizer_config.scheduler", VERL_SCHEDULERS
    ),
    "actor_rollout_ref.actor.optim.betas": Alias("trainer.policy.optimizer_config.adam_betas"),
    "actor_rollout_ref.actor.optim.clip_grad": Alias("trainer.policy.optimizer_config.max_grad_norm"),
    "actor_rollout_ref.actor.grad_clip": Alias("trainer.policy.optimizer_config.max_grad_norm"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Alias("trainer.policy_mini_batch_size"),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": Alias("trainer.micro_train_batch_size_per_gpu"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": Alias("trainer.max_tokens_per_microbatch"),
    "actor_rollout_ref.actor.ppo_epochs": Alias("trainer.update_epochs_per_batch"),
    "actor_rollout_ref.actor.clip_ratio": Alias(
        "trainer.algorithm.eps_clip_low", also={"trainer.algorithm.eps_clip_high": lambda value: value}
    ),
    "actor_rollout_ref.actor.clip_ratio_low": Alias("trainer.algorithm.eps_clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": Alias("trainer.algorithm.eps_clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": Alias("trainer.algorithm.clip_ratio_c"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": Alias(
        "trainer.algorithm.policy_loss_type", {"vanilla": "dual_clip", "geo_mean": "gmpo", "gpg": "policy_gradient"}
    ),
    "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": Alias("trainer.algorithm.clip_cov.clip_ratio"),
    "actor_rollout_ref.actor.policy_loss.clip_cov_lb": Alias("trainer.algorithm.clip_cov.clip_cov_lb"),
    "actor_rollout_ref.actor.policy_loss.clip_cov_ub": Alias("trainer.algorithm.clip_cov.clip_cov_ub"),
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": Alias("trainer.algorithm.kl_cov.kl_cov_frac"),
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": Alias("trainer.algorithm.kl_cov.ppo_kl_coef"),
    "actor_rollout_ref.actor.tau_pos": Alias("trainer.algorithm.sapo.tau_pos"),
    "actor_rollout_ref.actor.tau_neg": Alias("trainer.algorithm.sapo.tau_neg"),
    "actor_rollout_ref.actor.loss_scale_factor": Alias("trainer.algorithm.max_seq_len"),
    "actor_rollout_ref.actor.entropy_coeff": Alias(
        "trainer.algorithm.entropy_loss_coef", also={"trainer.algorithm.use_entropy_loss": bool}
    ),
    "actor_rollout_ref.actor.use_kl_loss": Alias("trainer.algorithm.use_kl_loss"),
    "actor_rollout_ref.actor.kl_loss_coef": Alias("trainer.algorithm.kl_loss_coef"),
    "actor_rollout_ref.actor.kl_loss_type": Alias(
        "trainer.algorithm.kl_estimator_type",
        {**VERL_KL, "kl+": "k1+", "mse+": "k2", "k2+": "k2", "low_var_kl+": "k3+"},
    ),
    "actor_rollout_ref.actor.loss_agg_mode": Alias(
        "trainer.algorithm.loss_reduction",
        {
            "token-mean": "token_mean",
            "seq-mean-token-mean": "sequence_mean",
            "seq-mean-token-sum": "seq_mean_token_sum",
            "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
            "token-sum": "token_sum",
        },
    ),
    "actor_rollout_ref.rollout.name": Alias("generator.backend"),
    "actor_rollout_ref.rollout.n": Alias("generator.n_samples_per_prompt"),
    "actor_rollout_ref.rollout.temperature": Alias("generator.sampling_params.temperature"),
    "actor_rollout_ref.rollout.top_p": Alias("generator.sampling_params.top_p"),
    "actor_rollout_ref.rollout.top_k": Alias("generator.sampling_params.top_k"),
    "actor_rollout_ref.rollout.response_length": Alias("generator.sampling_params.max_generate_length"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": Alias("generator.gpu_memory_utilization"),
    "actor_rollout_ref.rollout.max_num_seqs": Alias("generator.max_num_seqs"),
    "actor_rollout_ref.rollout.max_num_batched_tokens": Alias("generator.max_num_batched_tokens"),
    "actor_rollout_ref.rollout.enforce_eager": Alias("generator.enforce_eager"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": Alias("generator.inference_engine_tensor_parallel_size"),
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": Alias(
        "generator.inference_engine_pipeline_parallel_size"
    ),
    "actor_rollout_ref.rollout.data_parallel_size": Alias("generator.inference_engine_data_parallel_size"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": Alias("trainer.micro_forward_batch_size_per_gpu"),
    "actor_rollout_ref.rollout.val_kwargs.n": Alias("generator.eval_n_samples_per_prompt"),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": Alias(
        "generator.eval_sampling_params.temperature", {False: 0.0, True: None}
    ),
    "actor_rollout_ref.rollout.val_kwargs.temperature": Alias("generator.eval_sampling_params.temperature"),
    "actor_rollout_ref.rollout.val_kwargs.top_p": Alias("generator.eval_sampling_params.top_p"),
    "actor_rollout_ref.rollout.val_kwargs.top_k": Alias("generator.eval_sampling_params.top_k"),
    "critic.model.path": Alias("trainer.critic.model.path"),
    "critic.model.lora_rank": Alias("trainer.critic.model.lora.rank"),
    "critic.model.lora_alpha": Alias("trainer.critic.model.lora.alpha"),
    "critic.model.target_modules": Alias("trainer.critic.model.lora.target_modules"),
    "critic.optim.lr": Alias("trainer.critic.optimizer_config.lr"),
    "critic.optim.weight_decay": Alias("trainer.critic.optimizer_config.weight_decay"),
    "critic.model.fsdp_config.model_dtype": Alias("trainer.critic.model.dtype", VERL_DTYPES),
    "critic.model.fsdp_config.fsdp_size": Alias("trainer.critic.fsdp_config.fsdp_size"),
    "critic.model.fsdp_config.reshard_after_forward": Alias("trainer.critic.fsdp_config.reshard_after_forward"),
    "critic.optim.betas": Alias("trainer.critic.optimizer_config.adam_betas"),
    "critic.optim.clip_grad": Alias("trainer.critic.optimizer_config.max_grad_norm"),
    "critic.optim.warmup_style": Alias("trainer.critic.optimizer_config.scheduler", VERL_SCHEDULERS),
    "critic.optim.lr_scheduler_type": Alias("trainer.critic.optimizer_config.scheduler", VERL_SCHEDULERS),
    "critic.optim.lr_warmup_steps": Alias("trainer.critic.optimizer_config.num_warmup_steps", {-1: None}),
    "critic.optim.lr_warmup_steps_ratio": Alias("trainer.critic.optimizer_config.warmup_ratio"),
    "critic.ulysses_sequence_parallel_size": Alias("trainer.critic.sequence_parallel_size"),
    "critic.grad_clip": Alias("trainer.critic.optimizer_config.max_grad_norm"),
    "critic.ppo_mini_batch_size": Alias("trainer.critic_mini_batch_size"),
    "critic.cliprange_value": Alias("trainer.algorithm.value_clip"),
    "trainer.total_epochs": Alias("trainer.epochs"),
    "trainer.total_training_steps": Alias("trainer.max_training_steps"),
    "trainer.experiment_name": Alias("trainer.run_name"),
    "trainer.default_local_dir": Alias("trainer.ckpt_path"),
    "trainer.max_actor_ckpt_to_keep": Alias("trainer.max_ckpts_to_keep", {None: -1}),
    "trainer.resume_from_path": Alias("trainer.resume_path"),
    "trainer.save_freq": Alias("trainer.ckpt_interval"),
    "trainer.test_freq": Alias("trainer.eval_interval"),
    "trainer.val_before_train": Alias("trainer.eval_before_train"),
    "trainer.nnodes": Alias("trainer.placement.policy_num_nodes"),
    "trainer.n_gpus_per_node": Alias("trainer.placement.policy_num_gpus_per_node"),
}

ALIASES: dict[str, Alias] = {**SKYRL, **VERL}


MEMORY_WITHOUT_EFFECT = {
    "trainer.use_sample_packing": "padding is left out wherever the model allows it",
    "trainer.remove_microbatch_padding": "padding is left out wherever the model allows it",
    "trainer.gradient_checkpointing_use_reentrant": "both ways to recompute activations give the same gradients",
    "trainer.recompute_old_logprobs_per_minibatch": "log-probs do not depend on the micro-batches of a row",
    "trainer.logprobs_chunk_size": "log-probs are computed in blocks that fit into caches",
    **{
        f"trainer.{role}.optimizer_config.offload_after_step": "trainer.placement.offload_idle decides what "
        "leaves its device between the phases of a step"
        for role in ("policy", "critic")
    },
}
"""Keys of other versions that change the memory or the speed of a computation, but no result."""

SKYRL_WITHOUT_EFFECT = {
    **MEMORY_WITHOUT_EFFECT,
    "trainer.algorithm.value_head_prefix": "the critic's value head is always called `score`",
    **{
        f"{section}.{name}": reason
        for section in ENGINE_SECTIONS
        for name, reason in {
            "vllm_v1_disable_multiproc": "the launcher decides which process vLLM runs in",
            "fully_sharded_loras": "vLLM merges the adapter into its weights",
            "override_existing_update_group": "each weight sync opens connections of its own",
            "use_cache_salt": "cached keys and values are dropped when the weights change",
            "model_name": "AgentGenerator(model_name=…) names the model of the HTTP endpoint",
            "http_endpoint_host": "AgentGenerator(host=…) sets the address of the HTTP endpoint",
            "http_endpoint_port": "AgentGenerator(port=…) sets the port of the HTTP endpoint",
        }.items()
    },
    "data.dataloader.num_workers": "the trainer reads the rows when it draws them",
    "data.dataloader.persistent_workers": "the trainer reads the rows when it draws them",
    "trainer.policy.model.lora.lora_sync_path": "adapters reach the engine without a file",
    "trainer.policy.model.lora.max_loras": "a run has one adapter",
    "trainer.policy.model.lora.max_cpu_loras": "a run has one adapter",
    **{
        f"trainer.{role}.megatron_config.{name}": reason
        for role in ("policy", "ref")
        for name, reason in {
            "ddp_config": "gradients are summed in float32 once, before the optimizer step",
            "lora_config": "trainer.policy.model.lora has the settings of the adapter",
            "empty_cuda_cache": "freed memory of a GPU stays with PyTorch, which uses it again",
        }.items()
    },
    "actor_rollout_ref.rollout.layered_summon": "weights are always gathered one tensor at a time",
    "actor_rollout_ref.rollout.load_format": "the engine gets the policy's weights before the first rollout",
    "actor_rollout_ref.model.use_shm": "models are read from their folder, which the system caches",
}
"""Keys of other versions on which nothing depends here, each with the reason; they are accepted with a log line."""


_MODEL_CONFIG = (
    "the engine, exports and later runs read the config.json of the model; copy the model and change the file there"
)
_TRAJECTORIES = "set trainer.dump_trajectories=true, which writes all training trajectories"
_MIXTURE = "set data.mixture.min_per_batch, the minimum number of prompts of each data source in a batch"
_EXPERTS = (
    (1,),
    "engines have their own options; set generator.engine_init_kwargs.enable_expert_parallel=true for vLLM, or "
    "generator.engine_init_kwargs.ep_size for SGLang",
)

_FSDP: dict[str, tuple[tuple[Any, ...], str]] = {
    "mixed_precision.reduce_dtype": (("fp32",), "gradients are always added up in float32"),
    "mixed_precision.buffer_dtype": (("fp32",), "buffers are always float32"),
    "mixed_precision": ((None,), "set param_dtype in the same section"),
    "wrap_policy.transformer_layer_cls_to_wrap": ((None,), "every transformer block is sharded"),
    "wrap_policy": ((None,), "every transformer block is sharded"),
}

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "trainer.fully_async.clear_kv_cache_on_weight_sync": (
        (True,),
        "cached keys and values belong to one version of the weights",
    ),
    **{
        f"trainer.{role}.megatron_config.{name}": (({}, None), reason)
        for role in ("policy", "ref")
        for name, reason in {
            "transformer_config_kwargs": "Megatron-Core's settings follow from the model; for recomputation, set "
            "trainer.gradient_checkpointing=true",
            "model_config_kwargs": "the settings of a model are those in its config.json",
            "optimizer_config_kwargs": "AdamW's settings are trainer.policy.optimizer_config"
            if role == "policy"
            else "the reference has no optimizer",
            "torch_profiler_config": "there is no profiler",
        }.items()
    },
    **{f"trainer.{role}.model_config_kwargs": (({}, None), _MODEL_CONFIG) for role in MODELS},
    **{f"{section}.{name}": ((None,), _MODEL_CONFIG) for section in ("trainer", "generator") for name in ROPE},
    **{
        f"{section}.{name}": entry
        for section in ENGINE_SECTIONS
        for name, entry in {
            "model_dtype": (
                ("bfloat16",),
                "vLLM and SGLang compute in bfloat16 on a GPU with trainer.bf16=true, else in the type of the policy; "
                "set generator.engine_init_kwargs.dtype for another type",
            ),
            "enable_http_endpoint": (
                (False,),
                "agents get an HTTP endpoint from AgentGenerator, which get_generator of your experiment returns: "
                "docs/guides/endpoint.md",
            ),
        }.items()
    },
    "generator.inference_engine_expert_parallel_size": _EXPERTS,
    "generator.inference_engine.expert_parallel_size": _EXPERTS,
    "generator.inference_engine.external_proxy_url": (
        (None,),
        "name each server in generator.remote_inference_engine_urls",
    ),
    "trainer.disable_fast_tokenizer": ((False,), "the tokenizer is always that of tokenizer.json"),
    "trainer.policy.use_torch_compile": ((False,), "training runs without torch.compile"),
    "trainer.policy.record_memory": (
        (False,),
        "no snapshots of memory are written; `skyrl train --dry-run` prints the memory of each process",
    ),
    "trainer.policy.track_extra_gradient_metrics": ((False,), "policy/grad_norm is the only metric of gradients"),
    **{f"trainer.{role}.fsdp_config.{name}": entry for role in MODELS for name, entry in _FSDP.items()},
    "trainer.use_expandable_segments": (
        (False,),
        "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",
    ),
    "trainer.use_hybrid_env_sampling": ((False,), _MIXTURE),
    "trainer.min_samples_per_env": ((0,), _MIXTURE),
    "trainer.dump_data_batch": ((False,), _TRAJECTORIES),
    "trainer.print_example_interval": ((-1,), _TRAJECTORIES),
    "trainer.num_logger_train_samples": ((0,), _TRAJECTORIES),
    "trainer.num_logger_eval_samples": ((0,), "evaluated trajectories are written with trainer.dump_eval_results=true"),
    "trainer.tags": ((None, []), "set $WANDB_TAGS, which Weights & Biases reads"),
    "trainer.log_path": ((None,), "the log is train.log in the run folder; set trainer.output_dir"),
    "trainer.enable_ray_gpu_monitor": ((False,), "GPUs are monitored by Weights & Biases and by Ray's dashboard"),
}
"""Keys of SkyRL for what does not exist here: the values that turn it off, and the reason, with what to use instead.
Keys of a section come before the section itself."""
