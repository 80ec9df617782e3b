"""Rules that involve several keys. Each is a function that yields one sentence per problem.

The type and range of a single key belong to its field. Rules about the registered estimator and policy loss are in
`skyrl_train.algorithms.rules`.
"""

from skyrl_train.config.base import Section
from skyrl_train.config.problems import Rule
from skyrl_train.config.rules import algorithm, data, engine, placement, run

RUN_RULES: tuple[Rule, ...] = (
    placement.launcher_starts_every_process,
    placement.strategy_fits_the_models,
    placement.strategy_can_save_memory,
    placement.memory_settings_fit_the_ranks,
    run.optimizers_can_learn,
    run.adapters_are_possible,
    run.bases_can_be_quantized,
    run.weights_can_be_short,
    run.names_are_folders,
    data.sources_can_be_read,
    run.resume_path_is_a_checkpoint,
    run.uploads_have_files,
    run.wandb_settings_have_a_run,
)
"""Rules of every kind of run."""

RULES: tuple[Rule, ...] = (
    data.custom_dataset_is_complete,
    data.environment_plays_as_configured,
    algorithm.mini_batches_divide_batch,
    algorithm.defaults_can_be_derived,
    *RUN_RULES,
    engine.lengths_are_ordered,
    engine.conversation_has_one_mode,
    placement.devices_can_be_shared,
    placement.idle_memory_is_shared,
    engine.weights_have_a_transport,
    engine.engines_have_devices,
    engine.engine_fits_its_devices,
    engine.servers_can_be_used,
    engine.sampling_has_log_probs,
    engine.engine_has_its_options,
    engine.experts_can_be_replayed,
    algorithm.reference_is_a_second_model,
    algorithm.filter_has_a_group,
    algorithm.kl_terms_are_used,
    algorithm.bounds_leave_room,
)
"""Rules that read only the configuration."""

RUN_MACHINE_RULES: tuple[Rule, ...] = (
    placement.packages_are_installed,
    placement.sharding_fits_ranks,
    run.wandb_can_start,
)
MACHINE_RULES = (engine.engine_is_installed, *RUN_MACHINE_RULES)
"""Rules that also inspect the machine. Checked before a run, but not for a report about a finished run."""

RUN_WARNINGS: tuple[Rule, ...] = (run.settings_have_an_effect, data.sources_are_unusual, placement.devices_are_used)
WARNINGS: tuple[Rule, ...] = (
    algorithm.policy_learns_from_rewards,
    *RUN_WARNINGS,
    engine.engines_use_all_devices,
    engine.sampling_is_unusual,
    algorithm.coefficients_are_unusual,
)
"""Warnings about settings that are allowed but probably a mistake."""


def find_problems(cfg: Section, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """Return a sentence for each problem that the rules find."""
    return [sentence for rule in rules for sentence in rule(cfg)]
