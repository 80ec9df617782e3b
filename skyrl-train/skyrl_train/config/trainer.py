"""`trainer.*`: the steps of a run, its batches, and its outputs."""

from typing import Annotated, Literal

from annotated_types import Ge

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.base import Allowed, Count, Resolved, Section, Text, resolved_later
from skyrl_train.config.policy import CriticConfig, PolicyConfig, RefConfig
from skyrl_train.config.run import PlacedRole, RunConfig, RunPlacementConfig


class PlacementConfig(RunPlacementConfig):
    launcher: Literal["auto", "inline", "ray"] = "auto"
    """`inline` runs everything on one device, in one process (two with `fully_async`). `ray` runs each rank and each
    engine in its own Ray worker process. It joins the cluster at `$RAY_ADDRESS` or one that `ray start` started on this
    machine, and otherwise starts one. `auto` uses Ray only if a key below needs more than one process."""

    colocate_all: bool = True
    """Train and generate on the same GPUs. `false` reserves separate GPUs for the policy, the critic and each engine,
    and for the reference as `colocate_policy_ref` says."""

    offload_idle: Annotated[bool | Literal["auto"], Allowed("auto, true or false")] = "auto"
    """With `colocate_all=true` and an engine that has its own copy of the weights, offload idle models and engines from
    the GPU. While a model computes, the engine sleeps and the other models move to host memory. While the engine
    generates, only the policy's weights stay on the GPU. Results do not change. `auto` means true on GPUs."""

    colocate_policy_ref: bool = True
    """Put the policy and the reference on the same GPUs. Only used if `colocate_all=false`."""

    critic_num_nodes: Resolved[Count] = resolved_later()
    """Number of critic nodes. Defaults to `policy_num_nodes`."""

    critic_num_gpus_per_node: Resolved[Count] = resolved_later()
    """Number of critic GPUs per node. Defaults to `policy_num_gpus_per_node`."""

    ref_num_nodes: Resolved[Count] = resolved_later()
    """Number of reference nodes. Defaults to `policy_num_nodes`."""

    ref_num_gpus_per_node: Resolved[Count] = resolved_later()
    """Number of reference GPUs per node. Defaults to `policy_num_gpus_per_node`."""

    def size(self, role: PlacedRole) -> tuple[int, int]:
        """Return (nodes, ranks per node) of a model. A reward model has the policy's size."""
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
    """Train and generate concurrently, in separate processes. The engine is a Ray worker
    (`placement.colocate_all=false`), a running server, or a second process on this machine. Rollouts become off-policy:
    consider `algorithm.off_policy_correction`."""

    max_staleness_steps: Annotated[int, Ge(0)] = 4
    """Maximum age, in steps, of the weights that started a rollout when it is trained on. Rollouts are generated this
    many steps ahead. 0 is on-policy. Larger values hide slow rollouts, at the cost of staler data."""

    num_parallel_generation_workers: Count = 768
    """Maximum number of prompts whose rollouts are in progress at once."""

    in_flight_weight_updates: bool = True
    """Let rollouts in progress continue with new weights. `false` finishes them before each weight sync. Each rollout
    is then sampled by one version of the weights, unless its engine is lost."""

    @property
    def continues_rollouts(self) -> bool:
        """True if weights change while rollouts are in progress."""
        return self.enabled and self.in_flight_weight_updates and self.max_staleness_steps > 0


class TrainerConfig(RunConfig):
    placement: PlacementConfig = PlacementConfig()
    policy: PolicyConfig = PolicyConfig()
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    fully_async: FullyAsyncConfig = FullyAsyncConfig()

    update_epochs_per_batch: Count = 1
    """Number of passes over each batch of rollouts (PPO's inner epochs)."""

    train_batch_size: Count = 1024
    """Number of prompts per training step."""

    policy_mini_batch_size: Count = 256
    """Number of prompts per optimizer step of the policy. Must divide `train_batch_size`."""

    critic_mini_batch_size: Count = 256
    """Number of prompts per optimizer step of the critic. Must divide `train_batch_size`. Ignored without a critic."""

    update_ref_every_epoch: bool = False
    """Copy the policy to the reference after each epoch except the last."""

    flash_attn: bool = True
    """No effect. Attention is always PyTorch's SDPA. On GPUs, it uses a flash kernel where possible."""

    max_prompt_length: Count = 512
    """Maximum prompt length in tokens. Longer prompts are dropped from the dataset."""

    eval_batch_size: Count = 1024
    """Number of prompts per evaluation batch."""

    eval_before_train: bool = True
    """Also evaluate before the first step, unless evaluation is disabled."""

    dump_eval_results: bool = True
    """Write all evaluation trajectories to `evals/` in the run folder."""

    remote_trajectory_url: Text | None = None
    """URL such as `s3://skyrl-trajectories`. Evaluation trajectories are uploaded to
    `<remote_trajectory_url>/evals/<run_name>/global_step_<N>/`. Needs `dump_eval_results=true`."""

    dump_trajectories: bool = False
    """Write all training trajectories to `trajectories/` in the run folder, with log-probs and advantages of tokens."""

    n_dumped_prompts: Annotated[int, Ge(0)] = 1
    """Without `dump_trajectories`: prompts of each step whose trajectories are written, without values of tokens."""

    log_verl_metrics: bool = False
    """Also log step metrics under verl's names (`actor/pg_loss`, `critic/score/mean`, `response_length/mean`, …) and
    names used by verl recipes, such as `train/reward`. `skyrl verl main_ppo` sets this."""

    @property
    def policy_is_reference(self) -> bool:
        """True if the reference is the policy without its adapter. No second model is loaded."""
        return self.ref.is_base_of(self.policy.model) and not self.update_ref_every_epoch
