"""Training on pairs of answers: direct preference optimization (DPO) and reward models."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import PreferenceObjective, RewardObjective, SupervisedObjective
from skyrl_train.config.supervised import DPO, REWARD
from skyrl_train.dataset.supervised import SegmentReader, TokenRow, build_rewarded_segment
from skyrl_train.entrypoints.sft import SupervisedExp
from skyrl_train.models.loading import load_model
from skyrl_train.types import Segment


class DPOExp(SupervisedExp):
    """A DPO run."""

    schema = DPO

    def get_objective(self) -> SupervisedObjective:
        dpo = self.cfg.trainer.dpo
        return PreferenceObjective(dpo.beta, dpo.label_smoothing, dpo.loss_type)


class RewardExp(SupervisedExp):
    """A run that trains a reward model."""

    schema = REWARD

    def get_model(self) -> PreTrainedModel:
        """Load the model to train. If it has no reward head, it gets one of zeros."""
        model, pad_token_id = self.cfg.trainer.policy.model, self.tokenizer.pad_token_id
        options = self.loading_options(model.dtype)
        return load_model(model.path, "reward", pad_token_id=pad_token_id, **options)

    def get_segment_reader(self) -> SegmentReader:
        pad_token_id = self.tokenizer.pad_token_id

        def read(rows: Sequence[TokenRow]) -> tuple[Segment, ...]:
            """Return the last row of an answer."""
            return (build_rewarded_segment(rows[-1].token_ids, pad_token_id, rows[-1].images),)

        return read

    def get_objective(self) -> SupervisedObjective:
        return RewardObjective()
