"""SkyRL's trainer of asynchronous runs, for its scripts. `generators.source.BufferedRollouts` plays their rollouts."""

from __future__ import annotations

from skyrl_train.ray_ppo_trainer import RayPPOTrainer


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """A `RayPPOTrainer` whose rollouts continue while it trains, for `BasePPOExp.get_trainer`.

    It turns `trainer.fully_async.enabled` on, if engines and policy are in separate processes.
    """
