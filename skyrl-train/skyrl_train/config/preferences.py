"""Configurations for training on preferences: direct preference optimization (DPO) and reward models."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from skyrl_train.config.base import Section, Text
from skyrl_train.config.policy import Betas, LearningRate, RefConfig
from skyrl_train.config.sft import (
    SFT,
    SFTOptimizerConfig,
    SFTPolicyConfig,
    SFTTrainerConfig,
    SupervisedConfig,
    SupervisedDataConfig,
    supervised_schema,
)


class PreferenceDataConfig(SupervisedDataConfig):
    """Preferences: rows with a prompt, a chosen and a rejected answer."""

    chosen_key: Text = "chosen"
    """Column with the better answer: a string or a list of messages. Without a column `prompt_key`, the prompt is
    the common prefix of both answers."""

    rejected_key: Text = "rejected"
    """Column with the worse answer, in the same format as `chosen_key`."""

    truncation: Literal["error", "left", "right"] = "error"
    """What to do with longer rows: raise an error, or drop tokens on the left or right. A pair is dropped if one of its
    answers has no token left."""


class PreferenceOptimizerConfig(SFTOptimizerConfig):
    """AdamW, one step per batch."""

    lr: LearningRate = 1e-6

    adam_betas: Betas = (0.9, 0.999)

    weight_decay: Annotated[float, Ge(0)] = 0.0


class PreferencePolicyConfig(SFTPolicyConfig):
    """The trained model."""

    optimizer_config: PreferenceOptimizerConfig = PreferenceOptimizerConfig()


class DPOLossConfig(Section):
    """The loss of a pair of answers. h = log π_policy(answer) - log π_ref(answer)."""

    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid` is DPO: -log σ(β (h_chosen - h_rejected)). `ipo` is (h_chosen - h_rejected - 1 / (2 β))², with h
    averaged over an answer's tokens."""

    beta: Annotated[float, Gt(0)] = 0.1
    """Coefficient β. Larger values keep the policy closer to the reference."""

    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Assumed probability that a label is wrong (conservative DPO). Only for `loss_type=sigmoid`."""


class DPOTrainerConfig(SFTTrainerConfig):
    """The training run."""

    policy: PreferencePolicyConfig = PreferencePolicyConfig()

    ref: RefConfig = RefConfig()
    """The frozen reference model."""

    dpo: DPOLossConfig = DPOLossConfig()

    @property
    def policy_is_reference(self) -> bool:
        """True if the reference is the policy without its adapter. No second model is loaded."""
        return self.ref.is_base_of(self.policy.model)


class DPOConfig(SupervisedConfig):
    """The typed configuration of direct preference optimization."""

    data: PreferenceDataConfig = PreferenceDataConfig()
    trainer: DPOTrainerConfig = DPOTrainerConfig()


class RewardDataConfig(PreferenceDataConfig):
    """Preferences: rows with a prompt, a chosen and a rejected answer."""

    def row_length(self, n_context: int | None) -> int:
        """Return the maximum row length, leaving room in the context for a copy of the last token."""
        length = super().row_length(n_context)
        return length - 1 if length == n_context else length


class RewardOptimizerConfig(PreferenceOptimizerConfig):
    """AdamW, one step per batch."""

    lr: LearningRate = 1e-5


class RewardPolicyConfig(SFTPolicyConfig):
    """The trained model: a reward model, or a language model that gets a new reward head."""

    optimizer_config: RewardOptimizerConfig = RewardOptimizerConfig()


class RewardTrainerConfig(SFTTrainerConfig):
    """The training run."""

    policy: RewardPolicyConfig = RewardPolicyConfig()


class RewardConfig(SupervisedConfig):
    """The typed configuration of training a reward model."""

    data: RewardDataConfig = RewardDataConfig()
    trainer: RewardTrainerConfig = RewardTrainerConfig()


def smoothing_has_a_sigmoid(cfg: DPOConfig) -> Iterator[str]:
    """Reject label smoothing with `ipo`: it has no labels to smooth."""
    dpo = cfg.trainer.dpo
    if dpo.label_smoothing > 0 and dpo.loss_type != "sigmoid":
        yield (
            f"trainer.dpo.label_smoothing={dpo.label_smoothing:g} has no effect on trainer.dpo.loss_type="
            f"{dpo.loss_type}; set trainer.dpo.label_smoothing=0, or trainer.dpo.loss_type=sigmoid"
        )


def answers_are_scored_equally(cfg: SupervisedConfig) -> Iterator[str]:
    """Reject adapter dropout: the two answers of a pair would be scored with different weights."""
    key, lora = "trainer.policy.model.lora", cfg.trainer.policy.model.lora
    if lora.dropout > 0:
        yield (
            f"{key}.dropout={lora.dropout:g} would score the answers of a pair with different random weights, and "
            f"their difference is what is trained; set {key}.dropout=0"
        )


DPO = replace(
    supervised_schema(DPOConfig, "dpo_config", answers_are_scored_equally, smoothing_has_a_sigmoid),
    paths=(*SFT.paths, "trainer.ref.model.path"),
    sources=(*SFT.sources, ("trainer.ref.model.path", lambda cfg: cfg.trainer.policy.model.path)),
)
"""The configuration of direct preference optimization."""


def reward_models_are_sharded(cfg: RewardConfig) -> Iterator[str]:
    """Reject Megatron-Core: it has no reward head."""
    if not cfg.trainer.strategy_traits.has_scalar_heads:
        yield (
            f"trainer.strategy={cfg.trainer.strategy} trains language models only; set trainer.strategy=fsdp2 for a "
            "reward model"
        )


REWARD = supervised_schema(RewardConfig, "reward_config", answers_are_scored_equally, reward_models_are_sharded)
"""The configuration of training a reward model."""
