"""The reference: the policy as it was before training, or a teacher; frozen."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.scoring import score_tokens

WEIGHTS = "model_world_size_1_rank_0.pt"


class RefWorker:
    """Scores log-probs of a model that does not learn."""

    def __init__(self, model: PreTrainedModel, cfg: TrainerConfig) -> None:
        self.model = model.requires_grad_(False)
        self._cfg = cfg

    def score(self, batch: TrainingBatch) -> torch.Tensor:
        """Log-probs (B, R) of the batch's sampled tokens."""
        return score_tokens(self.model, batch, self._cfg).logprobs

    def check_can_become(self, model: PreTrainedModel) -> None:
        """Raise ConfigError unless the model has weights of the same names and shapes."""
        ours, theirs = ({name: tensor.shape for name, tensor in m.state_dict().items()} for m in (self.model, model))
        if ours != theirs:
            raise ConfigError(
                "trainer.update_ref_every_epoch=true makes the policy the reference, and trainer.ref.model.path has "
                "another architecture; set trainer.update_ref_every_epoch=false, or leave trainer.ref.model.path out"
            )

    @torch.no_grad()
    def become(self, model: PreTrainedModel) -> None:
        """Take over the weights of a model of the same architecture."""
        self.model.load_state_dict(model.state_dict())

    def checkpoint_bytes(self) -> int:
        """How large `save` makes a folder."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    def save(self, folder: Path) -> None:
        """Write the weights into `folder`."""
        folder.mkdir(parents=True)
        torch.save(self.model.state_dict(), folder / WEIGHTS)

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote; CheckpointError if it is not there or does not fit."""
        try:
            self.model.load_state_dict(torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"cannot resume the reference from {folder}: {error}; it is part of a checkpoint when "
                "trainer.update_ref_every_epoch=true"
            ) from error
