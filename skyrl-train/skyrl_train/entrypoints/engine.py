"""The inference engine of a run."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_gym.envs.entry_point import load_attribute
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineSetup, InferenceEngine
from skyrl_train.inference_engines.client import EngineClient
from skyrl_train.launch.launcher import Launcher
from skyrl_train.launch.weight_syncs import EngineSync
from skyrl_train.models.deferred import deferring
from skyrl_train.models.loading import POLICY_PATH, default_device
from skyrl_train.models.lora import add_adapter
from skyrl_train.models.quantization import quantize_base
from skyrl_train.plan import RunPlan
from skyrl_train.plan.hardware import free_host_bytes
from skyrl_train.types.specs import lora_spec
from skyrl_train.weight_sync import SyncOptions
from skyrl_train.weight_sync.base import Transport
from skyrl_train.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

RECONNECT_INTERVAL_S = 2.0

FLOAT32_TOLERANCE, BF16_TOLERANCE = 1e-3, 0.1  # nats


def new_engine(
    cfg: SkyRLConfig,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    reserved_bytes: int,
    executor: ThreadPoolExecutor | None,
) -> InferenceEngine:
    """Create the engine of a run, or connect to running servers.

    An engine that this run starts may use the fraction `gpu_memory_utilization` of the GPU's free memory (of this
    machine's without a GPU), less `reserved_bytes` that the trainer will allocate. Engines on one CPU machine share it.
    Only the embedded engine needs `model`. An engine in this process computes in the single thread of `executor`.
    Without one, the engine has this process to itself, or starts its own.
    """
    generator = cfg.generator
    if not generator.run_engines_locally:
        return _connect_servers(EngineSetup(cfg, tokenizer))
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
    else:
        free, total = free_host_bytes(), psutil.virtual_memory().total
    n_sharing = 1 if torch.cuda.is_available() else generator.num_inference_engines  # each GPU has one engine
    usable = int(max(free - reserved_bytes, 0) * generator.gpu_memory_utilization) // n_sharing
    start: Callable[[EngineSetup], InferenceEngine] = load_attribute(generator.engine.start)
    return start(EngineSetup(cfg, tokenizer, model, usable, total, executor))


def load_engine_model(cfg: SkyRLConfig, load: Callable[[str, str], PreTrainedModel]) -> PreTrainedModel:
    """Load a copy of the policy for an engine that cannot share it. `load` takes a path and its configuration key."""
    section = cfg.trainer.policy.model
    lora = lora_spec(section, "trainer.policy.model.lora", cfg.trainer.seed)
    is_quantized = lora is not None and lora.config.is_quantized
    with deferring(is_quantized) as weights:
        model = load(section.path, POLICY_PATH)
    if lora is not None:
        if is_quantized:
            quantize_base(model, lora.key, default_device(), weights)
        add_adapter(model, lora)
    return model


def _connect_servers(setup: EngineSetup) -> EngineClient:
    """Connect to running servers. A lost server has `engine_start_timeout_seconds` to return."""
    generator = setup.cfg.generator
    urls, timeout_s = generator.remote_inference_engine_urls, generator.engine_start_timeout_seconds
    assert generator.engine.connect is not None
    connect: Callable[[str, EngineSetup], InferenceEngine] = load_attribute(generator.engine.connect)

    async def reconnect(index: int) -> InferenceEngine:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await asyncio.to_thread(connect, urls[index], setup)
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{error} (it was lost, and did not return in {timeout_s:g} s; raise "
                        "generator.engine_start_timeout_seconds if it needs more time)"
                    ) from error
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    return EngineClient([connect(url, setup) for url in urls], reconnect)


def sync_options(cfg: GeneratorConfig) -> SyncOptions:
    """Return the settings of weight syncs to other processes."""
    transport: Transport = "shared_memory" if cfg.weight_sync_backend == "shm" else cfg.weight_sync_backend
    if cfg.engine.reads_files and transport in ("nccl", "cuda_ipc"):
        logger.info(
            "generator.weight_sync_backend=%s has no effect with generator.backend=%s: it reads weights from files",
            *(transport, cfg.backend),
        )
        transport = "auto"
    return SyncOptions(
        transport,
        prefers_gpus=cfg.run_engines_locally and not cfg.engine.reads_files and not cfg.weight_sync_delta,
        ipc_bytes=int(cfg.weight_transfer_threshold_cuda_ipc_GB * 1e9),
        timeout_s=cfg.weight_sync_timeout_seconds,
        has_checksum=cfg.weight_sync_check != "off",
        sends_changes=cfg.weight_sync_delta,
    )


def sync_tolerance(
    cfg: SkyRLConfig, device: torch.device, engine_dtype: torch.dtype | None, *, is_copied: bool
) -> float | None:
    """Return the largest allowed difference between the log-probs of engine and policy; None if they are not compared.

    `is_copied` is False if the engine generates with the policy's own tensors. `device` holds the policy.
    `engine_dtype` is the dtype of the engine's weights, if known.
    """
    check = cfg.generator.weight_sync_check
    if check in ("off", "checksum") or (check == "auto" and not is_copied):
        return None
    if cfg.generator.weight_sync_tolerance is not None:
        return cfg.generator.weight_sync_tolerance
    computes_in_bf16 = cfg.trainer.bf16 and device.type == "cuda"
    model = cfg.trainer.policy.model
    dtypes = {getattr(torch, model.dtype), getattr(torch, model.train_dtype), engine_dtype or torch.float32}
    return BF16_TOLERANCE if computes_in_bf16 or dtypes != {torch.float32} else FLOAT32_TOLERANCE


def engine_sync(
    plan: RunPlan, launcher: Launcher, policy: WorkerGroup, engine: InferenceEngine, n_tokens: int
) -> EngineSync:
    """Return the policy's weight sync to the engine, with the configured check. `n_tokens` is the vocabulary size."""
    cfg, dtype, settings = plan.cfg, engine.info.weight_dtype, plan.cfg.trainer.fully_async
    weight_sync = launcher.weight_sync(policy, {"the engine": engine}, plan.sync_kind, dtype)
    is_copied = launcher.policy is None or not plan.needs_engine_model
    sync = EngineSync(
        weight_sync,
        engine,
        policy,
        n_token_ids=n_tokens,
        pauses=settings.enabled,
        timeout_s=cfg.generator.weight_sync_timeout_seconds,
        tolerance=sync_tolerance(cfg, launcher.device, dtype, is_copied=is_copied),
        # after the first sync, sampling for the check would wait for rollouts in progress
        checks_once=settings.continues_rollouts and cfg.generator.weight_sync_check == "auto",
    )
    if isinstance(engine, EngineClient):
        if settings.enabled and settings.in_flight_weight_updates:
            engine.follow(weight_sync, sync.is_current)
        else:  # the next sync waits for the rollouts, so a rollout must not wait for that sync
            engine.follow(weight_sync)
    return sync
