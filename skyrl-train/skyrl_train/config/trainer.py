"""`trainer.*`: the steps of a run, its batches, and its outputs."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.base import Allowed, Count, Resolved, Section, Text, resolved_later
from skyrl_train.config.policy import CriticConfig, PolicyConfig, RefConfig
from skyrl_train.config.run import PlacedRole, RunConfig, RunPlacementConfig


class PlacementConfig(RunPlacementConfig):
    """Processes of a training run. On a cluster without GPUs, each GPU in these keys is a process on the CPU."""

    launcher: Literal["auto", "inline", "ray"] = "auto"
    """`inline` runs everything on one device, in one process or, with `fully_async`, in two. `ray` runs each rank and
    each engine in a process of a Ray cluster: the one at `$RAY_ADDRESS`, the one that `ray start` began on this
    machine, or a new one. `auto` takes `ray` if a key below asks for more than one process."""

    colocate_all: bool = True
    """Training and the rollout engine share the same GPUs. `false` reserves others for each of policy, critic,
    reference and engine."""

    offload_idle: Annotated[bool | Literal["auto"], Allowed("auto, true or false")] = "auto"
    """With `colocate_all=true`, free GPU memory of what is idle, if the engine has its own copy of the weights. While a
    model computes, the engine sleeps and other models are in host memory; while the engine generates, all but the
    policy's weights are there. Results do not change. `auto`: on GPUs."""

    colocate_policy_ref: bool = True
    """Policy and reference share the same GPUs; read only when `colocate_all=false`."""

    critic_num_nodes: Resolved[Count] = resolved_later()
    """Nodes of the critic; null takes those of the policy."""

    critic_num_gpus_per_node: Resolved[Count] = resolved_later()
    """GPUs of the critic on each node; null takes those of the policy."""

    ref_num_nodes: Resolved[Count] = resolved_later()
    """Nodes of the reference; null takes those of the policy."""

    ref_num_gpus_per_node: Resolved[Count] = resolved_later()
    """GPUs of the reference on each node; null takes those of the policy."""

    def size(self, role: PlacedRole) -> tuple[int, int]:
        """Return the nodes of a model, and its ranks on each of them. A reward model has the policy's."""
        role = "policy" if role == "reward" else role
        return getattr(self, f"{role}_num_nodes"), getattr(self, f"{role}_num_gpus_per_node")

    @property
    def shares_devices(self) -> bool:
        return self.colocate_all

    def offloads_idle(self, has_gpus: bool) -> bool:
        is_on = has_gpus if self.offload_idle == "auto" else self.offload_idle
        return is_on and self.colocate_all


class FullyAsyncConfig(Section):
    """Asynchronous training: the engines generate the rollouts of the next steps while the policy is updated."""

    enabled: bool = False
    """Train and generate concurrently, in separate processes: on Ray with `placement.colocate_all=false`, with running
    servers, or with a second process on this machine. Rollouts become off-policy; see
    `algorithm.off_policy_correction`."""

    max_staleness_steps: Annotated[int, Ge(0)] = 4
    """Maximum number of steps between the weights that start a rollout and those that train on it. Rollouts of this
    many future steps are generated ahead; 0 is on-policy."""

    num_parallel_generation_workers: Count = 768
    """Maximum number of prompts whose rollouts are in progress at once."""

    in_flight_weight_updates: bool = True
    """Let rollouts in progress continue with new weights. `false` finishes them before each weight sync, so that one
    version of the weights samples each rollout, unless its engine is lost."""

    @property
    def continues_rollouts(self) -> bool:
        """True if weights change while rollouts are in progress."""
        return self.enabled and self.in_flight_weight_updates and self.max_staleness_steps > 0


class TrainerConfig(RunConfig):
    """The training run."""

    placement: PlacementConfig = PlacementConfig()
    """Processes of the run, and their places on GPUs."""

    policy: PolicyConfig = PolicyConfig()
    """The model that is trained."""

    critic: CriticConfig = CriticConfig()
    """The model that estimates values."""

    ref: RefConfig = RefConfig()
    """The frozen reference."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The mathematics of one update."""

    fully_async: FullyAsyncConfig = FullyAsyncConfig()
    """Asynchronous training."""

    update_epochs_per_batch: Count = 1
    """Passes over each batch of rollouts (the inner epochs of PPO)."""

    train_batch_size: Count = 1024
    """Prompts per training step."""

    policy_mini_batch_size: Count = 256
    """Prompts per optimizer step of the policy; divides `train_batch_size`."""

    critic_mini_batch_size: Count = 256
    """Prompts per optimizer step of the critic, when there is one; divides `train_batch_size`."""

    update_ref_every_epoch: bool = False
    """Copy the policy to the reference after each epoch but the last."""

    flash_attn: bool = True
    """No effect: attention is always PyTorch's SDPA, which uses a flash kernel on a GPU where it can."""

    max_prompt_length: Count = 512
    """Maximum prompt length in tokens; longer prompts are dropped from the dataset."""

    eval_batch_size: Count = 1024
    """Prompts per evaluation batch."""

    eval_before_train: bool = True
    """Also evaluate before the first step, if evaluation is on."""

    dump_eval_results: bool = True
    """Write every evaluated trajectory under `evals/` in the run folder."""

    remote_trajectory_url: Text | None = None
    """Upload the evaluated trajectories to `<remote_trajectory_url>/evals/<run_name>/global_step_<N>/`, e.g.
    `s3://skyrl-trajectories`; needs `dump_eval_results`."""

    dump_trajectories: bool = False
    """Write every training trajectory under `trajectories/` in the run folder."""

    log_verl_metrics: bool = False
    """Log the metrics of a step under the names of verl, too: `actor/pg_loss`, `critic/score/mean`,
    `response_length/mean`, …, and under those of recipes for it, such as `train/reward`. `skyrl verl main_ppo` sets
    this."""

    @property
    def policy_is_reference(self) -> bool:
        """True if the reference is the policy without its adapter, so that no second model is loaded."""
        return self.ref.is_base_of(self.policy.model) and not self.update_ref_every_epoch
