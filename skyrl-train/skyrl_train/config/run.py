"""The part of `trainer.*` that all kinds of training share: length, outputs and memory limits."""

import math
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field

from skyrl_train.config.backends import STRATEGIES, StrategyName, StrategyTraits
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
    resolved_later,
)

LoggerName = Literal["console", "jsonl", "tensorboard", "wandb"]
LoggerList = Annotated[
    list[LoggerName], BeforeValidator(as_list), Allowed("one of console, jsonl, tensorboard, wandb, or a list of them")
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
    """`inline` runs everything in one process. `ray` runs each rank in its own Ray worker process. It joins the cluster
    at `$RAY_ADDRESS` or one that `ray start` started on this machine, and otherwise starts one. `torchrun` starts the
    ranks with `torchrun`, without Ray. For several nodes, run the command under `torchrun` on each node. `auto` uses
    Ray only if a key below needs more than one process and `torchrun` did not start the command."""

    policy_num_nodes: Count = 1
    """Number of policy nodes."""

    policy_num_gpus_per_node: Count = 1
    """Number of policy GPUs per node. Each GPU is one rank and holds a shard of the model."""

    def size(self, role: PlacedRole) -> tuple[int, int]:
        """Return (nodes, ranks per node) of a model. All models have the policy's size."""
        return self.policy_num_nodes, self.policy_num_gpus_per_node

    @property
    def shares_devices(self) -> bool:
        """True if all models are on the policy's devices."""
        return True

    def offloads_idle(self, has_gpus: bool) -> bool:
        """Return True if idle models and engines are offloaded from the devices they share."""
        return False

    @property
    def uses_torchrun(self) -> bool:
        """True if the run takes several processes of torchrun."""
        return self.launcher == "torchrun" and math.prod(self.size("policy")) > 1

    @property
    def uses_ray(self) -> bool:
        """True if the run needs several processes, on a Ray cluster."""
        if self.launcher != "auto":
            return self.launcher == "ray"
        return not self.shares_devices or self.size("policy") != (1, 1)


class WatchdogConfig(Section):
    """Reports waits that are stuck, and ends those that no other limit ends."""

    warn_after_seconds: Annotated[float, Gt(0)] | None = 300.0
    """Warn of a wait without progress after this many seconds, with who waits for what, and write the stacks of the
    process to `stacks.txt`. Sooner if the wait has its own limit: after half of it. Repeated after twice the time. null
    disables the warning."""

    limit_seconds: Annotated[float, Gt(0)] | None = 7200.0
    """End a wait without progress after this many seconds if no other setting limits it. A rollout that waits for its
    environment, engine or reward becomes invalid. If models, a weight sync, a tracker or a disk do not respond, the run
    ends with exit status 5, and the last checkpoint is kept. null disables the limit."""


class RunConfig(Section):
    """The training run."""

    placement: RunPlacementConfig = RunPlacementConfig()

    strategy: StrategyName = "fsdp2"
    """How a model is split over its ranks. `fsdp2` and `fsdp` both mean PyTorch's FSDP2. `megatron` is tensor, pipeline
    and context parallelism with Megatron-Core (see `megatron_config`). No effect with a single rank."""

    sequence_parallel_backend: Annotated[Literal["ulysses"], Allowed("ulysses")] = "ulysses"
    """How `sequence_parallel_size` ranks share attention: Ulysses splits it by heads."""

    preflight: Literal["error", "warn"] = "error"
    """Reaction if weights, gradients and optimizer state alone exceed the free memory: `error` ends the run before it
    loads a model, `warn` logs a warning and continues."""

    epochs: Count = 1
    """Number of passes over the training data."""

    max_training_steps: OptionalCount = None
    """Stop after this many steps, even in the middle of an epoch. Defaults to the steps in `epochs`."""

    micro_train_batch_size_per_gpu: OptionalCount = None
    """Maximum number of rows per forward and backward pass. By default only `max_tokens_per_microbatch` limits it.
    Affects memory only: loss and gradient do not change."""

    micro_forward_batch_size_per_gpu: OptionalCount = None
    """Maximum number of rows per forward pass without gradient. By default only `max_tokens_per_microbatch` limits
    it."""

    max_tokens_per_microbatch: Annotated[
        OptionalCount, BeforeValidator(lambda value: None if value == -1 else value), Allowed("an integer >= 1 or null")
    ] = None
    """Maximum number of tokens per rank and pass. A longer row is processed alone. null and -1 mean 16,384 on a GPU and
    1,024 to 8,192 on a CPU, chosen so that activations take about 1 GiB and the vocabulary's probabilities at most 1
    GiB more. A prefix shared by several rows counts once, plus a quarter for each additional row. With
    `sequence_parallel_size` or `context_parallel_size`, the limit applies to each rank. Lower it if memory runs out:
    loss and gradient do not change."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Saves memory and costs about a third more compute."""

    activation_offload: bool = False
    """Keep activations in host memory between the forward and the backward pass: with `gradient_checkpointing` the
    inputs of the layers, otherwise all of them. Needs a GPU and a single rank per model."""

    bf16: bool = True
    """Run forward and backward passes in bfloat16 on GPUs. CPUs use the dtype of the weights:
    `trainer.policy.model.train_dtype` for trained weights and `trainer.policy.model.dtype` for frozen ones."""

    eval_interval: CountOrMinusOne = 5
    """Evaluate every N steps and after the last step. -1 disables evaluation."""

    ckpt_interval: CountOrMinusOne = 10
    """Write a checkpoint every N steps and after the last step. -1 disables checkpoints."""

    ckpt_timeout_seconds: Annotated[float, Gt(0)] = 60.0
    """Maximum number of seconds that a step waits for a slow disk to finish the previous checkpoint and start the next.
    After that, training continues with an alert and skips checkpoints until the slow one is written. The run always
    waits for the last step's checkpoint."""

    ckpt_path: Resolved[Text] = resolved_later()
    """Checkpoint folder. Defaults to `<output_dir>/<project_name>/<run_name>/ckpts`."""

    max_ckpts_to_keep: CountOrMinusOne = -1
    """Number of latest checkpoints to keep. -1 keeps as many as fit on the disk, or one with `remote_ckpt_url`."""

    remote_ckpt_url: Text | None = None
    """URL such as `s3://skyrl-checkpoints`, in any scheme fsspec supports. Each checkpoint is uploaded to
    `<remote_ckpt_url>/<project_name>/<model>/<run_name>/global_step_<N>/`. S3 needs credentials
    (`$AWS_ACCESS_KEY_ID` and `$AWS_SECRET_ACCESS_KEY`, or a profile): without them, nothing is uploaded.
    `resume_mode=latest` downloads a checkpoint that is newer than the local ones, and `max_ckpts_to_keep=-1` keeps one
    on this machine."""

    remote_exit_timeout_seconds: Annotated[float, Ge(0)] = 600.0
    """Maximum number of seconds to wait for uploads at the end of a run."""

    watchdog: WatchdogConfig = WatchdogConfig()

    hf_save_interval: CountOrMinusOne = -1
    """Export the policy as a Hugging Face folder every N steps. -1 disables exports."""

    export_path: Resolved[Text] = resolved_later()
    """Export folder. Defaults to `<output_dir>/<project_name>/<run_name>/export`."""

    resume_mode: ResumeMode = "latest"
    """`none` starts from scratch. `latest` resumes from the latest checkpoint in `ckpt_path`, if any. `from_path`
    resumes from `resume_path`."""

    resume_path: Text | None = None
    """Checkpoint folder or URL that ends in `global_step_<N>`, for `resume_mode=from_path`."""

    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 42
    """Seed for all randomness in the run."""

    output_dir: Text = "outputs"
    """Parent of all run folders. A run writes to `<output_dir>/<project_name>/<run_name>`."""

    project_name: Resolved[Text] = resolved_later()
    """Project name for the run folder and the trackers. Defaults to `$WANDB_PROJECT` with wandb, else `skyrl`."""

    run_name: Annotated[Resolved[Text], BeforeValidator(lambda text: None if text == "" else text)] = resolved_later()
    """Run name for the run folder and the trackers. An existing name resumes that run. null and the empty string
    default to `$WANDB_NAME` with wandb, else `<project_name>-<date>-<time>`."""

    logger: LoggerList = Field(default=["tensorboard"])
    """Where metrics are logged. `console` prints all metrics. `wandb` needs a login, e.g. `$WANDB_API_KEY`. A progress
    line and `metrics.jsonl` in the run folder are always written."""

    wandb_artifacts: bool = False
    """Log each checkpoint as a Weights & Biases artifact. wandb copies and uploads all of its files. Needs `wandb` in
    `logger`."""

    wandb_environment: StringList = Field(default=[])
    """Environment variables to show as `environment_variables` in the run's Config tab on Weights & Biases, e.g.
    `[CUDA_VISIBLE_DEVICES]`. Unset variables are left out. Needs `wandb` in `logger`."""

    @property
    def strategy_traits(self) -> StrategyTraits:
        """The traits of `strategy`."""
        return STRATEGIES[self.strategy]

    @property
    def run_dir(self) -> str:
        """The run folder, before `$HOME` and `~` are expanded."""
        return f"{self.output_dir.rstrip('/')}/{self.project_name}/{self.run_name}"
