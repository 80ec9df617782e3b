"""verl's programs: their defaults, and the options without an equivalent key here.

Options with an equivalent key are in the alias tables.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.compat.verl.keys import ACTOR, MODEL_SECTION, REF, ROLLOUT
from skyrl_train.config.loading import RL, Schema
from skyrl_train.config.supervised import SFT

Settings = Mapping[str, object]
"""The keys that a command line sets, each with its last value. A deleted key has the value None."""


@dataclass(frozen=True)
class Fixed:
    """An option that is accepted and dropped, because our behavior is fixed."""

    reason: str
    values: tuple[object, ...] | None = None
    """The values that match our behavior. None accepts any value, because results do not depend on the option."""

    def accepts(self, value: object) -> bool:
        """Return True if the value matches our behavior."""
        return self.values is None or any(value == known and type(value) is type(known) for known in self.values)


@dataclass(frozen=True)
class Conditional:
    """An option that has an effect only if `switch` is on."""

    switch: str
    key: str | None = None
    """Our equivalent key. None if the option is translated together with `switch`."""


@dataclass(frozen=True)
class VerlProgram:
    """A verl program: the configuration that its options become, and the options without a key in it.

    In the tables, a section's name stands for all options under it.
    """

    schema: Schema[Any]
    defaults: Settings
    """verl's defaults under our keys, wherever our own defaults would give different results."""
    fixed: Mapping[str, Fixed]
    refused: Mapping[str, str]
    """Options that cannot be honored, each with its fix. Null and false are accepted."""
    conditional: Mapping[str, Conditional]
    combined: tuple[str, ...] = ()
    """Options and sections whose meaning depends on other options."""
    derive: Callable[[Settings], Settings] = lambda _: {}
    """Returns the defaults that depend on other settings."""


def derive_defaults(settings: Settings) -> dict[str, object]:
    """Return the defaults of `main_ppo` that depend on other settings: for the critic, losses and engines."""
    defaults: dict[str, object] = {}
    if "trainer.critic.model.path" in settings:
        defaults |= {"trainer.algorithm.value_clip": 0.5, "trainer.critic.optimizer_config.lr": 1e-5}
    if settings.get("trainer.algorithm.policy_loss_type") == "kl_cov":
        defaults |= {"trainer.algorithm.kl_cov.kl_cov_frac": 2e-4, "trainer.algorithm.kl_cov.ppo_kl_coef": 0.1}
    correction = "trainer.algorithm.off_policy_correction"
    if settings.get(f"{correction}.tis_ratio_type") == "sequence":
        defaults[f"{correction}.sequence_tis_ratio_clip_high"] = 2.0
    if (n_engines := _count_engines(settings)) > 1:
        defaults["generator.num_inference_engines"] = n_engines
    return defaults


def _count_engines(settings: Settings) -> int:
    """Return the number of engines that fill the policy's GPUs, because verl samples on all of them."""
    placement, engine = "trainer.placement", "generator.inference_engine"
    is_shared = settings.get(f"{placement}.colocate_all") is not False
    if not is_shared or settings.get("generator.run_engines_locally") is False:
        return 1
    keys = (
        f"{placement}.policy_num_nodes",
        f"{placement}.policy_num_gpus_per_node",
        *(f"{engine}_{name}_parallel_size" for name in ("tensor", "pipeline", "data")),
    )
    texts = (str(settings.get(key)) for key in keys)
    # A value that is not a positive integer counts as 1 here, because validation rejects it later.
    n_nodes, n_gpus, *sizes = (int(text) if text.isdecimal() and int(text) else 1 for text in texts)
    return n_nodes * (n_gpus // math.prod(sizes))


ALWAYS_PACKED = Fixed("passes are always packed by tokens (trainer.max_tokens_per_microbatch)")
ALWAYS_DEFAULT_ATTENTION = Fixed("attention is PyTorch's SDPA, and the head computes only trained tokens")
ALWAYS_COMPLETE = Fixed(
    "checkpoints hold everything that a run needs to resume, and are written while training continues; skyrl merge "
    "converts one to a model"
)
OFFLOADED_IF_IDLE = Fixed("trainer.placement.offload_idle decides what leaves its device between the phases of a step")
NO_REMOTE_CODE = Fixed("models with custom code are not supported", (False,))
NO_OVERRIDES = Fixed("the model is built from its config.json; change the file in a copy of the model", (None, {}))
NO_PROFILER = Fixed("there is no profiler", (None, [], {}, False))
OWN_TOKENIZER = Fixed("the tokenizer is the model's", (None,))
PLAIN_ROWS = Fixed("rows are read as they are", (None, False))
SAME_TEMPLATE = Fixed("all rows have the template's variables in data.chat_template_kwargs")
IN_ORDER = Fixed("mini-batches keep the order of the prompts", (False,))
SYSTEM_CACHE = Fixed("models are read from their folder, and the operating system caches the files")
WHILE_SAMPLING = Fixed("rewards are computed while other rollouts are sampled")
RAY_DEFAULTS = Fixed("Ray uses all resources of the machine; $RAY_ADDRESS selects a cluster")

FSDP = {
    "wrap_policy": Fixed("every transformer block is sharded"),
    "optimizer_offload": OFFLOADED_IF_IDLE,
    "forward_prefetch": Fixed("FSDP2 prefetches automatically"),
    "use_orig_params": Fixed("FSDP2 always keeps the parameters"),
    "use_torch_compile": Fixed("training runs without torch.compile"),
    "entropy_from_logits_with_chunking": Fixed("the head computes in blocks that fit into memory"),
    "entropy_checkpointing": Fixed("the head computes in blocks that fit into memory"),
    "dtype": Fixed("GPUs compute in bfloat16; trainer.bf16=false selects float32", ("bfloat16",)),
    "seed": Fixed("the seed of a run is trainer.seed"),
    "full_determinism": Fixed("PyTorch's deterministic algorithms are not selected", (False,)),
}
"""Options of the sections `fsdp_config`."""

OPTIMIZER = {
    "optimizer": Fixed("the optimizer is AdamW", ("AdamW",)),
    "optimizer_impl": Fixed("the optimizer is torch.optim's AdamW", ("torch.optim",)),
    "override_optimizer_config": Fixed("the optimizer has no other settings", (None, {})),
    "min_lr_ratio": Fixed("schedules decay to 0", (None, 0, 0.0)),
    "num_cycles": Fixed("the cosine schedule is half a period", (0.5,)),
    "total_training_steps": Fixed("schedules cover all steps of the run"),
}
"""Options of the sections `optim`."""

HEAD = {
    "entropy_from_logits_with_chunking": FSDP["entropy_from_logits_with_chunking"],
    "entropy_checkpointing": FSDP["entropy_checkpointing"],
    "use_torch_compile": FSDP["use_torch_compile"],
    "use_fused_kernels": ALWAYS_DEFAULT_ATTENTION,
    "use_remove_padding": ALWAYS_PACKED,
    "use_dynamic_bsz": ALWAYS_PACKED,
    "profiler": NO_PROFILER,
    "profile": NO_PROFILER,
}
"""Options of models that change speed or memory."""

MODEL = {
    "use_remove_padding": ALWAYS_PACKED,
    "override_config": NO_OVERRIDES,
    "external_lib": Fixed("no module is imported", (None,)),
    "trust_remote_code": NO_REMOTE_CODE,
}
"""Options of the sections `model`."""

COMMON = {
    "data.trust_remote_code": NO_REMOTE_CODE,
    "data.tokenizer": OWN_TOKENIZER,
    "data.train_max_samples": Fixed("all rows are used", (-1,)),
    "data.val_max_samples": Fixed("all rows are used", (-1,)),
    "data.num_workers": Fixed("the trainer reads the rows"),
    "data.dataloader_num_workers": Fixed("the trainer reads the rows"),
    "data.use_shm": Fixed("rows are read from their files"),
    "data.image_key": Fixed("images are read from a column named images or image", ("images", "image")),
    "data.video_key": Fixed(
        "media in a column video or videos are rejected, and plain text there reaches the environment",
        ("videos", "video"),
    ),
    "data.image_patch_size": Fixed("the model's own image processor decides"),
    "trainer.default_hdfs_dir": Fixed("checkpoints are written to trainer.default_local_dir", (None,)),
    "trainer.device": Fixed("a GPU is used if available"),
    "trainer.use_legacy_worker_impl": Fixed("there is one implementation"),
    "trainer.balance_batch": Fixed("ranks always get nearly the same number of tokens"),
    "trainer.profile_steps": NO_PROFILER,
    "global_profiler": NO_PROFILER,
}


def _below(section: str, table: Mapping[str, Fixed]) -> dict[str, Fixed]:
    return {f"{section}.{name}": entry for name, entry in table.items()}


REJECTION = "algorithm.rollout_correction.rollout_rs"
ENGINE_OPTIONS = f"{ROLLOUT}.engine_kwargs"
OVERLONG = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")

MAIN_PPO = VerlProgram(
    RL,
    combined=(REJECTION, ENGINE_OPTIONS),
    derive=derive_defaults,
    defaults={
        "trainer.algorithm.advantage_estimator": "gae",
        "trainer.algorithm.policy_loss_type": "dual_clip",
        "trainer.algorithm.use_kl_loss": False,
        "trainer.log_verl_metrics": True,
        "generator.n_samples_per_prompt": 1,
        "generator.sampling_params.max_generate_length": 512,
        "trainer.epochs": 30,
        "trainer.ckpt_interval": -1,
        "trainer.eval_interval": -1,
    },
    fixed={
        **COMMON,
        "data.shuffle": Fixed("training prompts are always shuffled, with trainer.seed", (True,)),
        "data.validation_shuffle": Fixed("evaluation covers all validation prompts", (False,)),
        "data.sampler": Fixed("prompts are shuffled; data.mixture.curriculum adapts their sources", (None,)),
        "data.datagen": Fixed("data.custom_cls generates rows", (None,)),
        "data.prompt_key": Fixed("the prompt is the column `prompt`", ("prompt",)),
        "data.reward_fn_key": Fixed("the source of a row is the column `data_source`", ("data_source",)),
        "data.tool_config_path": Fixed("the environment defines the tools", (None,)),
        "data.need_tools_kwargs": Fixed("the environment defines the tools", (False,)),
        "data.return_raw_chat": Fixed("rows always carry their messages"),
        "data.return_raw_input_ids": Fixed("the trainer tokenizes prompts itself"),
        "data.return_full_prompt": Fixed("the trainer tokenizes prompts itself"),
        "data.return_multi_modal_inputs": Fixed("the trainer always computes the inputs of images"),
        "data.filter_overlong_prompts": Fixed("prompts above trainer.max_prompt_length are never trained"),
        "data.filter_overlong_prompts_workers": Fixed("the trainer measures the prompts"),
        "data.truncation": Fixed("prompts above trainer.max_prompt_length are left out, not cut"),
        "algorithm.use_pf_ppo": Fixed("PF-PPO is not supported", (False,)),
        "algorithm.pf_ppo": Fixed("PF-PPO is not supported, and off unless algorithm.use_pf_ppo is true"),
        "algorithm.filter_groups.metric": Fixed(
            "groups are compared by the rewards of their trajectories",
            (None, "acc", "score", "seq_reward", "seq_final_reward"),
        ),
        "algorithm.rollout_correction.bypass_mode": Fixed("the trainer always computes the old log-probs", (False,)),
        "algorithm.rollout_correction.loss_type": Fixed(
            "the loss is set by actor_rollout_ref.actor.policy_loss.loss_mode", ("ppo_clip",)
        ),
        "algorithm.rollout_correction.use_policy_gradient": Fixed(
            "the loss is set by actor_rollout_ref.actor.policy_loss.loss_mode", (False,)
        ),
        "algorithm.rollout_correction.rollout_is_batch_normalize": Fixed("weights are not normalized", (False,)),
        "actor_rollout_ref.hybrid_engine": Fixed("training and generation share devices", (True,)),
        "actor_rollout_ref.nccl_timeout": Fixed("the limit is $SKYRL_WORKER_NCCL_TIMEOUT_IN_S, 600 by default"),
        **_below(MODEL_SECTION, MODEL),
        f"{MODEL_SECTION}.hf_config_path": NO_OVERRIDES,
        f"{MODEL_SECTION}.tokenizer_path": OWN_TOKENIZER,
        f"{MODEL_SECTION}.custom_chat_template": Fixed(
            "chat templates are files: set generator.chat_template.source=file and name_or_path", (None,)
        ),
        f"{MODEL_SECTION}.use_fused_kernels": ALWAYS_DEFAULT_ATTENTION,
        f"{MODEL_SECTION}.fused_kernel_options": ALWAYS_DEFAULT_ATTENTION,
        f"{MODEL_SECTION}.use_liger": ALWAYS_DEFAULT_ATTENTION,
        **_below(ACTOR, HEAD),
        **_below(f"{ACTOR}.fsdp_config", FSDP),
        **_below(f"{ACTOR}.optim", OPTIMIZER),
        f"{ACTOR}.shuffle": IN_ORDER,
        f"{ACTOR}.data_loader_seed": FSDP["seed"],
        f"{ACTOR}.calculate_entropy": Fixed("the entropy is always logged"),
        f"{ACTOR}.use_prefix_grouper": Fixed("shared prefixes of rows are always computed once"),
        f"{ACTOR}.checkpoint": ALWAYS_COMPLETE,
        **_below(REF, HEAD),
        **_below(f"{REF}.fsdp_config", FSDP),
        f"{REF}.fsdp_config.model_dtype": Fixed(f"the reference has {ACTOR}.fsdp_config.model_dtype"),
        f"{REF}.strategy": Fixed("the reference is sharded like the policy"),
        f"{REF}.log_prob_micro_batch_size_per_gpu": Fixed(
            f"the reference uses {ROLLOUT}.log_prob_micro_batch_size_per_gpu"
        ),
        f"{REF}.log_prob_use_dynamic_bsz": ALWAYS_PACKED,
        f"{REF}.log_prob_max_token_len_per_gpu": ALWAYS_PACKED,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": ALWAYS_PACKED,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": ALWAYS_PACKED,
        f"{ROLLOUT}.max_model_len": Fixed("the engine uses the model's context length"),
        f"{ROLLOUT}.prompt_length": Fixed("the limit is data.max_prompt_length"),
        f"{ROLLOUT}.mode": Fixed("engines are always asynchronous", ("sync", "async")),
        f"{ROLLOUT}.seed": FSDP["seed"],
        f"{ROLLOUT}.dtype": Fixed("vLLM and SGLang sample in bfloat16 on GPUs", ("bfloat16", "auto")),
        f"{ROLLOUT}.do_sample": Fixed("training samples its rollouts", (True,)),
        f"{ROLLOUT}.over_sample_rate": Fixed("all rollouts of a batch are finished", (0, 0.0)),
        f"{ROLLOUT}.use_fire_sampling": Fixed("FIRE sampling is not supported", (False,)),
        f"{ROLLOUT}.ignore_eos": Fixed("rollouts end with the EOS token", (False,)),
        f"{ROLLOUT}.free_cache_engine": OFFLOADED_IF_IDLE,
        f"{ROLLOUT}.enable_chunked_prefill": Fixed("prompts are always prefilled in chunks"),
        f"{ROLLOUT}.enable_prefix_caching": Fixed("shared prefixes are always computed once"),
        f"{ROLLOUT}.cudagraph_capture_sizes": Fixed("vLLM chooses its CUDA graph sizes", (None, [])),
        f"{ROLLOUT}.expert_parallel_size": Fixed("expert parallelism is not supported", (1,)),
        f"{ROLLOUT}.scheduling_policy": Fixed("requests are served in order", ("fcfs",)),
        f"{ROLLOUT}.quantization": Fixed("the engine samples with the policy's weights", (None,)),
        f"{ROLLOUT}.logprobs_mode": Fixed(
            "log-probs are computed at the request's temperature", ("processed_logprobs",)
        ),
        f"{ROLLOUT}.calculate_log_probs": Fixed("the engine always returns log-probs"),
        f"{ROLLOUT}.disable_log_stats": Fixed("the engine's metrics are in `generate/`"),
        f"{ROLLOUT}.skip_tokenizer_init": Fixed("the engine takes and returns tokens"),
        f"{ROLLOUT}.skip_rollout": Fixed("every step samples its rollouts", (False,)),
        f"{ROLLOUT}.update_weights_bucket_megabytes": Fixed("weights are sent in pieces of a fixed size"),
        f"{ROLLOUT}.checkpoint_engine": Fixed("generator.weight_sync_backend selects the transport of weights"),
        f"{ROLLOUT}.agent.num_workers": Fixed("all rollouts run concurrently in the trainer's process"),
        f"{ROLLOUT}.agent.default_agent_loop": Fixed(
            "turns are played with environment.env_class", (None, "single_turn_agent")
        ),
        f"{ROLLOUT}.agent": Fixed("turns are played with environment.env_class", (None,)),
        f"{ROLLOUT}.trace": Fixed("trainer.dump_trajectories=true writes all trajectories", (None, False)),
        **_below("critic", HEAD),
        **_below("critic.model", MODEL),
        **_below("critic.model.fsdp_config", FSDP),
        **_below("critic.optim", OPTIMIZER),
        "critic.enable": Fixed("there is a critic if critic.model.path is set"),
        "critic.rollout_n": Fixed("the critic is trained on all rollouts"),
        "critic.strategy": Fixed("the critic is sharded like the policy"),
        "critic.shuffle": IN_ORDER,
        "critic.loss_agg_mode": Fixed(
            "the critic's loss is the mean over trajectories of their token means", ("seq-mean-token-mean",)
        ),
        "critic.checkpoint": ALWAYS_COMPLETE,
        "critic.ppo_epochs": Fixed("the critic uses actor_rollout_ref.actor.ppo_epochs", (1,)),
        "critic.ppo_micro_batch_size_per_gpu": Fixed(f"the critic uses {ACTOR}.ppo_micro_batch_size_per_gpu"),
        "critic.ppo_max_token_len_per_gpu": Fixed(f"the critic uses {ACTOR}.ppo_max_token_len_per_gpu"),
        "critic.forward_micro_batch_size_per_gpu": Fixed(
            f"the critic uses {ROLLOUT}.log_prob_micro_batch_size_per_gpu"
        ),
        "critic.forward_max_token_len_per_gpu": ALWAYS_PACKED,
        **{
            f"critic.model.{name}": Fixed(f"the critic follows {MODEL_SECTION}.{name}")
            for name in ("enable_gradient_checkpointing", "enable_activation_offload")
        },
        "critic.model.tokenizer_path": Fixed("the critic shares the policy's tokenizer"),
        "critic.model.use_shm": SYSTEM_CACHE,
        "critic.model.fsdp_config.param_offload": OFFLOADED_IF_IDLE,
        "reward_model.enable": Fixed("rewards come from environments or custom_reward_function", (False,)),
        "reward_model.reward_manager": Fixed(
            "custom_reward_function scores each reply", ("naive", "batch", "dapo", "prime")
        ),
        "reward_model.launch_reward_fn_async": WHILE_SAMPLING,
        "reward_model.num_workers": WHILE_SAMPLING,
        "reward_model.use_reward_loop": WHILE_SAMPLING,
        "reward_model.sandbox_fusion": Fixed("programs run in a sandbox on this machine", (None,)),
        "reward_model.reward_kwargs.max_resp_len": Fixed("the limit is data.max_response_length"),
        **{f"{name}.enable": Fixed(f"{name}.len turns the penalty on") for name in OVERLONG},
        **{f"{name}.log": Fixed("the penalty is in loss/avg_final_rewards") for name in OVERLONG},
        "trainer.critic_warmup": Fixed("the policy is trained from the first step", (0,)),
        "trainer.esi_redundant_time": Fixed("SIGTERM ends a run with a checkpoint"),
        "trainer.log_val_generations": Fixed("replies are written to evals/ in the run folder", (0,)),
        "trainer.max_critic_ckpt_to_keep": Fixed("trainer.max_actor_ckpt_to_keep counts checkpoints of both models"),
        "trainer.val_only": Fixed("this command trains", (False,)),
        "trainer.del_local_ckpt_after_load": Fixed("checkpoints are kept", (False,)),
        "trainer.ray_wait_register_center_timeout": Fixed("a rank that does not start ends the run"),
        "ray_kwargs": RAY_DEFAULTS,
        "ray_init": RAY_DEFAULTS,
        "transfer_queue": Fixed("batches do not pass through a queue", (False,)),
    },
    refused={
        "trainer.rollout_data_dir": "set trainer.dump_trajectories=true; the run folder then has trajectories/",
        "trainer.validation_data_dir": "remove it; evaluated replies are in evals/ in the run folder",
        f"{ACTOR}.ppo_micro_batch_size": f"use {ACTOR}.ppo_micro_batch_size_per_gpu, the rows of one device",
        **{
            f"{name}.log_prob_micro_batch_size": (
                f"use {ROLLOUT}.log_prob_micro_batch_size_per_gpu, the rows of one device"
            )
            for name in (REF, ROLLOUT)
        },
        "critic.ppo_micro_batch_size": f"use {ACTOR}.ppo_micro_batch_size_per_gpu, the rows of one device",
        "critic.forward_micro_batch_size": f"use {ROLLOUT}.log_prob_micro_batch_size_per_gpu, the rows of one device",
        "reward_model.model": "remove it, and score replies with custom_reward_function or an environment",
        "custom_reward_function.reward_kwargs": "remove it, and give the function's arguments default values",
        f"{ROLLOUT}.multi_turn.enable": (
            "remove it; set environment.env_class to an environment, and generator.max_turns"
        ),
        "data.gen_batch_size": (
            "remove it; dynamic sampling draws batches of data.train_batch_size until enough groups are left"
        ),
    },
    conditional={
        f"{REJECTION}_threshold": Conditional(REJECTION),
        f"{REJECTION}_threshold_lower": Conditional(REJECTION),
        **{
            f"{name}.{option}": Conditional(f"{name}.enable", f"trainer.algorithm.{key}")
            for name in OVERLONG
            for option, key in (("len", "overlong_buffer_len"), ("penalty_factor", "overlong_buffer_penalty_factor"))
        },
        f"{ROLLOUT}.multi_turn": Conditional(f"{ROLLOUT}.multi_turn.enable"),
    },
)

FSDP_SFT_TRAINER = VerlProgram(
    SFT,
    defaults={
        "trainer.policy.optimizer_config.lr": 1e-5,
        "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95],
        "trainer.policy.optimizer_config.weight_decay": 0.01,
        "trainer.policy.optimizer_config.warmup_ratio": 0.1,
        "trainer.train_batch_size": 256,
        "data.max_length": 1024,
        "trainer.epochs": 4,
        "trainer.ckpt_interval": -1,
        "trainer.eval_interval": -1,
    },
    fixed={
        **COMMON,
        "data.shuffle": Fixed("training rows are always shuffled, with trainer.seed", (True,)),
        "data.balance_dp_token": Fixed("the loss is always the mean over all tokens of the batch"),
        "data.pad_mode": Fixed("padding is left out wherever the model allows it"),
        "data.use_dynamic_bsz": ALWAYS_PACKED,
        "data.ignore_input_ids_mismatch": Fixed("a conversation is rendered once"),
        "data.multiturn.enable": Fixed("rows with a column `messages` are conversations"),
        "data.multiturn.enable_thinking_key": SAME_TEMPLATE,
        "data.enable_thinking_key": SAME_TEMPLATE,
        "data.custom_cls.path": PLAIN_ROWS,
        "data.custom_cls.name": PLAIN_ROWS,
        **_below("model", MODEL),
        **_below("model.fsdp_config", FSDP),
        "model.tokenizer_path": OWN_TOKENIZER,
        "model.use_liger": ALWAYS_DEFAULT_ATTENTION,
        "model.use_shm": SYSTEM_CACHE,
        **_below("engine", FSDP),
        **_below("optim", OPTIMIZER),
        "use_remove_padding": ALWAYS_PACKED,
        "checkpoint": ALWAYS_COMPLETE,
        "trainer.checkpoint": ALWAYS_COMPLETE,
        "trainer.profile_interval": Fixed("there is no profiler", ([-1, -1],)),
    },
    refused={"data.micro_batch_size": "use data.micro_batch_size_per_gpu, the rows of one pass"},
    conditional={},
)

PROGRAMS = {"main_ppo": MAIN_PPO, "fsdp_sft_trainer": FSDP_SFT_TRAINER, "sft_trainer": FSDP_SFT_TRAINER}
"""verl's programs by the last part of their module. verl 0.10 renamed `fsdp_sft_trainer` to `sft_trainer`."""
