"""The part of `trainer.*` that every kind of training has: its length, its outputs, and the limits of its memory."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field

from skyrl_train.config.base import (
    Allowed,
    Count,
    CountOrMinusOne,
    OptionalCount,
    Resolved,
    Section,
    StringList,
    Text,
    as_list,
    empty_as_null,
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


PlacedRole = Literal["policy", "critic", "ref", "reward"]


class RunPlacementConfig(Section):
    """Processes of a training run. On a cluster without GPUs, each GPU in these keys is a process on the CPU."""

    launcher: Literal["auto", "inline", "ray", "torchrun"] = "auto"
    """`inline` runs everything in one process. `ray` runs each rank in a process of a Ray cluster: the one at
    `$RAY_ADDRESS`, the one that `ray start` began on this machine, or a new one. `torchrun` starts the ranks with
    `torchrun`, without Ray; on several nodes, run the command under `torchrun` on each. `auto` takes `ray` if a key
    below asks for more than one process, unless `torchrun` has started the command."""

    policy_num_nodes: Count = 1
    """Nodes of the policy."""

    policy_num_gpus_per_node: Count = 1
    """GPUs of the policy on each node. Each holds one rank, with a shard of the model."""

    def size(self, role: PlacedRole) -> tuple[int, int]:
        """Return the nodes of a model, and its ranks on each of them: those of the policy."""
        return self.policy_num_nodes, self.policy_num_gpus_per_node

    @property
    def shares_devices(self) -> bool:
        """True if all models are on the policy's devices."""
        return True

    def offloads_idle(self, has_gpus: bool) -> bool:
        """Return True if models and engines leave the devices that they share while they are idle."""
        return False

    @property
    def uses_torchrun(self) -> bool:
        """True if the run takes several processes of torchrun."""
        return self.launcher == "torchrun" and math.prod(self.size("policy")) > 1

    @property
    def uses_ray(self) -> bool:
        """True if the run takes several processes, on a Ray cluster."""
        if self.launcher != "auto":
            return self.launcher == "ray"
        return not self.shares_devices or self.size("policy") != (1, 1)


class RunConfig(Section):
    """The training run."""

    placement: RunPlacementConfig = RunPlacementConfig()
    """Processes of the run."""

    strategy: Literal["fsdp2", "fsdp", "megatron"] = "fsdp2"
    """Division of a model over its ranks: `fsdp2` and `fsdp` both mean PyTorch's FSDP2; `megatron` is tensor and
    pipeline parallelism with Megatron-Core, as in `megatron_config`. A single rank holds the whole model."""

    sequence_parallel_backend: Annotated[Literal["ulysses"], Allowed("ulysses")] = "ulysses"
    """Division of attention among the ranks of `sequence_parallel_size`: by its heads."""

    preflight: Literal["error", "warn"] = "error"
    """Reaction if weights, gradients and optimizer state alone exceed the free memory: `error` ends the run before it
    loads a model, `warn` logs a warning and continues."""

    epochs: Count = 1
    """Passes over the training data."""

    max_training_steps: OptionalCount = None
    """Stop after this many steps, even within an epoch; null trains for `epochs`."""

    micro_train_batch_size_per_gpu: OptionalCount = None
    """Maximum number of rows in one forward and backward pass; null leaves it to `max_tokens_per_microbatch`.
    It limits memory; the loss and its gradient do not depend on it."""

    micro_forward_batch_size_per_gpu: OptionalCount = None
    """Maximum number of rows in one forward pass; null leaves it to `max_tokens_per_microbatch`."""

    max_tokens_per_microbatch: Annotated[
        OptionalCount,
        BeforeValidator(lambda value: None if value == -1 else value),
        Allowed("an integer >= 1 or null"),
    ] = None
    """Maximum number of tokens of a rank in one pass; a longer row is processed alone. null or -1 selects a default:
    16,384 on a GPU; on a CPU between 1,024 and 8,192, so that activations take about 1 GiB (and probabilities of the
    vocabulary at most another). A shared prefix counts fully once and a quarter for each further row. With
    `sequence_parallel_size` or `context_parallel_size`, the limit applies to each rank. It bounds memory; the loss and
    its gradient do not depend on it."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""

    bf16: bool = True
    """Compute in bfloat16 on a GPU; a CPU computes in float32. `trainer.policy.model.dtype` is the type of the
    weights."""

    eval_interval: CountOrMinusOne = 5
    """Steps between evaluations, with one after the last step; -1 turns evaluation off."""

    ckpt_interval: CountOrMinusOne = 10
    """Steps between checkpoints, with one after the last step; -1 writes none."""

    ckpt_timeout_seconds: Annotated[float, Gt(0)] = 60.0
    """Maximum number of seconds that training waits for a slow disk because of a checkpoint. Until the slow one is
    written, steps are not saved, with an alert. The checkpoint of the last step is waited for."""

    ckpt_path: Resolved[Text] = resolved_later()
    """Folder of the checkpoints; null takes `<output_dir>/<project_name>/<run_name>/ckpts`."""

    max_ckpts_to_keep: CountOrMinusOne = -1
    """Number of newest checkpoints to keep; -1 keeps as many as fit on the disk, or one with `remote_ckpt_url`."""

    remote_ckpt_url: Text | None = None
    """Upload each checkpoint to `<remote_ckpt_url>/<project_name>/<model>/<run_name>/global_step_<N>/`, e.g.
    `s3://skyrl-checkpoints`, or any URL of fsspec. S3 needs credentials (`$AWS_ACCESS_KEY_ID` and
    `$AWS_SECRET_ACCESS_KEY`, or a profile); without them, nothing is uploaded. `resume_mode=latest` downloads a newer
    checkpoint from there, and `max_ckpts_to_keep=-1` keeps one on this machine."""

    remote_exit_timeout_seconds: Annotated[float, Ge(0)] = 600.0
    """Maximum number of seconds that the end of a run waits for its uploads."""

    hf_save_interval: CountOrMinusOne = -1
    """Steps between exports of the policy as a Hugging Face folder; -1 exports none."""

    export_path: Resolved[Text] = resolved_later()
    """Folder of the exports; null takes `<output_dir>/<project_name>/<run_name>/export`."""

    resume_mode: ResumeMode = "latest"
    """Start from scratch (`none`), from the newest checkpoint under `ckpt_path` if there is one (`latest`), or from
    `resume_path` (`from_path`)."""

    resume_path: Text | None = None
    """A checkpoint folder or its URL, ending in `global_step_<N>`; read when `resume_mode=from_path`."""

    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 42
    """Seed of every random choice of the run."""

    output_dir: Text = "outputs"
    """The run folder is `<output_dir>/<project_name>/<run_name>`."""

    project_name: Resolved[Text] = resolved_later()
    """Project name, used for the run folder and the trackers; null takes `$WANDB_PROJECT` with wandb, else `skyrl`."""

    run_name: Annotated[Resolved[Text], BeforeValidator(empty_as_null)] = resolved_later()
    """Run name, used for the run folder and the trackers; an existing name resumes that run. If null or empty, it is
    `$WANDB_NAME` with wandb, else `<project_name>-<date>-<time>`."""

    logger: LoggerList = Field(default=["tensorboard"])
    """Trackers of metrics; `console` prints all of them, wandb needs WANDB_API_KEY. A progress line and `metrics.jsonl`
    in the run folder are always written."""

    wandb_artifacts: bool = False
    """Log each checkpoint as an artifact of the Weights & Biases run, which copies and uploads all of its files; needs
    `wandb` in `logger`."""

    wandb_environment: StringList = Field(default=[])
    """Environment variables that the Config tab of the Weights & Biases run shows as `environment_variables`, e.g.
    `[CUDA_VISIBLE_DEVICES]`; those that are not set are left out. Needs `wandb` in `logger`."""

    @property
    def run_dir(self) -> str:
        """The run folder, before `$HOME` and `~` are expanded."""
        return f"{self.output_dir.rstrip('/')}/{self.project_name}/{self.run_name}"

    def remote_url(self, model: str) -> str | None:
        """Return the folder of this run below `remote_ckpt_url`, given the path of its model; None without that key."""
        if self.remote_ckpt_url is None:
            return None
        parts = (self.remote_ckpt_url.rstrip("/"), self.project_name, model.rstrip("/").rpartition("/")[2])
        return "/".join((*parts, self.run_name))
