"""New weights for a model that vLLM has loaded, in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


@torch.no_grad()
def load_weights(worker: WorkerBase, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy tensors, named as in a checkpoint, into the model of a worker, layer by layer.

    vLLM fuses projections and, on a CPU, keeps packed copies of them, which are made anew. What got no tensor keeps its
    values; its names are returned.
    """
    model = worker.model_runner.get_model()
    names = {name for name, _ in model.named_parameters()}
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        try:
            loaded: set[str] = model.load_weights(weights)
        finally:
            finalize_layerwise_reload(model, worker.model_config)
        for module in model.modules():  # on a CPU, a head that shares its weight with the embedding has packed it too
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                module.quant_method.process_weights_after_loading(module)
    return names - loaded
