"""`data.*`: the sources of prompts."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge
from pydantic import Field

from skyrl_train.config.base import Allowed, Section, StringList, Text


class MixtureConfig(Section):
    """The share of each `data_source` in a batch. Without these keys, all training prompts are shuffled together."""

    weights: Annotated[dict[str, Annotated[float, Ge(0)]], Allowed("a section of data_source=weight")] = Field(
        default={}
    )
    """Shares by data source, relative to one another: `data.mixture.weights={gsm8k:3,search:1}`. Each source has
    epochs of its own. Empty: by the number of prompts, if one of the other keys is set."""

    min_per_batch: Annotated[int, Ge(0)] = 0
    """Minimum number of prompts of each data source in every batch."""

    curriculum: Text | None = None
    """`module:function` that adapts the weights: called after each step as `function(step, weights, metrics)`, it
    returns the weights of the next one. `metrics` are those of the step, e.g. `reward/search/avg_raw_reward`."""

    @property
    def is_used(self) -> bool:
        """True if batches are mixed by data source."""
        return bool(self.weights) or self.min_per_batch > 0 or self.curriculum is not None


class DataConfig(Section):
    """The datasets: prompts to train on and prompts to evaluate on."""

    train_data: StringList = Field(default=["$HOME/data/gsm8k/train.parquet"])
    """Training prompts: parquet, json or jsonl files, or Hugging Face names (`owner/name:split`,
    `owner/name/config:split`; without a split, `train`). A single string is a list of one; `$HOME` and `~` are
    expanded when the file is read."""

    val_data: StringList = Field(default=["$HOME/data/gsm8k/validation.parquet"])
    """Evaluation prompts, in the same forms. Metrics are reported per `data_source`. May be empty when
    `trainer.eval_interval=-1`."""

    mixture: MixtureConfig = MixtureConfig()
    """The mixture of data sources in a batch."""
