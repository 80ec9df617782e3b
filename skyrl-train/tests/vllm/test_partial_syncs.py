"""Syncs that send vLLM only an adapter, or only the values that changed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.engines import EngineKit, distance
from train_kit.models import experts_of_vllm
from train_kit.processes import find_descendants
from train_kit.weight_sync import AdapterSource, TensorSource, add_random_adapter, change_adapter
from transformers import GPT2Config, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.vllm.engine import AsyncVLLMEngine, VLLMEngine
from skyrl_train.models.loading import load_model
from skyrl_train.models.lora import trained_parameters
from skyrl_train.weight_sync import SyncOptions, WeightSync
from skyrl_train.weight_sync.base import Transport
from skyrl_train.weight_sync.memory import NAME

pytestmark = pytest.mark.timeout(600)

NewEngine = Callable[..., VLLMEngine]
SaveModel = Callable[[PretrainedConfig], Path]
CPU = torch.device("cpu")


def adapter_megabytes(model: PreTrainedModel) -> float:
    return sum(p.nbytes for p in trained_parameters(model).values()) / 1e6


@pytest.mark.parametrize("transport", ["shared", "shared_memory", "gloo"])
@pytest.mark.parametrize(
    "settings", [{"rank": 3, "alpha": 8}, {"rank": 2, "alpha": 1, "target_modules": ["q_proj", "down_proj", "lm_head"]}]
)
async def test_an_adapter_follows_its_base(
    new_engine: NewEngine,
    policy: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    transport: Transport,
    settings: dict[str, Any],
) -> None:
    engine = new_engine()
    with torch.no_grad():
        policy.model.norm.weight.mul_(1.5)  # the base is not the model that the engine has loaded
    add_random_adapter(policy, **settings)
    kit = EngineKit(new_engine, policy, tiny_tokenizer, 1e-4, 32)
    options = SyncOptions(transport, timeout_s=20.0)
    sync = WeightSync(AdapterSource(policy), {"the engine": engine}, options, kind="factors")
    for version in range(4):
        change_adapter(policy, version)
        assert await distance(engine, kit) > 1e-2
        metrics = (await sync(version)).numbers()
        assert await distance(engine, kit) < 1e-4
        if version and transport != "shared":
            assert metrics["sync/megabytes"] < 1.2 * adapter_megabytes(policy) + 0.01  # padding of small tensors
            assert metrics["sync/verified_copies"] == 1


async def test_an_adapter_of_transposed_matrices(
    start: Callable[[PretrainedConfig], tuple[VLLMEngine, EngineKit]],
) -> None:
    config = GPT2Config(vocab_size=488, n_embd=64, n_layer=2, n_head=2, n_positions=256, initializer_range=0.2)
    engine, kit = start(config)
    add_random_adapter(kit.model, rank=2, alpha=4)
    options = SyncOptions("shared_memory", timeout_s=20.0)
    sync = WeightSync(AdapterSource(kit.model), {"the engine": engine}, options, kind="factors")
    for version in range(2):
        change_adapter(kit.model, version)
        await sync(version)
        assert await distance(engine, kit) < 1e-4


async def test_changes_of_bfloat16_weights(
    new_engine: NewEngine, policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    policy.bfloat16()
    engine = new_engine()
    kit = EngineKit(new_engine, copy.deepcopy(policy).float(), tiny_tokenizer, 1e-4, 32)
    options = SyncOptions("shared_memory", timeout_s=20.0, sends_changes=True)
    sync = WeightSync(TensorSource(policy.named_parameters), {"the engine": engine}, options)
    megabytes = []
    for version in range(4):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.view(-1)[version::40] += 0.5
        kit.model.load_state_dict(policy.state_dict())
        assert await distance(engine, kit) > 1e-2
        megabytes.append((await sync(version)).numbers()["sync/megabytes"])
        assert await distance(engine, kit) < 1e-4
    assert max(megabytes[1:]) < 0.2 * megabytes[0]


async def test_workers_of_experts_share_the_base_of_an_adapter(
    tiny_tokenizer: PreTrainedTokenizerBase, save_model: SaveModel, vllm_options: dict[str, Any]
) -> None:
    path = save_model(experts_of_vllm(0.3))
    model = load_model(str(path), dtype=torch.float32, device=CPU)
    add_random_adapter(model, rank=2, alpha=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    options = {"model": str(path), **vllm_options, "tensor_parallel_size": 2}
    engine = AsyncVLLMEngine(options, tiny_tokenizer)
    kit = EngineKit(lambda: engine, model, tiny_tokenizer, 1e-4, 32)
    try:
        sync = WeightSync(
            AdapterSource(model), {"the engine": engine}, SyncOptions("auto", timeout_s=60.0), kind="factors"
        )
        for version in range(3):
            change_adapter(model, version)
            assert await distance(engine, kit) > 1e-2
            metrics = (await sync(version)).numbers()
            assert metrics["sync/verified_copies"] == 2
            assert await distance(engine, kit) < 1e-4
        assert metrics["sync/megabytes"] < 1.2 * adapter_megabytes(model) + 0.01
        mapped = [
            {line.split()[4] for line in Path(f"/proc/{worker.pid}/maps").read_text().splitlines() if NAME in line}
            for worker in find_descendants("Worker_TP")
        ]
        assert len(mapped) == 2
        assert len(mapped[0] & mapped[1]) == 1, "the workers map one file of memory"
    finally:
        await engine.close()
