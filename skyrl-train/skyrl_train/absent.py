"""Methods and attributes of SkyRL's classes that do not exist here, each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_train.errors import ConfigError

TRAINER_METHODS = {
    "_remove_tail_data": "override get_prompts of the experiment",
    "build_dataloader": "override get_prompts of the experiment",
    "build_models": "override get_model of the experiment",
    "convert_to_training_input": "override build_batch",
    "dump_data": "add a callback",
    "fwd_logprobs_values_reward": "override score",
    "generate": "override generate of the generator",
    "handle_dynamic_sampling": "override rollout",
    "init_weight_sync_state": "override sync_weights",
    "load_checkpoints": "override resume",
    "pad_batch": "override build_batch",
    "run_training": "override update",
    "save_checkpoints": "override save_checkpoint",
    "save_models": "override export",
    "sync_policy_weights_to_inference_engines": "override sync_weights",
    "train_critic_and_policy": "override update",
    "update_ref_with_policy": "add a callback",
}

TRAINER_ATTRIBUTES = {
    "critic_model": "use learner.critic",
    "eval_dataloader": "use eval_dataset",
    "policy_model": "use learner.policy",
    "ref_model": "use learner.ref",
    "train_dataloader": "use train_dataset",
}

EXPERIMENT_METHODS = {
    "_setup_trainer": "override get_model, get_engine, get_generator, get_callbacks or get_trainer",
    "get_colocate_pg": "set trainer.placement",
    "get_inference_client": "override get_engine",
}


CLIENT_METHODS = {
    "chat_completion": "use generate, or an AgentGenerator",
    "completion": "use generate, or an AgentGenerator",
    "pause_generation": "use pause",
    "resume_generation": "use resume",
}
"""Methods of `InferenceEngineClient`."""


def refuse_overrides(cls: type, absent: Mapping[str, str]) -> None:
    """Raise ConfigError for a class that defines one of the `absent` methods, which would never be called."""
    for name, instead in absent.items():
        if hasattr(cls, name):
            raise ConfigError(
                f"{cls.__name__}.{name} would never be called; {instead} instead (docs/guides/coming-from-skyrl.md)"
            )


def describe_missing(owner: object, name: str, absent: Mapping[str, str]) -> str:
    """Return the message of an AttributeError, with what to do instead if the name is one of `absent`."""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in absent:
        message += f", which SkyRL has; {absent[name]} instead (docs/guides/coming-from-skyrl.md)"
    return message
