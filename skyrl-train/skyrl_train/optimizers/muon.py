"""Muon (Jordan et al., 2024) for hidden matrices, AdamW for all other parameters."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from skyrl_train.optimizers.adamw import AdamW


class Muon(AdamW):
    """`torch.optim.Muon` for `matrices`, and AdamW for all other parameters, with the same learning rate.

    Muon's update is orthogonal, and is scaled to the RMS of an update of AdamW (Liu et al., 2025, arXiv:2502.16982), so
    learning rates and weight decay of AdamW fit. It needs one moment, in float32.
    """

    def __init__(self, params: Iterable[torch.Tensor], matrices: Collection[torch.Tensor], **settings: Any) -> None:
        super().__init__(params, **settings)
        self._matrices = set(matrices)
        self._is_plain = False

    def _new_moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if parameter not in self._matrices:
            return super()._new_moments(parameter)
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=torch.float32)}

    def _update(self, index: int, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if parameter not in self._matrices:
            super()._update(index, parameter, group)
            return
        state = self.state[parameter]
        matrix = torch.nn.Parameter(parameter.detach().float())  # the weights themselves if they are float32
        matrix.grad = parameter.grad
        muon = torch.optim.Muon(
            [matrix], lr=group["lr"], weight_decay=group["weight_decay"], adjust_lr_fn="match_rms_adamw"
        )
        muon.state[matrix]["momentum_buffer"] = state["momentum_buffer"]
        muon.step()
        self._store(parameter.detach(), matrix.detach(), int(state["step"]), index, 0)
