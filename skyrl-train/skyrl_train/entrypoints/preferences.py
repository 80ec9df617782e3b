"""Training on pairs of answers: direct preference optimization (DPO) and reward models."""

from functools import partial

from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import PreferenceObjective, RewardObjective, SupervisedObjective
from skyrl_train.config.preferences import DPO, REWARD
from skyrl_train.dataset.supervised import SegmentReader, build_rewarded_segment
from skyrl_train.entrypoints.sft import SupervisedExp
from skyrl_train.launch.launcher import ModelLauncher
from skyrl_train.models.loading import (
    POLICY_PATH,
    REF_PATH,
    check_same_vocabulary,
    check_vocabulary_size,
    load_reward_model,
)
from skyrl_train.types.specs import LoraSpec, Role
from skyrl_train.workers.group import WorkerGroup


class DPOExp(SupervisedExp):
    """A DPO run."""

    is_stock = True

    schema = DPO

    @property
    def roles(self) -> list[Role]:
        return ["policy"] if self.cfg.trainer.policy_is_reference else ["policy", "ref"]

    def get_objective(self) -> SupervisedObjective:
        dpo = self.cfg.trainer.dpo
        return PreferenceObjective(dpo.beta, dpo.label_smoothing, dpo.loss_type)

    async def load_reference(self, launcher: ModelLauncher, policy: WorkerGroup, lora: LoraSpec | None) -> WorkerGroup:
        """Load the frozen reference. If the reference is the policy without its adapter, return the policy."""
        trainer = self.cfg.trainer
        if trainer.policy_is_reference:
            return policy
        path = trainer.ref.model.path
        if path != trainer.policy.model.path:
            check_same_vocabulary(path, REF_PATH, self.tokenizer)
        load = partial(self.load_language_model, path, REF_PATH)
        lora = lora if trainer.ref.shares_adapter_with(trainer.policy.model) else None
        ref = await launcher.load(self.model_spec("ref", load, None, lora), None)
        check_vocabulary_size(ref.facts.n_embeddings, REF_PATH, path, policy.facts.n_embeddings)
        return ref


class RewardExp(SupervisedExp):
    """A run that trains a reward model."""

    is_stock = True

    schema = REWARD
    role = "reward"

    def get_model(self) -> PreTrainedModel:
        """Load the model to train. If it has no reward head, it gets one of zeros."""
        path, pad_token_id = self.cfg.trainer.policy.model.path, self.tokenizer.pad_token_id
        return load_reward_model(path, pad_token_id=pad_token_id, **self._loading_options(POLICY_PATH))

    def get_segment_reader(self) -> SegmentReader:
        pad_token_id = self.tokenizer.pad_token_id
        return lambda rows: (build_rewarded_segment(rows[-1].token_ids, pad_token_id),)  # of an answer's last row

    def get_objective(self) -> SupervisedObjective:
        return RewardObjective()
