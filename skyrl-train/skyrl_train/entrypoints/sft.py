"""A run on fixed data, built from its configuration. Override a `get_*` method to replace a part."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms.objectives import CrossEntropyObjective, SupervisedObjective
from skyrl_train.callbacks import Callback, Checkpointing, Export, Logging, Reporting, SavedConfig
from skyrl_train.config.loading import ConfigSource, Schema, validate
from skyrl_train.config.problems import raise_problems
from skyrl_train.config.sft import SFT, SupervisedConfig
from skyrl_train.dataset.supervised import ConversationEncoder, SegmentReader, SupervisedDataset, build_segments
from skyrl_train.entrypoints.base import Experiment, train
from skyrl_train.entrypoints.describe_plan import check_memory
from skyrl_train.entrypoints.preflight import find_long_rows
from skyrl_train.inference_engines.sequence import all_eos_ids
from skyrl_train.launch.launcher import ModelLauncher, started
from skyrl_train.launch.specs import model_spec, optimizer_spec
from skyrl_train.learner import TrainedModels
from skyrl_train.models.loading import POLICY_PATH, default_device, load_model, load_tokenizer
from skyrl_train.plan import TrainingPlan, limit_steps
from skyrl_train.remote_storage import RemoteStorage
from skyrl_train.supervised_trainer import SupervisedRows, SupervisedTrainer, Validation
from skyrl_train.tracking import Tracking
from skyrl_train.types.specs import LoraSpec, ModelSpec, OptimizerSpec, Role, lora_spec
from skyrl_train.workers.group import WorkerGroup


class SupervisedExp(Experiment):
    """Base class for runs on fixed data."""

    is_stock = True

    schema: ClassVar[Schema[Any]]
    """The configuration schema of this kind of run."""

    role: ClassVar[Role] = "policy"
    """The role of the trained model."""

    def __init__(self, cfg: SupervisedConfig | ConfigSource) -> None:
        """Check the configuration and create the run folder. Raise a ConfigError that lists every problem."""
        super().__init__(validate(cfg, self.schema))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The cached result of `get_tokenizer`."""
        return self.get_tokenizer()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the policy's tokenizer, with `data.chat_template` if it is set."""
        path = self.cfg.data.chat_template
        template = None if path is None else Path(path).read_text(encoding="utf-8")
        return load_tokenizer(
            self.cfg.trainer.policy.model.path, POLICY_PATH, template, "data.chat_template", replaces_template=True
        )

    def get_dataset(self, sources: Sequence[str], max_checked_rows: int | None = None) -> SupervisedDataset:
        """Open the rows of `data.train_data` or `data.val_data` as tokens. Check at most `max_checked_rows` in advance.

        Raises:
            ConfigError: rows may be longer than the context of the model.
            DataError: a source cannot be read, or a row is invalid.
        """
        data, path = self.cfg.data, self.cfg.trainer.policy.model.path
        try:
            eos = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:  # the model has no generation_config.json
            eos = None
        text_config = AutoConfig.from_pretrained(path).get_text_config()
        n_context = getattr(text_config, "max_position_embeddings", None)
        # Check again, because the model's configuration may have been downloaded only now.
        raise_problems(find_long_rows(self.cfg, n_context))
        encoder = ConversationEncoder(self.tokenizer, data.chat_template_kwargs, all_eos_ids(eos, None))
        return SupervisedDataset(sources, encoder, data, self.get_segment_reader(), n_context, max_checked_rows)

    def get_segment_reader(self) -> SegmentReader:
        """Return the function that converts the token rows of an answer to segments."""
        return build_segments

    @abstractmethod
    def get_objective(self) -> SupervisedObjective:
        """Return the loss that the model minimizes."""

    def get_model(self) -> PreTrainedModel:
        """Load the model to train."""
        return self.load_language_model(self.cfg.trainer.policy.model.path, POLICY_PATH)

    def load_language_model(self, path: str, key: str) -> PreTrainedModel:
        """Load the causal language model at `path`. Errors name the configuration key `key`."""
        return load_model(path, **self._loading_options(key))

    def _loading_options(self, key: str) -> dict[str, Any]:
        """Return the options for loading a model. Errors name the configuration key `key`."""
        trainer = self.cfg.trainer
        return {
            "dtype": getattr(torch, trainer.policy.model.dtype),
            "device": default_device(),
            "gradient_checkpointing": trainer.gradient_checkpointing,
            "key": key,
        }

    def get_callbacks(
        self, val_dataset: SupervisedDataset | None, models: TrainedModels, tracker: Tracking
    ) -> list[Callback]:
        """Return the callbacks of a step, in order."""
        validation = []
        if val_dataset is not None:
            validation.append(Validation(val_dataset, models, self.get_objective(), self.tokenizer.pad_token_id))
        return [
            SavedConfig(self.run_folder),
            *validation,
            Logging(tracker),
            Checkpointing(),
            Export(),
            Reporting(self.run_folder),
            RemoteStorage(self.run_folder),
        ]

    async def _run(self) -> None:
        cfg, data = self.cfg.trainer, self.cfg.data
        dataset = self.get_dataset(data.train_data, data.max_checked_rows)
        rows = SupervisedRows(dataset, cfg.train_batch_size, cfg.seed, self.tokenizer.pad_token_id)
        val_dataset = self.get_dataset(data.val_data) if cfg.eval_interval > 0 and data.val_data else None
        total_steps = limit_steps(cfg, rows.order.batches_per_epoch)
        optimizer = optimizer_spec(cfg.policy.optimizer_config, "trainer.policy.optimizer_config", total_steps)
        if not self.replaces("get_model"):
            check_memory(TrainingPlan(self.cfg))
        async with started(self.new_model_launcher(self.roles)) as launcher:
            lora = lora_spec(cfg.policy.model, "trainer.policy.model.lora", cfg.seed)
            spec = self.model_spec(self.role, self.get_model, optimizer, lora)
            policy = await launcher.load(spec, self.get_objective())
            models = TrainedModels(cfg, policy, await self.load_reference(launcher, policy, lora))
            with self.open_tracker() as tracker:
                trainer = SupervisedTrainer(
                    self.cfg,
                    rows=rows,
                    models=models,
                    total_steps=total_steps,
                    callbacks=self.get_callbacks(val_dataset, models, tracker),
                )
                await train(trainer)

    @property
    def roles(self) -> list[Role]:
        """Roles of the models in the run."""
        return [self.role]

    def model_spec(
        self,
        role: Role,
        load: Callable[[], PreTrainedModel],
        optimizer: OptimizerSpec | None = None,
        lora: LoraSpec | None = None,
    ) -> ModelSpec:
        """Return the specification of a model. Without `optimizer`, the model is frozen."""
        return model_spec(
            role,
            load,
            self.tokenizer.save_pretrained,
            self.cfg.trainer,
            temperature=1.0,
            optimizer=optimizer,
            lora=lora,
            sharding=self.cfg.trainer.ref if role == "ref" else self.cfg.trainer.policy,
            eos_ids=[self.tokenizer.eos_token_id],
        )

    async def load_reference(
        self, launcher: ModelLauncher, policy: WorkerGroup, lora: LoraSpec | None
    ) -> WorkerGroup | None:
        """Return the reference, possibly the policy without its adapter, or None if the objective reads none."""
        return None


class SFTExp(SupervisedExp):
    """A supervised fine-tuning run."""

    is_stock = True

    schema = SFT

    def get_objective(self) -> SupervisedObjective:
        return CrossEntropyObjective()
