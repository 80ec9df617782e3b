"""Keys of verl with the same meaning here, mapped to ours."""

from skyrl_train.aliases import Alias

KL_IN_REWARD = "trainer.algorithm.use_kl_in_reward"
VERL_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
VERL_SCHEDULERS = {"constant": "constant_with_warmup"}
VERL_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
CORRECTION = "trainer.algorithm.off_policy_correction"
ACTOR, REF, ROLLOUT, MODEL_SECTION = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))


def _optimizer(theirs: str, ours: str) -> dict[str, Alias]:
    """Return the aliases of a section `optim`."""
    return {
        f"{theirs}.lr": Alias(f"{ours}.lr"),
        f"{theirs}.betas": Alias(f"{ours}.adam_betas"),
        f"{theirs}.weight_decay": Alias(f"{ours}.weight_decay"),
        f"{theirs}.clip_grad": Alias(f"{ours}.max_grad_norm"),
        f"{theirs}.lr_warmup_steps": Alias(f"{ours}.num_warmup_steps", {-1: None}),
        f"{theirs}.lr_warmup_steps_ratio": Alias(f"{ours}.warmup_ratio"),
        f"{theirs}.lr_scheduler_type": Alias(f"{ours}.scheduler", VERL_SCHEDULERS),
        f"{theirs}.warmup_style": Alias(f"{ours}.scheduler", VERL_SCHEDULERS),
    }


COMMON = {
    "data.train_files": Alias("data.train_data"),
    "data.val_files": Alias("data.val_data"),
    "data.train_batch_size": Alias("trainer.train_batch_size"),
    "data.seed": Alias("trainer.seed"),
    "trainer.nnodes": Alias("trainer.placement.policy_num_nodes"),
    "trainer.n_gpus_per_node": Alias("trainer.placement.policy_num_gpus_per_node"),
    "trainer.total_epochs": Alias("trainer.epochs"),
    "trainer.total_training_steps": Alias("trainer.max_training_steps"),
    "trainer.experiment_name": Alias("trainer.run_name"),
    "trainer.default_local_dir": Alias("trainer.ckpt_path"),
    "trainer.resume_from_path": Alias("trainer.resume_path"),
    "trainer.save_freq": Alias("trainer.ckpt_interval"),
    "trainer.test_freq": Alias("trainer.eval_interval"),
}
"""Keys of both programs."""

ALIASES = {
    **COMMON,
    **_optimizer(f"{ACTOR}.optim", "trainer.policy.optimizer_config"),
    **_optimizer("critic.optim", "trainer.critic.optimizer_config"),
    "data.val_batch_size": Alias("trainer.eval_batch_size"),
    "data.max_prompt_length": Alias("trainer.max_prompt_length"),
    "data.max_response_length": Alias("generator.sampling_params.max_generate_length"),
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
    f"{MODEL_SECTION}.path": Alias("trainer.policy.model.path"),
    f"{MODEL_SECTION}.lora_rank": Alias("trainer.policy.model.lora.rank"),
    f"{MODEL_SECTION}.lora_alpha": Alias("trainer.policy.model.lora.alpha"),
    f"{MODEL_SECTION}.target_modules": Alias("trainer.policy.model.lora.target_modules"),
    f"{MODEL_SECTION}.exclude_modules": Alias("trainer.policy.model.lora.exclude_modules"),
    f"{MODEL_SECTION}.lora_adapter_path": Alias("trainer.policy.model.lora.lora_path"),
    f"{MODEL_SECTION}.enable_gradient_checkpointing": Alias("trainer.gradient_checkpointing"),
    f"{MODEL_SECTION}.enable_activation_offload": Alias("trainer.activation_offload"),
    f"{ACTOR}.strategy": Alias("trainer.strategy"),
    f"{ACTOR}.fsdp_config.param_offload": Alias("trainer.policy.fsdp_config.cpu_offload"),
    f"{ACTOR}.fsdp_config.reshard_after_forward": Alias("trainer.policy.fsdp_config.reshard_after_forward"),
    f"{ACTOR}.fsdp_config.fsdp_size": Alias("trainer.policy.fsdp_config.fsdp_size"),
    f"{ACTOR}.fsdp_config.offload_policy": Alias("trainer.policy.fsdp_config.cpu_offload", {False: None}),
    f"{ACTOR}.fsdp_config.model_dtype": Alias("trainer.policy.model.dtype", VERL_DTYPES),
    f"{REF}.fsdp_config.param_offload": Alias("trainer.ref.fsdp_config.cpu_offload"),
    f"{REF}.fsdp_config.reshard_after_forward": Alias("trainer.ref.fsdp_config.reshard_after_forward"),
    f"{REF}.fsdp_config.fsdp_size": Alias("trainer.ref.fsdp_config.fsdp_size"),
    f"{ACTOR}.ulysses_sequence_parallel_size": Alias("trainer.policy.sequence_parallel_size"),
    f"{REF}.ulysses_sequence_parallel_size": Alias("trainer.ref.sequence_parallel_size"),
    f"{ACTOR}.grad_clip": Alias("trainer.policy.optimizer_config.max_grad_norm"),
    f"{ACTOR}.ppo_mini_batch_size": Alias("trainer.policy_mini_batch_size"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Alias("trainer.micro_train_batch_size_per_gpu"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": Alias("trainer.max_tokens_per_microbatch"),
    f"{ACTOR}.ppo_epochs": Alias("trainer.update_epochs_per_batch"),
    f"{ACTOR}.clip_ratio": Alias(
        "trainer.algorithm.eps_clip_low", also={"trainer.algorithm.eps_clip_high": lambda value: value}
    ),
    f"{ACTOR}.clip_ratio_low": Alias("trainer.algorithm.eps_clip_low"),
    f"{ACTOR}.clip_ratio_high": Alias("trainer.algorithm.eps_clip_high"),
    f"{ACTOR}.clip_ratio_c": Alias("trainer.algorithm.clip_ratio_c"),
    f"{ACTOR}.policy_loss.loss_mode": Alias(
        "trainer.algorithm.policy_loss_type", {"vanilla": "dual_clip", "geo_mean": "gmpo", "gpg": "policy_gradient"}
    ),
    f"{ACTOR}.policy_loss.clip_cov_ratio": Alias("trainer.algorithm.clip_cov.clip_ratio"),
    f"{ACTOR}.policy_loss.clip_cov_lb": Alias("trainer.algorithm.clip_cov.clip_cov_lb"),
    f"{ACTOR}.policy_loss.clip_cov_ub": Alias("trainer.algorithm.clip_cov.clip_cov_ub"),
    f"{ACTOR}.policy_loss.kl_cov_ratio": Alias("trainer.algorithm.kl_cov.kl_cov_frac"),
    f"{ACTOR}.policy_loss.ppo_kl_coef": Alias("trainer.algorithm.kl_cov.ppo_kl_coef"),
    f"{ACTOR}.tau_pos": Alias("trainer.algorithm.sapo.tau_pos"),
    f"{ACTOR}.tau_neg": Alias("trainer.algorithm.sapo.tau_neg"),
    f"{ACTOR}.loss_scale_factor": Alias("trainer.algorithm.max_seq_len"),
    f"{ACTOR}.entropy_coeff": Alias(
        "trainer.algorithm.entropy_loss_coef", also={"trainer.algorithm.use_entropy_loss": bool}
    ),
    f"{ACTOR}.use_kl_loss": Alias("trainer.algorithm.use_kl_loss"),
    f"{ACTOR}.kl_loss_coef": Alias("trainer.algorithm.kl_loss_coef"),
    f"{ACTOR}.kl_loss_type": Alias(
        "trainer.algorithm.kl_estimator_type",
        {**VERL_KL, "kl+": "k1+", "mse+": "k2", "k2+": "k2", "low_var_kl+": "k3+"},
    ),
    f"{ACTOR}.loss_agg_mode": Alias(
        "trainer.algorithm.loss_reduction",
        {
            "token-mean": "token_mean",
            "seq-mean-token-mean": "sequence_mean",
            "seq-mean-token-sum": "seq_mean_token_sum",
            "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
            "token-sum": "token_sum",
        },
    ),
    f"{ROLLOUT}.name": Alias("generator.backend"),
    f"{ROLLOUT}.n": Alias("generator.n_samples_per_prompt"),
    f"{ROLLOUT}.temperature": Alias("generator.sampling_params.temperature"),
    f"{ROLLOUT}.top_p": Alias("generator.sampling_params.top_p"),
    f"{ROLLOUT}.top_k": Alias("generator.sampling_params.top_k"),
    f"{ROLLOUT}.response_length": Alias("generator.sampling_params.max_generate_length"),
    f"{ROLLOUT}.gpu_memory_utilization": Alias("generator.gpu_memory_utilization"),
    f"{ROLLOUT}.max_num_seqs": Alias("generator.max_num_seqs"),
    f"{ROLLOUT}.max_num_batched_tokens": Alias("generator.max_num_batched_tokens"),
    f"{ROLLOUT}.enforce_eager": Alias("generator.enforce_eager"),
    f"{ROLLOUT}.tensor_model_parallel_size": Alias("generator.inference_engine_tensor_parallel_size"),
    f"{ROLLOUT}.pipeline_model_parallel_size": Alias("generator.inference_engine_pipeline_parallel_size"),
    f"{ROLLOUT}.data_parallel_size": Alias("generator.inference_engine_data_parallel_size"),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": Alias("trainer.micro_forward_batch_size_per_gpu"),
    f"{ROLLOUT}.val_kwargs.n": Alias("generator.eval_n_samples_per_prompt"),
    f"{ROLLOUT}.val_kwargs.do_sample": Alias("generator.eval_sampling_params.temperature", {False: 0.0, True: None}),
    f"{ROLLOUT}.val_kwargs.temperature": Alias("generator.eval_sampling_params.temperature"),
    f"{ROLLOUT}.val_kwargs.top_p": Alias("generator.eval_sampling_params.top_p"),
    f"{ROLLOUT}.val_kwargs.top_k": Alias("generator.eval_sampling_params.top_k"),
    "critic.model.path": Alias("trainer.critic.model.path"),
    "critic.model.lora_rank": Alias("trainer.critic.model.lora.rank"),
    "critic.model.lora_alpha": Alias("trainer.critic.model.lora.alpha"),
    "critic.model.target_modules": Alias("trainer.critic.model.lora.target_modules"),
    "critic.model.fsdp_config.model_dtype": Alias("trainer.critic.model.dtype", VERL_DTYPES),
    "critic.model.fsdp_config.fsdp_size": Alias("trainer.critic.fsdp_config.fsdp_size"),
    "critic.model.fsdp_config.reshard_after_forward": Alias("trainer.critic.fsdp_config.reshard_after_forward"),
    "critic.ulysses_sequence_parallel_size": Alias("trainer.critic.sequence_parallel_size"),
    "critic.grad_clip": Alias("trainer.critic.optimizer_config.max_grad_norm"),
    "critic.ppo_mini_batch_size": Alias("trainer.critic_mini_batch_size"),
    "critic.cliprange_value": Alias("trainer.algorithm.value_clip"),
    "trainer.max_actor_ckpt_to_keep": Alias("trainer.max_ckpts_to_keep", {None: -1}),
    "trainer.val_before_train": Alias("trainer.eval_before_train"),
}
"""Keys of `main_ppo`."""

SFT_ALIASES = {
    **COMMON,
    **_optimizer("optim", "trainer.policy.optimizer_config"),
    "data.micro_batch_size_per_gpu": Alias("trainer.micro_train_batch_size_per_gpu"),
    "data.max_token_len_per_gpu": Alias("trainer.max_tokens_per_microbatch"),
    "data.apply_chat_template_kwargs": Alias("data.chat_template_kwargs"),
    "data.multiturn.messages_key": Alias("data.messages_key"),
    "data.multiturn.tools_key": Alias("data.tools_key"),
    "model.partial_pretrain": Alias("trainer.policy.model.path"),
    "model.path": Alias("trainer.policy.model.path"),
    "model.enable_gradient_checkpointing": Alias("trainer.gradient_checkpointing"),
    "model.enable_activation_offload": Alias("trainer.activation_offload"),
    "model.fsdp_config.model_dtype": Alias("trainer.policy.model.dtype", VERL_DTYPES),
    "engine.model_dtype": Alias("trainer.policy.model.dtype", VERL_DTYPES),
    "model.lora_rank": Alias("trainer.policy.model.lora.rank"),
    "model.lora_alpha": Alias("trainer.policy.model.lora.alpha"),
    "model.target_modules": Alias("trainer.policy.model.lora.target_modules"),
    "model.exclude_modules": Alias("trainer.policy.model.lora.exclude_modules"),
    "model.lora_adapter_path": Alias("trainer.policy.model.lora.lora_path"),
    "optim.lr_scheduler": Alias("trainer.policy.optimizer_config.scheduler", VERL_SCHEDULERS),
    "optim.warmup_steps_ratio": Alias("trainer.policy.optimizer_config.warmup_ratio"),
    "model.strategy": Alias("trainer.strategy"),
    "engine.strategy": Alias("trainer.strategy"),
    "engine.fsdp_size": Alias("trainer.policy.fsdp_config.fsdp_size"),
    "engine.reshard_after_forward": Alias("trainer.policy.fsdp_config.reshard_after_forward"),
    "engine.param_offload": Alias("trainer.policy.fsdp_config.cpu_offload"),
    "engine.ulysses_sequence_parallel_size": Alias("trainer.policy.sequence_parallel_size"),
    "model.fsdp_config.cpu_offload": Alias("trainer.policy.fsdp_config.cpu_offload"),
    "model.fsdp_config.offload_params": Alias("trainer.policy.fsdp_config.cpu_offload"),
    "ulysses_sequence_parallel_size": Alias("trainer.policy.sequence_parallel_size"),
    "trainer.max_ckpt_to_keep": Alias("trainer.max_ckpts_to_keep", {None: -1}),
}
"""Keys of verl's SFT trainer with the same meaning here."""

TASK_OPTIONS = {"cases", "game_list", "game_configs", "game_types", "max_random_steps", "reward_mode", "task_types"}
"""Options of the recipes' dataset classes. They are under an open field, so no search over fields finds them."""
