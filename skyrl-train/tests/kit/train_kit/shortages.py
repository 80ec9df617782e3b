"""Shortages of memory, as PyTorch, NumPy and CUDA report them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.types import TrainingBatch

CPU_SHORTAGE = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried…"

SHORTAGES: dict[str, Callable[[], Exception]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError(CPU_SHORTAGE),
    "numpy": MemoryError,
}


class _Exhausting(torch.autograd.Function):
    """The identity, whose gradient does not fit into memory."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise SHORTAGES["cpu"]()


def limit_tokens(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, kind: str = "cpu", *, backward: bool = False
) -> None:
    """Let the passes of all models run out of memory with more than `max_tokens` tokens, or only their backward."""
    forward = ScoringModule.forward

    def limited(self: ScoringModule, rows: TrainingBatch) -> Any:
        is_too_large = int(rows.attention_mask.sum()) > max_tokens
        if is_too_large and not backward:
            raise SHORTAGES[kind]()
        scores = forward(self, rows)
        if is_too_large and torch.is_grad_enabled():
            return scores._replace(**{scores._fields[0]: _Exhausting.apply(scores[0])})
        return scores

    monkeypatch.setattr(ScoringModule, "forward", limited)
