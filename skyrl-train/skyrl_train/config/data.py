"""`data.*`: where the prompts come from."""

from __future__ import annotations

from pydantic import Field

from skyrl_train.config.base import Section, StringList


class DataConfig(Section):
    """The datasets: prompts to train on and prompts to evaluate on."""

    train_data: StringList = Field(default=["$HOME/data/gsm8k/train.parquet"])
    """Training prompts: parquet, json or jsonl files, or Hugging Face names (`name` or `name:split`). One string stands
    for a list of one; `$HOME` and `~` are expanded when the file is read."""

    val_data: StringList = Field(default=["$HOME/data/gsm8k/validation.parquet"])
    """Evaluation prompts, same forms. Metrics are reported per `data_source`. May be empty when
    `trainer.eval_interval=-1`."""
