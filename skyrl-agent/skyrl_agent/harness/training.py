"""Train and evaluate the agent of a harness: `skyrl-agent train pi data.train_data=harbor:tasks key=value`.

The agents of verifiers environments are a harness, too: `skyrl-agent train verifiers data.train_data=verifiers:my-env`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_agent.harness.agent import HarnessAgent, HarnessGenerator, TaskAgent
from skyrl_agent.harness.config import VERIFIERS, HarnessConfig
from skyrl_agent.harness.harbor import HarborTask, harbor_rows
from skyrl_gym.adapters.verifiers import rows as verifiers_rows
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.base import value_at
from skyrl_train.config.problems import raise_problems, show
from skyrl_train.dataset.files import write_temporary
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.dataset.rows import LocatedRow
from skyrl_train.entrypoints.command import parse_cli
from skyrl_train.entrypoints.evaluation import EvaluationExperiment
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.preflight import find_missing
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.inference_engines.base import InferenceEngine

FROM_HARNESS_FILE = {"generator.max_turns": "max_turns", "generator.trajectory_timeout_seconds": "trajectory_timeout"}
"""Settings that a harness file sets, with their names there."""

UNUSED = (
    "generator.batched",
    "generator.step_wise_trajectories",
    "generator.inject_context_status",
    "generator.max_response_length",
    "generator.use_conversation_multi_turn",
    "environment.env_class",
    "environment.skyrl_gym",
)
"""Settings for environment rollouts. Agents do not use them."""


def parse_harness(
    source: Path, overrides: Sequence[str], file: Path | None = None, *, trains: bool
) -> tuple[HarnessConfig, SkyRLConfig]:
    """Return a harness and skyrl-train's configuration for it.

    Sources `harbor:PATH` and `verifiers:ENVIRONMENT` become files of rows.

    Args:
        source: a harness file, or the name of a known agent.
        overrides: skyrl-train settings `key=value`.
        file: a YAML file with more settings.
        trains: False for an evaluation.

    Raises:
        ConfigError: settings are invalid, or contradict the harness file.
        DataError: a Harbor task or an environment cannot be used.
    """
    harness = HarnessConfig.load(source)
    own = [f"{key}={getattr(harness, name)}" for key, name in FROM_HARNESS_FILE.items()]
    own.append("environment.env_class=harness")  # for reports
    cfg, expected = parse_cli([*own, *overrides], file), parse_cli(own)
    problems = []
    settings: Mapping[str, Any] | None = None
    if harness.harness == VERIFIERS:
        settings = cfg.environment.skyrl_gym.env_config(VERIFIERS)
        gym = expected.environment.skyrl_gym.model_copy(update={VERIFIERS: settings})
        expected = expected.model_copy(
            update={"environment": expected.environment.model_copy(update={"skyrl_gym": gym})}
        )
    for key in (*FROM_HARNESS_FILE, *UNUSED):
        if (value := value_at(cfg, key)) != value_at(expected, key):
            fix = "set it in the harness file" if key in FROM_HARNESS_FILE else "remove it"
            problems.append(f"{key}={show(value)} has no effect on a harness; {fix}")
    data = {
        key: [_to_file(source, harness, settings) for source in getattr(cfg.data, key)]
        for key in ("train_data", "val_data")
    }
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update=data)})
    raise_problems([*problems, *find_missing(cfg, trains=trains)])
    return harness, cfg


def _to_file(source: str, harness: HarnessConfig, settings: Mapping[str, Any] | None) -> str:
    """Return the path of a source's rows. Rows of tasks are written to a file named by their hash."""
    kind, _, name = source.partition(":")
    if kind == "harbor":
        rows = _harbor_rows(source, Path(name).expanduser(), harness)
    elif kind == VERIFIERS:
        if settings is None:
            raise DataError(f"{source} has tasks of verifiers, which need skyrl-agent train verifiers")
        try:
            arguments = {key: settings.get(key) for key in ("args", "env")}
            rows = list(verifiers_rows(name, arguments["args"], env=arguments["env"], is_chat=False))
        except (ImportError, ValueError) as error:
            raise DataError(f"{source}: {error}") from error
    else:
        return source
    return write_temporary(rows)


def _harbor_rows(source: str, folder: Path, harness: HarnessConfig) -> list[dict[str, Any]]:
    rows, problems = harbor_rows(folder), []
    for row in rows:
        try:
            HarborTask.read(Path(row["harbor"])).check(harness.workspace, harness.pass_env)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError(f"{len(problems)} of {len(rows)} tasks of {source} cannot be used; {'; '.join(problems[:3])}")
    return rows


class HarnessExp(RLExperiment):
    """Training of the agent of a harness."""

    def __init__(self, harness: HarnessConfig, cfg: SkyRLConfig) -> None:
        """Create the run folder. ConfigError lists every problem."""
        self.agent = _create_agent(harness, cfg)
        super().__init__(cfg)

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> HarnessGenerator:
        return HarnessGenerator(self.agent, cfg.generator, inference_engine_client, tokenizer)

    def check_environments(self, datasets: Sequence[PromptDataset]) -> None:
        """Check every row, up front or when it is drawn. Build images."""
        for dataset in datasets:
            if not dataset.is_checked:
                dataset.check_drawn = lambda row: check_tasks(self.agent, [row])
            check_tasks(self.agent, dataset.checked_rows())


class HarnessEvaluation(HarnessExp, EvaluationExperiment):
    """Evaluation of the agent of a harness."""


def check_tasks(agent: TaskAgent, rows: Iterable[LocatedRow]) -> None:
    """Check that rows are tasks of an agent. DataError names the bad rows."""
    problems = []
    for location, row in rows:
        try:
            agent.check_row(row)
        except DataError as error:
            problems.append(f"{location}: {error}")
    if problems:
        raise DataError(f"{len(problems)} rows are not tasks for this harness; the first: {'; '.join(problems[:3])}")


def _create_agent(harness: HarnessConfig, cfg: SkyRLConfig) -> TaskAgent:
    if harness.harness != VERIFIERS:
        return HarnessAgent(harness)
    try:
        from skyrl_agent.harness.verifiers import VerifiersAgent
    except ImportError as error:
        raise ConfigError(f"harness={VERIFIERS}: {error}") from error
    return VerifiersAgent(harness, cfg.environment.skyrl_gym.env_config(VERIFIERS))
