"""Shared code of the examples that learn: data → warm start → GRPO → result.

An example passes a `Recipe` to `main`. Steps with existing results are skipped.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from time import strftime
from typing import Any

from examples.tiny_model import N_STEPS, make_tiny_model
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_report.learning_curve import MetricRows, plot_learning_curve
from skyrl_report.metrics_file import read_metrics
from skyrl_report.page import write_report
from skyrl_report.run_folder import AGGREGATED, RunFolder
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.files import read_rows
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import parse_cli, run_command
from skyrl_train.errors import ConfigError

N_CONVERSATIONS = 4096
N_SHOWN = 400
"""Characters of an episode to show."""

TINY_MODEL = (
    "trainer.algorithm.use_kl_loss=true",
    "trainer.algorithm.kl_loss_coef=0.01",
    "trainer.algorithm.eps_clip_high=0.28",
    "trainer.policy.optimizer_config.lr=1e-3",
    "trainer.policy.optimizer_config.scheduler=linear",
    "trainer.policy.optimizer_config.num_warmup_steps=10",
    "trainer.policy.optimizer_config.adam_betas=[0.9,0.95]",
    "trainer.policy.optimizer_config.weight_decay=0",
    "trainer.eval_interval=10",
    "trainer.eval_batch_size=512",
    "trainer.ckpt_interval=20",
    "trainer.max_ckpts_to_keep=1",
    "trainer.hf_save_interval=1000",
    "trainer.epochs=1000",
    "trainer.logger=[jsonl,tensorboard]",
    "generator.batched=true",
)
"""Settings for training the tiny model on any task."""


@dataclass(frozen=True)
class Recipe:
    """The task-specific part of an example."""

    name: str
    write_data: Callable[[Path], object]  # writes train.parquet and validation.parquet to a folder
    attempt: Callable[[dict[str, Any], random.Random], ConversationType] | None
    """Returns a random conversation for a row, to warm-start a tiny model on. None: `make_model` makes the model."""
    overrides: tuple[str, ...]
    metric: str  # name of an evaluation metric
    required: float  # value of the metric that counts as learned
    chance: float  # the metric's value of the baseline
    n_steps: int
    baseline: str = "random attempts"
    context_length: int = 512
    n_start_steps: int = N_STEPS  # steps of the warm start
    vocab_size: int = 512  # more would merge longer fixed wordings into single tokens
    make_model: Callable[[Path, Path, int], object] | None = None
    """Writes the model to start from, given the folders of data and model, and the seed."""
    service: Callable[[Path], AbstractContextManager[Sequence[str]]] = lambda _: nullcontext(())
    """A context that runs during training, e.g. a server. It yields overrides."""


@dataclass(frozen=True)
class LearningRun:
    """A run of a recipe under `output_dir`/`recipe.name`."""

    recipe: Recipe
    output_dir: Path
    seed: int
    n_steps: int
    overrides: tuple[str, ...] = ()
    label: str = ""  # distinguishes runs with the same data, model and seed
    experiment: type[RLExperiment] = RLExperiment

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return f"seed{self.seed}-{self.label}" if self.label else f"seed{self.seed}"

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.output_dir / self.recipe.name / self.name)

    @property
    def exported_model(self) -> Path:
        """Path of the model after the last step."""
        return self.folder.path / "export" / f"global_step_{self.n_steps}" / "policy"

    @property
    def is_finished(self) -> bool:
        """True if the run has logged its last step."""
        return bool(self.metrics()) and self.metrics()[-1]["step"] >= self.n_steps

    def check(self) -> None:
        """Raise ConfigError if the overrides are invalid or turn evaluation off."""
        if self._configuration(()).trainer.eval_interval < 0:
            raise ConfigError(
                "trainer.eval_interval=-1 turns evaluation off, but the verdict needs it; "
                "leave it out, or set it to a large number to evaluate only before the first and after the last step"
            )

    def prepare(self) -> None:
        """Write the dataset and the warm-started model, if missing."""
        if not (self._data / "validation.parquet").is_file():  # the file written last
            self.recipe.write_data(self._data)
        if self.recipe.make_model is not None and not self._model.is_dir():
            self.recipe.make_model(self._data, self._model, self.seed)
        elif self.recipe.attempt is not None and not self._model.is_dir():
            rows, rng = read_rows(str(self._data / "train.parquet")), random.Random(self.seed)
            conversations = [self.recipe.attempt(rng.choice(rows), rng) for _ in range(N_CONVERSATIONS)]
            recipe = self.recipe
            make_tiny_model(
                conversations,
                self._model,
                self.seed,
                n_steps=recipe.n_start_steps,
                context_length=recipe.context_length,
                vocab_size=recipe.vocab_size,
            )

    def move_aside(self) -> None:
        """Rename a finished run's folder to make room for a new run with this name."""
        kept = self.folder.path.with_name(f"{self.name}-before-{strftime('%Y%m%d-%H%M%S')}")
        self.folder.path.rename(kept)
        print(f"An earlier run is finished; it is now in {kept}")

    def train(self) -> None:
        """Train from the start, or resume an interrupted run."""
        with self.recipe.service(self._data) as service_overrides:
            self.experiment(self._configuration(service_overrides)).run()

    def metrics(self) -> MetricRows:
        """Return the metrics that the run has logged so far."""
        return read_metrics(self.folder.metrics) if self.folder.metrics.exists() else []

    @property
    def _data(self) -> Path:
        return self.output_dir / self.recipe.name / "data"

    @property
    def _model(self) -> Path:
        kind = "tiny-qwen3" if self.recipe.make_model is None else "warm-start"
        return self.output_dir / self.recipe.name / "models" / f"{kind}-seed{self.seed}"

    def _configuration(self, service_overrides: Sequence[str]) -> SkyRLConfig:
        run_overrides = (
            f"data.train_data=['{self._data / 'train.parquet'}']",
            f"data.val_data=['{self._data / 'validation.parquet'}']",
            f"trainer.policy.model.path='{self._model}'",
            f"trainer.output_dir='{self.output_dir}'",
            f"trainer.project_name={self.recipe.name}",
            f"trainer.run_name={self.name}",
            f"trainer.max_training_steps={self.n_steps}",
            f"trainer.seed={self.seed}",
        )
        return parse_cli([*TINY_MODEL, *self.recipe.overrides, *service_overrides, *run_overrides, *self.overrides])


def _episodes(folder: Path) -> list[dict[str, Any]]:
    """Return the validation episodes in a folder, in the order of the dataset."""
    files = sorted(file for file in folder.glob("*.jsonl") if file.name != AGGREGATED)
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def print_improvement(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> None:
    """Print the episode whose reward rose the most."""
    pairs = list(zip(before, after, strict=True))
    first, last = max(pairs, key=lambda pair: (pair[1]["total_reward"] or 0) - (pair[0]["total_reward"] or 0))
    print(f"\nPrompt (its end):\n{indent(first['input_prompt'][-N_SHOWN:], '  ')}")
    for when, episode in (("before", first), ("after", last)):
        print(f"{when} (reward {episode['total_reward']}):\n{indent(episode['output_response'][-N_SHOWN:], '  ')}")


def learn(run: LearningRun, command: str, title: str) -> bool:
    """Prepare and train, print the result, and return True if it reaches the required value."""
    started = time.monotonic()
    recipe = run.recipe
    run.check()
    run.prepare()
    if run.is_finished:
        run.move_aside()
    run.train()
    lines = {"required": recipe.required, recipe.baseline: recipe.chance}
    plot_learning_curve(run.metrics(), run.folder.learning_curve, metric=recipe.metric, title=title, baselines=lines)
    write_report(run.folder, command=command, baselines={recipe.metric: lines})
    values = {row["step"]: row[recipe.metric] for row in run.metrics() if recipe.metric in row}
    after = values[max(values)]
    print(f"\n{recipe.metric} ({run.n_steps} steps, {time.monotonic() - started:.0f} s)\n")
    for label, value in ((recipe.baseline, recipe.chance), ("before training", values.get(0)), ("after", after)):
        if value is not None:
            print(f"  {label:<16} {value:6.1%}   {'█' * round(40 * max(0.0, value))}")
    print_improvement(_episodes(run.folder.evals(min(values))), _episodes(run.folder.evals(max(values))))
    has_learned = after >= recipe.required
    print(f"\n{'Passed' if has_learned else 'FAILED'}: {recipe.required:.0%} required")
    print(f"Learning curve: {run.folder.learning_curve}\nReport:         {run.folder.report}")
    return has_learned


def main(
    recipe: Recipe, doc: str, argv: Sequence[str] | None = None, experiment: type[RLExperiment] = RLExperiment
) -> None:
    """Run an example from the command line, with overrides after `--`. Exit with status 1 if it did not learn."""
    title = doc.splitlines()[0]
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--seed", type=int, default=42, help="seed of the model, the data order and sampling")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs"), help="folder of the run folders")
    parser.add_argument("--steps", type=int, default=recipe.n_steps, help="training steps")
    parser.add_argument("overrides", nargs="*", help="configuration overrides key=value")
    args = parser.parse_args(argv)
    output_dir = args.output_dir.expanduser().resolve()
    run = LearningRun(recipe, output_dir, args.seed, args.steps, tuple(args.overrides), experiment=experiment)
    results: list[bool] = []
    command = f"python -m examples.{recipe.name}.learn --seed {args.seed}"
    run_command(lambda: results.append(learn(run, command, title.removesuffix("."))))
    sys.exit(0 if results[0] else 1)
