"""Train and evaluate agents with skyrl-train: `skyrl-agent train task.yaml data.train_data=… key=value`.

The task file sets the keys of `generator` that it knows: `num_trajectories` is `generator.n_samples_per_prompt`,
`max_iterations` is `generator.max_turns`, and so on. All other settings work as in `skyrl train`.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_agent.auto import AutoAgentRunner
from skyrl_agent.config import AgentConfig
from skyrl_agent.loading import load_class
from skyrl_agent.runner import AgentRunner
from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.trajectory import Instance
from skyrl_gym.runtime.text import describe_error
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.base import value_at
from skyrl_train.config.problems import Rule, raise_problems, show
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.dataset.rows import LocatedRow
from skyrl_train.entrypoints.command import parse_cli
from skyrl_train.entrypoints.evaluation import EvaluationExperiment
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.generators.rewards import RewardFunctions
from skyrl_train.inference_engines.base import InferenceEngine, SamplingParams

QUOTED = re.compile(r"(\\*)('|$)")
FROM_TASK_FILE = {
    "generator.max_turns": "max_iterations",
    "generator.max_response_length": "max_response_length",
    "generator.n_rollout_retries": "n_retries",
    "generator.trajectory_timeout_seconds": "trajectory_timeout",
}
"""Settings that an agent reads from the task file, with their names there."""

UNUSED = (
    "generator.batched",
    "generator.use_conversation_multi_turn",
    "generator.append_eos_token_after_stop_str_in_multi_turn",
    "generator.chat_template.name_or_path",
    "generator.chat_template_kwargs",
    "generator.step_wise_trajectories",
    "generator.merge_stepwise_output",
    "generator.inject_context_status",
    "generator.max_input_length",
    "environment.env_class",
    "environment.skyrl_gym",
)
"""Settings for environment rollouts. Agents do not use them."""


def sampling_settings(sampling: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as keys of `generator.sampling_params`."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return {
        "max_generate_length": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        **{name: getattr(sampling, name) for name in names},
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def to_overrides(agent: AgentConfig) -> list[str]:
    """Convert a task file's settings to overrides of skyrl-train's configuration."""
    settings = agent.generator
    generator = {
        **{key: getattr(settings, name) for key, name in FROM_TASK_FILE.items()},
        "generator.n_samples_per_prompt": settings.num_trajectories,
        "generator.eval_n_samples_per_prompt": settings.val_config.num_trajectories,
        "environment.env_class": agent.task.rpartition(".")[2],  # for reports
    }
    for section, is_training in (("sampling_params", True), ("eval_sampling_params", False)):
        sampling = sampling_settings(settings.sampling(is_training=is_training))
        generator |= {f"generator.{section}.{name}": value for name, value in sampling.items()}
    return [f"{key}={_quote(value)}" for key, value in generator.items()]


def _quote(value: Any) -> str:
    """Quote a value for overrides. Their grammar escapes only quotes, and backslashes before a quote."""
    if isinstance(value, list):
        return f"[{','.join(map(_quote, value))}]"
    if isinstance(value, str):
        return "'" + QUOTED.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"
    return "null" if value is None else str(value)


def parse_task(
    task: Path, overrides: Sequence[str], file: Path | None = None, *rules: Rule
) -> tuple[AgentConfig, SkyRLConfig]:
    """Return a task file's settings, and skyrl-train's configuration for it.

    Args:
        task: the task file.
        overrides: skyrl-train settings `key=value`. They override the task file.
        file: a YAML file with more settings. The task file overrides it.
        rules: additional checks of the configuration, e.g. for missing files.

    Raises:
        FileNotFoundError: the task file does not exist.
        ConfigError: settings are invalid, or contradict the task file.
    """
    agent = AgentConfig.load(task)
    if agent.generator.infer_backend != "skyrl-train":
        raise ConfigError(
            f"{task}: generator.infer_backend={agent.generator.infer_backend} must be skyrl-train for this command"
        )
    cfg = parse_cli([*to_overrides(agent), *overrides], file, *rules)
    expected = parse_cli(to_overrides(agent))
    problems = []
    for key in (*FROM_TASK_FILE, *UNUSED):
        if (value := value_at(cfg, key)) != value_at(expected, key):
            name = FROM_TASK_FILE.get(key)
            fix = f"set generator.{name} in {task}" if name else "remove it"
            problems.append(f"{key}={show(value)} has no effect on agents; {fix}")
    raise_problems(problems)
    return agent, cfg


def check_rows(agent: AgentConfig, rows: Iterable[LocatedRow]) -> None:
    """Have the task check rows. DataError names the rows that it rejects."""
    task: type[BaseTask] = load_class(agent.task, BaseTask)
    n_rows, problems = 0, []
    for location, row in rows:
        n_rows += 1
        try:
            instance = Instance.from_row({**row.env_extras, "prompt": []}, location, agent)
            task.check_instance(instance.data, instance.data_source)
        except Exception as error:  # noqa: BLE001, the boundary of a row
            problems.append(f"{location}: {error if isinstance(error, DataError) else describe_error(error)}")
    if problems:
        raise DataError(
            f"{task.__name__} rejects {len(problems)} of {n_rows} rows; the first: {'; '.join(problems[:3])}"
        )


class AgentExp(RLExperiment):
    """Training of an agent."""

    def __init__(self, agent: AgentConfig, cfg: SkyRLConfig) -> None:
        """Create the run folder. ConfigError lists every problem."""
        super().__init__(cfg)
        self.agent = agent

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> AgentRunner:
        runner = AutoAgentRunner.from_task(self.agent, inference_engine_client, tokenizer)
        runner.rewards = RewardFunctions(cfg.generator, runner.encoder)
        return runner

    def check_environments(self, datasets: Sequence[PromptDataset]) -> None:
        """Have the task check every row, including datasets whose rows are checked when they are drawn."""
        for dataset in datasets:
            if not dataset.is_checked:
                dataset.check_drawn = lambda row: check_rows(self.agent, [row])
            check_rows(self.agent, dataset.checked_rows())


class AgentEvaluation(AgentExp, EvaluationExperiment):
    """Evaluation of an agent."""
