"""`data.*`: where the prompts come from."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge
from pydantic import Field

from skyrl_train.config.base import Allowed, Section, StringList, Text


class MixtureConfig(Section):
    """What each `data_source` contributes to a batch. Without any of this, all training prompts are shuffled."""

    weights: Annotated[dict[str, Annotated[float, Ge(0)]], Allowed("a section of data_source=weight")] = Field(
        default={}
    )
    """Shares by data source, relative to one another: `data.mixture.weights={gsm8k:3,search:1}`. Each source is gone
    through in epochs of its own. Empty: by the number of prompts, where one of the other keys is set."""

    min_per_batch: Annotated[int, Ge(0)] = 0
    """Prompts of each data source in every batch at least, however small its share."""

    curriculum: Text | None = None
    """`module:function` that moves the weights: called after each step as `function(step, weights, metrics)`, returns
    the weights of the next one. `metrics` are those of the step, e.g. `reward/search/avg_raw_reward`."""

    @property
    def is_used(self) -> bool:
        """Whether batches are mixed by data source."""
        return bool(self.weights) or self.min_per_batch > 0 or self.curriculum is not None


class DataConfig(Section):
    """The datasets: prompts to train on and prompts to evaluate on."""

    train_data: StringList = Field(default=["$HOME/data/gsm8k/train.parquet"])
    """Training prompts: parquet, json or jsonl files, or Hugging Face names (`owner/name:split`,
    `owner/name/config:split`; without a split, `train`). One string stands for a list of one; `$HOME` and `~` are
    expanded when the file is read."""

    val_data: StringList = Field(default=["$HOME/data/gsm8k/validation.parquet"])
    """Evaluation prompts, same forms. Metrics are reported per `data_source`. May be empty when
    `trainer.eval_interval=-1`."""

    mixture: MixtureConfig = MixtureConfig()
    """How data sources share a batch."""
