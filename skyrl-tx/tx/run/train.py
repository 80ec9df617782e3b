"""`tx train`: fine-tune an adapter on a file, in this process.

Rerun the command to resume. Checkpoints of the complete state are written to `checkpoints/` in the output folder every
`--save-steps` steps and on a signal. Data order and updates are determined by the seed and the step number.
"""

import hashlib
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self

import numpy as np
from annotated_types import Ge, Gt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tx.flags import FlagParser, JsonObject, add_flag, format_errors, format_setting_errors
from tx.models.config import AdapterConfig
from tx.run.examples import ExampleBuilder, read_rows
from tx.tinker.backends.factory import BackendName, model_folder, new_backend, settings_of
from tx.tinker.backends.folder import load_settings
from tx.tinker.store.checkpoint_files import delete_folder, write_folder
from tx.tinker.types import AdamParams, Datum, Pass, PassResult, UserError
from tx.tinker.wire.requests import AdamSettings

logger = logging.getLogger(__name__)

MODEL_ID = "model"
SETTINGS, METRICS, CHECKPOINTS, ADAPTER = "settings.json", "metrics.jsonl", "checkpoints", "adapter"
MAY_CHANGE = frozenset({"max_steps", "save_steps", "output_dir"})
"""Settings that may change when a run resumes."""


def _parse_optimizer_args(settings: dict[str, Any]) -> dict[str, Any]:
    """Return AdamW settings as numbers. The learning rate has its own flag."""
    known = [name for name in AdamSettings.model_fields if name != "learning_rate"]
    if unknown := sorted(settings.keys() - set(known)):
        raise ValueError(f"{unknown[0]} is unknown; it may have {', '.join(known)}")
    try:
        return AdamSettings(**settings).model_dump(include=set(settings))
    except ValidationError as error:
        raise ValueError(format_setting_errors(error)) from error


class TrainConfig(BaseModel):
    """Settings of a run. Each field is a flag."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    base_model: str
    """The model: a Hugging Face repository or a folder."""

    dataset: Path
    """A .jsonl, .json or .parquet file. Rows have messages, prompt and completion, or text."""

    output_dir: Path
    """Folder for the adapter, checkpoints and metrics. If it holds the same run, the run resumes."""

    load_checkpoint_path: Path | None = None
    """A saved folder with the initial weights. Its rank applies."""

    lora_rank: Annotated[int, Ge(0)] = 32
    """Rank of the adapter. 0 trains all parameters."""

    learning_rate: Annotated[float, Gt(0)] = 1e-4
    """Learning rate of AdamW."""

    optimizer_args: Annotated[JsonObject, AfterValidator(_parse_optimizer_args)] = Field(default_factory=dict)
    """More AdamW settings as JSON, e.g. '{"weight_decay": 0.1, "grad_clip_norm": 1.0}'."""

    batch_size: Annotated[int, Ge(1)] = 8
    """Rows per step."""

    epochs: Annotated[int, Ge(1)] = 1
    """Passes over the dataset."""

    max_steps: Annotated[int, Ge(1)] | None = None
    """Maximum number of steps."""

    max_length: Annotated[int, Ge(2)] = 2048
    """Maximum tokens per row. Longer rows are truncated."""

    save_steps: Annotated[int, Ge(1)] = 500
    """Steps between checkpoints."""

    seed: Annotated[int, Ge(0)] = 0
    """Seed of the adapter and of the row order."""

    backend: BackendName = "jax"
    """The compute backend: jax or torch."""

    backend_config: JsonObject = Field(default_factory=dict)
    """Backend settings, as JSON."""

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        settings_of(self.backend, self.backend_config)
        return self


def main(arguments: Sequence[str]) -> None:
    """Train until the last step or a signal."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = parse(arguments)
    try:
        TrainCommand(config).train()
    except UserError as error:
        sys.exit(f"tx train: {error}")


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Parse a command line. Exit with a message if a setting is invalid."""
    parser = FlagParser(prog="tx train", allow_abbrev=False, description="Fine-tune an adapter on a file.")
    for name in TrainConfig.model_fields:
        add_flag(parser, TrainConfig, name, *(["--model"] if name == "base_model" else []))
    settings = parser.parse_flags(arguments)
    try:
        return TrainConfig(**settings)
    except ValidationError as error:
        parser.error(format_errors(error))


class TrainCommand:
    """A training run in its output folder."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._is_ending = False
        self._checkpoints = config.output_dir / CHECKPOINTS
        rows = read_rows(config.dataset)
        self._settings = self._check_settings()
        try:
            folder = model_folder(config.base_model)
            self._backend = new_backend(config.backend, folder, config.backend_config, config.base_model)
        except (OSError, ValueError) as error:
            raise UserError(f"failed to load --base-model {config.base_model}: {error}") from error
        max_length = min(config.max_length, self._backend.base_model.max_context - 1)
        examples = ExampleBuilder(self._backend.base_model.folder, max_length)
        self._data = [examples.convert(number, row) for number, row in enumerate(rows, start=1)]
        self._steps_of_epoch = -(-len(rows) // config.batch_size)
        n_steps = config.epochs * self._steps_of_epoch
        self._n_steps = n_steps if config.max_steps is None else min(n_steps, config.max_steps)

    def train(self) -> None:
        """Run the remaining steps, then write the adapter to the output folder."""
        step = self._begin()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # SIGHUP under nohup
                signal.signal(number, self._end)
        while step < self._n_steps and not self._is_ending:
            step += 1
            self._step(step)
            if step % self._config.save_steps == 0 or step == self._n_steps or self._is_ending:
                write_folder(self._checkpoints / str(step), self._backend.capture(MODEL_ID, with_optimizer=True))
                for earlier in self._saved_steps():
                    if earlier != step:
                        delete_folder(self._checkpoints / str(earlier))
        if step < self._n_steps:
            logger.info("stopped after step %d of %d; rerun the command to resume", step, self._n_steps)
            return
        adapter = self._config.output_dir / ADAPTER
        write_folder(adapter, self._backend.capture(MODEL_ID, with_optimizer=False))
        logger.info("the weights are in %s", adapter)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True

    def _begin(self) -> int:
        """Load the last checkpoint or create a model, and record the settings. Return the number of finished steps."""
        last = max(self._saved_steps(), default=0)
        if last:
            self._backend.load_model(MODEL_ID, self._checkpoints / str(last), with_optimizer=True)
            logger.info("resuming after step %d of %d", last, self._n_steps)
        elif self._config.load_checkpoint_path is not None:
            try:
                self._backend.load_model(MODEL_ID, self._config.load_checkpoint_path, with_optimizer=False)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"--load-checkpoint-path {self._config.load_checkpoint_path} cannot be loaded into --base-model "
                    f"{self._config.base_model}: {error}"
                ) from error
        else:
            self._backend.create_model(MODEL_ID, AdapterConfig(rank=self._config.lora_rank, seed=self._config.seed))
        self._config.output_dir.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(self._settings, indent=1)
        (self._config.output_dir / SETTINGS).write_text(f"{settings}\n", encoding="utf-8")
        metrics = self._config.output_dir / METRICS
        if metrics.is_file():  # drop the metrics of steps that will run again
            lines = [line for line in metrics.read_text("utf-8").splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= last]
            metrics.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        return last

    def _step(self, number: int) -> None:
        """Train on a batch and record its metrics.

        Raises:
            UserError: the loss or the gradient norm is NaN or infinite.
        """
        started = time.perf_counter()
        batch = self._batch(number)
        n_counted = float(sum(datum.inputs["weights"].sum() for datum in batch))
        scaled = [
            Datum(datum.tokens, {**datum.inputs, "weights": datum.inputs["weights"] / np.float32(n_counted)})
            for datum in batch
        ]
        *_, result = self._backend.compute(Pass(MODEL_ID, scaled, "cross_entropy"))
        assert isinstance(result, PassResult)
        if not math.isfinite(result.loss):
            raise UserError(
                f"step {number}: the loss is {result.loss}; use a lower --learning-rate and another --output-dir"
            )
        params = AdamParams(learning_rate=self._config.learning_rate, **self._config.optimizer_args)
        try:
            metrics = self._backend.optim_step(MODEL_ID, params)
        except UserError as error:
            raise UserError(f"step {number}: {error}") from error
        seconds = time.perf_counter() - started
        n_tokens = sum(len(datum.tokens) for datum in batch)
        settings = {"step": number, "loss": result.loss, "tokens": n_tokens, "seconds": seconds}
        with (self._config.output_dir / METRICS).open("a", encoding="utf-8") as file:
            file.write(
                json.dumps(settings | {name.rpartition("/")[2]: value for name, value in metrics.items()}) + "\n"
            )
        speed = n_tokens / seconds
        logger.info("step %d of %d: loss %.4f, %.0f tokens/s", number, self._n_steps, result.loss, speed)

    def _batch(self, number: int) -> list[Datum]:
        """Return a step's data. Every epoch has a different order."""
        epoch, step = divmod(number - 1, self._steps_of_epoch)
        order = np.random.default_rng([self._config.seed, epoch]).permutation(len(self._data))
        chosen = order[step * self._config.batch_size : (step + 1) * self._config.batch_size]
        return [datum for row in chosen for datum in self._data[row]]

    # -- the output folder

    def _check_settings(self) -> dict[str, Any]:
        """Return the settings to record. Refuse to resume a run with different ones."""
        settings = self._config.model_dump(mode="json", exclude=set(MAY_CHANGE)) | {"lora_rank": self._check_rank()}
        settings["dataset_sha256"] = hashlib.sha256(self._config.dataset.read_bytes()).hexdigest()
        file = self._config.output_dir / SETTINGS
        if file.is_file():
            before = json.loads(file.read_text("utf-8"))
            changes = ", ".join(
                f"{name}={before.get(name)!r}" for name in settings if before.get(name) != settings[name]
            )
            if changes:
                raise UserError(f"{self._config.output_dir} has a run with {changes}; use another --output-dir")
        return settings

    def _check_rank(self) -> int:
        """Return the adapter's rank. If there are initial weights, they determine it.

        Raises:
            UserError: `--load-checkpoint-path` is not a saved folder, or its rank differs from `--lora-rank`.
        """
        path, rank = self._config.load_checkpoint_path, self._config.lora_rank
        if path is None:
            return rank
        steps = self._saved_steps()
        folder = self._checkpoints / str(max(steps)) if steps else path  # a resumed run no longer needs the path
        try:
            saved_rank = load_settings(folder).rank
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--load-checkpoint-path {path} has no valid training.json; name a checkpoint of the server, or "
                f"{ADAPTER}/ or a folder in {CHECKPOINTS}/ of another run"
            ) from error
        if "lora_rank" in self._config.model_fields_set and rank != saved_rank:
            raise UserError(f"--lora-rank={rank} differs from rank {saved_rank} of {folder}; omit --lora-rank")
        return saved_rank

    def _saved_steps(self) -> list[int]:
        return [int(folder.name) for folder in self._checkpoints.glob("*") if folder.name.isdecimal()]
