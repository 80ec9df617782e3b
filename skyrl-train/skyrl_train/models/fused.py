"""RMSNorm and rotary embeddings with fewer passes over memory.

Eager PyTorch needs about ten elementwise operations for each of them, forward and backward. In small models on a CPU
and in all models on a GPU, their memory traffic takes as long as the matrix products. In bfloat16, an eager RMSNorm
also keeps a float32 copy of its input for the backward pass. On a CPU, only float32 rotary embeddings are fused.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from transformers import PreTrainedModel

ROTARY = "apply_rotary_pos_emb"
"""Function that nearly every attention of transformers looks up in its own module."""

TOLERANCE = 1e-5

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def fuse_operations(model: PreTrainedModel) -> None:
    """Replace a model's RMSNorms and rotary embedding by fused versions where they compute the standard formula.

    Architectures vary (Gemma adds 1 to the norm's weight), so each is compared with the fused version on random
    inputs. The rotary function belongs to a module of transformers, so all models of the architecture get the new one.
    """
    norms: dict[tuple[type, int], bool] = {}  # by class and number of parameters: some norms of Gemma 4 have no weight
    body: Any = model.base_model
    last_norm = getattr(body.get_decoder(), "norm", None)  # of the language model, in a vision-language model
    for module in model.modules():
        cls = type(module)
        if cls.__name__.endswith("RMSNorm"):
            kind = (cls, len(list(module.parameters())))
            if kind not in norms:
                norms[kind] = _is_rms_norm(module)
            if norms[kind]:
                module.forward = MethodType(partial(_rms_norm_forward, is_last=module is last_norm), module)
        source = sys.modules[cls.__module__]
        rotary = getattr(source, ROTARY, None)
        if cls.__name__.endswith("Attention") and rotary is not None and _is_half_rotary(rotary):
            setattr(source, ROTARY, _fused_rotary(rotary))


class _RMSNorm(torch.autograd.Function):
    """weight · x / √(mean(x²) + ε) over the last dimension (Zhang and Sennrich, 2019), computed in float32."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        scale = _inverse_rms(states, epsilon)
        ctx.save_for_backward(states, weight, scale)
        return torch.mul(states, scale).to(states.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, scale = ctx.saved_tensors
        size = states.shape[-1]
        grad, weight, scale = grad.reshape(-1, size).float(), weight.float(), scale.reshape(-1, 1)
        normalized = states.reshape(-1, size) * scale
        product = grad * normalized
        weight_grad = product.sum(dim=0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, weight_grad, None
        # With n = x · scale: ∂L/∂x = scale · (g∘w - n · mean(g∘w∘n)). Buffers are reused, so the order matters.
        mean = torch.mv(product, weight).div_(size)  # (rows,)
        states_grad = torch.mul(grad, weight, out=product).sub_(normalized.mul_(mean[:, None])).mul_(scale)
        return states_grad.to(states.dtype).view_as(states), weight_grad, None


def _inverse_rms(states: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return 1 / √(mean(x²) + ε) (…, 1) float32 over the last dimension."""
    norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(_scalar(epsilon), norm, norm, value=1 / states.shape[-1]).rsqrt_()


@cache
def _scalar(value: float) -> torch.Tensor:
    """Return a float32 scalar tensor, cached: for a few tokens, creating one takes as long as the arithmetic."""
    with torch.inference_mode(False):  # autograd rejects tensors that inference mode created
        return torch.tensor(value, dtype=torch.float32, device="cpu")


def _rms_norm_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, is_last: bool, **kwargs: Any
) -> torch.Tensor:
    """Compute the norm. Under autocast on a GPU, return autocast's dtype: the result goes into matrix products.

    The model's last norm keeps the dtype of the weights, because a value head needs float32.
    """
    weight = self.weight
    assert isinstance(weight, torch.Tensor)
    if hidden_states.is_cuda and not (args or kwargs):
        dtype = torch.promote_types(hidden_states.dtype, weight.dtype)
        if torch.is_autocast_enabled("cuda") and not is_last:
            dtype = torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda", enabled=False):  # autocast would copy all states to float32
            same = weight.to(hidden_states.dtype)  # PyTorch's kernel takes a weight of the dtype of the states
            return torch.nn.functional.rms_norm(hidden_states, weight.shape, same, _epsilon(self)).to(dtype)
    is_fusible = hidden_states.is_cpu and hidden_states.dtype == weight.dtype in (torch.float32, torch.bfloat16)
    if args or kwargs or not is_fusible:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    if not torch.is_grad_enabled():  # for a few tokens, `apply` alone takes a quarter of the time
        scale = _inverse_rms(hidden_states, _epsilon(self))
        return torch.mul(hidden_states, scale).to(hidden_states.dtype).mul_(weight)
    return _RMSNorm.apply(hidden_states, weight, _epsilon(self))


def _epsilon(module: torch.nn.Module) -> float:
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)  # type: ignore[arg-type]


def _is_rms_norm(module: torch.nn.Module) -> bool:
    """Return True if a module computes `_RMSNorm` with its only parameter. Some add 1 to the weight, for example."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    if list(shapes) != ["weight"] or not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        return False
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, *shapes["weight"], generator=generator)
    weight = torch.randn(shapes["weight"], generator=generator)
    try:
        with torch.no_grad():
            own = functional_call(module, {"weight": weight}, (states,))
            fused = _RMSNorm.apply(states, weight, _epsilon(module))
            return torch.allclose(own, fused, rtol=TOLERANCE, atol=TOLERANCE)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # another signature or return type
        return False


class _HalfRotary(torch.autograd.Function):
    """Rotary embedding in Llama's order: value i of a head rotates with value i + d/2 (RoFormer, Su et al., 2021)."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(states, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    """Rotate states by their angles times `direction`, 1 or -1."""
    half = states.shape[-1] // 2
    rotated = states * cos
    rotated[..., :half].addcmul_(states[..., half:], sin[..., :half], value=-direction)
    rotated[..., half:].addcmul_(states[..., :half], sin[..., half:], value=direction)
    return rotated


def _fused_rotary(original: Rotary) -> Rotary:
    """Return a fused version of `original` that calls it for unsupported inputs."""

    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_fusible = q.is_cuda or (q.is_cpu and q.dtype == cos.dtype == torch.float32)
        if args or kwargs or not is_fusible or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, *args, **kwargs)
        cos, sin = (angles.to(q.dtype).unsqueeze(1) for angles in (cos, sin))
        if not torch.is_grad_enabled():
            return _rotate(q, cos, sin, 1), _rotate(k, cos, sin, 1)
        return _HalfRotary.apply(q, cos, sin), _HalfRotary.apply(k, cos, sin)

    apply_rotary_pos_emb.original = original  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _is_half_rotary(rotary: Rotary) -> bool:
    """Return True if a function of transformers computes `_HalfRotary` and has not been replaced yet."""
    if hasattr(rotary, "original"):
        return False
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 3, 8, generator=generator)  # (1, heads, tokens, d) each
    angles = torch.randn(1, 3, 4, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    try:
        own = rotary(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # another signature
        return False
    fused = (_rotate(states, cos[:, None], sin[:, None], 1) for states in (q, k))
    return all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in zip(own, fused, strict=True))
