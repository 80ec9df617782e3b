"""Low-rank adapters on models that Megatron-Core divides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_kit.megatron import (
    MERGED,
    PIPELINE,
    TENSOR,
    batch_for,
    compare,
    exported_tensors,
    layouts,
    layouts_and_models,
    load_model_group,
    model_spec,
)
from train_kit.ranks import save, single_rank
from train_kit.weight_sync import MirroredSink

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.errors import ConfigError
from skyrl_train.launch.process import ProcessRank
from skyrl_train.models.lora import WEIGHTS
from skyrl_train.types.specs import ModelSpec
from skyrl_train.weight_sync import SyncOptions, WeightSync

pytest.importorskip("megatron.core", reason="needs megatron-core, the extra mcore of skyrl-train")
pytestmark = pytest.mark.megatron


@layouts_and_models([("tensor", "llama"), ("sequence", "qwen3"), ("pipeline", "qwen2")])
async def test_steps_equal_those_of_one_process(
    two_ranks: list[ProcessRank],
    paths: dict[str, Path],
    adapters: dict[str, Path],
    tmp_path: Path,
    model: str,
    megatron: MegatronConfig,
) -> None:
    await compare(two_ranks, paths[model], megatron, tmp_path, {"lora_path": str(adapters[model])} | MERGED)
    single, divided = (load_file(tmp_path / name / "lora_adapter" / WEIGHTS) for name in ("single", "divided"))
    assert single.keys() == divided.keys()
    for name, tensor in single.items():
        torch.testing.assert_close(divided[name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.nightly
@layouts(["tensor", "sequence", "pipeline"])
@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "v_proj"], ["k_proj", "up_proj"], ["o_proj"]], ids=str)
async def test_a_new_adapter_of_some_matrices(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, megatron: MegatronConfig, modules: Any
) -> None:
    lora = {"rank": 3, "alpha": 6, "target_modules": modules, "init_method": "gaussian"} | MERGED
    await compare(two_ranks, paths["qwen2"], megatron, tmp_path, lora)


@pytest.mark.nightly
@layouts(["sequence", "pipeline"])
async def test_gradient_checkpointing(
    two_ranks: list[ProcessRank], paths: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, megatron: Any
) -> None:
    lora = {"lora_path": str(adapters["qwen3"])} | MERGED
    await compare(two_ranks, paths["qwen3"], megatron, tmp_path, lora, gradient_checkpointing=True)


@pytest.mark.nightly
@layouts(["tensor", "sequence", "pipeline"])
async def test_a_float32_adapter_on_a_bfloat16_model(
    two_ranks: list[ProcessRank], paths: dict[str, Path], adapters: dict[str, Path], megatron: MegatronConfig
) -> None:
    path, lora, metrics = paths["qwen3"], {"lora_path": str(adapters["qwen3"])}, []
    for ranks, layout in (([single_rank()], None), (two_ranks, megatron)):
        group = await load_model_group(ranks, model_spec(path, layout, lora, dtype=torch.bfloat16))
        metrics.append((await group.update(batch_for(path, 1))).numbers())
        assert {tensor.dtype for tensor in await group.tensor_specs("adapter")} == {torch.float32}
        assert {tensor.dtype for tensor in await group.tensor_specs()} == {torch.bfloat16}
    for name in ("grad_norm", "adapter_norm"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=2e-2)


@layouts(["sequence"], nightly=["pipeline"])
async def test_an_adapter_is_sent_and_switched_off(
    two_ranks: list[ProcessRank], paths: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, megatron: Any
) -> None:
    path, lora = paths["qwen3"], {"lora_path": str(adapters["qwen3"])}
    batch = batch_for(path, 1)
    group = await load_model_group(two_ranks, model_spec(path, megatron, lora))
    base, adapted = [await load_model_group([single_rank()], model_spec(path, None, x)) for x in (None, lora)]
    reference = (await base.score(batch))["logprobs"]
    await group.update(batch)  # the learning rate starts at 0
    torch.testing.assert_close((await group.score(batch, adapter=False))["logprobs"], reference, rtol=0, atol=2e-5)
    await group.update(batch)
    expected = (await group.score(batch))["logprobs"]
    mirrored, options = MirroredSink(), SyncOptions("broadcast", chunk_bytes=5_000, timeout_s=60)
    await WeightSync(group, {"base": base}, options)(1)
    await WeightSync(group, {"adapted": adapted}, options, kind="adapter")(1)
    await WeightSync(group, {"mirrored": mirrored}, options, kind="factors")(1)
    for other in (base, adapted):
        torch.testing.assert_close((await other.score(batch))["logprobs"], expected, rtol=0, atol=2e-5)
    assert (expected - reference).abs().max() > 1e-2
    merged = await exported_tensors(base, tmp_path)
    assert all(torch.equal(mirrored.tensors[name], merged[name]) for name in mirrored.tensors)
    for _ in range(2):
        await adapted.update(batch)
    await WeightSync(adapted, {"group": group}, options, kind="adapter")(2)
    received = (await group.score(batch))["logprobs"]
    torch.testing.assert_close(received, (await adapted.score(batch))["logprobs"], rtol=0, atol=2e-5)
    assert not torch.equal(received, expected)


@layouts(["tensor"], nightly=["sequence"])
async def test_ranks_that_share_a_matrix_drop_the_same_inputs(
    two_ranks: list[ProcessRank], paths: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, megatron: Any
) -> None:
    path, lora = paths["qwen3"], {"lora_path": str(adapters["qwen3"])}
    batch = batch_for(path, 1)

    def with_dropout(spec: ModelSpec, dropout: float) -> ModelSpec:
        assert spec.lora is not None
        settings = spec.lora.config.model_copy(update={"dropout": dropout})
        return replace(spec, lora=replace(spec.lora, config=settings))

    other = await load_model_group(two_ranks, with_dropout(model_spec(path, None, lora), 0.5))  # FSDP2: ranks differ
    await other.update(batch)
    folder = await save(other, tmp_path / "other")
    norms = []
    for dropout, recomputes in ((0.0, False), (0.5, False), (0.5, True)):
        exact = model_spec(path, megatron, lora, gradient_checkpointing=recomputes)
        group = await load_model_group(two_ranks, with_dropout(exact, dropout))
        await group.load_state(folder)
        norms.append([(await group.update(batch)).numbers()["grad_norm"] for _ in range(2)])
    assert norms[1] == pytest.approx(norms[2], rel=1e-4), "layers that are recomputed drop other inputs"
    assert norms[1] != pytest.approx(norms[0], rel=1e-4), "nothing was dropped"
    scores = await group.score(batch)
    assert torch.equal((await group.score(batch))["logprobs"], scores["logprobs"]), "scores are random"
    single = await load_model_group([single_rank()], model_spec(path, None, lora))
    await single.load_state(await save(group, tmp_path / "policy"))  # with the factors of one of the ranks
    torch.testing.assert_close((await single.score(batch))["logprobs"], scores["logprobs"], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("modules", "megatron", "message"),
    [
        (["q_proj", "lm_head"], TENSOR, r"has no adapter for the head lm_head; leave it out of .*target_modules, or"),
        (
            r"model\.layers\.1\..*_proj",
            PIPELINE,
            r"has no matrix of the layers 0 to 0, .*parallel_size=2 stages .*size=1",
        ),
        (["gate"], TENSOR, "has no module gate; its linear modules are"),
    ],
    ids=["head", "stage", "name"],
)
async def test_adapters_that_cannot_be_divided_are_refused(
    two_ranks: list[ProcessRank], paths: dict[str, Path], modules: Any, megatron: MegatronConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await load_model_group(two_ranks, model_spec(paths["llama"], megatron, {"rank": 2, "target_modules": modules}))
