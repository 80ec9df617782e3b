"""A run on fixed data, built from its configuration. Override a `get_*` method to replace a part."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms.objectives import CrossEntropyObjective, SupervisedObjective
from skyrl_train.callbacks import Callback, Checkpointing, Export, Logging, Reporting, SavedConfig
from skyrl_train.config.loading import ConfigSource, Schema, validate
from skyrl_train.config.problems import raise_problems
from skyrl_train.config.supervised import SFT, DPOTrainerConfig, SupervisedConfig
from skyrl_train.dataset.supervised import ConversationEncoder, SegmentReader, SupervisedDataset, build_segments
from skyrl_train.entrypoints.base import Experiment, train
from skyrl_train.entrypoints.load_learner import ModelLoader
from skyrl_train.entrypoints.memory_plan import warn_of_shortage
from skyrl_train.entrypoints.preflight import find_long_rows
from skyrl_train.inference_engines.sequence import all_eos_ids
from skyrl_train.launch.launcher import started
from skyrl_train.learner import TrainedModels
from skyrl_train.models.loading import POLICY_PATH, load_tokenizer
from skyrl_train.plan import TrainingPlan, limit_steps
from skyrl_train.remote_storage import RemoteStorage
from skyrl_train.supervised_trainer import SupervisedRows, SupervisedTrainer, Validation
from skyrl_train.timer import StepTimer
from skyrl_train.tracking import Tracking


class SupervisedExp(Experiment):
    """Base class for runs on fixed data."""

    schema: ClassVar[Schema[Any]]
    """The configuration schema of this kind of run."""

    def __init__(self, cfg: SupervisedConfig | ConfigSource) -> None:
        """Check the configuration and create the run folder. Raise a ConfigError that lists every problem."""
        super().__init__(validate(cfg, self.schema))

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
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
        cfg, data, plan = self.cfg.trainer, self.cfg.data, TrainingPlan(self.cfg)
        dataset = self.get_dataset(data.train_data, data.max_checked_rows)
        rows = SupervisedRows(dataset, cfg.train_batch_size, cfg.seed, self.tokenizer.pad_token_id)
        val_dataset = self.get_dataset(data.val_data) if cfg.eval_interval > 0 and data.val_data else None
        total_steps = limit_steps(cfg, rows.order.batches_per_epoch)
        if not self.replaces("get_model"):
            warn_of_shortage(plan)
        async with started(self.new_model_launcher(plan.roles)) as launcher:
            loader, role, objective = ModelLoader(cfg, launcher, self.tokenizer), plan.roles[0], self.get_objective()
            with (loading := StepTimer())("load"):
                policy = await loader.load_trained(role, self.get_model, objective, cfg.policy, total_steps)
                ref = None
                if isinstance(cfg, DPOTrainerConfig):
                    ref = await loader.load_reference(cfg, self.load_language_model, policy)
            models = TrainedModels(cfg, policy, ref)
            with self.open_tracker() as tracker:
                trainer = SupervisedTrainer(
                    self.cfg,
                    rows=rows,
                    models=models,
                    total_steps=total_steps,
                    callbacks=self.get_callbacks(val_dataset, models, tracker),
                )
                await train(trainer, loading)


class SFTExp(SupervisedExp):
    """A supervised fine-tuning run."""

    schema = SFT

    def get_objective(self) -> SupervisedObjective:
        return CrossEntropyObjective()
