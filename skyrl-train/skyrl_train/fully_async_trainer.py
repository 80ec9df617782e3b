"""SkyRL's asynchronous trainer, for scripts that return it from `get_trainer`."""

from __future__ import annotations

from skyrl_train.ray_ppo_trainer import RayPPOTrainer


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """A `RayPPOTrainer` that trains while `generators.buffered.BufferedRollouts` generates.

    It turns `trainer.fully_async.enabled` on if the engines run in other processes.
    """
