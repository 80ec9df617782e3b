"""The PyTorch backend: Hugging Face models that the packed engine of `skyrl_train` supports."""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from skyrl_gym.images import EncodedImage
from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.inference_engines.hf.support import check_supported
from skyrl_train.inference_engines.sequence import all_eos_ids
from skyrl_train.models.loading import default_device, load_model
from skyrl_train.models.memory import cache_bytes_per_token
from tx.models.config import AdapterConfig, ModelError
from tx.tinker.backends.base import BaseModel, Done, Save
from tx.tinker.backends.config import TorchConfig
from tx.tinker.backends.models import Models, PassAccumulator
from tx.tinker.backends.stop_strings import StopStringMatcher
from tx.tinker.backends.torch import folders
from tx.tinker.backends.torch.adam import TorchOptimizer, adam_step, moments_of, new_optimizer
from tx.tinker.backends.torch.experts import replace_experts
from tx.tinker.backends.torch.images import ImageReader, check_separated, load_processor
from tx.tinker.backends.torch.sampler import TorchSampler
from tx.tinker.backends.torch.training import Gradients, add, micro_batch, micro_batches
from tx.tinker.backends.torch.weights import Weights, new_weights
from tx.tinker.losses import fill_defaults
from tx.tinker.types import AdamParams, ImageInput, Pass, PassResult, SampleRequest, UserError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TorchModel:
    """A model under training. Its tensors are modified in place."""

    lora: AdapterConfig
    weights: Weights
    optimizer: TorchOptimizer
    gradients: Gradients | None = None


class TorchBackend:
    """A backend in PyTorch, built from components of `skyrl_train`."""

    def __init__(self, folder: Path, name: str, config: TorchConfig) -> None:
        self._config = config
        self._base = Weights(_load(folder, config))
        processor = load_processor(self._base.model)
        self._images = None if processor is None else ImageReader(processor)
        self._models: Models[TorchModel] = Models()
        self._stop_strings = StopStringMatcher(folder)
        model = self._base.model
        self._sampler = TorchSampler(
            n_tokens=config.cache_tokens(cache_bytes_per_token(model)),
            n_lanes=config.sample_lanes or (16 if model.device.type == "cpu" else 64),
            max_groups=config.sample_groups,
            ends_with=self._stop_strings.contains_any,
        )
        shape, generation = model.config.get_text_config(), model.generation_config
        eos_ids = all_eos_ids(shape.eos_token_id if generation is None else generation.eos_token_id, None)
        self.base_model = BaseModel(
            name=name,
            folder=folder,
            vocab_size=int(shape.vocab_size),
            max_context=min(int(shape.max_position_embeddings), self._sampler.max_length),
            eos_ids=tuple(sorted(eos_ids)),
            can_train_all=self._images is None,  # the image encoder stays as it is
        )

    @property
    def is_compiling(self) -> bool:
        return False

    # -- models

    def create_model(self, model_id: str, lora: AdapterConfig) -> None:
        self._models.check_new(model_id)
        seed = lora.seed if lora.seed is not None else secrets.randbits(31)
        weights = new_weights(self._base.model, lora, seed)
        self._models[model_id] = TorchModel(lora, weights, new_optimizer(weights.trained))

    def delete_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def models(self) -> Mapping[str, AdapterConfig]:
        return {model_id: model.lora for model_id, model in self._models.items()}

    # -- images

    def read_image(self, image: ImageInput) -> tuple[list[int], EncodedImage]:
        if self._images is None:
            raise UserError(f"{self.base_model.name} reads only text; send tokens, or serve a vision-language model")
        return self._images.read(image)

    # -- training

    def compute(self, pass_: Pass) -> Iterator[PassResult | None]:
        model = self._models[pass_.model_id]
        for datum in pass_.data:
            check_separated(self._base.model, datum.images)
        whole = fill_defaults(pass_)
        accumulator = PassAccumulator(whole.data, add)
        for number, indices in enumerate(micro_batches(whole.data, self._config.micro_batch_tokens)):
            if number:
                yield None
            accumulator.add_rows(indices, *micro_batch(whole, [whole.data[index] for index in indices], model.weights))
        model.gradients = accumulator.add_to(model.gradients)
        yield accumulator.result

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        model = self._models[model_id]
        gradients = model.gradients
        if gradients is None:
            logger.warning("optim_step of %s without any gradient", model_id)
            gradients = [torch.zeros_like(tensor) for tensor in model.weights.trained]
        model.gradients = None
        norm = adam_step(model.optimizer, gradients, params)
        return {"skyrl.ai/grad_norm": norm, "skyrl.ai/learning_rate": params.learning_rate}

    def drop_gradients(self, model_id: str) -> None:
        if model_id in self._models:
            self._models[model_id].gradients = None

    # -- folders

    def n_bytes(self, model_id: str, *, with_optimizer: bool) -> int:
        model = self._models[model_id]
        saved = list(model.weights.trained)
        if with_optimizer:
            moments = moments_of(model.optimizer)
            saved += [*moments.first, *moments.second, *(moments.master_weights or ())]
        return sum(tensor.nbytes for tensor in saved)

    def capture(self, model_id: str, *, with_optimizer: bool) -> Save:
        model = self._models[model_id]
        saves = [folders.capture_weights(model.weights, model.lora, self.base_model.name)]
        if with_optimizer:
            saves.append(folders.capture_moments(model.weights, moments_of(model.optimizer)))

        def save(folder: Path) -> None:
            for save_part in saves:
                save_part(folder)

        return save

    def load_model(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        self._models.check_new(model_id)
        lora, weights = folders.load_weights(folder, self._base.model)
        moments = folders.load_moments(folder, weights) if with_optimizer else None
        self._models[model_id] = TorchModel(lora, weights, new_optimizer(weights.trained, moments))

    # -- sampling

    def weights_of(self, model_id: str) -> Weights:
        return self._models[model_id].weights.freeze()

    def load_weights(self, folder: Path) -> Weights:
        _, weights = folders.load_weights(folder, self._base.model)
        return weights

    def base_weights(self) -> Weights:
        return self._base

    def sample(self, request: SampleRequest, weights: Weights, done: Done) -> Callable[[], None]:
        self._stop_strings.check(request.params.stop_strings)
        check_separated(self._base.model, request.images)
        return self._sampler.add(request, weights, done)

    def step(self) -> bool:
        if self._sampler.is_idle:
            return False
        self._sampler.step()
        return True

    def counts(self) -> Mapping[str, int]:
        return {
            "samples running": self._sampler.n_running,
            "sample requests waiting": self._sampler.n_waiting,
            "free tokens of the cache": self._sampler.n_free,
        }


def _load(folder: Path, config: TorchConfig) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    device = default_device() if config.device is None else torch.device(config.device)
    try:
        model = load_model(
            str(folder),
            dtype=getattr(torch, config.dtype),
            device=device,
            gradient_checkpointing=config.gradient_checkpointing,
            key="base_model",
        )
    except ConfigError as error:
        raise ModelError(str(error)) from error
    model.requires_grad_(False)
    replace_experts(model)
    try:
        check_supported(model, bf16=False)
    except EngineError as error:
        raise ModelError(
            f"base_model={folder} is not supported by --backend torch: {error}; use another model"
        ) from error
    return model
