"""Command lines of verl's `main_ppo` and `fsdp_sft_trainer`, as overrides of this configuration.

Options with a key of the same meaning are in the alias tables. The tables here have the others: options on which
nothing depends, options that cannot be honoured, and verl's defaults where they change what is computed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from hydra.core.override_parser.types import Override

from skyrl_train.config.cli import changed_keys, is_override, parse_override
from skyrl_train.config.loading import RL, Schema
from skyrl_train.config.problems import OPEN_SECTION, did_you_mean, open_fields, raise_problems, show
from skyrl_train.config.sft import SFT
from skyrl_train.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fixed:
    """An option of verl that is accepted and dropped, because this system always behaves in one way."""

    reason: str
    values: tuple[object, ...] | None = None
    """The values that describe that behavior; None if results do not depend on the option."""


@dataclass(frozen=True)
class VerlProgram:
    """A program of verl: the configuration that its options are read into, and the options without a key in it."""

    schema: Schema[Any]
    defaults: Mapping[str, object]
    """Our keys with the defaults of verl, where others would change what is computed."""
    fixed: Mapping[str, Fixed]
    refused: Mapping[str, str]
    """Options that cannot be honoured, each with what to do instead."""
    critic_defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults that hold if there is a critic."""


RESUME_MODES = {"auto": "latest", "disable": "none", "resume_path": "from_path"}
"""Values of `trainer.resume_mode`, a key of both."""


ALWAYS_PACKED = Fixed("passes are always packed by tokens (trainer.max_tokens_per_microbatch)")
ALWAYS_DEFAULT_ATTENTION = Fixed("attention is PyTorch's SDPA, and the head computes trained tokens only")
OFFLOADED_IF_IDLE = Fixed("trainer.placement.offload_idle decides what leaves its device between the phases of a step")
NO_REMOTE_CODE = Fixed("models with code of their own are not supported", (False,))
ONE_FOLDER = Fixed("checkpoints are written to trainer.default_local_dir", (None,))
ANY_DEVICE = Fixed("a GPU is used if there is one")
PLAIN_ROWS = Fixed("rows are read as they are", (None, False))

COMMON_FIXED = {
    "data.trust_remote_code": NO_REMOTE_CODE,
    "data.tokenizer": Fixed("the tokenizer is the model's", (None,)),
    "data.train_max_samples": Fixed("all rows are used", (-1,)),
    "data.val_max_samples": Fixed("all rows are used", (-1,)),
    "data.num_workers": Fixed("rows are read by the trainer"),
    "data.dataloader_num_workers": Fixed("rows are read by the trainer"),
    "trainer.default_hdfs_dir": ONE_FOLDER,
    "trainer.device": ANY_DEVICE,
    "trainer.use_legacy_worker_impl": Fixed("there is one implementation"),
}

MAIN_PPO = VerlProgram(
    RL,
    critic_defaults={"trainer.algorithm.value_clip": 0.5, "trainer.critic.optimizer_config.lr": 1e-5},
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
        **COMMON_FIXED,
        "data.shuffle": Fixed("training prompts are always shuffled, with trainer.seed", (True,)),
        "data.validation_shuffle": Fixed("evaluation covers all validation prompts", (False,)),
        "data.prompt_key": Fixed("the prompt is the column `prompt`", ("prompt",)),
        "data.reward_fn_key": Fixed("the source of a row is the column `data_source`", ("data_source",)),
        "data.return_raw_chat": Fixed("rows always carry their messages"),
        "data.return_raw_input_ids": Fixed("the trainer tokenizes prompts itself"),
        "data.return_full_prompt": Fixed("the trainer tokenizes prompts itself"),
        "data.filter_overlong_prompts": Fixed("prompts above trainer.max_prompt_length are never trained"),
        "data.filter_overlong_prompts_workers": Fixed("prompts are measured by the trainer"),
        "data.truncation": Fixed("prompts above trainer.max_prompt_length are left out, not cut"),
        "algorithm.use_pf_ppo": Fixed("PF-PPO is not supported", (False,)),
        "actor_rollout_ref.hybrid_engine": Fixed("training and generation share devices", (True,)),
        "actor_rollout_ref.model.use_remove_padding": ALWAYS_PACKED,
        "actor_rollout_ref.model.use_fused_kernels": ALWAYS_DEFAULT_ATTENTION,
        "actor_rollout_ref.model.use_liger": ALWAYS_DEFAULT_ATTENTION,
        "actor_rollout_ref.model.trust_remote_code": NO_REMOTE_CODE,
        "actor_rollout_ref.actor.use_dynamic_bsz": ALWAYS_PACKED,
        "actor_rollout_ref.actor.use_torch_compile": Fixed("training runs without torch.compile"),
        "actor_rollout_ref.actor.shuffle": Fixed("mini-batches keep the order of the prompts", (False,)),
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": OFFLOADED_IF_IDLE,
        "actor_rollout_ref.ref.strategy": Fixed("the reference is sharded as the policy is"),
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": Fixed(
            "the reference takes actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
        ),
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": ALWAYS_PACKED,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": ALWAYS_PACKED,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": ALWAYS_PACKED,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": ALWAYS_PACKED,
        "actor_rollout_ref.rollout.max_model_len": Fixed("the engine takes the context length of the model"),
        "actor_rollout_ref.rollout.prompt_length": Fixed("the limit is data.max_prompt_length"),
        "actor_rollout_ref.rollout.mode": Fixed("engines are always asynchronous", ("sync", "async")),
        "actor_rollout_ref.rollout.do_sample": Fixed("training samples its rollouts", (True,)),
        "actor_rollout_ref.rollout.ignore_eos": Fixed("rollouts end with the EOS token", (False,)),
        "actor_rollout_ref.rollout.free_cache_engine": OFFLOADED_IF_IDLE,
        "actor_rollout_ref.rollout.enable_chunked_prefill": Fixed("new prompts are always prefilled in chunks"),
        "actor_rollout_ref.rollout.enable_prefix_caching": Fixed("shared prefixes are always computed once"),
        "actor_rollout_ref.rollout.calculate_log_probs": Fixed("the engine always returns log-probs"),
        "actor_rollout_ref.rollout.disable_log_stats": Fixed("the engine's metrics are in `generate/`"),
        "critic.model.use_remove_padding": ALWAYS_PACKED,
        "critic.model.enable_gradient_checkpointing": Fixed(
            "the critic follows actor_rollout_ref.model.enable_gradient_checkpointing"
        ),
        "critic.model.tokenizer_path": Fixed("the critic shares the policy's tokenizer"),
        "critic.model.trust_remote_code": NO_REMOTE_CODE,
        "critic.model.fsdp_config.param_offload": OFFLOADED_IF_IDLE,
        "critic.model.fsdp_config.optimizer_offload": OFFLOADED_IF_IDLE,
        "critic.strategy": Fixed("the critic is sharded as the policy is"),
        "critic.use_dynamic_bsz": ALWAYS_PACKED,
        "critic.ppo_micro_batch_size_per_gpu": Fixed(
            "the critic takes actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
        ),
        "critic.ppo_max_token_len_per_gpu": Fixed("the critic takes actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        "reward_model.enable": Fixed("rewards come from environments or custom_reward_function", (False,)),
        "reward_model.reward_manager": Fixed("custom_reward_function scores each reply", ("naive", "batch")),
        "reward_model.launch_reward_fn_async": Fixed("rewards are computed while other rollouts are sampled"),
        "trainer.balance_batch": Fixed("ranks always get the same number of tokens, nearly"),
        "trainer.critic_warmup": Fixed("the policy is trained from the first step", (0,)),
        "trainer.log_val_generations": Fixed("replies are written to evals/ in the run folder", (0,)),
        "trainer.max_critic_ckpt_to_keep": Fixed("trainer.max_actor_ckpt_to_keep counts checkpoints of both models"),
        "trainer.val_only": Fixed("this command trains", (False,)),
        "trainer.del_local_ckpt_after_load": Fixed("checkpoints are kept", (False,)),
        "trainer.ray_wait_register_center_timeout": Fixed("ranks that do not start end the run by themselves"),
    },
    refused={
        "trainer.rollout_data_dir": "set trainer.dump_trajectories=true; the run folder then has trajectories/",
        "trainer.validation_data_dir": "remove it; evaluated replies are in evals/ in the run folder",
        "actor_rollout_ref.actor.ppo_micro_batch_size": (
            "use actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, the rows of one device"
        ),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size": (
            "use actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu, the rows of one device"
        ),
        "reward_model.model.path": "remove it, and score replies with custom_reward_function or an environment",
        "actor_rollout_ref.rollout.multi_turn.enable": (
            "remove it; set environment.env_class to an environment, and generator.max_turns"
        ),
        "data.gen_batch_size": (
            "remove it; dynamic sampling draws batches of data.train_batch_size until enough groups are left"
        ),
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
        **COMMON_FIXED,
        "data.balance_dp_token": Fixed("the loss is always the mean over all tokens of the batch"),
        "data.use_shm": Fixed("rows are read from their files"),
        "data.multiturn.enable": Fixed("rows with a column `messages` are conversations"),
        "data.custom_cls.path": PLAIN_ROWS,
        "data.custom_cls.name": PLAIN_ROWS,
        "model.use_liger": ALWAYS_DEFAULT_ATTENTION,
        "model.use_shm": Fixed("models are read from their folder, which the system caches"),
        "model.trust_remote_code": NO_REMOTE_CODE,
        "model.external_lib": Fixed("no module is imported", (None,)),
        "use_remove_padding": ALWAYS_PACKED,
    },
    refused={
        "data.micro_batch_size": "use data.micro_batch_size_per_gpu, the rows of one pass",
        "trainer.checkpoint.save_contents": "remove it; checkpoints hold all that a run needs to resume",
    },
)

PROGRAMS = {"main_ppo": MAIN_PPO, "fsdp_sft_trainer": FSDP_SFT_TRAINER, "sft_trainer": FSDP_SFT_TRAINER}
"""verl's programs by the last part of their module; verl 0.10 has renamed `fsdp_sft_trainer` to `sft_trainer`."""

PROCESSES = {
    "nnodes": "trainer.placement.policy_num_nodes",
    "nproc_per_node": "trainer.placement.policy_num_gpus_per_node",
}
"""The keys of a launcher's options."""


def read_command(words: Sequence[str]) -> tuple[VerlProgram, list[str]]:
    """Return the program and its overrides in this configuration.

    `words` may be a whole command line: `torchrun --nproc_per_node=1 -m verl.trainer.fsdp_sft_trainer optim.lr=2e-6`.

    Raises:
        ConfigError: the words name no program, or it lists every option that cannot be honoured.
    """
    names = [word.rpartition(".")[2] for word in words]
    position = next((index for index, name in enumerate(names) if name in PROGRAMS), None)
    if position is None:
        raise ConfigError(
            f"skyrl verl {' '.join(words)} names none of verl's programs {', '.join(PROGRAMS)}; write e.g. skyrl verl "
            "main_ppo algorithm.adv_estimator=grpo, or skyrl verl before a whole command line"
        )
    program = PROGRAMS[names[position]]
    processes = []
    for name, number in re.findall(r"--(nnodes|nproc[-_]per[-_]node)[= ](\S+)", " ".join(words[:position])):
        key = PROCESSES[name.replace("-", "_")]
        logger.warning("--%s=%s is read as %s=%s", name, number, key, number)
        processes.append(f"{key}={number}")
    return program, translate([*processes, *words[position + 1 :]], program)


def translate(argv: Sequence[str], program: VerlProgram) -> list[str]:
    """Return the options of a program of verl as overrides of its configuration here, in their order.

    Logs a line for each option that is dropped or changed, and for verl's defaults; the alias tables log the others.

    Raises:
        ConfigError: it lists every option that cannot be parsed or honoured.
    """
    overrides: list[str] = []
    problems: dict[str, str] = {}  # by option: the last value counts
    keys: set[str] = set()
    for text in argv:
        if not is_override(text):
            overrides.append(text)  # reported when the overrides are parsed
            continue
        key = text
        try:
            option = parse_override(text)
            key = option.key_or_group
            translated = _translate_option(option, program)
        except ConfigError as error:
            problems[key] = str(error)
            continue
        problems.pop(key, None)
        if translated is not None:
            overrides.append(translated)
            keys |= changed_keys(parse_override(translated), program.schema.fields)
    raise_problems(problems.values())
    for alias in (alias for key, alias in program.schema.aliases.items() if key in keys):
        keys |= {alias.key, *alias.also}
    if "trainer.policy.optimizer_config.num_warmup_steps" in keys:
        keys.add("trainer.policy.optimizer_config.warmup_ratio")  # either sets the warm-up
    of_critic = program.critic_defaults if "trainer.critic.model.path" in keys else {}
    defaults = [f"{key}={show(value)}" for key, value in {**program.defaults, **of_critic}.items() if key not in keys]
    if defaults:
        logger.warning("defaults of verl: %s", " ".join(defaults))
    return [*defaults, *overrides]


def _translate_option(option: Override, program: VerlProgram) -> str | None:
    """Return an override, None if the option has no effect; ConfigError if it cannot be honoured."""
    key, value = option.key_or_group, option.value()
    if option.is_delete():
        return option.input_line
    if problem := _find_problem(key, value, program):
        raise ConfigError(problem)
    if key in program.fixed:
        logger.warning("%s=%s has no effect: %s", key, show(value), program.fixed[key].reason)
        return None
    if key == "hydra.run.dir":
        logger.warning("%s is read as trainer.output_dir=%s", key, show(value))
        return f"trainer.output_dir={str(option.input_line).partition('=')[2]}"  # with its quotes
    if key == "trainer.resume_mode" and isinstance(value, str) and value in RESUME_MODES:
        logger.warning("%s=%s is read as %s=%s", key, value, key, RESUME_MODES[value])
        return f"{key}={RESUME_MODES[value]}"
    return option.input_line


def _find_problem(key: str, value: object, program: VerlProgram) -> str | None:
    """Return a sentence if an option of verl cannot be honoured, with what to do instead."""
    option = f"{key}={show(value)}"
    if key in program.refused:
        return f"{option} is not supported; {program.refused[key]}"
    if key in program.fixed:
        fixed = program.fixed[key]
        is_met = fixed.values is None or any(value == known and type(value) is type(known) for known in fixed.values)
        return None if is_met else f"{option} is not supported: {fixed.reason}; remove it"
    schema = program.schema
    known = (*schema.fields, *schema.aliases, *schema.without_effect, "hydra.run.dir")
    with_keys_below = (*open_fields(schema.fields), *schema.aliases, OPEN_SECTION)
    if key in known or key.startswith(tuple(f"{name}." for name in with_keys_below)):
        return None
    if nearest := get_close_matches(key, [*known, *program.fixed], n=1, cutoff=0.9):
        return f"{option}: there is no key {key}; did you mean {nearest[0]}?"
    return f"{option}: there is no key {key} here; {did_you_mean(key, schema.fields)}"
