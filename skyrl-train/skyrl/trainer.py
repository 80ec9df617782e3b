"""SkyRL's trainers with the signatures of the new layout."""

from skyrl_train.compat.skyrl import trainer
from skyrl_train.compat.skyrl.generator import GeneratorOutput

__all__ = ["FullyAsyncRayPPOTrainer", "RayPPOTrainer"]


class RayPPOTrainer(trainer.RayPPOTrainer):
    """A trainer whose `postprocess_generator_output` also returns the uids."""

    @property
    def postprocesses(self) -> bool:
        return type(self).postprocess_generator_output is not RayPPOTrainer.postprocess_generator_output

    def postprocess_generator_output(  # type: ignore[override]
        self,
        generator_output: GeneratorOutput,
        uids: list[str],
        metrics_generator_output: GeneratorOutput | None = None,
        metrics_uids: list[str] | None = None,
    ) -> tuple[GeneratorOutput, list[str]]:
        """Return the rollouts of a step with per-token rewards, and the unchanged `uids`.

        The last two parameters are ignored, because the trainer computes its metrics itself.
        """
        return super().postprocess_generator_output(generator_output, uids), uids


class FullyAsyncRayPPOTrainer(RayPPOTrainer, trainer.FullyAsyncRayPPOTrainer):
    """A `RayPPOTrainer` that trains while rollouts are generated."""
