"""The JAX backend."""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from tx.models.adapters import adapter_of, load_adapter, named_factors, save_adapter
from tx.models.checkpoints import load_params, named_tensors, params_of
from tx.models.config import AdapterConfig, ModelConfig, read_config
from tx.models.decoder import Params
from tx.models.lora import Adapter, covered_names, new_adapter
from tx.models.sharding import mesh_of, place_rows, place_weight, replicate
from tx.tinker.backends.base import BaseModel, Done, Save
from tx.tinker.backends.config import JaxConfig
from tx.tinker.backends.folder import (
    OPTIMIZER,
    WHOLE_MODEL,
    load_settings,
    moments_of,
    named_moments,
    optimizer_file,
    save_settings,
)
from tx.tinker.backends.images import NO_IMAGES
from tx.tinker.backends.jax.adam import JaxMoments, adam_step, float32_params, new_moments, step_of
from tx.tinker.backends.jax.groups import SamplerWeights
from tx.tinker.backends.jax.programs import cache_programs, programs
from tx.tinker.backends.jax.sampler import JaxSampler
from tx.tinker.backends.jax.training import (
    NAMES,
    SETTINGS,
    MicroBatchShape,
    ScaledAdapter,
    add,
    micro_batch,
    micro_batches,
    pad,
)
from tx.tinker.backends.models import Models, PassAccumulator, check_covers_any, check_grad_norm
from tx.tinker.backends.stop_strings import StopStringMatcher
from tx.tinker.losses import fill_defaults
from tx.tinker.types import AdamParams, ImageInput, Pass, PassResult, SampleRequest, UserError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class JaxModel:
    """A model under training. Its arrays are replaced, never modified."""

    lora: AdapterConfig
    weights: Adapter | Params
    moments: JaxMoments
    gradients: Adapter | Params | None = None


class JaxBackend:
    """A backend in JAX, for Qwen3, Qwen3-MoE and Llama 3."""

    def __init__(self, folder: Path, name: str, config: JaxConfig) -> None:
        self._config = config
        self._shape: ModelConfig = read_config(folder)
        self._dtype = jnp.dtype(config.dtype)
        if self._dtype == jnp.float32:
            jax.config.update("jax_default_matmul_precision", "highest")
        cache_programs(config.compile_cache)
        self._programs = programs()
        self._mesh = mesh_of(config.fully_sharded_data_parallel_size, config.tensor_parallel_size)
        self._place = partial(place_weight, self._mesh)
        self._params = load_params(folder, self._shape, self._dtype, self._place)
        self._models: Models[JaxModel] = Models()
        self._stop_strings = StopStringMatcher(folder)
        self._sampler = JaxSampler(
            self._shape,
            n_tokens=config.cache_tokens(self._shape.cache_bytes(self._dtype.itemsize)),
            n_lanes=config.sample_lanes,
            max_groups=config.sample_groups,
            dtype=self._dtype,
            mesh=self._mesh,
            ends_with=self._stop_strings.contains_any,
        )
        self.base_model = BaseModel(
            name=name,
            folder=folder,
            vocab_size=self._shape.vocab_size,
            max_context=min(self._shape.max_positions, self._sampler.max_length),
            eos_ids=self._shape.eos_ids,
            can_train_all=True,
        )

    @property
    def is_compiling(self) -> bool:
        return self._programs.is_compiling

    # -- models

    def create_model(self, model_id: str, lora: AdapterConfig) -> None:
        self._models.check_new(model_id)
        if lora.rank:
            check_covers_any(covered_names(lora, self._shape), lora, f"this {self._shape.family} model")
        seed = lora.seed if lora.seed is not None else secrets.randbits(31)
        weights = self._params if lora.rank == 0 else new_adapter(lora, self._shape, seed)
        self._models[model_id] = self._model(lora, weights, new_moments(weights))

    def delete_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def models(self) -> Mapping[str, AdapterConfig]:
        return {model_id: model.lora for model_id, model in self._models.items()}

    def counts(self) -> Mapping[str, int]:
        return {
            "programs compiled": self._programs.n_compiled,
            "samples running": self._sampler.n_running,
            "sample requests waiting": self._sampler.n_waiting,
            "free pages of the cache": self._sampler.n_free_pages,
        }

    # -- training

    def read_image(self, image: ImageInput) -> NoReturn:
        raise UserError(NO_IMAGES)

    def compute(self, pass_: Pass) -> Iterator[PassResult | None]:
        model = self._models[pass_.model_id]
        whole = fill_defaults(pass_)
        accumulator = PassAccumulator(whole.data, add)
        for number, (shape, indices) in enumerate(micro_batches(whole.data, self._config.micro_batch_tokens)):
            if number:
                yield None
            accumulator.add_rows(indices, *self._micro_batch(model, whole, shape, indices))
        model.gradients = accumulator.add_to(model.gradients)
        yield accumulator.result

    def _micro_batch(
        self, model: JaxModel, pass_: Pass, shape: MicroBatchShape, indices: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, Adapter | Params | None]:
        tokens, inputs = pad([pass_.data[index] for index in indices], shape)
        adapter = model.weights if isinstance(model.weights, Adapter) else None
        lp, losses, gradients = micro_batch(
            self._shape,
            self._params if isinstance(model.weights, Adapter) else model.weights,
            None if adapter is None else ScaledAdapter(adapter, jnp.float32(model.lora.scale)),
            jnp.int32(NAMES.index(pass_.loss_fn)),
            place_rows(self._mesh, tokens),
            {name: place_rows(self._mesh, value) for name, value in inputs.items()},
            {name: jnp.float32(pass_.settings.get(name, 0.0)) for name in SETTINGS},
            has_gradient=not pass_.is_forward_only,
            remat=self._config.gradient_checkpointing,
        )
        return np.asarray(lp), np.asarray(losses), gradients

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        model = self._models[model_id]
        gradients = model.gradients
        if gradients is None:
            logger.warning("optim_step of %s without any gradient", model_id)
            gradients = jax.tree.map(
                lambda array: jnp.zeros_like(array, jnp.float32, device=array.sharding), model.weights
            )
        model.gradients = None
        weights, moments, norm = adam_step(model.weights, model.moments, gradients, step_of(params))
        check_grad_norm(float(norm))
        if self._mesh.size > 1:  # otherwise, the next step would compile again for the compiler's placement
            placement = jax.tree.map(lambda array: array.sharding, (model.weights, model.moments))
            weights, moments = jax.device_put((weights, moments), placement)
        model.weights, model.moments = weights, moments
        return {"skyrl.ai/grad_norm": float(norm), "skyrl.ai/learning_rate": params.learning_rate}

    def drop_gradients(self, model_id: str) -> None:
        if model_id in self._models:
            self._models[model_id].gradients = None

    # -- folders

    def n_bytes(self, model_id: str, *, with_optimizer: bool) -> int:
        model = self._models[model_id]
        saved = (model.weights, model.moments if with_optimizer else None)
        return sum(array.nbytes for array in jax.tree.leaves(saved))

    def capture(self, model_id: str, *, with_optimizer: bool) -> Save:
        model = self._models[model_id]
        # JAX arrays are immutable, so references are a snapshot: later steps replace them.
        lora, weights, moments = model.lora, model.weights, model.moments

        def save(folder: Path) -> None:
            if isinstance(weights, Adapter):
                save_adapter(folder, weights, lora, self._shape, self.base_model.name)
            else:
                save_file(self._name_tensors(lora, weights), folder / WHOLE_MODEL, metadata={"format": "pt"})
            save_settings(folder, lora)
            if with_optimizer:
                first, second = (self._name_tensors(lora, tree) for tree in (moments.first, moments.second))
                master = None if moments.master_weights is None else self._name_tensors(lora, moments.master_weights)
                save_file(named_moments(first, second, np.asarray(moments.n_steps), master), folder / OPTIMIZER)

        return save

    def load_model(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        self._models.check_new(model_id)
        lora, weights = self._read(folder)
        moments = self._read_moments(folder, lora, weights) if with_optimizer else new_moments(weights)
        self._models[model_id] = self._model(lora, weights, moments)

    def _model(self, lora: AdapterConfig, weights: Adapter | Params, moments: JaxMoments) -> JaxModel:
        """Use the sharding that a training step produces, so that the first step does not cause another compilation."""
        if isinstance(weights, Adapter):
            weights, moments = replicate(self._mesh, (weights, moments))
        else:
            indices = jax.tree.map(lambda array: array.sharding, weights)
            first, second, master_weights = (
                None if tree is None else jax.device_put(tree, indices)
                for tree in (moments.first, moments.second, moments.master_weights)
            )
            moments = JaxMoments(first, second, replicate(self._mesh, moments.n_steps), master_weights)
        return JaxModel(lora, weights, moments)

    def _read(self, folder: Path) -> tuple[AdapterConfig, Adapter | Params]:
        lora = load_settings(folder)
        if lora.rank:
            return lora, load_adapter(folder, lora, self._shape)
        return lora, load_params(folder, self._shape, self._dtype, self._place)

    def _read_moments(self, folder: Path, lora: AdapterConfig, weights: Adapter | Params) -> JaxMoments:
        first, second, n_steps, saved = moments_of(load_file(optimizer_file(folder)))
        master = float32_params(weights)
        if master is not None and saved is not None:
            master = self._build_tree(saved, lora)
        return JaxMoments(self._build_tree(first, lora), self._build_tree(second, lora), jnp.asarray(n_steps), master)

    def _name_tensors(self, lora: AdapterConfig, tree: Adapter | Params) -> dict[str, np.ndarray]:
        if isinstance(tree, Adapter):
            return dict(named_factors(tree, lora, self._shape))
        return dict(named_tensors(tree, self._shape))

    def _build_tree(self, tensors: Mapping[str, np.ndarray], lora: AdapterConfig) -> Adapter | Params:
        return (
            adapter_of(tensors, lora, self._shape)
            if lora.rank
            else params_of(tensors, self._shape, jnp.float32, self._place)
        )

    # -- sampling

    def weights_of(self, model_id: str) -> SamplerWeights:
        model = self._models[model_id]
        return self._sampler_weights(model.lora, model.weights)

    def load_weights(self, folder: Path) -> SamplerWeights:
        return self._sampler_weights(*self._read(folder))

    def base_weights(self) -> SamplerWeights:
        return SamplerWeights(self._params)

    def _sampler_weights(self, lora: AdapterConfig, weights: Adapter | Params) -> SamplerWeights:
        if isinstance(weights, Adapter):
            return SamplerWeights(self._params, replicate(self._mesh, weights), lora.scale)
        return SamplerWeights(weights)

    def sample(self, request: SampleRequest, weights: SamplerWeights, done: Done) -> Callable[[], None]:
        self._stop_strings.check(request.params.stop_strings)
        return self._sampler.add(request, weights, done)

    def step(self) -> bool:
        if self._sampler.is_idle:
            return False
        self._sampler.step()
        return True
