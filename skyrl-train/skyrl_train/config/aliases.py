"""The one table of other spellings: SkyRL's in other versions, and verl's, each with the key that stands for it here.

Only keys that mean the same are listed. A value map translates values whose spelling differs too; values that it does
not mention pass as they are, and a value that it maps to None leaves the key alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.config.problems import FIELDS, show

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alias:
    """The key that stands for another spelling, and its value map."""

    key: str
    values: Mapping[Any, Any] = field(default_factory=dict)

    def translate(self, value: Any) -> Any:
        """The value as it is spelt here; None where the key stays as it is."""
        try:
            return self.values.get(value, value)
        except TypeError:  # lists and mappings have no spelling
            return value


SKYRL = {
    "generator.inference_engine.backend": Alias("generator.backend"),
    "generator.inference_engine.run_engines_locally": Alias("generator.run_engines_locally"),
    "generator.inference_engine.num_engines": Alias("generator.num_inference_engines"),
    "generator.inference_engine.tensor_parallel_size": Alias("generator.inference_engine_tensor_parallel_size"),
    "generator.inference_engine.weight_sync_backend": Alias("generator.weight_sync_backend"),
    "generator.inference_engine.async_engine": Alias("generator.async_engine"),
    "generator.inference_engine.gpu_memory_utilization": Alias("generator.gpu_memory_utilization"),
    "generator.inference_engine.max_num_seqs": Alias("generator.max_num_seqs"),
    "generator.inference_engine.enforce_eager": Alias("generator.enforce_eager"),
    "trainer.algorithm.use_kl_estimator_k3": Alias("trainer.algorithm.kl_estimator_type", {True: "k3", False: None}),
    "trainer.algorithm.use_abs_kl": Alias("trainer.algorithm.kl_estimator_type", {True: "abs", False: None}),
}

VERL = {
    "data.train_files": Alias("data.train_data"),
    "data.val_files": Alias("data.val_data"),
    "data.train_batch_size": Alias("trainer.train_batch_size"),
    "data.val_batch_size": Alias("trainer.eval_batch_size"),
    "data.max_prompt_length": Alias("trainer.max_prompt_length"),
    "data.max_response_length": Alias("generator.sampling_params.max_generate_length"),
    "algorithm.adv_estimator": Alias("trainer.algorithm.advantage_estimator", {"reinforce_plus_plus": "reinforce++"}),
    "algorithm.norm_adv_by_std_in_grpo": Alias("trainer.algorithm.grpo_norm_by_std"),
    "actor_rollout_ref.model.path": Alias("trainer.policy.model.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Alias("trainer.gradient_checkpointing"),
    "actor_rollout_ref.actor.strategy": Alias("trainer.strategy"),
    "actor_rollout_ref.actor.optim.lr": Alias("trainer.policy.optimizer_config.lr"),
    "actor_rollout_ref.actor.optim.weight_decay": Alias("trainer.policy.optimizer_config.weight_decay"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": Alias("trainer.policy.optimizer_config.num_warmup_steps"),
    "actor_rollout_ref.actor.grad_clip": Alias("trainer.policy.optimizer_config.max_grad_norm"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Alias("trainer.policy_mini_batch_size"),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": Alias("trainer.micro_train_batch_size_per_gpu"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": Alias("trainer.max_tokens_per_microbatch"),
    "actor_rollout_ref.actor.ppo_epochs": Alias("trainer.update_epochs_per_batch"),
    "actor_rollout_ref.actor.clip_ratio_low": Alias("trainer.algorithm.eps_clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": Alias("trainer.algorithm.eps_clip_high"),
    "actor_rollout_ref.actor.use_kl_loss": Alias("trainer.algorithm.use_kl_loss"),
    "actor_rollout_ref.actor.kl_loss_coef": Alias("trainer.algorithm.kl_loss_coef"),
    "actor_rollout_ref.actor.kl_loss_type": Alias(
        "trainer.algorithm.kl_estimator_type", {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    ),
    "actor_rollout_ref.actor.loss_agg_mode": Alias(
        "trainer.algorithm.loss_reduction",
        {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"},
    ),
    "actor_rollout_ref.rollout.name": Alias("generator.backend"),
    "actor_rollout_ref.rollout.n": Alias("generator.n_samples_per_prompt"),
    "actor_rollout_ref.rollout.temperature": Alias("generator.sampling_params.temperature"),
    "actor_rollout_ref.rollout.top_p": Alias("generator.sampling_params.top_p"),
    "actor_rollout_ref.rollout.top_k": Alias("generator.sampling_params.top_k"),
    "actor_rollout_ref.rollout.response_length": Alias("generator.sampling_params.max_generate_length"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": Alias("generator.gpu_memory_utilization"),
    "actor_rollout_ref.rollout.max_num_seqs": Alias("generator.max_num_seqs"),
    "actor_rollout_ref.rollout.enforce_eager": Alias("generator.enforce_eager"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": Alias("generator.inference_engine_tensor_parallel_size"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": Alias("trainer.micro_forward_batch_size_per_gpu"),
    "actor_rollout_ref.rollout.val_kwargs.n": Alias("generator.eval_n_samples_per_prompt"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": Alias("generator.eval_sampling_params.temperature"),
    "actor_rollout_ref.rollout.val_kwargs.top_p": Alias("generator.eval_sampling_params.top_p"),
    "actor_rollout_ref.rollout.val_kwargs.top_k": Alias("generator.eval_sampling_params.top_k"),
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


def apply_aliases(tree: dict[str, Any]) -> list[str]:
    """Rename the other spellings inside a nested dict, in place, with a log line for each.

    A composed configuration holds a value under every key, so the other spelling wins over a value that is the default;
    it is a problem, and a returned sentence, when both were set and differ.
    """
    problems = []
    for old, alias in ALIASES.items():
        found, value = _pop(tree, old.split("."))
        new_value = alias.translate(value)
        if not found or (new_value is None and value is not None):
            continue
        default = FIELDS[alias.key].get_default()
        current = _get(tree, alias.key.split("."), default)
        if current not in (default, new_value):
            problems.append(
                f"{old}={show(value)} means {alias.key}={show(new_value)}, but {alias.key}={show(current)} was set "
                f"too; remove one of them"
            )
            continue
        logger.warning("%s=%s is read as %s=%s", old, show(value), alias.key, show(new_value))
        _put(tree, alias.key.split("."), new_value)
    return problems


def _pop(tree: dict[str, Any], path: list[str]) -> tuple[bool, Any]:
    """Take a value out of nested dicts, with the dicts that this empties; (False, None) where it is not there."""
    name, *rest = path
    if name not in tree:
        return False, None
    if not rest:
        return True, tree.pop(name)
    inner = tree[name]
    if not isinstance(inner, dict):
        return False, None
    result = _pop(inner, rest)
    if result[0] and not inner:
        del tree[name]
    return result


def _get(tree: Any, path: list[str], default: object) -> Any:
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return default
        tree = tree[name]
    return tree


def _put(tree: dict[str, Any], path: list[str], value: object) -> None:
    *parents, name = path
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = value
