"""Rules that involve several keys. Each is a small function that yields one sentence per problem.

The type and range of a single key belong to its field. Rules about the registered estimator and policy loss are in
`skyrl_train.algorithms.rules`.
"""

from __future__ import annotations

from skyrl_train.config.base import Section
from skyrl_train.config.problems import Rule
from skyrl_train.config.rules.algorithm import (
    bounds_leave_room,
    coefficients_are_unusual,
    distillation_has_a_teacher,
    filter_has_a_group,
    intervals_are_not_empty,
    kl_in_reward_is_possible,
    kl_settings_have_a_kl_term,
    loss_learns_from_rewards,
    mini_batches_divide_batch,
    reference_can_follow,
    rewards_are_compared,
    sequence_norm_has_a_length,
    training_temperature_is_positive,
)
from skyrl_train.config.rules.data import (
    custom_dataset_is_complete,
    custom_reward_function_is_called,
    evaluation_has_prompts,
    interpreter_has_processes,
    training_data_is_read_once,
    training_has_prompts,
    validation_data_is_read_once,
)
from skyrl_train.config.rules.engine import (
    conversation_has_one_mode,
    engine_fits_its_devices,
    engine_has_its_options,
    engine_is_installed,
    engines_have_devices,
    engines_use_all_devices,
    input_length_covers_prompts,
    sampling_is_unusual,
    sampling_lengths_are_ordered,
    servers_have_addresses,
    weights_have_a_transport,
)
from skyrl_train.config.rules.placement import (
    asynchronous_engine_has_its_own_devices,
    asynchronous_settings_have_an_effect,
    colocation_has_an_effect,
    critic_has_the_size_of_its_devices,
    critic_is_placed_if_there_is_one,
    idle_memory_is_shared,
    launcher_starts_every_process,
    megatron_has_its_models,
    megatron_has_ranks,
    megatron_is_installed,
    ray_is_installed,
    sharding_fits_ranks,
    strategy_has_its_settings,
)
from skyrl_train.config.rules.run import (
    adapters_are_on,
    adapters_are_possible,
    checkpoints_are_uploaded,
    names_are_folders,
    resume_path_is_a_checkpoint,
    resume_path_is_read,
    rollouts_are_scored_exactly,
    settings_have_an_effect,
    trajectories_are_uploaded,
    wandb_can_start,
    wandb_settings_have_a_run,
    warmup_is_set_once,
    weight_decay_shrinks_weights,
)

RULES: tuple[Rule, ...] = (
    training_has_prompts,
    custom_dataset_is_complete,
    custom_reward_function_is_called,
    mini_batches_divide_batch,
    sequence_norm_has_a_length,
    training_temperature_is_positive,
    input_length_covers_prompts,
    conversation_has_one_mode,
    launcher_starts_every_process,
    asynchronous_engine_has_its_own_devices,
    critic_has_the_size_of_its_devices,
    idle_memory_is_shared,
    strategy_has_its_settings,
    megatron_has_its_models,
    weights_have_a_transport,
    engines_have_devices,
    engine_fits_its_devices,
    servers_have_addresses,
    engine_has_its_options,
    sampling_lengths_are_ordered,
    warmup_is_set_once,
    weight_decay_shrinks_weights,
    adapters_are_possible,
    rollouts_are_scored_exactly,
    interpreter_has_processes,
    names_are_folders,
    validation_data_is_read_once,
    resume_path_is_a_checkpoint,
    checkpoints_are_uploaded,
    trajectories_are_uploaded,
    wandb_settings_have_a_run,
    distillation_has_a_teacher,
    reference_can_follow,
    filter_has_a_group,
    kl_in_reward_is_possible,
    kl_settings_have_a_kl_term,
    intervals_are_not_empty,
    bounds_leave_room,
)
"""Rules that read only the configuration."""

MACHINE_RULES: tuple[Rule, ...] = (
    engine_is_installed,
    ray_is_installed,
    megatron_is_installed,
    sharding_fits_ranks,
    wandb_can_start,
)
"""Rules that also inspect the machine. Checked before a run, but not for a report about a finished run."""

WARNINGS: tuple[Rule, ...] = (
    rewards_are_compared,
    loss_learns_from_rewards,
    adapters_are_on,
    resume_path_is_read,
    training_data_is_read_once,
    evaluation_has_prompts,
    engines_use_all_devices,
    critic_is_placed_if_there_is_one,
    colocation_has_an_effect,
    asynchronous_settings_have_an_effect,
    megatron_has_ranks,
    settings_have_an_effect,
    sampling_is_unusual,
    coefficients_are_unusual,
)
"""Warnings about settings that are allowed but probably a mistake."""


def find_problems(cfg: Section, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """Return a sentence for each problem that the rules find."""
    return [sentence for rule in rules for sentence in rule(cfg)]
