"""AdamW with float32 arithmetic, for weights in float32 or bfloat16 and moments in float32 or 8 bits."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_train.optimizers.block_quantization import dequantize, quantize
from skyrl_train.optimizers.rounding import noise_generator, round_to_bfloat16
from skyrl_train.types.training_memory import count_blocks, is_quantized

CHUNK_VALUES = 1 << 21
"""Number of values that a step computes at once. Its temporary tensors take about 64 MB."""

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the moments, and whether they have negative values."""


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter, 2019) that computes in float32, whatever the dtypes of weights and moments.

    With float32 weights and moments, it is `torch.optim.AdamW`, bit for bit. Otherwise, it converts a chunk of the
    weights and moments to float32, updates it, and converts it back:

    - bfloat16 weights are rounded stochastically. The random bits depend on the seed, the step, the parameter and the
      row in the whole parameter, so a resumed run and all copies of a shard round alike.
    - 8-bit moments are quantized in blocks. A moment is the two tensors `<moment>_codes` and `<moment>_scales`.

    Gradients are float32. Parameters may be DTensors that are sharded along dimension 0.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        quantizes_moments: bool = False,
        rounds_stochastically: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        (group,) = self.param_groups
        self.parameters: list[torch.Tensor] = group["params"]
        self._quantizes = quantizes_moments
        self._rounds_stochastically = rounds_stochastically
        self._seed = seed
        self._is_plain = not quantizes_moments and all(p.dtype != torch.bfloat16 for p in self.parameters)

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state of all parameters that have none: moments of 0 and step 0."""
        for parameter in self.parameters:
            if parameter not in self.state:
                device = parameter.device if self._is_plain else "cpu"  # others' `step` is read as a number
                self.state[parameter] = {"step": torch.zeros((), device=device)} | self._new_moments(parameter)

    def _new_moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if not (self._quantizes and is_quantized(parameter.shape)):
            return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in MOMENTS}
        moments, block_starts = {}, parameter.narrow(-1, 0, count_blocks(parameter.shape))
        for name in MOMENTS:
            # Scales of 0 make every code a moment of 0. DTensors are sharded as the parameter.
            moments[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            moments[f"{name}_scales"] = torch.zeros_like(
                block_starts, dtype=torch.float32, memory_format=torch.contiguous_format
            )
        return moments

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        if self._is_plain:
            return super().step(closure)
        assert closure is None
        self.init_state()
        (group,) = self.param_groups
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.state[parameter]["step"] += 1
                self._update(index, parameter, group)
        return None

    def _update(self, index: int, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a parameter, in chunks of rows."""
        state = {name: value for name, value in self.state[parameter].items() if name != "step"}
        step = int(self.state[parameter]["step"])
        beta1, beta2 = group["betas"]
        names = list(state)
        for first_row, (weights, grad, *parts) in _chunks(parameter, parameter.grad, *state.values()):
            stored = dict(zip(names, parts, strict=True))
            moments = {
                name: stored[name]
                if name in stored
                else dequantize(stored[f"{name}_codes"], stored[f"{name}_scales"], is_signed=is_signed)
                for name, is_signed in MOMENTS.items()
            }
            mean, square = moments.values()
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            denominator = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
            values = weights.float()  # the weights themselves if they are float32
            values.mul_(1 - group["lr"] * group["weight_decay"])
            values.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
            del denominator
            for name, is_signed in MOMENTS.items():
                if name not in stored:
                    codes, scales = quantize(moments[name], is_signed=is_signed)
                    stored[f"{name}_codes"].copy_(codes)
                    stored[f"{name}_scales"].copy_(scales)
            self._store(weights, values, step, index, first_row)

    def _store(self, weights: torch.Tensor, values: torch.Tensor, step: int, index: int, row: int) -> None:
        """Write updated float32 values to the weights of parameter number `index`, from `row` on."""
        if weights.dtype != torch.bfloat16:
            return  # updated in place
        generator = None
        if self._rounds_stochastically:
            generator = noise_generator(weights.device, self._seed, step, index, row)
        weights.copy_(round_to_bfloat16(values, generator))


def _chunks(parameter: torch.Tensor, *others: torch.Tensor | None) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield chunks of rows of this rank's part of a parameter, with the same rows of tensors of equal leading shape.

    A tensor (a, b, n) has a · b rows of n values. A chunk comes with the number of its first row in the whole tensor.
    """
    first_row = 0
    if isinstance(parameter, DTensor):
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        first_row = offset[0] * math.prod(parameter.shape[1:-1])
    parts = []
    for tensor in (parameter, *others):
        assert tensor is not None
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        n_columns = local.shape[-1] if local.ndim else 1
        parts.append(local.view(-1, n_columns) if local.numel() else local.new_empty(0, 1))
    n_rows = max(1, CHUNK_VALUES // parameter.shape[-1]) if parameter.ndim > 1 else 1
    for start in range(0, len(parts[0]), n_rows):
        yield first_row + start, [part[start : start + n_rows] for part in parts]
