"""Configurations of runs on fixed data: supervised fine-tuning (SFT), preferences (DPO) and reward models."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import Field

from skyrl_train.config.base import Allowed, Count, CountOrMinusOne, FreeValue, OptionalCount, Section, StringList, Text
from skyrl_train.config.dialects import MEMORY_WITHOUT_EFFECT, VERL_SFT
from skyrl_train.config.loading import RUN_PATHS, RUN_SOURCES, C, Schema
from skyrl_train.config.policy import Betas, LearningRate, OptimizerConfig, PolicyConfig, RefConfig, SchedulerName
from skyrl_train.config.problems import Rule
from skyrl_train.config.rules import RUN_MACHINE_RULES, RUN_RULES, RUN_WARNINGS
from skyrl_train.config.run import RunConfig

MAX_LENGTH = 2048
"""Default of `data.max_length` in tokens, unless the model's context is shorter."""


class SupervisedDataConfig(Section):
    """Training and validation data, and how rows are tokenized."""

    train_data: StringList = Field(default=[])
    """Training rows: parquet, json or jsonl files, or Hugging Face datasets (`owner/name:split` or
    `owner/name/config:split`, by default the split `train`). A single string is a list of one."""

    val_data: StringList = Field(default=[])
    """Validation rows, in the same format as `train_data`. An empty list disables the validation loss."""

    max_checked_rows: OptionalCount = 20_000
    """Number of training rows to check and tokenize before training, sampled at random if there are more. null checks
    all. Remaining rows are checked when they are drawn, and skipped if they are invalid or too long. Validation data is
    always checked completely."""

    prompt_key: Text = "prompt"
    """Column with the prompt: a string (used as a user message) or a list of messages."""

    prompt_dict_keys: StringList = Field(default=[])
    """Keys to descend below `prompt_key`, e.g. `[question]` for `{"question": "…"}`."""

    tools_key: Text = "tools"
    """Column with the row's tools for the chat template: a list of JSON schemas, or the same as a JSON string."""

    max_length: OptionalCount = None
    """Maximum length of a row in tokens, prompt and response together. Defaults to 2048, or the model's context length
    if that is shorter."""

    truncation: Literal["error", "left", "right"] = "error"
    """What to do with longer rows: raise an error, or drop tokens on the left or right. A row without any trained token
    left is dropped."""

    chat_template: Text | None = None
    """Path of a Jinja chat template to use instead of the tokenizer's. It is saved in exports and checkpoints."""

    chat_template_kwargs: Annotated[dict[str, FreeValue], Allowed("a section of variables of the template")] = Field(
        default={}
    )
    """Arguments of the chat template, e.g. `data.chat_template_kwargs.enable_thinking=false`."""

    def row_length(self, n_context: int | None) -> int:
        """Return the maximum row length in tokens. `n_context` is the model's context length, None if unknown."""
        return self.max_length or min(MAX_LENGTH, n_context or MAX_LENGTH)


class SFTDataConfig(SupervisedDataConfig):
    """Demonstrations: rows with a prompt and a response, or with a conversation."""

    messages_key: Text = "messages"
    """Column with a conversation: a list of messages with `role` and `content`. All assistant turns are trained, except
    leading ones before any other message. Rows without this column need a prompt and a response."""

    response_key: Text = "response"
    """Column with the response: a string."""

    response_dict_keys: StringList = Field(default=[])
    """Keys to descend below `response_key`."""


class SFTOptimizerConfig(OptimizerConfig):
    """The optimizer, one step per batch."""

    lr: LearningRate = 2e-6

    adam_betas: Betas = (0.9, 0.98)

    weight_decay: Annotated[float, Ge(0)] = 0.05

    scheduler: SchedulerName = "cosine"


class SFTPolicyConfig(PolicyConfig):
    optimizer_config: SFTOptimizerConfig = SFTOptimizerConfig()


class SFTTrainerConfig(RunConfig):
    policy: SFTPolicyConfig = SFTPolicyConfig()

    train_batch_size: Count = 32
    """Number of rows per training step."""

    micro_train_batch_size_per_gpu: OptionalCount = 8
    """Maximum number of rows per forward and backward pass, in addition to `max_tokens_per_microbatch`. null sets no
    limit on rows. Affects memory only: loss and gradient do not change."""

    eval_interval: CountOrMinusOne = 50
    """Compute the validation loss every N steps and after the last step. -1 disables it."""

    eval_before_train: bool = False
    """Also compute the validation loss before the first step."""

    ckpt_interval: CountOrMinusOne = 50


class SupervisedConfig(Section):
    """Configuration shared by supervised fine-tuning and training on preferences."""

    data: SupervisedDataConfig = SupervisedDataConfig()
    trainer: SFTTrainerConfig = SFTTrainerConfig()


class SFTConfig(SupervisedConfig):
    """The typed configuration of supervised fine-tuning."""

    data: SFTDataConfig = SFTDataConfig()


def validation_is_held_out(cfg: SupervisedConfig) -> Iterator[str]:
    """Warn about a source in both the training and the validation data."""
    for source in cfg.data.val_data:
        if source in cfg.data.train_data:
            yield (
                f"{source} is in data.train_data and in data.val_data, so val/loss measures how well it is memorized; "
                "hold out other rows"
            )


def supervised_schema(root: type[C], config_name: str, *rules: Rule) -> Schema[C]:
    """Return the schema of a run on fixed data. `rules` apply in addition to the shared rules."""
    return Schema(
        root,
        config_name,
        aliases={},
        without_effect=MEMORY_WITHOUT_EFFECT,
        paths=(*RUN_PATHS, "data.chat_template"),
        sources=RUN_SOURCES,
        rules=(*RUN_RULES, *rules),
        machine_rules=RUN_MACHINE_RULES,
        warnings=(*RUN_WARNINGS, validation_is_held_out),
    )


SFT = replace(supervised_schema(SFTConfig, "sft_config"), aliases=VERL_SFT)
"""The configuration of supervised fine-tuning."""


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
    lr: LearningRate = 1e-6

    adam_betas: Betas = (0.9, 0.999)

    weight_decay: Annotated[float, Ge(0)] = 0.0


class PreferencePolicyConfig(SFTPolicyConfig):
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
    def row_length(self, n_context: int | None) -> int:
        """Return the maximum row length, leaving room in the context for a copy of the last token."""
        length = super().row_length(n_context)
        return length - 1 if length == n_context else length


class RewardOptimizerConfig(PreferenceOptimizerConfig):
    lr: LearningRate = 1e-5


class RewardPolicyConfig(SFTPolicyConfig):
    """The trained model: a reward model, or a language model that gets a new reward head."""

    optimizer_config: RewardOptimizerConfig = RewardOptimizerConfig()


class RewardTrainerConfig(SFTTrainerConfig):
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
