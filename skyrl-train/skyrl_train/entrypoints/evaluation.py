"""An evaluation without training.

Plays the validation prompts like an evaluation during training, with `generator.eval_sampling_params` and
`generator.eval_n_samples_per_prompt`, and writes the same files, to `evals/eval_only/` in the run folder.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext

from skyrl_train.checkpoint import STORAGE_ERRORS, upload_files
from skyrl_train.dataset.custom import CustomDataset
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.entrypoints.experiment import BasePPOExp
from skyrl_train.errors import ConfigError, EnvError
from skyrl_train.evaluate import dump_evaluation, evaluate
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.remote_storage import open_evaluations

logger = logging.getLogger(__name__)


class EvalOnlyEntrypoint(BasePPOExp):
    """One evaluation, with the `get_*` methods of a training run."""

    trains = False

    def run(self) -> None:
        """Evaluate, print the metrics and write the trajectories."""
        with self.running():
            metrics = asyncio.run(self.evaluate())
            for name, value in sorted(metrics.items()):
                print(f"{name:<50} {value:.6g}")

    def get_eval_dataset(self) -> PromptDataset:
        """Load the prompts to evaluate on."""
        if self.cfg.data.custom_cls.path is not None:
            return CustomDataset(self.cfg, self.tokenizer, "validation")
        if not self.cfg.data.val_data:
            raise ConfigError("data.val_data=[] leaves nothing to evaluate; set data.val_data=[<file or dataset name>]")
        return self._open_prompts(self.cfg.data.val_data)

    async def evaluate(self) -> dict[str, float]:
        """Return the metrics on the validation prompts; EnvError if every rollout failed."""
        self.check_data()
        dataset = self.get_eval_dataset()
        self.check_environments([dataset])
        launching = self.launching([]) if self.cfg.generator.run_engines_locally else nullcontext()
        async with launching, self.playing(None) as (_, generator):
            with self.get_tracker() as tracker:
                metrics, trajectories = await evaluate(dataset, generator, self.cfg, 0)
                tracker.log(metrics, 0)
        folder = self.run_folder.evals(None)
        dump_evaluation(folder, trajectories, metrics, ChatEncoder(self.tokenizer))
        logger.info("%d trajectories are in %s", len(trajectories), folder)
        trainer = self.cfg.trainer
        if (remote := open_evaluations(trainer.remote_trajectory_url, trainer.run_name)) is not None:
            try:
                await asyncio.to_thread(upload_files, folder, remote / folder.name)
            except STORAGE_ERRORS as error:
                logger.warning("They could not be uploaded to %s: %s. Rerun the command to retry", remote.url, error)
        if not any(t.is_valid for t in trajectories):
            raise EnvError(f"all {len(trajectories)} rollouts failed; the first: {trajectories[0].error}")
        return metrics
