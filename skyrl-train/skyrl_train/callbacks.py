"""Callbacks around a training step: evaluation, logging, dumps, checkpoints, exports.

The trainer calls them in list order. Evaluation runs before logging, so that its metrics are logged with the step, and
checkpoints are saved after both.
"""

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from skyrl_gym.envs.entry_point import load_attribute
from skyrl_gym.runtime.text import describe_error
from skyrl_report.diagnosis import Diagnosis, append_findings, read_findings
from skyrl_report.metrics_file import read_metrics
from skyrl_report.page import own_command, report_run
from skyrl_report.refresh import Refresher
from skyrl_report.run_folder import RunFolder, Session
from skyrl_train.checkpoint import replace_text, step_of
from skyrl_train.config import SkyRLConfig, to_yaml
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.dataset.mixture import MixedPrompts
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.errors import ConfigError
from skyrl_train.evaluate import dump_images, evaluate, trajectory_row
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.run import Callback, Run, StepReport
from skyrl_train.tracking import Progress, Tracking

logger = logging.getLogger(__name__)

VERL_METRICS = "skyrl_train.compat.verl.metrics:verl_metrics"
"""The function behind `trainer.log_verl_metrics`. Imported on first use, because `compat` imports this module."""


def is_due(interval: int, report: StepReport, *, at_start: bool = False) -> bool:
    """Return True every `interval` steps and at the last step, but never for -1. `at_start` adds step 0."""
    if report.global_step == 0:
        return at_start
    return interval > 0 and (report.is_last or report.global_step % interval == 0)


class SavedConfig(Callback):
    """A callback that writes the resolved configuration, unless the run is already finished.

    A resume overwrites it with the current settings, and appends the changed ones to `changes.jsonl` with their step.
    """

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder = run_folder

    async def on_train_start(self, run: Run) -> None:
        if run.global_step < run.total_steps:
            self._run_folder.config_yaml.write_text(to_yaml(run.cfg), encoding="utf-8")
            earlier = [change for change in self._run_folder.read_changes() if change["after_step"] < run.global_step]
            if run.changes:
                earlier.append({"after_step": run.global_step, "settings": run.changes})
            if earlier or self._run_folder.changes.exists():
                write_jsonl(self._run_folder.changes, earlier)


@dataclass(eq=False)
class Evaluation(Callback):
    """A callback that evaluates every `eval_interval` steps, at the end, and at step 0 with `eval_before_train`."""

    dataset: PromptDataset
    generator: RolloutGenerator
    run_folder: RunFolder
    chat: ChatEncoder

    def __post_init__(self) -> None:
        self.evaluator: Callable[[Run], Awaitable[dict[str, float]]] = self.measure
        """Returns the metrics of the current weights. Assign another function to evaluate differently."""

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if is_due(run.cfg.trainer.eval_interval, report, at_start=run.cfg.trainer.eval_before_train):
            with report.timer("eval"):
                report.metrics |= await self.evaluator(run)

    async def measure(self, run: Run) -> dict[str, float]:
        """Evaluate the current weights. With `trainer.dump_eval_results`, write the trajectories to the run folder."""
        step, cfg = run.global_step, run.cfg
        folder = self.run_folder.evals(step) if cfg.trainer.dump_eval_results else None
        metrics, _ = await evaluate(self.dataset, self.generator, cfg, step, folder, self.chat)
        return metrics


class Logging(Callback):
    """A callback that logs metrics, updates the progress line, and warns once of each problem that they show."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self._progress: Progress | None = None
        self._diagnosis: Diagnosis | None = None
        self._findings = tracking.run_folder.findings

    async def on_train_start(self, run: Run) -> None:
        self._tracking.truncate_after(run.global_step or -1)  # a new run also logs step 0
        self._progress = Progress(run.total_steps, run.global_step)
        step = run.global_step or -1
        findings = [finding for finding in read_findings(self._findings) if finding.step <= step]
        self._findings.write_text("", encoding="utf-8")  # an empty file says that the run is diagnosed
        append_findings(self._findings, findings)
        rows = read_metrics(self._tracking.run_folder.metrics)
        self._diagnosis = Diagnosis(run.cfg.model_dump(mode="json"), rows, [finding.rule for finding in findings])

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        report.metrics |= report.timer.metrics()
        if report.trajectories:
            n_tokens = sum(t.n_tokens for t in report.trajectories)
            report.metrics["trainer/tokens_per_second"] = n_tokens / report.metrics["timing/step"]
        if isinstance(run.cfg, SkyRLConfig) and run.cfg.trainer.log_verl_metrics:
            verl_metrics = load_attribute(VERL_METRICS)
            report.metrics |= verl_metrics(report.metrics, report.trajectories, report.global_step, run.cfg)
        if report.metrics:
            try:
                self._tracking.log(report.metrics, report.global_step)
            except OSError as error:  # perhaps left from an earlier step; at the end, save the checkpoint anyway
                if not (report.is_last or run.is_stopping):
                    raise
                logger.warning("Failed to write metrics; the run retries at its end: %s", error)
        if self._progress is not None and report.global_step > 0:
            self._progress.update(report.global_step, report.metrics)
        if self._diagnosis is not None:
            findings = self._diagnosis.add({"step": report.global_step, **report.metrics})
            for finding in findings:
                logger.warning("%s", finding.text)
            append_findings(self._findings, findings)

    async def before_checkpoint(self, run: Run) -> None:
        try:
            await asyncio.to_thread(self._tracking.flush)
        except OSError as error:  # must not prevent a checkpoint on another disk
            logger.warning("The last steps' metrics are not written yet: %s", error)

    async def on_checkpoint(self, run: Run, path: Path) -> None:
        if run.cfg.trainer.wandb_artifacts:
            await asyncio.to_thread(self._tracking.log_checkpoint, path, step_of(path))

    async def on_train_end(self, run: Run, error: BaseException | None) -> None:
        if self._progress is not None:
            self._progress.close()
        await asyncio.to_thread(self._tracking.flush)  # the report reads them


Curriculum = Callable[[int, dict[str, float], Mapping[str, float]], Mapping[str, float]]
"""Maps (step, weights of the data sources, metrics of the step) to the weights for the next prompts."""


class CurriculumStep(Callback):
    """A callback that updates the weights of the data sources with the curriculum, before the step is logged."""

    def __init__(self, prompts: MixedPrompts, curriculum: Curriculum) -> None:
        self._prompts = prompts
        self._curriculum = curriculum

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if report.global_step > 0:
            weights = self._curriculum(report.global_step, self._prompts.weights, dict(report.metrics))
            try:
                self._prompts.set_weights(weights)
            except (ConfigError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"data.mixture.curriculum returned {weights!r} after step {report.global_step}: {error}"
                ) from error
            report.metrics |= {f"data/weight/{name}": weight for name, weight in self._prompts.weights.items()}


class TrajectoryDump(Callback):
    """A callback that writes trajectories of each step: of `trainer.n_dumped_prompts`, or of all prompts."""

    def __init__(self, run_folder: RunFolder, chat: ChatEncoder) -> None:
        self._run_folder = run_folder
        self._chat = chat

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        trainer, success_reward = run.cfg.trainer, run.cfg.generator.success_reward
        draws = list(dict.fromkeys(t.id.draw for t in report.trajectories))
        dumped = [
            t
            for t in report.trajectories
            if trainer.dump_trajectories or t.id.draw in draws[: trainer.n_dumped_prompts]
        ]
        if not dumped:
            return
        advantages = report.advantages() if trainer.dump_trajectories else None
        tokens = [None if advantages is None else advantages.get(t.id, ()) for t in dumped]
        path = self._run_folder.trajectories(report.global_step)
        await dump_images(path.parent, dumped)
        rows = zip(dumped, tokens, strict=True)
        write_jsonl(path, [trajectory_row(t, self._chat, success_reward, values) for t, values in rows])


class Checkpointing(Callback):
    """A callback that saves a checkpoint every `trainer.ckpt_interval` steps, after the last step and at a stop.

    Training continues while a checkpoint is written. After a failed save, it retries at each step until one succeeds.
    The free disk space is checked before the first step.
    """

    def __init__(self) -> None:
        self._saved_step = 0
        self._has_failed = False

    async def on_train_start(self, run: Run) -> None:
        self._saved_step = run.global_step
        if run.cfg.trainer.ckpt_interval > 0 and run.global_step < run.total_steps:
            await run.check_space()

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        interval = run.cfg.trainer.ckpt_interval
        is_stopping = run.is_stopping and interval > 0 and report.global_step > 0
        if is_stopping or (report.is_last and is_due(interval, report)):
            await run.save_checkpoint()
        elif is_due(interval, report) or (self._has_failed and not run.is_saving):
            self._has_failed = True  # until on_checkpoint
            await run.begin_checkpoint()

    async def on_checkpoint(self, run: Run, path: Path) -> None:
        self._saved_step, self._has_failed = step_of(path), False

    async def on_train_end(self, run: Run, error: BaseException | None) -> None:
        """Save the last step if a later callback or a signal stopped the run after `on_step_end`."""
        is_unsaved = run.is_stopping and self._saved_step < run.global_step
        if error is None and is_unsaved and run.cfg.trainer.ckpt_interval > 0:
            await run.save_checkpoint()


class Reporting(Callback):
    """A callback that keeps `report.html` fresh, and writes all plots when the run ends, even after an error.

    `session.json` records the process, its last step, and how it ended.
    """

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder = run_folder
        self._refresher = Refresher(run_folder, own_command())
        self._session: Session | None = None

    async def on_train_start(self, run: Run) -> None:
        if run.global_step < run.total_steps:
            here = (time.time(), socket.gethostname(), os.getpid())
            self._session = Session(run.total_steps, run.global_step, *here)
            self._write(self._session)

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        self._refresher.poll()

    async def on_train_end(self, run: Run, error: BaseException | None) -> None:
        self._refresher.close()
        if self._session is not None:
            fault = describe_error(error) if isinstance(error, Exception) else None
            self._write(replace(self._session, ended_at=time.time(), error=fault))
        report_run(self._run_folder, command=own_command())

    def _write(self, session: Session) -> None:
        replace_text(self._run_folder.session, json.dumps(asdict(session)))


class Export(Callback):
    """A callback that exports the policy and the critic as Hugging Face folders.

    It runs every `trainer.hf_save_interval` steps and after the last step. A run that was killed during an export
    writes the missing folder when it resumes.
    """

    async def on_train_start(self, run: Run) -> None:
        if not _export_folder(run, run.global_step).exists():
            await self.on_step_end(run, StepReport(run.global_step, run.global_step == run.total_steps, {}))

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if is_due(run.cfg.trainer.hf_save_interval, report):
            await run.export(_export_folder(run, report.global_step))


def _export_folder(run: Run, step: int) -> Path:
    return Path(run.cfg.trainer.export_path) / f"global_step_{step}"
