"""Low-rank adapters of models that ranks divide; `test_strategy.py` compares their training with one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from train_kit.strategies import Strategies, layouts
from train_kit.weight_sync import MirroredSink

from skyrl_train.algorithms.objectives import ValueObjective
from skyrl_train.types.specs import ModelSpec
from skyrl_train.weight_sync import SyncOptions, WeightSync


@layouts("fsdp2", "sequence", nightly=["pipeline"])
async def test_an_adapter_is_sent_and_switched_off(strategies: Strategies, layout: str) -> None:
    lora, batch = strategies.adapter("qwen3"), strategies.batch("qwen3")
    group = await strategies.load("qwen3", layout, lora)
    base, adapted = [await strategies.load("qwen3", None, each) for each in (None, lora)]
    reference = (await base.score(batch))["logprobs"]
    mirrored, options = MirroredSink(), SyncOptions("gloo", chunk_bytes=5_000, timeout_s=60)
    factors = WeightSync(group, {"mirrored": mirrored}, options, kind="factors")
    for version in range(2):
        without = (await group.score(batch, adapter=False))["logprobs"]
        torch.testing.assert_close(without, reference, rtol=0, atol=2e-5)
        await group.update(batch)
        await factors(version)
    assert mirrored.kinds == ["base_and_factors", "factors"]
    expected = (await group.score(batch))["logprobs"]
    await WeightSync(group, {"base": base}, options)(1)
    await WeightSync(group, {"adapted": adapted}, options, kind="adapter")(1)
    for other in (base, adapted):
        torch.testing.assert_close((await other.score(batch))["logprobs"], expected, rtol=0, atol=2e-5)
    assert (expected - reference).abs().max() > 1e-2
    merged = await strategies.weights(base)
    assert all(torch.equal(mirrored.tensors[name], merged[name]) for name in mirrored.tensors)
    await adapted.update(batch)
    await WeightSync(adapted, {"group": group}, options, kind="adapter")(2)
    received = (await group.score(batch))["logprobs"]
    torch.testing.assert_close(received, (await adapted.score(batch))["logprobs"], rtol=0, atol=2e-5)
    assert not torch.equal(received, expected)


@layouts("fsdp2", nightly=["tensor", "sequence", "pipeline"])
async def test_a_float32_adapter_on_a_bfloat16_model(strategies: Strategies, layout: str) -> None:
    metrics = []
    for each in (None, layout):
        group = await strategies.load("qwen3", each, strategies.adapter("qwen3"), dtype=torch.bfloat16)
        metrics.append((await group.update(strategies.batch("qwen3"))).numbers())
        assert {tensor.dtype for tensor in await group.tensor_specs("adapter")} == {torch.float32}
        assert {tensor.dtype for tensor in await group.tensor_specs()} == {torch.bfloat16}
    for name in ("grad_norm", "adapter_norm"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=5e-2)


@layouts("fsdp2", nightly=["tokens"])
async def test_ranks_with_a_base_in_4_bits_compute_and_send_what_one_process_does(
    strategies: Strategies, layout: str
) -> None:
    batch, options, found = strategies.batch("qwen3"), SyncOptions("gloo", timeout_s=60), []

    def quantized(spec: ModelSpec) -> ModelSpec:
        return replace(
            spec, lora=replace(spec.lora, config=spec.lora.config.model_copy(update={"quantize_base": "nf4"}))
        )

    original = await strategies.load("qwen3", None, strategies.adapter("qwen3"))
    for each in (None, layout):
        group = await strategies.load("qwen3", each, strategies.adapter("qwen3"), change=quantized)
        assert group.facts.n_parameters == original.facts.n_parameters
        base = (await group.score(batch, adapter=False))["logprobs"]
        await group.update(batch)
        folder = await strategies.save(group)
        await group.update(batch)
        mirrored = MirroredSink()
        sync = WeightSync(group, {"mirrored": mirrored}, options, kind="factors")
        await sync(0)
        scores = (await group.score(batch))["logprobs"]
        found.append((base, scores, mirrored.tensors))
        await group.load_state(folder)
        await group.update(batch)
        torch.testing.assert_close((await group.score(batch))["logprobs"], scores, rtol=0, atol=1e-6)
    (base, scores, tensors), (base_of_ranks, scores_of_ranks, tensors_of_ranks) = found
    torch.testing.assert_close(base_of_ranks, base, rtol=0, atol=2e-5)
    torch.testing.assert_close(scores_of_ranks, scores, rtol=0, atol=2e-5)
    assert ((await original.score(batch, adapter=False))["logprobs"] - base).abs().max() > 1e-2
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensors_of_ranks[name], tensor, rtol=0, atol=2e-5)
    engine = await strategies.load("qwen3")  # an engine that holds whole matrices
    await WeightSync(group, {"engine": engine}, options)(1)
    torch.testing.assert_close((await engine.score(batch))["logprobs"], scores, rtol=0, atol=2e-5)


async def test_a_continued_adapter_of_a_critic_keeps_its_head(strategies: Strategies) -> None:
    async def load(layout: str | None, **lora: Any) -> Any:
        return await strategies.load("qwen3", layout, lora, role="critic", objective=ValueObjective(1e9))

    batch = replace(strategies.batch("qwen3"))
    batch.values, batch.returns = 0.0 * batch.loss_mask, 1.0 * batch.loss_mask
    trained = await load(None, rank=4)
    await trained.update(batch)
    expected = (await trained.score(batch))["values"]
    assert expected.abs().max() > 1e-3, "the head of a new critic is 0"
    folder = await strategies.export(trained)
    for layout in (None, "fsdp2"):
        continued = await load(layout, lora_path=str(folder))
        torch.testing.assert_close((await continued.score(batch))["values"], expected, rtol=0, atol=1e-5)


# -- dropout


def with_dropout(spec: ModelSpec, dropout: float = 0.5) -> ModelSpec:
    return replace(spec, lora=replace(spec.lora, config=spec.lora.config.model_copy(update={"dropout": dropout})))


async def test_ranks_of_fsdp2_drop_different_inputs_in_updates_only(strategies: Strategies) -> None:
    lora, batch = strategies.adapter("qwen3"), strategies.batch("qwen3")
    norms, scores = [], []
    for index, dropout in enumerate((0.0, 0.5, 0.5)):
        group = await strategies.load("qwen3", "fsdp2", lora, change=lambda spec, p=dropout: with_dropout(spec, p))
        probes = [await group.probe(batch) for _ in range(2 if index == 2 else 1)]  # which take no random numbers
        assert probes[0] == probes[-1]
        norms.append([(await group.update(batch)).numbers()["grad_norm"] for _ in range(2)])
        scores.append([(await group.score(batch))["logprobs"] for _ in range(2)])
        assert torch.equal(*scores[-1])
    assert norms[1] == norms[2]
    assert torch.equal(scores[1][0], scores[2][0])
    assert norms[1][0] > 1.02 * norms[0][0], "half of the inputs, doubled, have the same mean and more variance"
    folder = await strategies.save(group)
    states = [torch.load(folder / f"rng_{rank}.pt", weights_only=True)["torch"] for rank in range(2)]
    assert not torch.equal(*states)


@layouts("tensor", nightly=["sequence"])
async def test_ranks_of_megatron_that_share_a_matrix_drop_the_same_inputs(strategies: Strategies, layout: str) -> None:
    lora, batch = strategies.adapter("qwen3"), strategies.batch("qwen3")
    other = await strategies.load("qwen3", "fsdp2", lora, change=with_dropout)  # whose ranks differ
    await other.update(batch)
    folder = await strategies.save(other)
    norms = []
    for dropout, recomputes in ((0.0, False), (0.5, False), (0.5, True)):
        group = await strategies.load(
            "qwen3",
            layout,
            lora,
            change=lambda spec, p=dropout: with_dropout(spec, p),
            gradient_checkpointing=recomputes,
        )
        await group.load_state(folder)
        norms.append([(await group.update(batch)).numbers()["grad_norm"] for _ in range(2)])
    assert norms[1] == pytest.approx(norms[2], rel=1e-4), "layers that are recomputed drop other inputs"
    assert min(norms[1]) > max(norms[0]), "half of the inputs, doubled, have the same mean and more variance"
    scores = await group.score(batch)
    assert torch.equal((await group.score(batch))["logprobs"], scores["logprobs"]), "scores are random"
    single = await strategies.load("qwen3", None, lora)
    await single.load_state(await strategies.save(group))  # with the factors of one of the ranks
    torch.testing.assert_close((await single.score(batch))["logprobs"], scores["logprobs"], rtol=0, atol=2e-5)
