"""A run of supervised fine-tuning, assembled from its configuration. Override a `get_*` method to replace a part."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms.objectives import CrossEntropyObjective
from skyrl_train.callbacks import Callback, Checkpointing, Export, Logging, Reporting, SavedConfig
from skyrl_train.config.loading import ConfigSource, validate
from skyrl_train.config.sft import SFT, SFTConfig
from skyrl_train.dataset.supervised import ConversationEncoder, SupervisedDataset
from skyrl_train.entrypoints.base import Experiment, train
from skyrl_train.launch.inline import InlineLauncher, model_spec, optimizer_spec
from skyrl_train.learner import TrainedModels
from skyrl_train.models.loading import POLICY_PATH, default_device, load_model, load_tokenizer
from skyrl_train.sft_trainer import SFTTrainer, SupervisedRows, Validation
from skyrl_train.tracking import Tracking
from skyrl_train.types.specs import lora_spec
from skyrl_train.workers.group import WorkerGroup

logger = logging.getLogger(__name__)


class SFTExp(Experiment):
    """One run of supervised fine-tuning."""

    def __init__(self, cfg: SFTConfig | ConfigSource) -> None:
        """Check the configuration and create the run folder; ConfigError lists every problem."""
        super().__init__(validate(cfg, SFT))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of `get_tokenizer`."""
        return self.get_tokenizer()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the policy's tokenizer, with `data.chat_template` if it is set."""
        path = self.cfg.data.chat_template
        template = None if path is None else Path(path).read_text(encoding="utf-8")
        tokenizer = load_tokenizer(self.cfg.trainer.policy.model.path, chat_template=template)
        if template is not None:
            tokenizer.chat_template = template
        return tokenizer

    def get_dataset(self, sources: Sequence[str]) -> SupervisedDataset:
        """Load the rows of `data.train_data` or `data.val_data` as tokens."""
        data, path = self.cfg.data, self.cfg.trainer.policy.model.path
        try:
            eos = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:  # the model has no generation_config.json
            eos = None
        eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        return SupervisedDataset(sources, ConversationEncoder(self.tokenizer, data.chat_template_kwargs, eos_ids), data)

    def get_model(self) -> PreTrainedModel:
        """Load the model to train."""
        trainer = self.cfg.trainer
        return load_model(
            trainer.policy.model.path,
            dtype=getattr(torch, trainer.policy.model.dtype),
            device=default_device(),
            gradient_checkpointing=trainer.gradient_checkpointing,
            key=POLICY_PATH,
        )

    def get_callbacks(
        self, val_dataset: SupervisedDataset | None, policy: WorkerGroup, tracker: Tracking
    ) -> list[Callback]:
        """Return the callbacks of a step, in order."""
        validation = []
        if val_dataset is not None:
            validation.append(Validation(val_dataset, policy, self.tokenizer.pad_token_id))
        return [
            SavedConfig(self.run_folder),
            *validation,
            Logging(tracker),
            Checkpointing(),
            Export(),
            Reporting(self.run_folder),
        ]

    async def _run(self) -> None:
        cfg = self.cfg.trainer
        rows = SupervisedRows(
            self.get_dataset(self.cfg.data.train_data), cfg.train_batch_size, cfg.seed, self.tokenizer.pad_token_id
        )
        validates = cfg.eval_interval > 0 and self.cfg.data.val_data
        val_dataset = self.get_dataset(self.cfg.data.val_data) if validates else None
        total_steps = cfg.epochs * rows.batches_per_epoch
        total_steps = min(total_steps, cfg.max_training_steps or total_steps)
        optimizer = optimizer_spec(cfg.policy.optimizer_config, total_steps)
        if optimizer.n_warmup_steps >= total_steps:
            logger.warning(
                "trainer.policy.optimizer_config.num_warmup_steps=%d is not below the %d steps of this run: the "
                "learning rate only rises; lower it, or train longer",
                *(optimizer.n_warmup_steps, total_steps),
            )
        assert self._compute is not None
        lora = lora_spec(cfg.policy.model, "trainer.policy.model.lora", cfg.seed)
        spec = model_spec("policy", self.get_model, self.tokenizer.save_pretrained, cfg, 1.0, optimizer, lora)
        policy = await InlineLauncher(self._compute).load(spec, CrossEntropyObjective())
        with self.get_tracker() as tracker:
            trainer = SFTTrainer(
                self.cfg,
                rows=rows,
                models=TrainedModels(cfg, policy),
                total_steps=total_steps,
                callbacks=self.get_callbacks(val_dataset, policy, tracker),
            )
            await train(trainer)
