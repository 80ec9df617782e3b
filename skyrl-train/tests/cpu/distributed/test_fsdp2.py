"""FSDP over gloo ranks: results equal those of one process, and checkpoints are interchangeable between both."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import pytest_asyncio
import torch
from distributed.rank_groups import (
    EXACT,
    compare,
    first_gradient,
    load_group,
    save,
    single_rank,
    spec,
    train_with_moves,
)
from safetensors.torch import load_file
from small_models import ROUTER_BIAS, new_biased_router
from train_kit.weight_sync import MirroredSink
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from workers.worker_batches import (
    as_batch,
    config,
    largest_difference,
    off_policy_batch,
    policy_objective,
    random_trajectories,
)

from skyrl_train.algorithms.objectives import CrossEntropyObjective, RewardObjective, ValueObjective
from skyrl_train.checkpoint.merge import merge_checkpoint
from skyrl_train.config.algorithm import LossReduction
from skyrl_train.config.policy import FSDPConfig
from skyrl_train.dataset.supervised import build_rewarded_segment, build_supervised_batch
from skyrl_train.errors import WorkerError
from skyrl_train.launch.process import ProcessRank, start_ranks
from skyrl_train.models.loading import load_model, load_reward_model
from skyrl_train.types import DrawnPrompt
from skyrl_train.weight_sync import SyncOptions, WeightSync
from skyrl_train.workers.group import WorkerGroup


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
async def ranks(request: pytest.FixtureRequest) -> AsyncIterator[list[ProcessRank]]:
    """Two or four rank processes, shared by the tests of this module."""
    started = start_ranks(request.param)
    yield started
    for rank in started:
        await rank.close()


on_two_and_four = pytest.mark.parametrize("ranks", [2, 4], indirect=True)
"""Four ranks in CI as well, for properties that two do not have."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("max_rows", [1, 3, 16])
async def test_gradients_do_not_depend_on_ranks_or_micro_batches(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path, max_rows: int
) -> None:
    cfg = config(micro_train_batch_size_per_gpu=max_rows).trainer
    batch = off_policy_batch(tiny_model, 400, seed=21)
    await compare(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg), batch, tmp_path)


@pytest.mark.parametrize("reduction", get_args(LossReduction))
async def test_every_reduction_divides_by_the_count_of_the_whole_mini_batch(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path, reduction: str
) -> None:
    algorithm = {"loss_reduction": reduction, "max_seq_len": 40, "use_entropy_loss": True, "top_entropy_quantile": 0.5}
    cfg = config(algorithm=algorithm, micro_train_batch_size_per_gpu=3).trainer
    batch = off_policy_batch(tiny_model, 400, seed=22)
    await compare(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg), batch, tmp_path, 2 * EXACT)


async def test_a_whole_batch_loss(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(micro_train_batch_size_per_gpu=3, algorithm={"clip_cov": {"clip_ratio": 0.2}}).trainer
    objective = policy_objective(cfg, "clip_cov")
    batch = off_policy_batch(tiny_model, 400, seed=23)
    await compare(ranks, spec("policy", tiny_model_path, cfg), objective, batch, tmp_path)


async def test_a_critic(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(micro_train_batch_size_per_gpu=3).trainer
    batch = off_policy_batch(tiny_model, 400, seed=24)
    noise = torch.Generator().manual_seed(0)
    batch.values = torch.randn(batch.loss_mask.shape, generator=noise) * batch.loss_mask
    batch.returns = torch.randn(batch.loss_mask.shape, generator=noise) * batch.loss_mask
    await compare(ranks, spec("critic", tiny_model_path, cfg), ValueObjective(0.2), batch, tmp_path)


@pytest.mark.parametrize("max_rows", [1, 3])
async def test_the_cross_entropy_of_answers(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path, max_rows: int
) -> None:
    cfg = config(micro_train_batch_size_per_gpu=max_rows).trainer
    batch = off_policy_batch(tiny_model, 400, seed=28)
    model_spec, objective = spec("policy", tiny_model_path, cfg), CrossEntropyObjective()
    await compare(ranks, model_spec, objective, batch, tmp_path)
    single, sharded = [
        (await (await load_group(group_ranks, model_spec, objective)).forward_backward(batch)).numbers()["loss"]
        for group_ranks in ([single_rank()], ranks)
    ]
    assert sharded == pytest.approx(single, abs=1e-6)


async def test_the_gradient_is_clipped_by_its_norm_over_all_ranks(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config().trainer
    batch = off_policy_batch(tiny_model, 400, seed=25)
    clipped = spec("policy", tiny_model_path, cfg, max_grad_norm=0.01)
    await compare(ranks, clipped, policy_objective(cfg), batch, tmp_path, 1e-3)
    group = await load_group(ranks, clipped, policy_objective(cfg))
    assert (await group.update(batch)).numbers()["grad_norm"] > 0.1, "nothing was clipped"
    gradient = await first_gradient(group, clipped, policy_objective(cfg), tmp_path / "clipped")
    norm = torch.stack([values.norm() for values in gradient.values()]).norm().item()
    assert norm == pytest.approx(0.01, rel=1e-3)


async def test_ranks_without_rows_take_part_in_collectives(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config().trainer
    batch = off_policy_batch(tiny_model, 400, seed=26)
    batch.loss_mask[1:] = 0
    await compare(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg), batch, tmp_path)
    group = await load_group(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg))
    batch.loss_mask.zero_()
    metrics = (await group.update(batch)).numbers()
    assert metrics["skipped_updates"] == 0
    assert "grad_norm" not in metrics, "no rank has a gradient"


async def test_scores_equal_those_of_one_process_before_and_after_an_update(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    cfg = config(micro_forward_batch_size_per_gpu=3).trainer
    batch = as_batch(random_trajectories(3, 4, 400, seed=27), config())
    scores = []
    for group_ranks in ([single_rank()], ranks):
        group = await load_group(group_ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg))
        before = await group.score(batch)
        await group.update(batch)
        after = await group.score(batch)
        assert not torch.equal(before["logprobs"], after["logprobs"])
        scores.append((before, after))
    for single, sharded in zip(*scores, strict=True):
        for name in ("logprobs", "entropy", "sum_pi_squared"):
            torch.testing.assert_close(sharded[name], single[name], rtol=0, atol=2e-5, msg=name)


async def test_a_checkpoint_of_several_ranks_resumes_on_one_and_back(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    cfg = config(policy={"optimizer_config": {"scheduler": "linear", "num_warmup_steps": 2, "lr": 1e-4}}).trainer
    policy_spec = spec("policy", tiny_model_path, cfg)
    batches = [as_batch(random_trajectories(2, 3, 400, seed), config()) for seed in range(3)]
    sharded = await load_group(ranks, policy_spec, policy_objective(cfg))
    await sharded.update(batches[0])
    folder = await save(sharded, tmp_path / "sharded")
    expected = (await sharded.update(batches[1])).numbers()

    single = await load_group([single_rank()], policy_spec, policy_objective(cfg))
    await single.load_state(folder)
    assert (await single.update(batches[1])).numbers() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    folder = await save(single, tmp_path / "single")
    expected = (await single.update(batches[2])).numbers()

    resharded = await load_group(ranks, policy_spec, policy_objective(cfg))
    await resharded.load_state(folder)
    assert (await resharded.update(batches[2])).numbers() == pytest.approx(expected, rel=1e-4, abs=1e-5)


async def test_a_checkpoint_resumes_on_another_number_of_ranks(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    policy_spec = spec("policy", tiny_model_path, config(policy={"optimizer_config": {"lr": 1e-4}}).trainer)
    objective = policy_objective(config().trainer)
    batches = [as_batch(random_trajectories(2, 3, 400, seed), config()) for seed in range(2)]
    group = await load_group(ranks, policy_spec, objective)
    await group.update(batches[0])
    folder = await save(group, tmp_path / "policy")
    expected = (await group.update(batches[1])).numbers()
    others = start_ranks({2: 4, 4: 2}[len(ranks)])
    try:
        resumed = await load_group(others, policy_spec, objective)
        await resumed.load_state(folder)
        assert (await resumed.update(batches[1])).numbers() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    finally:
        for rank in others:
            await rank.close()


async def test_a_rank_that_cannot_write_fails_the_save_and_training_continues(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    cfg = config(policy={"optimizer_config": {"lr": 1e-4}}).trainer
    batch = as_batch(random_trajectories(2, 3, 400, seed=1), config())
    group = await load_group(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg))
    (tmp_path / "broken/rng_1.pt").mkdir(parents=True)
    with pytest.raises(OSError, match=r"the policy could not be written: IsADirectoryError: .*rng_1\.pt"):
        await save(group, tmp_path / "broken")
    assert not (tmp_path / "broken/.metadata").exists(), "it would be taken for complete"
    await group.update(batch)
    folder = await save(group, tmp_path / "policy")
    expected = (await group.update(batch)).numbers()
    await group.load_state(folder)
    assert (await group.update(batch)).numbers() == expected


async def test_an_export_is_a_plain_hugging_face_folder(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config().trainer
    group = await load_group(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg))
    await group.export(tmp_path / "export")
    exported = load_model(str(tmp_path / "export"), dtype=torch.float32, device=torch.device("cpu"))
    for name, tensor in tiny_model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name


async def test_an_export_has_the_buffers_of_the_model(ranks: list[ProcessRank], tmp_path: Path) -> None:
    cfg, base = config().trainer, new_biased_router(tmp_path / "base")
    group = await load_group(ranks, spec("policy", base, cfg), policy_objective(cfg))
    await group.export(tmp_path / "export")
    expected, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "export"))
    assert expected.keys() == exported.keys()
    assert torch.equal(exported[ROUTER_BIAS], expected[ROUTER_BIAS])


async def test_no_rank_waits_for_the_disk_of_an_export(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    cfg = config().trainer
    await load_group(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg))
    os.mkfifo(tmp_path / "config.json")
    first, *others = (asyncio.create_task(rank.call("export", tmp_path)) for rank in ranks)
    try:
        assert await asyncio.wait_for(asyncio.gather(*others), 60) == [None] * len(others)
        assert not first.done()
    finally:
        await asyncio.to_thread((tmp_path / "config.json").read_bytes)  # lets the first rank open the pipe
        assert await first is None


@pytest.mark.parametrize("lora", [{}, {"rank": 4, "merge_on_export": True}, {"rank": 4}], ids=str)
async def test_a_disk_that_refuses_an_export_leaves_the_group_usable(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    cfg = config(policy={"model": {"lora": lora}}).trainer
    group = await load_group(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg))
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).mkdir()
    with pytest.raises(OSError, match=r"the policy could not be written: .*config\.json"):
        await group.export(tmp_path)
    await group.export(tmp_path / "elsewhere")
    await group.update(as_batch(random_trajectories(2, 3, 400, seed=1), config()))


async def test_weights_are_synchronized_from_sharded_ranks_to_another_group(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    cfg = config().trainer
    policy_spec = spec("policy", tiny_model_path, cfg)
    group = await load_group(ranks, policy_spec, policy_objective(cfg))
    rank = single_rank()
    other = await load_group([rank], policy_spec, policy_objective(cfg))
    batch = as_batch(random_trajectories(2, 3, 400, seed=1), config())
    await group.update(batch)
    before = await other.score(batch)
    await WeightSync(group, {"other": other}, SyncOptions("gloo", chunk_bytes=50_000, timeout_s=60))(1)
    after, sharded = await other.score(batch), await group.score(batch)
    assert not torch.equal(before["logprobs"], after["logprobs"])
    torch.testing.assert_close(after["logprobs"], sharded["logprobs"], rtol=0, atol=2e-5)


def sharding(n_ranks: int) -> list[FSDPConfig]:
    """Return settings that change where weights are, and no result."""
    half = n_ranks // 2
    return [
        FSDPConfig(reshard_after_forward=False),
        FSDPConfig(fsdp_size=half, cpu_offload=True),  # two copies of the weights
        *([FSDPConfig(reshard_after_forward=half)] if half > 1 else []),
    ]


@on_two_and_four
async def test_the_placement_of_weights_changes_no_gradient(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(micro_train_batch_size_per_gpu=3).trainer
    batch, objective = off_policy_batch(tiny_model, 400, seed=21), policy_objective(cfg)
    for index, fsdp in enumerate(sharding(len(ranks))):
        placed = replace(spec("policy", tiny_model_path, cfg), fsdp=fsdp)
        await compare(ranks, placed, objective, batch, tmp_path / str(index))
        group = await load_group(ranks, placed, objective)
        before = await group.score(batch)
        await group.load_state(tmp_path / f"{index}/single")
        assert await group.is_finite()
        await group.export(tmp_path / f"{index}/export")
        assert not torch.equal((await group.score(batch))["logprobs"], before["logprobs"])


async def test_a_model_that_moves_between_calls_trains_bit_for_bit_alike(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    cfg = config(policy={"optimizer_config": {"lr": 1e-3}}).trainer
    batches = [as_batch(random_trajectories(2, 3, 400, seed), config()) for seed in range(3)]
    for index, fsdp in enumerate([FSDPConfig(), *sharding(len(ranks))]):
        placed = replace(spec("policy", tiny_model_path, cfg, max_grad_norm=0.5), fsdp=fsdp)
        group = await load_group(ranks, placed, policy_objective(cfg))
        expected = [(await group.update(batch)).numbers() for batch in batches]
        stationary = await save(group, tmp_path / f"{index}/stationary")
        group = await load_group(ranks, placed, policy_objective(cfg))
        assert await train_with_moves(group, batches) == expected
        moved = await save(group, tmp_path / f"{index}/moved")
        for path in stationary.glob("*.distcp"):
            assert (moved / path.name).read_bytes() == path.read_bytes(), path.name


async def test_recomputed_activations_change_no_gradient(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(micro_train_batch_size_per_gpu=3).trainer
    load = partial(
        load_model,
        str(tiny_model_path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        gradient_checkpointing=True,
    )
    batch = off_policy_batch(tiny_model, 400, seed=21)
    checkpointed = replace(spec("policy", tiny_model_path, cfg), load=load)
    await compare(ranks, checkpointed, policy_objective(cfg), batch, tmp_path)


async def test_blocks_compute_in_bfloat16_and_gradients_add_up_in_float32(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(micro_train_batch_size_per_gpu=3).trainer
    batch, objective = off_policy_batch(tiny_model, 400, seed=21), policy_objective(cfg)
    exact = spec("policy", tiny_model_path, cfg)
    scores, gradients = [], []
    for name, fsdp in (("exact", exact.fsdp), ("rounded", FSDPConfig(param_dtype="bfloat16"))):
        group = await load_group(ranks, replace(exact, fsdp=fsdp), objective)
        scores.append((await group.score(batch))["logprobs"])
        await group.update(batch)
        gradients.append(await first_gradient(group, exact, objective, tmp_path / name))
    assert 1e-4 < (scores[0] - scores[1]).abs().max() < 0.1, "blocks do not compute in bfloat16"
    assert {values.dtype for values in gradients[1].values()} == {torch.float32}
    largest = max(values.abs().max().item() for values in gradients[0].values())
    assert 1e-4 * largest < largest_difference(*gradients) < 0.5 * largest  # processors round differently
    rounded = torch.cat([values.flatten() for values in gradients[1].values()])
    assert (rounded != rounded.bfloat16()).float().mean() > 0.5, "the sum over ranks was rounded to bfloat16"


async def test_weights_loaded_in_bfloat16_are_trained_in_float32(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    """The files are float32: each rank rounds its part of them. A step of 2e-6 changes few bfloat16 numbers."""
    cfg = config(policy={"optimizer_config": {"lr": 2e-6}}).trainer
    load = partial(load_model, str(tiny_model_path), dtype=torch.bfloat16, device=torch.device("cpu"))
    rounded, objective = replace(spec("policy", tiny_model_path, cfg), load=load), policy_objective(cfg)
    batch = off_policy_batch(tiny_model, 400, seed=21)
    await compare(ranks, rounded, objective, batch, tmp_path)

    results = []
    for name, group_ranks in (("single", [single_rank()]), ("sharded", ranks)):
        group = await load_group(group_ranks, rounded, objective)
        await group.load_state(tmp_path / ("sharded" if name == "single" else "single"))  # saved by the others
        await group.update(batch)
        reader = single_rank()
        copy = await load_group([reader], rounded, objective)
        await copy.load_state(await save(group, tmp_path / name / "again"))
        results.append({key: p.detach().clone() for key, p in reader.worker.module.hf_model.named_parameters()})
        assert {tensor.dtype for tensor in await group.tensor_specs()} == {torch.bfloat16}
        await group.export(tmp_path / name / "export")
        exported = load_file(tmp_path / name / "export/model.safetensors")
        assert all(torch.equal(exported[key], value.bfloat16()) for key, value in results[-1].items())
        assert AutoConfig.from_pretrained(tmp_path / name / "export").dtype == torch.bfloat16
        await WeightSync(group, {"copy": copy}, SyncOptions("gloo", timeout_s=60))(1)
        synced = reader.worker.module.hf_model.named_parameters()
        assert all(torch.equal(value, exported[key].float()) for key, value in synced)
    assert largest_difference(*results) < 1e-7
    start = {name: parameter.bfloat16().float() for name, parameter in tiny_model.named_parameters()}
    steps = torch.cat([(results[0][name] - values).flatten() for name, values in start.items()])
    assert (steps != 0).float().mean() > 0.7, "the embeddings of some tokens have no gradient"
    assert steps.abs().max() < 5e-6


LORA = {"model": {"lora": {"rank": 4}}, "optimizer_config": {"lr": 1e-3}}


async def test_gradients_of_an_adapter(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(policy=LORA, micro_train_batch_size_per_gpu=3).trainer
    batch = off_policy_batch(tiny_model, 400, seed=28)
    await compare(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg), batch, tmp_path)


async def test_ranks_drop_different_inputs_of_an_adapter_in_updates_only(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(policy=LORA, micro_train_batch_size_per_gpu=3).trainer
    batch, exact = off_policy_batch(tiny_model, 400, seed=28), spec("policy", tiny_model_path, cfg)
    assert exact.lora is not None
    lora = replace(exact.lora, config=exact.lora.config.model_copy(update={"dropout": 0.5}))
    norms, scores = [], []
    for index, options in enumerate((exact, replace(exact, lora=lora), replace(exact, lora=lora))):
        group = await load_group(ranks, options, policy_objective(cfg))
        probes = [await group.probe(batch) for _ in range(2 if index == 2 else 1)]  # which take no random numbers
        assert probes[0] == probes[-1]
        norms.append([(await group.update(batch)).numbers()["grad_norm"] for _ in range(2)])
        scores.append([(await group.score(batch))["logprobs"] for _ in range(2)])
        assert torch.equal(*scores[-1])
    assert norms[1] == norms[2]
    assert torch.equal(scores[1][0], scores[2][0])
    assert abs(norms[1][0] / norms[0][0] - 1) > 0.02
    await save(group, tmp_path)
    states = [torch.load(tmp_path / f"rng_{rank}.pt", weights_only=True)["torch"] for rank in range(len(ranks))]
    assert len({tuple(state.tolist()) for state in states}) == len(ranks)


async def test_gradients_of_the_adapter_of_a_critic(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(critic={"model": {"path": str(tiny_model_path), "lora": {"rank": 4}}}).trainer
    batch = off_policy_batch(tiny_model, 400, seed=24)
    batch.values = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(0)) * batch.loss_mask
    batch.returns = batch.values.roll(1) * batch.loss_mask
    await compare(ranks, spec("critic", tiny_model_path, cfg), ValueObjective(0.2), batch, tmp_path)


async def test_a_continued_adapter_of_a_critic_keeps_its_head(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    model: dict[str, Any] = {"path": str(tiny_model_path), "lora": {"rank": 4}}
    batch = off_policy_batch(tiny_model, 400, seed=24)
    batch.values, batch.returns = 0.0 * batch.loss_mask, 1.0 * batch.loss_mask
    cfg = config(critic={"model": model}, policy={"optimizer_config": {"lr": 1e-2}}).trainer
    trained = await load_group([single_rank()], spec("critic", tiny_model_path, cfg), ValueObjective(1e9))
    await trained.update(batch)
    expected = (await trained.score(batch))["values"]
    assert expected.abs().max() > 1e-3, "the head of a new critic is 0"
    await trained.export(tmp_path / "adapter")

    cfg = config(critic={"model": model | {"lora": {"lora_path": str(tmp_path / "adapter")}}}).trainer
    for group_ranks in ([single_rank()], ranks):
        continued = await load_group(group_ranks, spec("critic", tiny_model_path, cfg), ValueObjective(1e9))
        torch.testing.assert_close((await continued.score(batch))["values"], expected, rtol=0, atol=1e-5)


async def test_an_adapter_learns_after_the_reference_was_scored_without_it(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(policy=LORA).trainer
    batches = [as_batch(random_trajectories(2, 3, 400, seed), config()) for seed in range(3)]
    frozen = replace(spec("policy", tiny_model_path, config().trainer), role="ref", optimizer=None)
    base = WorkerGroup(frozen, [single_rank()], None)
    await base.load()
    expected = await base.score(batches[0])
    scores = []
    for group_ranks in ([single_rank()], ranks):
        group = await load_group(group_ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg))
        for batch in batches:
            reference = await group.score(batches[0], adapter=False)
            torch.testing.assert_close(reference["logprobs"], expected["logprobs"], rtol=0, atol=2e-5)
            metrics = (await group.update(batch)).numbers()
        assert metrics["adapter_norm"] > 0
        scores.append(await group.score(batches[0]))
        assert (scores[-1]["logprobs"] - expected["logprobs"]).abs().max() > 1e-2
    torch.testing.assert_close(scores[1]["logprobs"], scores[0]["logprobs"], rtol=0, atol=1e-3)

    folder = await save(group, tmp_path / "checkpoint" / "policy")
    resumed = await load_group([single_rank()], spec("policy", tiny_model_path, cfg), policy_objective(cfg))
    await resumed.load_state(folder)
    after = await resumed.score(batches[0])
    torch.testing.assert_close(after["logprobs"], scores[1]["logprobs"], rtol=0, atol=2e-5)
    plain = spec("policy", tiny_model_path, config().trainer)
    merged_group = await load_group([single_rank()], plain, policy_objective(config().trainer))
    await WeightSync(group, {"merged": merged_group}, SyncOptions("auto", timeout_s=60))(1)
    merged = await merged_group.score(batches[0])
    torch.testing.assert_close(merged["logprobs"], scores[1]["logprobs"], rtol=0, atol=2e-5)


async def test_the_base_and_factors_of_an_adapter_make_the_merged_weights(
    ranks: list[ProcessRank], tiny_model_path: Path
) -> None:
    cfg = config(policy=LORA).trainer
    group = await load_group(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg))
    sinks, options = [MirroredSink(), MirroredSink()], SyncOptions("auto", timeout_s=30)
    merged = WeightSync(group, {"merged": sinks[0]}, options)
    factors = WeightSync(group, {"factors": sinks[1]}, options, kind="factors")
    for version in range(2):
        await group.update(as_batch(random_trajectories(2, 3, 400, version), config()))
        n_megabytes = [(await sync(version)).numbers()["sync/megabytes"] for sync in (merged, factors)]
        assert sinks[0].tensors.keys() == sinks[1].tensors.keys()
        assert all(torch.equal(sinks[1].tensors[name], tensor) for name, tensor in sinks[0].tensors.items())
    assert sinks[1].kinds == ["base_and_factors", "factors"]
    assert n_megabytes[1] < 0.3 * n_megabytes[0]


async def test_a_float32_adapter_on_a_bfloat16_model(ranks: list[ProcessRank], tiny_model_path: Path) -> None:
    cfg = config(policy=LORA).trainer
    low_precision = partial(load_model, str(tiny_model_path), dtype=torch.bfloat16, device=torch.device("cpu"))
    batch = as_batch(random_trajectories(2, 3, 400, seed=1), config())
    results = []
    for group_ranks in ([single_rank()], ranks):
        lora_spec = replace(spec("policy", tiny_model_path, cfg), load=low_precision)
        group = await load_group(group_ranks, lora_spec, policy_objective(cfg))
        results.append((await group.update(batch)).numbers())
    assert results[1]["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=2e-2)
    assert results[1]["adapter_norm"] == pytest.approx(results[0]["adapter_norm"], rel=2e-2)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("lora", [{}, {"rank": 4, "merge_on_export": True}])
async def test_a_merged_checkpoint_is_the_model_of_the_ranks(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path, lora: dict[str, Any], is_tied: bool
) -> None:
    base = tmp_path / "base"
    settings = AutoConfig.from_pretrained(tiny_model_path, tie_word_embeddings=is_tied)
    AutoModelForCausalLM.from_config(settings).save_pretrained(base)
    cfg = config(policy={**LORA, "model": {"path": str(base), "lora": lora}}).trainer
    group = await load_group(ranks, spec("policy", base, cfg), policy_objective(cfg))
    for seed in range(2):
        await group.update(as_batch(random_trajectories(2, 3, 400, seed), config()))
    await save(group, tmp_path / "policy")
    await group.export(tmp_path / "export")
    report = merge_checkpoint(tmp_path, tmp_path / "merged")
    assert report.logit_gap < 1e-5
    exported, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "merged"))
    assert exported.keys() == merged.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-7, msg=name)
    assert (tmp_path / "merged/lora_adapter/adapter_model.safetensors").exists() == bool(lora)
    assert ("lm_head.weight" in merged) != is_tied
    batch = as_batch(random_trajectories(2, 3, 400, seed=2), config())
    whole = await load_group(
        [single_rank()], spec("policy", tmp_path / "merged", config().trainer), policy_objective(cfg)
    )
    expected, logprobs = [(await one.score(batch))["logprobs"] for one in (group, whole)]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    original = await load_group([single_rank()], spec("policy", base, config().trainer), policy_objective(cfg))
    assert ((await original.score(batch))["logprobs"] - expected).abs().max() > 1e-3


@on_two_and_four
@pytest.mark.parametrize("sequence_parallel_size", [1, 2])
@pytest.mark.parametrize("lora", [{}, {"rank": 4}])
async def test_a_reward_model_is_trained_as_in_one_process(
    ranks: list[ProcessRank], tiny_model_path: Path, lora: dict[str, Any], sequence_parallel_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 60, (n,), generator=generator).tolist() for n in (9, 4, 7, 7, 3, 12)]
    pairs = [
        tuple((build_rewarded_segment(row, 0),) for row in pair) for pair in zip(rows[0::2], rows[1::2], strict=True)
    ]
    batch = build_supervised_batch([DrawnPrompt(i, pair, i) for i, pair in enumerate(pairs)], 0)
    cfg = config(policy={**LORA, "model": {"path": str(tiny_model_path), "lora": lora}}).trainer
    load = partial(
        load_reward_model,
        str(tiny_model_path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        key="trainer.policy.model.path",
        pad_token_id=0,
    )
    reward_spec = replace(
        spec("policy", tiny_model_path, cfg),
        role="reward",
        load=load,
        sequence_parallel_size=sequence_parallel_size,
    )
    ours, theirs = [await load_group(r, reward_spec, RewardObjective()) for r in (ranks, [single_rank()])]
    for _ in range(3):
        expected, metrics = [(await group.update(batch)).numbers() for group in (theirs, ours)]
        assert metrics == pytest.approx(expected, rel=1e-4, abs=EXACT)
    assert metrics["loss"] < math.log(2) - 0.01
    values = [(await group.score(batch))["values"] for group in (theirs, ours)]
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-4)


async def test_nan_weights_on_any_rank_are_found(ranks: list[ProcessRank], tiny_model_path: Path) -> None:
    policy_spec = spec("policy", tiny_model_path, config().trainer)
    rank = single_rank()
    diverged = await load_group([rank], policy_spec, policy_objective(config().trainer))
    with torch.no_grad():  # one value, in the slice of the last rank
        rank.worker.module.get_parameter("model.model.layers.1.mlp.up_proj.weight")[-1, -1] = torch.nan
    group = await load_group(ranks, policy_spec, policy_objective(config().trainer))
    await WeightSync(diverged, {"group": group}, SyncOptions("gloo", timeout_s=60))(1)
    assert not await group.is_finite()


async def test_a_probe_does_not_depend_on_the_number_of_ranks(ranks: list[ProcessRank], tiny_model_path: Path) -> None:
    cfg = config().trainer
    batch = as_batch(random_trajectories(2, 3, 400, seed=1), config()).select([0, 1, 2])  # some ranks get fillers
    probes = []
    for group_ranks in ([single_rank()], ranks):
        group = await load_group(group_ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg))
        probes.append((await group.probe(batch)).numbers())
        assert await group.is_finite()
    assert probes[1] == pytest.approx(probes[0], rel=1e-4)


async def test_a_killed_rank_fails_the_call_by_name_and_breaks_the_group(tiny_model_path: Path) -> None:
    started = start_ranks(2)
    try:
        cfg = config().trainer
        group = await load_group(started, spec("policy", tiny_model_path, cfg), policy_objective(cfg))
        batch = as_batch(random_trajectories(2, 3, 400, seed=1), config())
        started[1]._process.kill()
        with pytest.raises(WorkerError, match=r"rank 1 \(process \d+\) ended with exit status -9 during score"):
            await group.score(batch)
        with pytest.raises(WorkerError, match=r"the policy is unusable after .*rank 1"):
            await group.score(batch)
    finally:
        for rank in started:
            await rank.close()
    assert not any(rank._process.is_alive() for rank in started)
