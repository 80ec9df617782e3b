"""Engines of vLLM that span several devices: tensor, pipeline and data parallelism."""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from train_kit.engines import EngineKit, Listener, assert_agrees, distance
from train_kit.processes import find_descendants
from train_kit.weight_sync import SYNC_TIMEOUT_S, AdapterSource, add_random_adapter, change_adapter
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.entrypoints import main_base
from skyrl_train.errors import EngineLostError
from skyrl_train.inference_engines.vllm.engine import PARALLEL_SIZES, AsyncVLLMEngine
from skyrl_train.weight_sync import SyncOptions, WeightSync

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", PARALLEL_SIZES)
async def test_two_workers_sample_with_the_policys_weights_after_each_update(
    name: str,
    tiny_model_path: Path,
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    vllm_options: dict[str, Any],
) -> None:
    def start() -> AsyncVLLMEngine:
        return AsyncVLLMEngine({"model": str(tiny_model_path), **vllm_options, name: 2}, tiny_tokenizer)

    kit = EngineKit(start, copy.deepcopy(tiny_model), tiny_tokenizer, 1e-4, cache_block_size=32, transport="auto")
    engine = kit.new()
    try:
        assert engine.n_weight_copies == 2
        for version in range(1, 6):
            kit.add_noise(seed=version)
            await kit.sync(engine, version)
            requests = [kit.request(40, 12, seed=10 * version + i, temperature=0.7, ignore_eos=True) for i in range(6)]
            for request, result in zip(requests, await engine.generate(requests), strict=True):
                assert result.weight_spans == ((version, 12),)
                assert_agrees(kit, request, result)
        listener = Listener(engine, kit.request(20, 300, ignore_eos=True))
        await listener.wait_for(20)
        await engine.pause()
        kit.add_noise(seed=9)
        await kit.sync(engine, 9)
        await engine.resume()
        result = await listener.result()
        assert [span.version for span in result.weight_spans] == [5, 9]
        add_random_adapter(kit.model, rank=2)
        options = SyncOptions("auto", timeout_s=SYNC_TIMEOUT_S)
        sync = WeightSync(AdapterSource(kit.model), {"the engine": engine}, options, kind="factors")
        for version in (10, 11):
            change_adapter(kit.model, version)
            assert (await sync(version)).numbers()["sync/verified_copies"] == 2
            assert await distance(engine, kit) < 1e-4
    finally:
        await engine.close()


async def test_a_killed_worker_ends_the_sync_and_the_engine(
    tiny_model_path: Path,
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    vllm_options: dict[str, Any],
) -> None:
    options = {"model": str(tiny_model_path), **vllm_options, "tensor_parallel_size": 2}
    engine = AsyncVLLMEngine(options, tiny_tokenizer)
    kit = EngineKit(lambda: engine, copy.deepcopy(tiny_model), tiny_tokenizer, 1e-4, 32, transport="auto")
    try:
        await engine.generate([kit.request(8, 2)])
        next(find_descendants("Worker_TP1")).kill()
        async with asyncio.timeout(60):
            with pytest.raises(EngineLostError, match="a vLLM worker ended during skyrl_receive_weights"):
                await kit.sync(engine, 1)
        with pytest.raises(EngineLostError):
            await engine.check_health()
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("placement", "reserved"),
    [
        (["trainer.placement.policy_num_gpus_per_node=2"], "1 × 2 CPUs for policy, engine"),
        (["trainer.placement.colocate_all=false"], "1 × 2 CPUs for engine"),
    ],
)
def test_a_run_trains_with_an_engine_of_two_workers(
    placement: list[str],
    reserved: str,
    catch_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    settings = [
        "generator.backend=vllm",
        "generator.inference_engine_tensor_parallel_size=2",
        "trainer.policy.optimizer_config.lr=0.01",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.eval_interval=-1",
    ]
    try:
        main_base.main([*catch_run, *settings, *placement])
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert f"Reserved {reserved}" in caplog.text
    rows = [json.loads(line) for line in (tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["sync/verified_copies"] == 2
        assert row["sync/logprob_gap"] < 1e-3
    for row in rows[1:]:
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-3
        assert row["policy/grad_norm"] > 0
