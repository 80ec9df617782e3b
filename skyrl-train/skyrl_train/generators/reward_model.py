"""A reward model as a reward function that scores rollouts in large batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file

from skyrl_train.config.generator import RewardModelConfig
from skyrl_train.config.policy import LoraConfig
from skyrl_train.dataset.supervised import build_rewarded_segment, build_supervised_batch
from skyrl_train.distributed import SingleStrategy
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import check_same_vocabulary, default_device, load_model
from skyrl_train.models.lora import adapter_role, read_config
from skyrl_train.types import DrawnPrompt
from skyrl_train.types.specs import LoraSpec, ModelSpec, World
from skyrl_train.workers.split import join, split
from skyrl_train.workers.worker import Worker

if TYPE_CHECKING:
    from skyrl_train.generators.rewards import RewardSample

KEY = "generator.reward_model.path"


class RewardModel:
    """A sequence-classification model in this process. Its reward head reads a rollout's last token.

    It scores sampled tokens, so it must have the policy's tokenizer. If a rollout's history was rewritten, only the
    last row is scored. The path may be an adapter from `skyrl reward`, to apply to its base model.
    """

    def __init__(self, cfg: RewardModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the model. Raise ConfigError if there is none, or if its tokenizer differs."""
        assert cfg.path is not None, f"{KEY} is not set"
        check_same_vocabulary(cfg.path, KEY, tokenizer)
        device, lora = default_device(), _find_adapter(cfg.path)
        load = partial(
            load_model,
            cfg.path if lora is None else lora.base_path,
            "reward",
            dtype=getattr(torch, cfg.dtype),
            device=device,
            key=KEY,
            pad_token_id=None if lora is None else tokenizer.pad_token_id,
        )
        spec = ModelSpec(
            "reward", load, tokenizer.save_pretrained, lora=lora, max_tokens_per_micro_batch=cfg.max_tokens_per_batch
        )
        self._worker = Worker(spec, SingleStrategy(World(device=str(device))))
        self._max_tokens = cfg.max_tokens_per_batch
        config = self._worker.module.hf_model.config
        self._pad_token_id: int | None = config.pad_token_id
        self._context_length: int | None = getattr(config, "max_position_embeddings", None)

    def __call__(self, samples: Sequence[RewardSample]) -> list[float | None]:
        """Return the reward of each sample, or None for samples longer than the model's context."""
        token_ids = [sample.trajectory.segments[-1].token_ids for sample in samples]
        fits = [i for i, ids in enumerate(token_ids) if len(ids) <= (self._context_length or len(ids))]
        rewards: list[float | None] = [None] * len(samples)
        if fits:
            scores = self.score([token_ids[i] for i in fits])
            for i, score in zip(fits, scores, strict=True):
                rewards[i] = score
        return rewards

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return one reward per row of tokens."""
        segments = [build_rewarded_segment(row, self._pad_token_id) for row in rows]
        batch = build_supervised_batch([DrawnPrompt(i, ((s,),), i) for i, s in enumerate(segments)], pad_token_id=0)
        shards, order = split(batch, 1, self._max_tokens, shares_prefixes=self._worker.module.shares_prefixes)
        values = join(order, [self._worker.score(shard) for shard in shards], len(batch))["values"]  # (B, 1)
        return [float(value) for value in values[:, 0]]


def _find_adapter(path: str) -> LoraSpec | None:
    """Return the specification of the adapter at `path`, or None if there is a full model.

    Raise ConfigError if the adapter has no reward head, or does not name its base model.
    """
    if find_adapter_config_file(path) is None:
        return None
    config = read_config(path, f"{KEY}={path}")
    if adapter_role(config) != "reward" or not config.modules_to_save:
        raise ConfigError(f"{KEY}={path} is an adapter without a reward head; use one that `skyrl reward` has trained")
    if config.base_model_name_or_path is None:
        raise ConfigError(
            f"{KEY}={path} is an adapter that does not name its base model; merge both with `skyrl merge adapter "
            f"{path} TARGET_DIR --base MODEL`, and use TARGET_DIR"
        )
    return LoraSpec(LoraConfig(lora_path=path), "generator.reward_model", config.base_model_name_or_path)
