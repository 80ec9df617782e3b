"""The backend on JAX."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from tx.models.adapters import adapter_of, load_adapter, named_factors, save_adapter
from tx.models.checkpoints import load_params, named_tensors, params_of
from tx.models.config import LoraConfig, ModelConfig, read_config
from tx.models.decoder import Params
from tx.models.lora import Adapter, new_adapter, rows_of
from tx.tinker.backends.base import BaseModel, Done
from tx.tinker.backends.jax.adam import Moments, adam_step, new_moments, step_of
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.backends.jax.sampler import Sampler, SamplerWeights
from tx.tinker.backends.jax.training import Shape, add_rows, micro_batch, padded, shape_of
from tx.tinker.losses import LOSSES, completed
from tx.tinker.tokens import Decoder
from tx.tinker.types import AdamParams, Datum, Pass, PassResult, SampleRequest, UserError

logger = logging.getLogger(__name__)

SETTINGS, OPTIMIZER = "training.json", "optimizer.safetensors"


@dataclass(slots=True)
class Model:
    """A model under training. Its arrays are never changed, only replaced."""

    lora: LoraConfig
    weights: Adapter | Params
    moments: Moments
    gradients: Adapter | Params | None = None


@dataclass(slots=True, eq=False)
class _Work:
    """A pass on its way."""

    asked: Pass
    model: Model
    n_left: int
    logprobs: list[Any]
    token_losses: list[Any]
    gradients: Any = None


class JaxBackend:
    """See `Backend`."""

    def __init__(self, folder: Path, name: str, config: JaxConfig) -> None:
        self._config = config
        self._shape: ModelConfig = read_config(folder)
        self._dtype = jnp.dtype(config.dtype)
        if self._dtype == jnp.float32:
            jax.config.update("jax_default_matmul_precision", "highest")
        self._params = load_params(folder, self._shape, self._dtype)
        self._models: dict[str, Model] = {}
        self._decoder = Decoder(folder)
        self._sampler = Sampler(
            self._shape,
            n_tokens=config.cache_tokens(self._shape, self._dtype.itemsize),
            n_lanes=config.sample_lanes,
            most_groups=config.sample_groups,
            dtype=self._dtype,
            ends_with=self._decoder.holds_any,
        )
        self.base_model = BaseModel(
            name=name,
            folder=folder,
            vocab_size=self._shape.vocab_size,
            max_context=min(self._shape.max_positions, self._sampler.longest),
            eos_ids=self._shape.eos_ids,
            can_train_all=True,
        )

    # -- models

    def create_model(self, model_id: str, lora: LoraConfig) -> None:
        seed = lora.seed if lora.seed is not None else secrets.randbits(31)
        weights = self._params if lora.rank == 0 else new_adapter(lora, self._shape, seed)
        self._add(model_id, Model(lora, weights, new_moments(weights)))

    def delete_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def models(self) -> Mapping[str, LoraConfig]:
        return {model_id: model.lora for model_id, model in self._models.items()}

    def _add(self, model_id: str, model: Model) -> None:
        if model_id in self._models:
            raise UserError(f"there is a model {model_id} already")
        self._models[model_id] = model

    def _model(self, model_id: str) -> Model:
        if model_id not in self._models:
            raise UserError(f"there is no model {model_id}; it was unloaded, or never created")
        return self._models[model_id]

    # -- training

    def passes(self, asked: Sequence[Pass]) -> Iterator[tuple[int, PassResult | Exception] | None]:
        works: dict[int, _Work] = {}
        for number, one in enumerate(asked):
            try:
                model = self._model(one.model_id)
            except UserError as error:
                yield number, error
                continue
            n = len(one.data)
            works[number] = _Work(completed(one), model, n, [None] * n, [None] * n)
        for batch in self._micro_batches(works):
            try:
                self._compute(batch)
            except Exception as error:
                logger.exception("a micro-batch failed")
                failed = {id(work) for work, _ in batch}
                for number in [number for number, work in works.items() if id(work) in failed]:
                    del works[number]
                    yield number, error
                continue
            for number in [number for number, work in works.items() if work.n_left == 0]:
                yield number, self._result(works.pop(number))
            yield None

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        model = self._model(model_id)
        gradients = model.gradients
        if gradients is None:
            logger.warning("optim_step of %s without any gradient", model_id)
            gradients = jax.tree.map(jnp.zeros_like, model.weights)
        model.weights, model.moments, norm = adam_step(model.weights, model.moments, gradients, step_of(params))
        model.gradients = None
        return {"skyrl.ai/grad_norm": float(norm), "skyrl.ai/learning_rate": params.learning_rate}

    def _micro_batches(self, works: Mapping[int, _Work]) -> Iterator[list[tuple[_Work, int]]]:
        """Data that can be computed in one program: of one length, loss and kind of adapter.

        The data of a pass are in one order whatever else there is, so that its gradients add up the same.
        """
        alike: dict[tuple[Any, ...], list[tuple[_Work, int]]] = {}
        for work in works.values():
            for i, datum in enumerate(work.asked.data):
                alike.setdefault(self._kind(work, datum), []).append((work, i))
        for kind in sorted(alike, key=str):
            shape: Shape = kind[0]
            for start in range(0, len(alike[kind]), shape.n_rows):
                batch = [(work, i) for work, i in alike[kind][start : start + shape.n_rows] if work in works.values()]
                if batch:
                    yield batch

    def _kind(self, work: _Work, datum: Datum) -> tuple[Any, ...]:
        model, asked = work.model, work.asked
        weights = model.weights
        adapters = SamplerWeights(self._params, weights).kind[1:] if isinstance(weights, Adapter) else id(model)
        return shape_of(datum), asked.loss_fn, asked.is_forward_only, tuple(sorted(datum.inputs)), adapters

    def _compute(self, batch: Sequence[tuple[_Work, int]]) -> None:
        first, _ = batch[0]
        data = [work.asked.data[i] for work, i in batch]
        shape = shape_of(data[0])
        tokens, inputs = padded(data, shape)
        trains_all = first.model.lora.rank == 0
        of_row = [work for work, _ in batch] + [first] * (shape.n_rows - len(batch))
        rows = None
        if not trains_all:
            rows = rows_of(
                [work.model.weights for work in of_row], jnp.asarray([work.model.lora.scale for work in of_row])
            )
        names = LOSSES[first.asked.loss_fn].settings
        settings = {name: np.asarray([work.asked.settings[name] for work in of_row], np.float32) for name in names}
        lp, losses, gradients = micro_batch(
            self._shape,
            first.model.weights if trains_all else self._params,
            rows,
            tokens,
            inputs,
            settings,
            loss=first.asked.loss_fn,
            has_gradient=not first.asked.is_forward_only,
            trains_all=trains_all,
            remat=self._config.gradient_checkpointing,
        )
        if gradients is not None:
            self._add_up(batch, gradients, trains_all=trains_all)
        lp, losses = np.asarray(lp), np.asarray(losses)
        for row, (work, i) in enumerate(batch):
            n = len(work.asked.data[i].tokens)
            work.logprobs[i], work.token_losses[i] = lp[row, :n], losses[row, :n]
            work.n_left -= 1

    def _add_up(self, batch: Sequence[tuple[_Work, int]], gradients: Any, *, trains_all: bool) -> None:
        if trains_all:
            work = batch[0][0]
            work.gradients = gradients if work.gradients is None else _sum(work.gradients, gradients)
            return
        start = 0
        for end in range(1, len(batch) + 1):
            work = batch[start][0]
            if end == len(batch) or batch[end][0] is not work:
                total = _zeros(work.model.weights) if work.gradients is None else work.gradients
                work.gradients = add_rows(total, gradients, jnp.int32(start), jnp.int32(end))
                start = end

    def _result(self, work: _Work) -> PassResult:
        if work.gradients is not None:
            model = work.model
            model.gradients = work.gradients if model.gradients is None else _sum(model.gradients, work.gradients)
        loss = float(sum(np.sum(one, dtype=np.float64) for one in work.token_losses))
        return PassResult(loss, work.logprobs, work.token_losses)

    # -- folders

    def save_model(self, model_id: str, folder: Path) -> None:
        model = self._model(model_id)
        self.save_weights(model_id, folder)
        tensors = {
            f"{name}.{path}": tensor
            for name, moments in (("first", model.moments.first), ("second", model.moments.second))
            for path, tensor in self._named(model.lora, moments)
        }
        save_file(tensors | {"n_steps": np.asarray(model.moments.n_steps)}, folder / OPTIMIZER)

    def save_weights(self, model_id: str, folder: Path) -> None:
        model = self._model(model_id)
        if isinstance(model.weights, Adapter):
            save_adapter(folder, model.weights, model.lora, self._shape, self.base_model.name)
        else:
            save_file(
                dict(self._named(model.lora, model.weights)), folder / "model.safetensors", metadata={"format": "pt"}
            )
        (folder / SETTINGS).write_text(json.dumps({"lora": asdict(model.lora)}), encoding="utf-8")

    def load_model(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        lora, weights = self._read(folder)
        moments = self._read_moments(folder, lora) if with_optimizer else new_moments(weights)
        self._add(model_id, Model(lora, weights, moments))

    def _read(self, folder: Path) -> tuple[LoraConfig, Adapter | Params]:
        lora = LoraConfig(**json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["lora"])
        if lora.rank:
            return lora, load_adapter(folder, lora, self._shape)
        return lora, load_params(folder, self._shape, self._dtype)

    def _read_moments(self, folder: Path, lora: LoraConfig) -> Moments:
        if not (folder / OPTIMIZER).is_file():
            raise UserError("the checkpoint has no state of an optimizer; load it without")
        tensors = load_file(folder / OPTIMIZER)
        first, second = (
            self._tree(
                {path.removeprefix(f"{name}."): one for path, one in tensors.items() if path.startswith(f"{name}.")},
                lora,
            )
            for name in ("first", "second")
        )
        return Moments(first, second, jnp.asarray(tensors["n_steps"]))

    def _named(self, lora: LoraConfig, tree: Adapter | Params) -> Iterator[tuple[str, np.ndarray]]:
        if isinstance(tree, Adapter):
            return named_factors(tree, lora, self._shape)
        return named_tensors(tree, self._shape)

    def _tree(self, tensors: Mapping[str, np.ndarray], lora: LoraConfig) -> Adapter | Params:
        return adapter_of(tensors, lora, self._shape) if lora.rank else params_of(tensors, self._shape, self._dtype)

    # -- sampling

    def weights_of(self, model_id: str) -> SamplerWeights:
        model = self._model(model_id)
        return self._frozen(model.lora, model.weights)

    def load_weights(self, folder: Path) -> SamplerWeights:
        return self._frozen(*self._read(folder))

    def base_weights(self) -> SamplerWeights:
        return SamplerWeights(self._params)

    def _frozen(self, lora: LoraConfig, weights: Adapter | Params) -> SamplerWeights:
        if isinstance(weights, Adapter):
            return SamplerWeights(self._params, weights, lora.scale)
        return SamplerWeights(weights)

    def sample(self, asked: SampleRequest, weights: SamplerWeights, done: Done) -> Callable[[], None]:
        if asked.params.stop_strings and not self._decoder.is_there:
            raise UserError(
                f"stop strings need the model's tokenizer, and {self.base_model.folder} has none; give tokens"
            )
        return self._sampler.add(asked, weights, done)

    def step(self) -> bool:
        if self._sampler.is_idle:
            return False
        self._sampler.step()
        return True


@jax.jit
def _sum(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)


@jax.jit
def _zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)
