"""Keys of other SkyRL versions: aliases, keys without an effect, and rejected keys."""

from typing import Any

from skyrl_train.aliases import Alias

MODELS = ("policy", "critic", "ref")
ROPE = ("rope_scaling", "rope_theta")
ENGINE_SECTIONS = ("generator", "generator.inference_engine")
ENGINE_KEYS = (
    *("backend", "run_engines_locally", "engine_init_kwargs", "async_engine", "gpu_memory_utilization"),
    *("enforce_eager", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill"),
    *("weight_sync_backend", "weight_transfer_threshold_cuda_ipc_GB"),
)
"""Keys of `generator` that are in `generator.inference_engine` in other versions."""

ALIASES = {
    **{f"generator.inference_engine.{name}": Alias(f"generator.{name}") for name in ENGINE_KEYS},
    "generator.inference_engine.num_engines": Alias("generator.num_inference_engines"),
    "generator.inference_engine.tensor_parallel_size": Alias("generator.inference_engine_tensor_parallel_size"),
    "generator.inference_engine.pipeline_parallel_size": Alias("generator.inference_engine_pipeline_parallel_size"),
    "generator.inference_engine.data_parallel_size": Alias("generator.inference_engine_data_parallel_size"),
    "generator.inference_engine.external_server_urls": Alias("generator.remote_inference_engine_urls"),
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


MEMORY_WITHOUT_EFFECT = {
    "trainer.use_sample_packing": "padding is left out wherever the model allows it",
    "trainer.remove_microbatch_padding": "padding is left out wherever the model allows it",
    "trainer.gradient_checkpointing_use_reentrant": "both ways to recompute activations give the same gradients",
    "trainer.recompute_old_logprobs_per_minibatch": "log-probs do not depend on a row's micro-batches",
    "trainer.logprobs_chunk_size": "log-probs are computed in blocks that fit into caches",
    **{
        f"trainer.{role}.optimizer_config.offload_after_step": "trainer.placement.offload_idle decides what "
        "leaves its device between the phases of a step"
        for role in ("policy", "critic")
    },
}
"""Keys of other versions that change only memory or speed."""

WITHOUT_EFFECT = {
    **MEMORY_WITHOUT_EFFECT,
    "trainer.algorithm.value_head_prefix": "the critic's value head is always called `score`",
    **{
        f"{section}.{name}": reason
        for section in ENGINE_SECTIONS
        for name, reason in {
            "vllm_v1_disable_multiproc": "the launcher decides which process vLLM runs in",
            "fully_sharded_loras": "vLLM merges the adapter into its weights",
            "override_existing_update_group": "each weight sync opens new connections",
            "use_cache_salt": "cached keys and values are dropped when the weights change",
            "model_name": "AgentGenerator(model_name=…) sets the model name of the HTTP endpoint",
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
            "lora_config": "the adapter is configured in trainer.policy.model.lora",
            "empty_cuda_cache": "PyTorch keeps freed GPU memory for reuse",
        }.items()
    },
    "actor_rollout_ref.rollout.layered_summon": "weights are always gathered one tensor at a time",
    "actor_rollout_ref.rollout.load_format": "the engine gets the policy's weights before the first rollout",
    "actor_rollout_ref.model.use_shm": "models are read from their folder, and the operating system caches the files",
}
"""Keys of other versions that have no effect here, each with the reason. They are accepted with a log line."""


_MODEL_CONFIG = (
    "the engine, exports and later runs read the model's config.json; copy the model and change the file there"
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
            "model_config_kwargs": "a model's settings come from its config.json",
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
                "vLLM and SGLang compute in bfloat16 on a GPU with trainer.bf16=true, else in the policy's dtype; "
                "set generator.engine_init_kwargs.dtype for another dtype",
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
        "list each server in generator.remote_inference_engine_urls",
    ),
    "trainer.disable_fast_tokenizer": ((False,), "the fast tokenizer in tokenizer.json is always used"),
    "trainer.policy.use_torch_compile": ((False,), "training runs without torch.compile"),
    "trainer.policy.record_memory": (
        (False,),
        "memory snapshots are not written; `skyrl train --dry-run` prints the memory of each process",
    ),
    "trainer.policy.track_extra_gradient_metrics": ((False,), "policy/grad_norm is the only gradient metric"),
    **{f"trainer.{role}.fsdp_config.{name}": entry for role in MODELS for name, entry in _FSDP.items()},
    "trainer.use_expandable_segments": ((False,), "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"),
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
"""SkyRL keys for features that do not exist here: the values that turn the feature off, and the reason or the
replacement. A section's keys come before the section itself."""
