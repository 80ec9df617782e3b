"""The plan of a training run: roles and ranks, engines and their weights, steps, memory and disk."""

from dataclasses import dataclass
from functools import cached_property

from skyrl_train.algorithms.rules import loads_reference
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.backends import EngineTraits
from skyrl_train.plan.forecast import (
    BYTES,
    DiskForecast,
    MemoryForecast,
    PlannedModel,
    Ranks,
    count_batches,
    count_steps,
    forecast_disk,
    forecast_memory,
    plan_models,
    plan_ranks,
)
from skyrl_train.types.specs import Role, SyncKind


@dataclass(frozen=True)
class EnginePlan:
    """The engines of a run, e.g. one embedded engine that shares the policy's tensors."""

    traits: EngineTraits
    n_local: int
    """Engines that the run starts."""
    n_devices: int
    """GPUs of each of them."""
    servers: tuple[str, ...]
    """Addresses of running servers."""
    dtype: str
    """Dtype of their weights."""
    has_process: bool
    """Without Ray, the engine runs in a separate process, so that it can generate while the policy is updated."""
    has_copy: bool
    """The engines keep their own copy of the policy's weights."""

    @property
    def needs_model(self) -> bool:
        """True if the engine's process loads a model with transformers, or shares the policy."""
        return self.n_local > 0 and self.traits.is_embedded

    @property
    def receiving_servers(self) -> list[str]:
        """Servers that receive tensors. Servers of other kinds read files."""
        return [] if self.traits.reads_files else list(self.servers)


@dataclass(frozen=True)
class RunPlan:
    """The plan of a reinforcement learning run.

    The sizes of models are read from their files on first use, and are None if the models are not on this machine.
    """

    cfg: SkyRLConfig
    has_gpus: bool

    @property
    def roles(self) -> list[Role]:
        """The models that the run loads."""
        roles: list[Role] = ["policy"]
        roles += ["critic"] if self.cfg.trainer.critic.model.path is not None else []
        return roles + (["ref"] if loads_reference(self.cfg) else [])

    @cached_property
    def models(self) -> list[PlannedModel]:
        """The models with their sizes. Raises ConfigError if an adapter does not fit."""
        return plan_models(self.cfg)

    @property
    def has_known_sizes(self) -> bool:
        """True if all models are on this machine."""
        return all(model.n_parameters is not None for model in self.models)

    @property
    def ranks(self) -> Ranks:
        """Nodes and ranks per node of each model. Empty for a run in one process."""
        return plan_ranks(self.cfg.trainer.placement, self.models)

    @property
    def offloads_idle(self) -> bool:
        """True if idle models and engines are offloaded from the devices they share."""
        return self.cfg.offloads_idle(has_gpus=self.has_gpus)

    @cached_property
    def engine(self) -> EnginePlan:
        """The engines."""
        generator, trainer = self.cfg.generator, self.cfg.trainer
        traits = generator.engine
        is_local = generator.run_engines_locally
        is_apart = trainer.placement.uses_ray or self.cfg.has_engine_process
        return EnginePlan(
            traits,
            n_local=generator.n_local_engines,
            n_devices=generator.n_devices_per_engine,
            servers=() if is_local else tuple(generator.remote_inference_engine_urls),
            dtype=self.cfg.engine_dtype(has_gpu=self.has_gpus),
            has_process=self.cfg.has_engine_process,
            has_copy=not is_local or is_apart or not traits.is_embedded,
        )

    @property
    def engine_bytes(self) -> float:
        """Size of the weights on each device of an engine that the run starts, or 0 if it shares the policy's tensors.

        Data-parallel devices hold copies.
        """
        if not self.engine.n_local or not self.engine.has_copy:
            return 0.0
        generator = self.cfg.generator
        n_shards = generator.inference_engine_tensor_parallel_size * generator.inference_engine_pipeline_parallel_size
        return (self.models[0].n_parameters or 0) * BYTES[self.engine.dtype] / n_shards

    @property
    def sync_kind(self) -> SyncKind:
        """Kind of weight sync. The embedded engine computes with the adapter itself. Other engines merge it."""
        if not self.cfg.trainer.policy.model.lora.is_used:
            return "full"
        return "adapter" if self.engine.needs_model else "factors"

    @property
    def sources(self) -> list[str]:
        """Files and datasets to train on. Empty with a user-defined dataset class."""
        return [] if self.cfg.data.custom_cls.path is not None else self.cfg.data.train_data

    @cached_property
    def n_batches(self) -> int | None:
        """Batches per epoch, or None before the data is downloaded."""
        return count_batches(self.cfg.trainer, self.sources)

    @property
    def n_steps(self) -> int | None:
        """Steps of the run, or None before the data is downloaded."""
        return count_steps(self.cfg.trainer, self.n_batches)

    def forecast_memory(self) -> MemoryForecast | None:
        """Forecast the memory of training. Return None if it is unknown."""
        return forecast_memory(self.cfg.trainer, self.models, offloads_idle=self.offloads_idle)

    def forecast_disk(self) -> DiskForecast | None:
        """Forecast the disk space for checkpoints and exports. Return None before the models are downloaded."""
        return forecast_disk(self.cfg.trainer, self.models, self.n_steps)
