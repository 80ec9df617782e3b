"""`tx train`: fine-tune an adapter on a file, in this process.

The same command goes on where it was: after every `--save-steps` steps, and when it is told to end, all of the state is
in `checkpoints/` of the output folder, and what comes next follows from the seed and the number of the step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Self

import numpy as np
from annotated_types import Ge, Gt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tx.flags import JsonObject, add_flag, problems_of
from tx.models.config import LoraConfig
from tx.run.examples import Examples, read_rows
from tx.tinker.backends.factory import BackendName, model_folder, new_backend, settings_of
from tx.tinker.checkpoint_files import delete_folder, write_folder
from tx.tinker.types import AdamParams, Datum, Pass, PassResult, UserError

logger = logging.getLogger(__name__)

MODEL_ID = "model"
SETTINGS, METRICS, CHECKPOINTS, ADAPTER = "settings.json", "metrics.jsonl", "checkpoints", "adapter"
MAY_CHANGE = frozenset({"max_steps", "save_steps", "output_dir"})
"""Settings that a run may go on with otherwise."""


class TrainConfig(BaseModel):
    """All settings; each field is a flag."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    base_model: str
    """The model: the name of a Hugging Face repository, or a folder."""

    dataset: Path
    """A .jsonl, .json or .parquet file, whose rows have messages, prompt and completion, or text."""

    output_dir: Path
    """Where the adapter, checkpoints and metrics go. With those of the same run there, it goes on."""

    load_checkpoint_path: Path | None = None
    """A folder that was saved, whose weights to begin with."""

    lora_rank: Annotated[int, Ge(0)] = 32
    """0: all parameters."""

    learning_rate: Annotated[float, Gt(0)] = 1e-4
    """Of AdamW."""

    optimizer_args: JsonObject = Field(default_factory=dict)
    """More of AdamW, as JSON, e.g. '{"weight_decay": 0.1, "grad_clip_norm": 1.0}'."""

    batch_size: Annotated[int, Ge(1)] = 8
    """Rows of a step."""

    epochs: Annotated[int, Ge(1)] = 1
    """How often to see all rows."""

    max_steps: Annotated[int, Ge(1)] | None = None
    """End after so many steps."""

    max_length: Annotated[int, Ge(2)] = 2048
    """Tokens of a row; the rest is cut off."""

    save_steps: Annotated[int, Ge(1)] = 500
    """Steps between checkpoints."""

    seed: Annotated[int, Ge(0)] = 0
    """Of the adapter, and of the order of rows."""

    backend: BackendName = "jax"
    """What computes: jax or torch."""

    backend_config: JsonObject = Field(default_factory=dict)
    """The backend's own settings, as JSON."""

    @model_validator(mode="after")
    def _fits_backend(self) -> Self:
        settings_of(self.backend, self.backend_config)
        return self


def main(arguments: Sequence[str]) -> None:
    """Train to the end, or until told to end."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = parse(arguments)
    try:
        Run(config).train()
    except UserError as error:
        sys.exit(f"tx train: {error}")


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The settings of a command line; ends the process with a message if they are wrong."""
    parser = argparse.ArgumentParser(prog="tx train", allow_abbrev=False, description="Fine-tune an adapter on a file.")
    for name in TrainConfig.model_fields:
        add_flag(parser, TrainConfig, name, *(["--model"] if name == "base_model" else []))
    told = vars(parser.parse_args(arguments))
    try:
        config = TrainConfig(**told)
        AdamParams(learning_rate=config.learning_rate, **config.optimizer_args)
    except ValidationError as error:
        parser.error(problems_of(error))
    except (TypeError, json.JSONDecodeError) as error:
        parser.error(f"--optimizer-args: {error}; it may have weight_decay, grad_clip_norm, beta1, beta2 and eps")
    return config


class Run:
    """A run, in its output folder."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._is_ending = False
        self._checkpoints = config.output_dir / CHECKPOINTS
        rows = read_rows(config.dataset)
        self._check_settings()
        try:
            folder = model_folder(config.base_model)
            self._backend = new_backend(config.backend, folder, config.backend_config, config.base_model)
        except (OSError, ValueError) as error:
            raise UserError(f"--base-model {config.base_model} cannot be loaded: {error}") from error
        longest = min(config.max_length, self._backend.base_model.max_context - 1)
        examples = Examples(self._backend.base_model.folder, longest)
        self._data = [examples.of_row(number, row) for number, row in enumerate(rows, start=1)]
        self._steps_of_epoch = -(-len(rows) // config.batch_size)
        n_steps = config.epochs * self._steps_of_epoch
        self._n_steps = n_steps if config.max_steps is None else min(n_steps, config.max_steps)

    def train(self) -> None:
        """All steps that are left; then the adapter is in the output folder."""
        step = self._begin()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)
        while step < self._n_steps and not self._is_ending:
            step += 1
            self._step(step)
            if step % self._config.save_steps == 0 or step == self._n_steps or self._is_ending:
                self._save(step)
        if step < self._n_steps:
            logger.info("ended after step %d of %d; the same command goes on", step, self._n_steps)
            return
        adapter = self._config.output_dir / ADAPTER
        write_folder(adapter, lambda folder: self._backend.save_weights(MODEL_ID, folder))
        logger.info("the weights are in %s", adapter)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True

    def _begin(self) -> int:
        """The state of the last checkpoint, or that of a new run; how many steps it has seen."""
        last = max(self._saved(), default=0)
        if last:
            self._backend.load_model(MODEL_ID, self._checkpoints / str(last), with_optimizer=True)
            logger.info("going on after step %d of %d", last, self._n_steps)
        elif self._config.load_checkpoint_path is not None:
            self._backend.load_model(MODEL_ID, self._config.load_checkpoint_path, with_optimizer=False)
        else:
            self._backend.create_model(MODEL_ID, LoraConfig(rank=self._config.lora_rank, seed=self._config.seed))
        self._forget_metrics_after(last)
        return last

    def _step(self, number: int) -> None:
        started = time.perf_counter()
        batch = self._batch(number)
        n_counted = float(sum(datum.inputs["weights"].sum() for datum in batch))
        scaled = [
            Datum(datum.tokens, {**datum.inputs, "weights": datum.inputs["weights"] / np.float32(n_counted)})
            for datum in batch
        ]
        *_, result = self._backend.compute(Pass(MODEL_ID, scaled, "cross_entropy"))
        assert isinstance(result, PassResult)
        params = AdamParams(learning_rate=self._config.learning_rate, **self._config.optimizer_args)
        metrics = self._backend.optim_step(MODEL_ID, params)
        seconds = time.perf_counter() - started
        n_tokens = sum(len(datum.tokens) for datum in batch)
        told = {"step": number, "loss": result.loss, "tokens": n_tokens, "seconds": seconds}
        with (self._config.output_dir / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(told | {name.rpartition("/")[2]: one for name, one in metrics.items()}) + "\n")
        speed = n_tokens / seconds
        logger.info("step %d of %d: loss %.4f, %.0f tokens/s", number, self._n_steps, result.loss, speed)

    def _batch(self, number: int) -> list[Datum]:
        """The data of a step: each epoch has an order of its own."""
        epoch, step = divmod(number - 1, self._steps_of_epoch)
        order = np.random.default_rng([self._config.seed, epoch]).permutation(len(self._data))
        chosen = order[step * self._config.batch_size : (step + 1) * self._config.batch_size]
        return [datum for row in chosen for datum in self._data[row]]

    # -- the output folder

    def _check_settings(self) -> None:
        """Note the settings; those of a run that goes on are the same."""
        told = self._config.model_dump(mode="json", exclude=set(MAY_CHANGE))
        told["dataset_sha256"] = hashlib.sha256(self._config.dataset.read_bytes()).hexdigest()
        file = self._config.output_dir / SETTINGS
        if file.is_file():
            other = _differing(json.loads(file.read_text("utf-8")), told)
            if other:
                raise UserError(f"{self._config.output_dir} has a run with {other}; give another --output-dir")
        self._config.output_dir.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    def _saved(self) -> list[int]:
        return [int(one.name) for one in self._checkpoints.glob("*") if one.name.isdecimal()]

    def _save(self, step: int) -> None:
        write_folder(self._checkpoints / str(step), lambda folder: self._backend.save_model(MODEL_ID, folder))
        for other in self._saved():
            if other != step:
                delete_folder(self._checkpoints / str(other))

    def _forget_metrics_after(self, step: int) -> None:
        """Steps that are done again are not told twice."""
        file = self._config.output_dir / METRICS
        if file.is_file():
            lines = [line for line in file.read_text("utf-8").splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _differing(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={before.get(name)!r}" for name in now if before.get(name) != now[name])
