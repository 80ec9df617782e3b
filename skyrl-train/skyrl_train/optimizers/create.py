"""Create the optimizer of a model."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from skyrl_train.optimizers.adamw import AdamW
from skyrl_train.optimizers.muon import Muon
from skyrl_train.types.specs import OptimizerSpec


def create_optimizer(
    parameters: Iterable[torch.nn.Parameter], spec: OptimizerSpec, model: PreTrainedModel | None = None
) -> AdamW:
    """Create the optimizer of `parameters`. Muon reads from `model` which of them are hidden matrices."""
    trained = list(parameters)
    accumulate_in_float32(trained)
    cfg = spec.config
    settings: dict[str, Any] = {
        "lr": cfg.lr,
        "betas": cfg.adam_betas,
        "weight_decay": cfg.weight_decay,
        "rounds_stochastically": cfg.stochastic_rounding,
        "seed": spec.seed,
    }
    if cfg.name == "muon":
        assert model is not None
        return Muon(trained, hidden_matrices(trained, model), **settings)
    return AdamW(trained, quantizes_moments=cfg.name == "adamw_8bit", **settings)


def hidden_matrices(parameters: Iterable[torch.nn.Parameter], model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Return the matrices between the embeddings and the head. Experts that are fused into 3-D tensors are none."""
    outer = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    outer += [head for head in (model.get_output_embeddings(), getattr(model, "score", None)) if head is not None]
    excluded = {parameter for module in outer for parameter in module.parameters()}
    return [parameter for parameter in parameters if parameter.ndim == 2 and parameter not in excluded]


def accumulate_in_float32(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make bfloat16 parameters add up the gradients of micro-batches in float32."""
    for parameter in parameters:
        if parameter.dtype != torch.bfloat16:
            continue
        if isinstance(parameter, DTensor):
            parameter.grad_dtype = None  # any dtype, because FSDP2 assigns the first gradient in bfloat16
            parameter.register_post_accumulate_grad_hook(_widen_gradient)
        else:
            parameter.grad_dtype = torch.float32


def _widen_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.float()
