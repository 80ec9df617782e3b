"""The part of an engine that runs inside vLLM's workers: the receiver of weights, and our sampler.

vLLM mixes the class named by `worker_extension_cls` (or `vllm serve … --worker-extension-cls …`) into its workers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import psutil
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_pp_group, get_world_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from skyrl_train.errors import EngineError, SyncError
from skyrl_train.inference_engines.sequence import all_eos_ids
from skyrl_train.inference_engines.stepped import EngineFacts
from skyrl_train.inference_engines.vllm.sampler import PositionSampler
from skyrl_train.inference_engines.vllm.wire import NATIVE_LOGPROBS, decode_plan
from skyrl_train.media.spans import TEXT_FOR_PLACEHOLDER
from skyrl_train.weight_sync import MirroredReceiver, WeightMirror

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

ROUTER_BIAS = ".e_score_correction_bias"  # of DeepSeek V3, GLM-4.5 and others


class WorkerExtension:
    """Methods added to each vLLM worker."""

    model_runner: Any
    device: torch.device
    rank: int
    vllm_config: VllmConfig

    def skyrl_prepare(self, sampler: str, eos_token_id: int | None, owner_pid: int | None = None) -> dict[str, Any]:
        """Install our sampler unless `sampler` is `native`. Return {"facts": …, "sampler": …} or {"error": …}.

        `auto` chooses the sampler that the server was started for. `eos_token_id` is the tokenizer's. If the process
        `owner_pid` ends, this worker also ends, and vLLM with it.
        """
        is_native = self.vllm_config.model_config.logprobs_mode == NATIVE_LOGPROBS
        if sampler == "auto":
            sampler = "native" if is_native else "seeded"
        if sampler == "native" and not is_native:
            return {"error": f"vLLM's own sampler must report log-probs with --logprobs-mode {NATIVE_LOGPROBS}"}
        if self.vllm_config.speculative_config is not None:
            return {"error": "speculative decoding gives no reliable log-probs; remove --speculative-config"}
        if sampler == "seeded" and self.vllm_config.scheduler_config.async_scheduling:
            return {"error": "asynchronous scheduling hides sampled tokens from the sampler; use --no-async-scheduling"}
        if sampler == "seeded" and not isinstance(self.model_runner, GPUModelRunner):  # the CPU runner is a subclass
            return {"error": "vLLM's second model runner calls samplers differently; set VLLM_USE_V2_MODEL_RUNNER=0"}
        native = self._native_sampler
        facts, runner = read_facts(self.vllm_config, eos_token_id), self.model_runner
        is_later_stage = isinstance(runner, GPUModelRunner) and not get_pp_group().is_first_rank
        if is_later_stage and runner.intermediate_tensors is None:
            # Allocate the hidden states of the previous pipeline stage. vLLM does this in a trial pass, but skips the
            # pass on a CPU if the cache size is set.
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.vllm_config.model_config.dtype, device=runner.device
            )
        if owner_pid is not None:
            threading.Thread(target=_end_with, args=(owner_pid,), daemon=True).start()
        self._read_placeholders_as_text()
        runner.sampler = PositionSampler(runner, frozenset(facts.eos_ids)) if sampler == "seeded" else native
        return {"facts": facts._asdict(), "sampler": sampler}

    def _read_placeholders_as_text(self) -> None:
        """Make a vision-language model read placeholders that no image fills, such as sampled ones, as text."""
        model, config = self.model_runner.get_model(), self.vllm_config.model_config
        placeholder_id = getattr(config.hf_config, "image_token_id", None)
        is_patched = "embed_input_ids" in vars(model)  # for an earlier client
        if placeholder_id is None or not config.is_multimodal_model or is_patched:
            return
        embed = model.embed_input_ids

        def embed_input_ids(
            input_ids: torch.Tensor, multimodal_embeddings: Any = None, *, is_multimodal: torch.Tensor | None = None
        ) -> torch.Tensor:
            is_text = input_ids == placeholder_id
            if is_multimodal is not None:
                is_text &= ~is_multimodal.to(input_ids.device)
            input_ids = input_ids.masked_fill(is_text, TEXT_FOR_PLACEHOLDER)
            return embed(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)

        model.embed_input_ids = embed_input_ids

    @cached_property
    def _native_sampler(self) -> Any:
        """vLLM's sampler. An earlier client may have replaced it, so it is read once, before that."""
        return self.model_runner.sampler

    @cached_property
    def _weight_mirror(self) -> WeightMirror:
        return WeightMirror(get_world_group(), self.device)

    def skyrl_receive_weights(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Receive weights. Return {"receipt": …}, {"sync_error": …} or {"error": …}.

        The rank in the encoded `plan` belongs to the first worker. Later workers add their rank.
        """
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        try:
            receiver = MirroredReceiver(decode_plan(plan, rank), self._weight_mirror)
            load_weights(self.model_runner.get_model(), self.vllm_config, receiver)
            return {"receipt": list(receiver.receipt)}
        except SyncError as error:
            return {"sync_error": str(error)}
        except Exception as error:  # raised by the driver, possibly on another machine
            logger.exception("vLLM could not receive weights")
            return {"error": str(error)}


def _end_with(pid: int) -> None:
    """End this process once the process `pid` has ended, even if it was killed."""
    try:
        owner = psutil.Process(pid)
        while owner.is_running() and owner.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1)
    except psutil.NoSuchProcess:
        pass
    os._exit(1)


@torch.no_grad()
def load_weights(model: Any, config: VllmConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy tensors with checkpoint names into a worker's part of the model.

    vLLM fuses projections and, on a CPU, keeps packed copies of them. Reloading layer by layer rebuilds both. Raise
    EngineError if the model has parameters that were not sent.
    """
    names = {name for name, _ in model.named_parameters()}
    # Reloading drops all values. Biases that balance a router's experts are constants in training, so no sync has them.
    constants = [(name, p.detach().clone()) for name, p in model.named_parameters() if name.endswith(ROUTER_BIAS)]
    with set_current_vllm_config(config), _packing_experts(model):
        initialize_layerwise_reload(model)
        try:
            loaded: set[str] = model.load_weights(chain(constants, weights))
        finally:
            finalize_layerwise_reload(model, config.model_config)
        for module in model.modules():  # on a CPU, a head tied to the embedding also has a packed copy
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                module.quant_method.process_weights_after_loading(module)
    if missing := names - loaded:
        raise EngineError(
            f"the policy has no tensor for {min(missing)} and {len(missing) - 1} other parameters of vLLM's model; "
            "they would keep old values, so use generator.backend=hf for this architecture"
        )


@contextmanager
def _packing_experts(model: Any) -> Iterator[None]:
    """Make vLLM pack the weights of experts that are loaded inside the context.

    On a CPU, vLLM packs only layers without a kernel, so hide the kernels meanwhile.
    """
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    methods = [layer.quant_method for layer in experts if current_platform.is_cpu()]
    kernels = [method.moe_kernel for method in methods]
    for method in methods:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in zip(methods, kernels, strict=True):
            method.moe_kernel = method.moe_kernel or kernel  # a failed sync may not have reached the layer


def read_facts(config: VllmConfig, eos_token_id: int | None) -> EngineFacts:
    """Read the facts from vLLM's configuration. `eos_token_id` is the tokenizer's."""
    model = config.model_config
    ids = model.try_get_generation_config().get("eos_token_id")
    return EngineFacts(
        int(model.max_model_len),
        int(model.get_vocab_size()),
        sorted(all_eos_ids(ids, eos_token_id)),
        config.parallel_config.world_size_across_dp,
        bool(model.enable_sleep_mode),
        str(model.dtype).removeprefix("torch."),
    )
