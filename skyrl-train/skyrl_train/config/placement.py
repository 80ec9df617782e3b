"""`trainer.placement.*`: which worker stands on which GPUs."""

from __future__ import annotations

from skyrl_train.config.base import Count, Section


class PlacementConfig(Section):
    """Nodes and GPUs of each worker group. A run in one process maps every group to one worker on one device."""

    colocate_all: bool = True
    """Training and rollout engines share the same GPUs."""

    colocate_policy_ref: bool = True
    """Policy and reference share the same GPUs; read only when `colocate_all=false`."""

    policy_num_nodes: Count = 1
    """Nodes of the policy."""

    policy_num_gpus_per_node: Count = 1
    """GPUs of the policy on each node."""

    critic_num_nodes: Count = 1
    """Nodes of the critic."""

    critic_num_gpus_per_node: Count = 1
    """GPUs of the critic on each node."""

    ref_num_nodes: Count = 1
    """Nodes of the reference."""

    ref_num_gpus_per_node: Count = 1
    """GPUs of the reference on each node."""
