"""The models of a run: how each is loaded, and the learner that trains them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms.contract import resolve_policy_loss
from skyrl_train.algorithms.objectives import Objective, PolicyObjective, ValueObjective
from skyrl_train.algorithms.rules import reads_reference
from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import ConfigError
from skyrl_train.launch.launcher import Launcher
from skyrl_train.launch.specs import model_spec, optimizer_spec
from skyrl_train.learner import Learner
from skyrl_train.models.loading import (
    CRITIC_PATH,
    POLICY_PATH,
    REF_PATH,
    check_same_vocabulary,
    check_vocabulary_size,
    default_device,
    load_model,
    load_value_model,
)
from skyrl_train.models.lora import add_adapter
from skyrl_train.types.specs import LoraSpec, OptimizerSpec, Role, lora_spec
from skyrl_train.workers.group import WorkerGroup

LORA = "trainer.policy.model.lora"

GetModel = Callable[[str, str], PreTrainedModel]
"""Loads the causal language model at a path, the value of a configuration key."""


def load_causal_model(cfg: SkyRLConfig, path: str, key: str) -> PreTrainedModel:
    """Load the causal language model at `path`, the value of the configuration key `key`."""
    return load_model(
        path,
        dtype=getattr(torch, cfg.trainer.policy.model.dtype),
        device=default_device(),
        gradient_checkpointing=cfg.trainer.gradient_checkpointing,
        key=key,
    )


def load_critic_model(cfg: SkyRLConfig, path: str) -> PreTrainedModel:
    """Load the critic's model."""
    return load_value_model(
        path,
        dtype=getattr(torch, cfg.trainer.critic.model.dtype),
        device=default_device(),
        gradient_checkpointing=cfg.trainer.gradient_checkpointing,
    )


def load_policy_copy(cfg: SkyRLConfig, get_model: GetModel) -> PreTrainedModel:
    """Load the policy, with its adapter if it has one, for an engine in another process."""
    section = cfg.trainer.policy.model
    model = get_model(section.path, POLICY_PATH)
    lora = lora_spec(section, LORA, cfg.trainer.seed)
    if lora is not None:
        add_adapter(model, lora)
    return model


async def load_learner(
    root: SkyRLConfig,
    launcher: Launcher,
    tokenizer: PreTrainedTokenizerBase,
    get_model: GetModel,
    get_value_model: Callable[[str], PreTrainedModel],
    total_steps: int,
) -> Learner:
    """Load the policy, and the critic and the reference if the configuration uses them.

    Raises:
        ConfigError: there is no model at a path, or the models do not fit together.
    """
    cfg = root.trainer
    n_prompts = total_steps * cfg.train_batch_size * cfg.update_epochs_per_batch

    async def load(
        role: Role,
        model: Callable[[], PreTrainedModel],
        objective: Objective | None = None,
        optimizer: OptimizerSpec | None = None,
        lora: LoraSpec | None = None,
    ) -> WorkerGroup:
        spec = model_spec(
            role,
            model,
            tokenizer.save_pretrained,
            cfg,
            cfg.algorithm.temperature,
            optimizer=optimizer,
            lora=lora,
            sharding={"policy": cfg.policy, "critic": cfg.critic, "ref": cfg.ref}[role],
            eos_ids=[tokenizer.eos_token_id, *root.generator.sampling_params.stop_token_ids],
        )
        return await launcher.load(spec, objective)

    policy = await load(
        "policy",
        partial(get_model, cfg.policy.model.path, POLICY_PATH),
        PolicyObjective(resolve_policy_loss(cfg.algorithm), cfg.algorithm),
        optimizer_spec(
            cfg.policy.optimizer_config, "trainer.policy.optimizer_config", n_prompts // cfg.policy_mini_batch_size
        ),
        lora_spec(cfg.policy.model, LORA, cfg.seed),
    )
    n_embeddings = policy.facts.n_embeddings
    critic, ref, reference_sync = None, None, None
    if cfg.critic.model.path is not None:
        check_same_vocabulary(cfg.critic.model.path, CRITIC_PATH, tokenizer)
        critic = await load(
            "critic",
            partial(get_value_model, cfg.critic.model.path),
            ValueObjective(cfg.algorithm.value_clip),
            optimizer_spec(
                cfg.critic.optimizer_config,
                "trainer.critic.optimizer_config",
                n_prompts // cfg.critic_mini_batch_size,
            ),
            lora_spec(cfg.critic.model, "trainer.critic.model.lora", cfg.seed),
        )
        check_vocabulary_size(critic.facts.n_embeddings, CRITIC_PATH, cfg.critic.model.path, n_embeddings)
    if reads_reference(cfg.algorithm) and cfg.policy_is_reference:
        ref = policy
    elif reads_reference(cfg.algorithm):
        check_same_vocabulary(cfg.ref.model.path, REF_PATH, tokenizer)
        lora = lora_spec(cfg.policy.model, LORA, cfg.seed)
        lora = lora if cfg.ref.shares_adapter_with(cfg.policy.model) else None
        ref = await load("ref", partial(get_model, cfg.ref.model.path, REF_PATH), lora=lora)
        check_vocabulary_size(ref.facts.n_embeddings, REF_PATH, cfg.ref.model.path, n_embeddings)
        if cfg.update_ref_every_epoch:
            if await policy.tensor_specs() != await ref.tensor_specs():
                raise ConfigError(
                    "trainer.update_ref_every_epoch=true makes the policy the reference, and "
                    "trainer.ref.model.path has another architecture; set trainer.update_ref_every_epoch=false, "
                    "or omit trainer.ref.model.path"
                )
            reference_sync = launcher.weight_sync(policy, {"the reference": ref})
    estimator = advantage_estimator(cfg.algorithm.advantage_estimator)
    return Learner(cfg, estimator, policy=policy, critic=critic, ref=ref, reference_sync=reference_sync)
