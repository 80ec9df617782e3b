"""Evaluation without training.

It plays the validation prompts like an evaluation during training, with `generator.eval_sampling_params` and
`generator.eval_n_samples_per_prompt`. It writes the same files, to `evals/eval_only/` in the run folder.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext

from skyrl_gym.benchmarks.scores import format_scores, score_benchmarks
from skyrl_report.page import own_command, report_run
from skyrl_report.remote import STORAGE_ERRORS
from skyrl_report.run_folder import AGGREGATED
from skyrl_train.config import changed_settings, to_yaml
from skyrl_train.dataset.files import open_source
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.entrypoints.engine import sync_options
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.prompts import open_eval_prompts
from skyrl_train.errors import ConfigError, DataError, EnvError
from skyrl_train.evaluate import evaluate
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.remote_storage import open_evaluations, upload_evaluation

logger = logging.getLogger(__name__)


class EvaluationExperiment(RLExperiment):
    """An evaluation without training. It has the `get_*` methods of a training run."""

    trains = False

    def run(self) -> None:
        """Evaluate, print the metrics and write the trajectories.

        Raises:
            ConfigError: the run folder belongs to a training run, or to an evaluation with other settings.
        """
        with self.running():
            folder, settings = self.run_folder, self.cfg.model_dump(mode="json")
            choose = "set trainer.run_name to another name"
            if folder.has_training:
                raise ConfigError(
                    f"{folder.path} has a training run, whose metrics an evaluation would replace; {choose}"
                )
            if folder.evaluation_results.exists():
                _, before = folder.read_config()
                if changes := changed_settings(before, settings):
                    raise ConfigError(f"{folder.path} has an evaluation with other settings ({changes[0]}); {choose}")
            folder.evals(None).mkdir(parents=True, exist_ok=True)  # marks the folder as an evaluation's
            folder.config_yaml.write_text(to_yaml(self.cfg), encoding="utf-8")
            metrics = asyncio.run(self.evaluate())
            report_run(folder, command=own_command())
            self.print_results(metrics)

    def print_results(self, metrics: Mapping[str, float]) -> None:
        """Print the metrics."""
        for name, value in sorted(metrics.items()):
            print(f"{name:<50} {value:.6g}")

    def get_eval_dataset(self) -> PromptDataset:
        """Load the prompts to evaluate on."""
        dataset = open_eval_prompts(self.cfg, self.tokenizer)
        if dataset is None:
            raise ConfigError("data.val_data=[] leaves nothing to evaluate; set data.val_data=[<file or dataset name>]")
        return dataset

    async def evaluate(self) -> dict[str, float]:
        """Return the metrics on the validation prompts. Raise EnvError if every rollout failed."""
        self.check_data()
        dataset = self.get_eval_dataset()
        self.check_environments([dataset])
        generator_cfg = self.cfg.generator
        is_local = generator_cfg.run_engines_locally
        launching = self.launching(self.plan, [], sync_options(generator_cfg)) if is_local else nullcontext()
        folder, chat = self.run_folder.evals(None), ChatEncoder(self.tokenizer)
        async with launching, self.playing(None) as (_, generator):
            with self.open_tracker() as tracker:
                metrics, trajectories = await evaluate(dataset, generator, self.cfg, 0, folder, chat)
                tracker.log(metrics, 0)
        logger.info("%d trajectories are in %s", len(trajectories), folder)
        failed = not any(t.is_valid for t in trajectories)
        if failed:
            self.run_folder.evaluation_results.unlink()  # the next try may change settings
        trainer = self.cfg.trainer
        if (remote := open_evaluations(trainer.remote_trajectory_url, trainer.run_name)) is not None:
            try:
                await asyncio.to_thread(upload_evaluation, folder, remote)
            except STORAGE_ERRORS as error:
                logger.warning("They could not be uploaded to %s: %s. Rerun the command to retry", remote.url, error)
        if failed:
            raise EnvError(f"all {len(trajectories)} rollouts failed; the first: {trajectories[0].error}")
        return metrics


class BenchmarkEvaluation(EvaluationExperiment):
    """An evaluation on named benchmarks, which plays every problem and prints scores with confidence intervals."""

    def get_eval_dataset(self) -> PromptDataset:
        """Load the problems. Raise DataError if one is too long."""
        dataset, (file,) = super().get_eval_dataset(), self.cfg.data.val_data
        if n_dropped := len(open_source(file)) - len(dataset):
            raise DataError(
                f"{n_dropped} problems are longer than trainer.max_prompt_length={self.cfg.trainer.max_prompt_length}, "
                "and a score without them would mean nothing; raise it"
            )
        return dataset

    def print_results(self, metrics: Mapping[str, float]) -> None:
        """Print a table of scores."""
        folder = self.run_folder.evals(None)
        files = [path for path in sorted(folder.glob("*.jsonl")) if path.name != AGGREGATED]
        samples = (json.loads(line) for path in files for line in path.read_text("utf-8").splitlines())
        print(format_scores(score_benchmarks(samples)))
        print(f"The samples are in {folder}")
