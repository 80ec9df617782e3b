"""Report of a merge, and the comparison of its logits with the sources."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from skyrl_train.checkpoint.model_folder import read_dtype
from skyrl_train.errors import CheckpointError
from skyrl_train.models.loading import model_class
from skyrl_train.types.specs import Role

N_PROBED_TOKENS = 32
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-4, 1e-1  # relative to the norm of the logits, in float32 and in shorter dtypes


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Report of a finished merge."""

    folder: Path
    n_tensors: int
    n_changed: int | None
    """Number of tensors that differ from the base, or from the first averaged model. None if the base is not on this
    machine.
    """
    logit_gap: float
    """‖result's logits - sources' logits‖ / ‖sources' logits‖."""


def load_model(
    folder: Path, dtype: torch.dtype, role: Role = "policy", config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """Load a model in a role, in evaluation mode. `config` replaces its configuration."""
    gc.collect()  # an earlier model may be part of a reference cycle
    auto_class = model_class(role, config or AutoConfig.from_pretrained(folder))
    model: PreTrainedModel = auto_class.from_pretrained(folder, dtype=dtype, config=config)
    return model.eval()


@torch.no_grad()
def probe(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits of fixed tokens, in float32."""
    n_tokens = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    token_ids = torch.randint(n_tokens, (2, N_PROBED_TOKENS), generator=torch.Generator().manual_seed(0))
    return model(input_ids=token_ids, use_cache=False).logits.float()


def compare(merged: Path, probe_sources: Callable[[torch.dtype], torch.Tensor], role: Role = "policy") -> float:
    """Return the relative difference between a merged model's logits and its sources' (`MergeReport.logit_gap`).

    One model is in memory at a time, or two for an average of mixtures of experts. Raise CheckpointError if rounding
    cannot explain the difference, or if the merged model lacks a tensor.
    """
    dtype = read_dtype(merged)
    reference = probe_sources(dtype)
    gc.collect()
    model, report = model_class(role, AutoConfig.from_pretrained(merged)).from_pretrained(
        merged, dtype=dtype, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"the merged model lacks {len(missing)} tensors, among them {missing[0]}, so nothing was written; report "
            "this with the names of the models"
        )
    gap = ((probe(model) - reference).norm() / reference.norm().clamp(min=1e-6)).item()
    limit = TOLERANCE if dtype == torch.float32 else LOW_PRECISION_TOLERANCE
    if not gap <= limit:
        raise CheckpointError(
            f"nothing was written, because the merged model's logits differ from its sources' by {gap:.2g} of their "
            f"norm, more than {limit:g}; report this with the names of the models"
        )
    return gap
