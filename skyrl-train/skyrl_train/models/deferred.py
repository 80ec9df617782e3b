"""Deferred weight loading: create a model empty, shard it, then read each rank's shards from the files.

No rank then holds the whole model. Where this is not possible, every rank loads the whole model first.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.initialization import no_init_weights

from skyrl_train.errors import ConfigError
from skyrl_train.models.weight_files import list_weight_files

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DeferredWeights:
    """The weight files of a model that was created empty."""

    source: str | None = None
    """Configuration key and path of the model, for messages. None until a model is created empty."""
    files: dict[str, Path] | None = None
    """File of each tensor. Tensors without a file are set to 0."""

    @torch.no_grad()
    def read(self, name: str, target: torch.Tensor, offset: Collection[int], dtype: torch.dtype | None = None) -> None:
        """Read one shard of a tensor into `target`: the slice of target's shape that starts at `offset`.

        Values are rounded to `dtype` first. Raise ConfigError if a value is NaN or infinite.
        """
        assert self.files is not None, "call `load_model` inside `deferring` first"
        if name not in self.files:
            target.zero_()
        elif target.numel():
            part = tuple(slice(first, first + n) for first, n in zip(offset, target.shape, strict=True))
            with safe_open(self.files[name], framework="pt") as tensors:  # opened per tensor, to unmap it right after
                target.copy_(tensors.get_slice(name)[part].to(dtype or target.dtype))
            if not is_finite(target):
                raise ConfigError(
                    f"{self.source} has NaN or infinite weights in {name}; use another checkpoint of the model"
                )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no value is NaN or infinite. `isfinite` would take 20 times as long, and 6 bytes per value."""
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())


_deferred: ContextVar[DeferredWeights | None] = ContextVar("deferred", default=None)


@contextmanager
def deferring(is_on: bool = True) -> Iterator[DeferredWeights]:
    """Make `load_model` create models empty, and yield the weights to read later."""
    weights = DeferredWeights()
    token = _deferred.set(weights if is_on else None)
    try:
        yield weights
    finally:
        _deferred.reset(token)


def create_without_weights(
    auto_class: Any, source: str, path: str, dtype: torch.dtype, optional: str = "", **settings: Any
) -> PreTrainedModel | None:
    """Create the model at `path` without its weights, within `deferring`, if its files have all its tensors.

    Return None if the model must be loaded as a whole. `source` is the configuration key and the path, for messages.
    Tensors with the prefix `optional` may be missing in the files. `settings` override the model's configuration.
    """
    weights = _deferred.get()
    if weights is None:
        return None
    folder = Path(path)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
        config = AutoConfig.from_pretrained(folder, **settings)
        config.name_or_path = path
        with no_init_weights():  # the OS backs memory with pages only when it is written
            model: PreTrainedModel = auto_class.from_config(config, dtype=dtype)
        model.tie_weights()  # `no_init_weights` also skips this
        files: dict[str, Path] = {}  # of each tensor
        shapes: dict[str, tuple[int, ...]] = {}
        for file in list_weight_files(folder):
            with safe_open(file, framework="pt") as tensors:
                for tensor in tensors.keys():  # noqa: SIM118, not a mapping
                    files[tensor] = file
                    shapes[tensor] = tuple(tensors.get_slice(tensor).get_shape())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:  # the full load reports the fault
        logger.debug("%s cannot be created without its weights: %r", source, error)
        return None
    needed = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if optional:
        shapes |= {name: shape for name, shape in needed.items() if name.startswith(optional) and name not in shapes}
    lacking = [name for name, shape in needed.items() if shapes.get(name) != shape]
    lacking += sorted(model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys())
    if lacking or get_checkpoint_conversion_mapping(config.model_type):
        reason = f"its files have no {lacking[0]}" if lacking else "transformers converts its tensors"
        logger.info("%s: every rank loads the whole model first, because %s", source, reason)
        return None
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    weights.source, weights.files = source, files
    return model
