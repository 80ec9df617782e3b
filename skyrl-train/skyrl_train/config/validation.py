"""The rules that tie several keys together: each is a small function that yields one sentence per problem.

The type and the range of a single key belong to its field. Rules of `trainer.algorithm.*` are in `algorithm_rules`;
those that need the registered functions are in `skyrl_train.algorithms.rules`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

from skyrl_train.config.algorithm_rules import ALGORITHM_RULES, ALGORITHM_WARNINGS
from skyrl_train.config.problems import Rule, show
from skyrl_train.config.root import SkyRLConfig
from skyrl_train.config.wandb_login import wandb_login_problem


def mini_batches_divide_batch(cfg: SkyRLConfig) -> Iterator[str]:
    """Every mini-batch of a step has the same number of prompts."""
    batch = cfg.trainer.train_batch_size
    for key, mini in _mini_batches(cfg).values():
        if batch % mini:
            yield f"{key}={mini} must divide trainer.train_batch_size={batch}; try {_around(mini, _divisors(batch))}"


def mini_batches_fill_workers(cfg: SkyRLConfig, policy_dp: int, critic_dp: int) -> Iterator[str]:
    """Every data-parallel worker gets the same, non-zero number of trajectories; holds by itself for one worker."""
    batch, n_samples = cfg.trainer.train_batch_size, cfg.generator.n_samples_per_prompt
    n_workers = {"policy": policy_dp, "critic": critic_dp}
    for role, (key, mini) in _mini_batches(cfg).items():
        n = n_workers[role]
        if mini * n_samples % n:
            splits = [size for size in _divisors(batch) if size * n_samples % n == 0]
            prompts = f"{key}={_around(mini, splits)}" if splits else ""
            samples = f"generator.n_samples_per_prompt={_next_multiple(n_samples, n)}"
            yield (
                f"{key}={mini} times generator.n_samples_per_prompt={n_samples} is {mini * n_samples} trajectories, "
                f"which do not split evenly over {n} {role} workers; "
                f"try {' or '.join(filter(None, [prompts, samples]))}"
            )


def _mini_batches(cfg: SkyRLConfig) -> dict[str, tuple[str, int]]:
    """Key and size of the mini-batches of each model that is trained."""
    sizes = {"policy": ("trainer.policy_mini_batch_size", cfg.trainer.policy_mini_batch_size)}
    if cfg.trainer.critic.model.path is not None:
        sizes["critic"] = ("trainer.critic_mini_batch_size", cfg.trainer.critic_mini_batch_size)
    return sizes


def sequence_norm_has_a_length(cfg: SkyRLConfig) -> Iterator[str]:
    """`seq_mean_token_sum_norm` divides by a constant that must be known."""
    algorithm = cfg.trainer.algorithm
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and algorithm.max_seq_len is None:
        yield (
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by trainer.algorithm.max_seq_len=null, "
            f"which cannot be worked out when generator.max_turns={cfg.generator.max_turns} and "
            "generator.max_input_length=null; set trainer.algorithm.max_seq_len"
        )


def training_temperature_is_positive(cfg: SkyRLConfig) -> Iterator[str]:
    """Greedy rollouts give no temperature to divide the logits by."""
    if cfg.trainer.algorithm.temperature == 0:
        yield (
            "generator.sampling_params.temperature=0.0 (greedy) cannot divide the logits in training, and "
            "trainer.algorithm.temperature=null takes it; try generator.sampling_params.temperature=1.0, or set "
            "trainer.algorithm.temperature=1.0 if rollouts shall be greedy"
        )


def input_length_covers_prompts(cfg: SkyRLConfig) -> Iterator[str]:
    """A prompt that the dataset keeps must fit the first turn; in one turn nothing longer ever comes."""
    n_prompt, n_input = cfg.trainer.max_prompt_length, cfg.generator.max_input_length
    if n_input is None:
        return
    if cfg.generator.max_turns == 1 and n_input != n_prompt:
        yield (
            f"generator.max_input_length={n_input} must equal trainer.max_prompt_length={n_prompt} when "
            f"generator.max_turns=1; try generator.max_input_length={n_prompt}, or null"
        )
    elif n_input < n_prompt:
        yield (
            f"generator.max_input_length={n_input} must be at least trainer.max_prompt_length={n_prompt}; "
            f"try generator.max_input_length={n_prompt} or more, or null for the model's context length"
        )


def engines_run_here(cfg: SkyRLConfig) -> Iterator[str]:
    """There is no way to reach an engine that another program started."""
    if not cfg.generator.run_engines_locally:
        yield (
            "generator.run_engines_locally=false asks for engines that another program started, which this version "
            "does not reach; set generator.run_engines_locally=true"
        )


def evaluation_has_prompts(cfg: SkyRLConfig) -> Iterator[str]:
    """Evaluation needs prompts, unless it is off."""
    if not cfg.data.val_data and cfg.trainer.eval_interval > 0:
        yield (
            f"data.val_data=[] leaves nothing to evaluate every trainer.eval_interval={cfg.trainer.eval_interval} "
            "steps; set data.val_data or trainer.eval_interval=-1"
        )


def training_has_prompts(cfg: SkyRLConfig) -> Iterator[str]:
    """Training needs prompts."""
    if not cfg.data.train_data:
        yield "data.train_data=[] leaves nothing to train on; set data.train_data=[<file or dataset name>]"


def resume_path_is_a_checkpoint(cfg: SkyRLConfig) -> Iterator[str]:
    """`resume_mode=from_path` names one checkpoint folder."""
    if cfg.trainer.resume_mode != "from_path":
        return
    path = cfg.trainer.resume_path
    if path is None:
        yield (
            "trainer.resume_mode=from_path needs trainer.resume_path=null to be a folder ending in global_step_<N>; "
            "set it, or trainer.resume_mode=latest"
        )
    elif not re.search(r"(^|/)global_step_\d+/?$", path):
        yield (
            f"trainer.resume_path={show(path)} must end in global_step_<N>; "
            f"try trainer.resume_path={path.rstrip('/')}/global_step_10, or trainer.resume_mode=latest"
        )


def resume_path_is_read(cfg: SkyRLConfig) -> Iterator[str]:
    """A path without its mode does nothing."""
    if cfg.trainer.resume_path is not None and cfg.trainer.resume_mode != "from_path":
        yield (
            f"trainer.resume_path={show(cfg.trainer.resume_path)} is not read when "
            f"trainer.resume_mode={cfg.trainer.resume_mode}; set trainer.resume_mode=from_path"
        )


def wandb_has_a_key(cfg: SkyRLConfig) -> Iterator[str]:
    """Weights & Biases refuses runs without a login, which would otherwise be seen only once the models have loaded."""
    problem = wandb_login_problem(os.environ) if "wandb" in cfg.trainer.logger else None
    if problem:
        yield problem


RULES: tuple[Rule, ...] = (
    training_has_prompts,
    evaluation_has_prompts,
    mini_batches_divide_batch,
    sequence_norm_has_a_length,
    training_temperature_is_positive,
    input_length_covers_prompts,
    engines_run_here,
    resume_path_is_a_checkpoint,
    *ALGORITHM_RULES,
)
"""Rules that read the configuration alone."""

MACHINE_RULES: tuple[Rule, ...] = (wandb_has_a_key,)
"""Rules that read the machine too: only a run checks them, a report about a finished run does not."""

WARNINGS: tuple[Rule, ...] = (*ALGORITHM_WARNINGS, resume_path_is_read)
"""What is allowed, but most likely not meant."""


def find_problems(cfg: SkyRLConfig, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """The sentences of every rule that a configuration breaks."""
    return [sentence for rule in rules for sentence in rule(cfg)]


def find_warnings(cfg: SkyRLConfig) -> list[str]:
    """The sentences of every warning that a configuration gives rise to."""
    return find_problems(cfg, WARNINGS)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _around(value: int, choices: list[int]) -> str:
    """The nearest choices below and above a value, e.g. "32 or 64"."""
    below = [choice for choice in choices if choice < value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return " or ".join(str(choice) for choice in below + above)


def _next_multiple(value: int, step: int) -> int:
    return math.ceil(value / step) * step
