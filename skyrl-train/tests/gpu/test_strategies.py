"""Every strategy on one GPU, with NCCL where it has a process group: updates and checkpoints equal those of a CPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from train_kit.batches import off_policy_batch
from train_kit.ranks import load_group, save, single_rank, spec
from train_kit.workers import config, policy_objective
from transformers import PreTrainedModel

from skyrl_train.config.policy import FSDPConfig, MegatronConfig
from skyrl_train.distributed import FSDP2Strategy, SingleStrategy
from skyrl_train.launch.process import LocalRank, RankHost
from skyrl_train.launch.timeouts import COLLECTIVE_TIMEOUT
from skyrl_train.models.loading import load_model
from skyrl_train.types.specs import World
from skyrl_train.weight_sync.sync import free_port

GPU = World(device="cuda:0")


@pytest.fixture(scope="module")
def nccl() -> Iterator[None]:
    """A process group with this process alone."""
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_strategy(name: str) -> Any:
    if name == "single":
        return SingleStrategy(GPU)
    if name == "megatron":
        from skyrl_train.distributed.megatron import MegatronStrategy

        return MegatronStrategy(GPU, MegatronConfig(), COLLECTIVE_TIMEOUT)
    return FSDP2Strategy(GPU, COLLECTIVE_TIMEOUT)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("lora_rank", [0, 4], ids=["all_weights", "adapter"])
@pytest.mark.parametrize(
    "name", ["single", "fsdp2", "fsdp2_cpu_offload", pytest.param("megatron", marks=pytest.mark.megatron)]
)
async def test_updates_and_checkpoints_equal_those_of_a_cpu(
    tiny_model: PreTrainedModel, tmp_path: Path, name: str, lora_rank: int, bf16: bool
) -> None:
    path, n_tokens = tmp_path / "model", tiny_model.config.vocab_size
    tiny_model.save_pretrained(path)
    model = {"lora": {"rank": lora_rank, "alpha": 8, "init_method": "gaussian"}} if lora_rank else {}
    cfg = config(bf16=bf16, policy={"model": model, "optimizer_config": {"lr": 1e-3}}).trainer
    objective = policy_objective(cfg)
    on_cpu = replace(spec("policy", path, cfg, max_grad_norm=1.0), bf16=False)
    on_gpu = replace(
        on_cpu,
        bf16=bf16,
        load=partial(load_model, str(path), dtype=torch.float32, device=torch.device("cuda")),
        megatron=MegatronConfig() if name == "megatron" else None,
        fsdp=FSDPConfig(cpu_offload=name == "fsdp2_cpu_offload"),
    )
    expected = await load_group([single_rank()], on_cpu, objective)
    host = RankHost(World(device="cuda"))
    host._strategies[on_gpu.megatron] = make_strategy(name)
    group = await load_group([LocalRank(ThreadPoolExecutor(1), host)], on_gpu, objective)
    atol, rel = (0.1, 0.1) if bf16 else (2e-4, 2e-3)
    batches = [off_policy_batch(tiny_model, seed, n_tokens=n_tokens) for seed in range(3)]
    for batch in batches[:2]:
        scores = await group.score(batch)
        for key, values in (await expected.score(batch)).items():
            torch.testing.assert_close(scores[key].cpu(), values, rtol=0, atol=atol, msg=key)
        metrics, reference = (await group.update(batch)).numbers(), (await expected.update(batch)).numbers()
        assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"], rel=rel)
    assert await group.is_finite()
    resumed = await load_group([single_rank()], on_cpu, objective)
    await resumed.load_state(await save(group, tmp_path / "policy"))
    scores, again = await group.score(batches[2]), await resumed.score(batches[2])
    torch.testing.assert_close(scores["logprobs"].cpu(), again["logprobs"], rtol=0, atol=atol)
