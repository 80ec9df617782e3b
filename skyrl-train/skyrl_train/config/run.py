"""The part of `trainer.*` that every kind of training has: its length, its outputs, and the limits of its memory."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Field

from skyrl_train.config.base import (
    Allowed,
    Count,
    CountOrMinusOne,
    OptionalCount,
    Resolved,
    Section,
    Text,
    as_list,
    resolved_later,
)

LoggerName = Literal["console", "jsonl", "tensorboard", "wandb"]
LoggerList = Annotated[
    list[LoggerName],
    BeforeValidator(as_list),
    Allowed("one of console, jsonl, tensorboard, wandb, or a list of them"),
]
ResumeMode = Annotated[
    Literal["none", "latest", "from_path"],
    BeforeValidator(lambda value: "none" if value is None else value),
    Allowed("one of none, latest, from_path, or null (none)"),
]


class RunConfig(Section):
    """The training run."""

    epochs: Count = 1
    """Passes over the training data."""

    max_training_steps: OptionalCount = None
    """Stop after this many steps, even within an epoch; null trains for `epochs`."""

    micro_train_batch_size_per_gpu: OptionalCount = None
    """Maximum number of rows in one forward and backward pass; null leaves it to `max_tokens_per_microbatch`.
    It limits memory; the loss and its gradient do not depend on it."""

    micro_forward_batch_size_per_gpu: OptionalCount = None
    """Maximum number of rows in one forward pass; null leaves it to `max_tokens_per_microbatch`."""

    max_tokens_per_microbatch: OptionalCount = None
    """Maximum number of tokens in one pass; a longer row is processed alone. null takes 16,384 on a GPU and
    4,096 on a CPU, whose caches hold the activations of few tokens. Tokens of a shared prefix count once, and a
    quarter for each other row. The limit bounds memory; the loss and its gradient do not depend on it."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""

    bf16: bool = True
    """Compute in bfloat16 on a GPU; a CPU computes in float32. `trainer.policy.model.dtype` is the type of the
    weights."""

    eval_interval: CountOrMinusOne = 5
    """Steps between evaluations, with one after the last step; -1 turns evaluation off."""

    ckpt_interval: CountOrMinusOne = 10
    """Steps between checkpoints, with one after the last step; -1 writes none."""

    ckpt_path: Resolved[Text] = resolved_later()
    """Folder of the checkpoints; null takes `<output_dir>/<project_name>/<run_name>/ckpts`."""

    max_ckpts_to_keep: CountOrMinusOne = -1
    """Number of newest checkpoints to keep; -1 keeps as many as fit on the disk."""

    hf_save_interval: CountOrMinusOne = -1
    """Steps between exports of the policy as a Hugging Face folder; -1 exports none."""

    export_path: Resolved[Text] = resolved_later()
    """Folder of the exports; null takes `<output_dir>/<project_name>/<run_name>/export`."""

    resume_mode: ResumeMode = "latest"
    """Start from scratch (`none`), from the newest checkpoint under `ckpt_path` if there is one (`latest`), or from
    `resume_path` (`from_path`)."""

    resume_path: Text | None = None
    """A checkpoint folder, ending in `global_step_<N>`; read when `resume_mode=from_path`."""

    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 42
    """Seed of every random choice of the run."""

    output_dir: Text = "outputs"
    """The run folder is `<output_dir>/<project_name>/<run_name>`."""

    project_name: Resolved[Text] = resolved_later()
    """Project name, used for the run folder and the trackers; null takes `$WANDB_PROJECT` with wandb, else `skyrl`."""

    run_name: Resolved[Text] = resolved_later()
    """Run name, used for the run folder and the trackers; an existing name resumes that run. null takes `$WANDB_NAME`
    with wandb, else `<project_name>-<date>-<time>`."""

    logger: LoggerList = Field(default=["tensorboard"])
    """Trackers of metrics; `console` prints all of them, wandb needs WANDB_API_KEY. A progress line and `metrics.jsonl`
    in the run folder are always written."""

    @property
    def run_dir(self) -> str:
        """The run folder, before `$HOME` and `~` are expanded."""
        return f"{self.output_dir.rstrip('/')}/{self.project_name}/{self.run_name}"
