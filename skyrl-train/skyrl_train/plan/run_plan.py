"""The plan of a run: models and ranks, weights of the engines, steps, memory and disk."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from skyrl_train.algorithms.rules import loads_reference
from skyrl_train.config import SkyRLConfig, TrainerConfig
from skyrl_train.config.run import RunConfig
from skyrl_train.config.supervised import DPOTrainerConfig, RewardConfig, SupervisedConfig
from skyrl_train.dataset.files import count_rows
from skyrl_train.plan.forecast import BYTES, DiskForecast, PlannedModel, plan_model
from skyrl_train.types.specs import Role, SyncKind

Ranks = Mapping[Role, tuple[int, int]]
"""Nodes, and ranks per node, of each model."""


def limit_steps(trainer: RunConfig, n_batches: int) -> int:
    """Return the steps of a run with `n_batches` per epoch."""
    n_steps = trainer.epochs * n_batches
    return min(n_steps, trainer.max_training_steps or n_steps)


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of a run on fixed data, and the base class of `RunPlan`.

    The sizes of models are read from their files on first use, and are None if the models are not on this machine.
    """

    cfg: SkyRLConfig | SupervisedConfig
    longest_prompt: int | None = field(default=None, kw_only=True)
    """Tokens of the longest training prompt, if it is known."""

    @property
    def roles(self) -> list[Role]:
        """The models that the run loads."""
        cfg = self.cfg
        roles: list[Role] = ["reward" if isinstance(cfg, RewardConfig) else "policy"]
        if isinstance(cfg, SkyRLConfig):
            roles += ["critic"] if cfg.trainer.critic.model.path is not None else []
            roles += ["ref"] if loads_reference(cfg) else []
        elif isinstance(cfg.trainer, DPOTrainerConfig) and not cfg.trainer.policy_is_reference:
            roles.append("ref")
        return roles

    @cached_property
    def models(self) -> list[PlannedModel]:
        """The models with their sizes. Raises ConfigError if an adapter does not fit."""
        return [plan_model(role, self.cfg.trainer) for role in self.roles]

    @property
    def has_known_sizes(self) -> bool:
        """True if all models are on this machine."""
        return all(model.n_parameters is not None for model in self.models)

    @property
    def ranks(self) -> Ranks:
        """Nodes and ranks per node of each model. Empty for a run in one process."""
        placement = self.cfg.trainer.placement
        if not (placement.uses_ray or placement.uses_torchrun):
            return {}
        return {role: placement.size(role) for role in self.roles}

    def count_shards(self, model: PlannedModel, ranks: Ranks) -> int:
        """Return the number of ranks that one copy of a model is split over."""
        trainer = self.cfg.trainer
        section = getattr(trainer, model.role, trainer.policy)  # `skyrl reward` trains trainer.policy
        if trainer.strategy_traits.is_model_parallel:
            megatron = section.megatron_config
            return int(megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size)
        size = int(section.fsdp_config.fsdp_size)
        return size if size > 0 else math.prod(ranks[model.role])

    def count_data_parallel_ranks(self) -> int:
        """Return the number of ranks of the trained model that get their own rows."""
        n_ranks, section = math.prod(self.ranks.get(self.roles[0], (1, 1))), self.cfg.trainer.policy
        if self.cfg.trainer.strategy_traits.is_model_parallel:
            return max(1, n_ranks // section.megatron_config.n_ranks_of_copy)
        return max(1, n_ranks // section.sequence_parallel_size)

    @property
    def offloads_idle(self) -> bool:
        """True if idle models and engines are offloaded from the devices they share."""
        return False

    @property
    def engine_bytes(self) -> float:
        """Size of the weights on each device of an engine that the run starts."""
        return 0.0

    @cached_property
    def n_batches(self) -> int | None:
        """Batches per epoch, or None before the data is downloaded and with a user-defined dataset class."""
        is_custom = isinstance(self.cfg, SkyRLConfig) and self.cfg.data.custom_cls.path is not None
        counts = [] if is_custom else [count_rows(source) for source in self.cfg.data.train_data]
        if None in counts or not counts:
            return None
        return sum(filter(None, counts)) // self.cfg.trainer.train_batch_size

    @property
    def n_steps(self) -> int | None:
        """Steps of the run, or None if neither `n_batches` nor their maximum is known."""
        trainer, n_batches = self.cfg.trainer, self.n_batches
        return trainer.max_training_steps if n_batches is None else limit_steps(trainer, n_batches)

    def forecast_disk(self, *, counts_steps: bool = True) -> DiskForecast | None:
        """Forecast the disk space for checkpoints and exports. Return None before the models are downloaded.

        `counts_steps=False` treats the number of steps as unknown.
        """
        if not self.has_known_sizes:
            return None
        trainer, n_steps = self.cfg.trainer, self.n_steps if counts_steps else None

        def times(interval: int) -> int | None:
            return 0 if interval < 0 else None if n_steps is None else math.ceil(n_steps / interval)

        n_kept = trainer.max_ckpts_to_keep
        n_kept = 1 if trainer.remote_ckpt_url is not None and n_kept < 0 else n_kept
        trained = [model for model in self.models if model.role != "ref"]
        checkpoint_bytes = sum(model.checkpoint_bytes for model in trained)
        if isinstance(trainer, TrainerConfig) and trainer.update_ref_every_epoch:  # the reference also changes
            checkpoint_bytes += sum(model.weight_bytes for model in self.models if model.role == "ref")
        return DiskForecast(
            checkpoint_bytes=checkpoint_bytes if trainer.ckpt_interval > 0 else 0,
            interval=trainer.ckpt_interval,
            n_kept=None if n_kept < 0 else n_kept,
            n_checkpoints=times(trainer.ckpt_interval),
            export_bytes=sum(model.export_bytes for model in trained) if trainer.hf_save_interval > 0 else 0,
            n_exports=times(trainer.hf_save_interval),
        )


@dataclass(frozen=True)
class RunPlan(TrainingPlan):
    """The plan of a reinforcement learning run."""

    cfg: SkyRLConfig
    has_gpus: bool

    @property
    def offloads_idle(self) -> bool:
        return self.cfg.offloads_idle(has_gpus=self.has_gpus)

    @property
    def needs_engine_model(self) -> bool:
        """True if the engine's process loads a model with transformers, or shares the policy."""
        return self.cfg.generator.n_local_engines > 0 and self.cfg.generator.engine.is_embedded

    @property
    def frees_cache(self) -> bool:
        """True if the engine shares the policy's weights on a GPU, and releases its cache before models compute."""
        return self.has_gpus and not self.has_engine_copy and not self.cfg.trainer.fully_async.enabled

    @property
    def has_engine_copy(self) -> bool:
        """True if the engines keep their own copy of the policy's weights."""
        generator = self.cfg.generator
        is_separate = self.cfg.trainer.placement.uses_ray or self.cfg.has_engine_process
        return not generator.run_engines_locally or is_separate or not generator.engine.is_embedded

    @property
    def receiving_servers(self) -> list[str]:
        """Servers that receive tensors. Servers of other kinds read files."""
        return [] if self.cfg.generator.engine.reads_files else self.cfg.generator.remote_inference_engine_urls

    @property
    def engine_bytes(self) -> float:
        """Size of the weights on each device of an engine that the run starts. 0 if it shares the policy's tensors."""
        generator = self.cfg.generator
        if not generator.n_local_engines or not self.has_engine_copy:
            return 0.0
        # Data-parallel devices hold copies.
        n_shards = generator.inference_engine_tensor_parallel_size * generator.inference_engine_pipeline_parallel_size
        dtype = self.cfg.engine_dtype(has_gpu=self.has_gpus)
        return (self.models[0].n_parameters or 0) * BYTES[dtype] / n_shards

    @property
    def sync_kind(self) -> SyncKind:
        """Kind of weight sync. The embedded engine computes with the adapter itself. Other engines merge it."""
        if not self.cfg.trainer.policy.model.lora.is_used:
            return "full"
        return "adapter" if self.needs_engine_model else "factors"
