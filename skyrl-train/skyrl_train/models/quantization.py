"""Hold the frozen matrices under an adapter in 4 bits: NF4 with double quantization (QLoRA, Dettmers et al., 2023,
arXiv:2305.14314).

Each block of 64 weights has a scale, its largest magnitude. A weight divided by its scale is rounded to the nearest of
16 levels, and two of these codes share a byte. The scales are rounded to 8 bits: each group of 256 scales has evenly
spaced levels between the logarithms of its smallest and its largest scale. So a weight takes 4 + 8/64 + 64/(64 · 256)
≈ 4.13 bits, and one outlier in a group does not cost the other scales their precision.

Gradients flow through a matrix but do not change it. Only one matrix at a time exists dequantized.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.media.processing import has_vision
from skyrl_train.models.checksum import tensor_checksum
from skyrl_train.models.deferred import DeferredWeights
from skyrl_train.models.loading import create_empty
from skyrl_train.models.offload import count_kept_bytes, release_heap
from skyrl_train.models.vision import language_model_name
from skyrl_train.types.specs import Role

logger = logging.getLogger(__name__)

BLOCK = 64
"""Weights that share a scale."""
GROUP = 256
"""Scales that share a range."""
MAX_FREED_BYTES = 1 << 26
"""Memory of quantized matrices that a process keeps while it quantizes others."""


class QuantizedLinear(torch.nn.Linear):
    """A frozen linear module whose weight is held in NF4.

    The codes are buffers, so they move between devices with the model. They are not in its state dict. `weight` returns
    the dequantized matrix. It computes in the dtype of its input.
    """

    codes: torch.Tensor  # (n / 2,) uint8
    scale_codes: torch.Tensor  # (groups, GROUP) uint8
    scale_ranges: torch.Tensor  # (groups, 2) float32: log of the smallest scale, and the step between levels

    def __init__(self, weight: torch.Tensor, bias: torch.nn.Parameter | None, checksum: int) -> None:
        """Quantize `weight` (out, in). `checksum` is the checksum of the weight in the model's files."""
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.dtype, self.checksum = weight.dtype, checksum
        self.register_parameter("bias", bias)
        blocks = weight.detach().float().view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        logs = scales.where(scales > 0, scales.max().clamp(min=torch.finfo(torch.float32).tiny)).log()
        padded = torch.cat([logs, logs[-1:].expand(-len(logs) % GROUP)]).view(-1, GROUP)
        low, high = padded.aminmax(dim=1, keepdim=True)
        step = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
        self.register_buffer("scale_ranges", torch.cat([low, step], 1), persistent=False)
        self.register_buffer("scale_codes", ((padded - low) / step).round().to(torch.uint8), persistent=False)
        levels = _levels(weight.device)
        codes = torch.bucketize(blocks / self._scales()[:, None], (levels[1:] + levels[:-1]) / 2, out_int32=True)
        high_half, low_half = codes.to(torch.uint8).view(-1, 2).unbind(1)
        self.register_buffer("codes", high_half * 16 + low_half, persistent=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The dequantized matrix (out, in), in the dtype of the model's files."""
        return self.dequantize(self.dtype)

    def empty_weight(self) -> torch.Tensor:
        """Return a tensor without memory that has the weight's shape, dtype and device. peft reads only these."""
        return torch.empty(1, dtype=self.dtype, device=self.codes.device).expand(self.out_features, self.in_features)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix (out, in), computed in float32 and rounded to `dtype`."""
        pairs = _level_pairs(self.codes.device).index_select(0, self.codes.int())
        blocks = pairs.view(torch.float32).view(-1, BLOCK).mul_(self._scales()[:, None])
        return blocks.view(self.out_features, self.in_features).to(dtype)

    def _scales(self) -> torch.Tensor:
        """Return the scale of each block (blocks,) float32."""
        low, step = self.scale_ranges.split(1, dim=1)
        return (self.scale_codes * step).add_(low).exp_().view(-1)[: self.out_features * self.in_features // BLOCK]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return _Product.apply(input, self)
        return self._product(input)

    def _product(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return torch.nn.functional.linear(input, self.dequantize(input.dtype), bias)


class _Product(torch.autograd.Function):
    """x · Wᵀ + b, with W dequantized again in the backward pass instead of kept since the forward pass."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return layer._product(input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return (grad @ ctx.layer.dequantize(grad.dtype) if ctx.needs_input_grad[0] else None), None


@cache
def _levels(device: torch.device) -> torch.Tensor:
    """Return the 16 levels of NF4 (16,) float32: quantiles of a normal distribution, scaled to [-1, 1].

    Seven are negative, one is 0 and eight are positive. The outermost quantile is the mean of 1 - 1/32 and 1 - 1/30.
    """
    with torch.inference_mode(False):
        last = 1 - (1 / 32 + 1 / 30) / 2
        negative, positive = (
            torch.special.ndtri(torch.linspace(last, 0.5, n, dtype=torch.float64, device="cpu")[:-1]) for n in (8, 9)
        )
        levels = torch.cat([-negative, torch.zeros(1, dtype=torch.float64, device="cpu"), positive.flip(0)])
        return (levels / levels.max()).float().to(device)


@cache
def _level_pairs(device: torch.device) -> torch.Tensor:
    """Return the two float32 levels of each byte of codes, as the bits of one integer (256,) int64.

    One lookup per byte is three times as fast as one per code on a CPU.
    """
    levels = _levels(device)
    with torch.inference_mode(False):
        return torch.cartesian_prod(levels, levels).view(torch.int64).view(-1)


def quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    """Return the modules in 4 bits by their path in the model."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@torch.no_grad()
def quantize_base(model: PreTrainedModel, key: str, device: torch.device, weights: DeferredWeights) -> None:
    """Hold the matrices of a model's body in 4 bits, in place, and move the model to `device`.

    `weights` are the files of a model that was created empty. They are read one tensor at a time, so the whole model
    never exists in its own dtype. `key` is the adapter's configuration key, for messages.

    Raises:
        ConfigError: the model has no matrix to hold in 4 bits, or a weight is NaN or infinite.
    """
    layers = _find_layers(model)
    if not layers:
        raise ConfigError(
            f"{key}.quantize_base=nf4: a {type(model).__name__} has no linear modules with a multiple of {BLOCK} "
            f"weights; set {key}.quantize_base=none"
        )
    is_empty = weights.source is not None
    for path, layer in layers.items():
        weight, name = layer.weight.detach(), f"{path}.weight"
        if is_empty:
            weight = torch.empty_like(weight)
            weights.read(name, weight, (0, 0))
        checksum, weight = tensor_checksum(name, weight), weight.to(device)
        model.set_submodule(path, QuantizedLinear(weight, layer.bias, checksum))
        layer.weight.data = weight.new_empty(0)  # `layers` still holds the module
        if count_kept_bytes() > MAX_FREED_BYTES:
            release_heap()  # the next matrix does not fit the gaps between the codes
    if is_empty:
        for name, parameter in model.named_parameters():
            weights.read(name, parameter.detach(), (0,) * parameter.ndim)
    model.to(device)  # type: ignore[arg-type]
    quantized = quantized_layers(model).values()
    n_bytes = sum(buffer.nbytes for layer in quantized for buffer in layer.buffers())
    n_quantized = sum(layer.in_features * layer.out_features for layer in quantized)
    logger.info("%s.quantize_base=nf4: %s weights in 4 bits take %s bytes", key, f"{n_quantized:,}", f"{n_bytes:,}")


@dataclass(frozen=True, slots=True)
class QuantizedSize:
    """Size of the part of a model that `quantize_base` holds in 4 bits."""

    n_parameters: int
    n_bytes: int
    n_largest: int  # parameters of the largest matrix


def measure_quantized(path: str, role: Role = "policy") -> QuantizedSize:
    """Return the size of what `quantize_base` holds in 4 bits of the model at `path`, without loading its weights."""
    sizes = [layer.weight.numel() for layer in _find_layers(create_empty(path, role, local_files_only=True)).values()]
    n_groups = sum(-(-n // (BLOCK * GROUP)) for n in sizes)
    n_bytes = sum(sizes) // 2 + n_groups * (GROUP + 2 * torch.float32.itemsize)
    return QuantizedSize(sum(sizes), n_bytes, max(sizes, default=0))


def _find_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """Return the linear modules of the language model's body by path.

    Excluded are heads, image encoders, experts in one tensor, matrices that several modules share, and subclasses that
    compute something else, such as routers.
    """
    body = f"{language_model_name(model)}." if has_vision(model.config) else ""
    head = model.get_output_embeddings()
    n_uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and type(module).forward is torch.nn.Linear.forward
        and path.startswith(body)
        and module is not head
        and path != "score"
        and n_uses[id(module.weight)] == 1
        and module.weight.numel() % BLOCK == 0
    }
