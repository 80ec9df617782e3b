"""FSDP over gloo ranks: gradients, scores and metrics equal those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from train_kit.batches import fill_in_values, off_policy_batch, random_batch
from train_kit.ranks import (
    EXACT,
    compare,
    load_group,
    load_policy,
    read_gradient,
    save,
    single_rank,
    spec,
    train_with_moves,
)
from train_kit.workers import config, largest_difference, policy_objective
from transformers import AutoConfig, PreTrainedModel

from skyrl_train.algorithms.objectives import CrossEntropyObjective, Objective, RewardObjective, ValueObjective
from skyrl_train.config.algorithm import LossReduction
from skyrl_train.config.policy import FSDPConfig
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.dataset.supervised import build_rewarded_segment, build_supervised_batch
from skyrl_train.launch.process import ProcessRank
from skyrl_train.types import DrawnPrompt, TrainingBatch
from skyrl_train.types.specs import Role
from skyrl_train.weight_sync import SyncOptions, WeightSync

LORA = {"model": {"lora": {"rank": 4}}, "optimizer_config": {"lr": 1e-3}}


@pytest.fixture(scope="module")
def batch(tiny_model: PreTrainedModel) -> TrainingBatch:
    """A mini-batch for all objectives."""
    return fill_in_values(off_policy_batch(tiny_model, 21))


# -- equal to one process


@dataclass(frozen=True)
class Case:
    """Settings of a model that takes a step."""

    trainer: dict[str, Any] = field(default_factory=dict)
    role: Role = "policy"
    objective: Callable[[TrainerConfig], Objective] = policy_objective
    loading: dict[str, Any] = field(default_factory=dict)
    tolerance: float = EXACT


def with_reduction(name: str) -> Case:
    algorithm = {"loss_reduction": name, "max_seq_len": 40, "use_entropy_loss": True, "top_entropy_quantile": 0.5}
    return Case({"algorithm": algorithm}, tolerance=2 * EXACT)


CASES = {
    "1 row at a time": Case({"micro_train_batch_size_per_gpu": 1}),
    "all rows at once": Case({"micro_train_batch_size_per_gpu": 16}),
    "a whole-batch loss": Case(
        {"algorithm": {"clip_cov": {"clip_ratio": 0.2}}}, objective=lambda cfg: policy_objective(cfg, "clip_cov")
    ),
    "a critic": Case(role="critic", objective=lambda _: ValueObjective(0.2)),
    "cross entropy": Case(objective=lambda _: CrossEntropyObjective()),
    "recomputed activations": Case(loading={"gradient_checkpointing": True}),
    "an adapter": Case({"policy": LORA}),
    "the adapter of a critic": Case(
        {"critic": {"model": {"path": "base", "lora": {"rank": 4}}}}, "critic", lambda _: ValueObjective(0.2)
    ),
    **{name: with_reduction(name) for name in get_args(LossReduction)},
}
BY_DEFAULT = {
    "all rows at once",
    "a whole-batch loss",
    "a critic",
    "an adapter",
    "the adapter of a critic",
    "prompt_mean",
}  # test_sequence_parallel.py has others, in which two ranks compute the same rows


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.nightly) for name in CASES]
)
async def test_a_step_has_the_gradient_and_metrics_of_one_process(
    ranks: list[ProcessRank], tiny_model_path: Path, batch: TrainingBatch, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    cfg = config(**{"micro_train_batch_size_per_gpu": 3, **case.trainer}).trainer
    model = spec(case.role, tiny_model_path, cfg, **case.loading)
    await compare(ranks, model, case.objective(cfg), batch, tmp_path, case.tolerance)


async def test_the_gradient_is_clipped_by_its_norm_over_all_ranks(
    ranks: list[ProcessRank], tiny_model_path: Path, batch: TrainingBatch, tmp_path: Path
) -> None:
    cfg = config().trainer
    clipped = spec("policy", tiny_model_path, cfg, max_grad_norm=0.01)
    await compare(ranks, clipped, policy_objective(cfg), batch, tmp_path, 1e-3)
    gradient = read_gradient(tmp_path / "divided")
    norm = torch.stack([values.norm() for values in gradient.values()]).norm().item()
    assert norm == pytest.approx(0.01, rel=1e-3)


async def test_ranks_without_rows_take_part_in_collectives(
    ranks: list[ProcessRank], tiny_model_path: Path, batch: TrainingBatch, tmp_path: Path
) -> None:
    cfg = config().trainer
    one_row, no_row = (
        replace(batch, loss_mask=batch.loss_mask * (torch.arange(len(batch)) < n)[:, None]) for n in (1, 0)
    )
    group = await compare(ranks, spec("policy", tiny_model_path, cfg), policy_objective(cfg), one_row, tmp_path)
    metrics = (await group.update(no_row)).numbers()
    assert metrics["skipped_updates"] == 0
    assert "grad_norm" not in metrics, "no rank has a gradient"


async def test_scores_equal_those_of_one_process_before_and_after_an_update(
    ranks: list[ProcessRank], tiny_model_path: Path, batch: TrainingBatch
) -> None:
    scores = []
    for group_ranks in ([single_rank()], ranks):
        group = await load_policy(group_ranks, tiny_model_path, micro_forward_batch_size_per_gpu=3)
        before = await group.score(batch)
        await group.update(batch)
        after = await group.score(batch)
        assert not torch.equal(before["logprobs"], after["logprobs"])
        scores.append((before, after))
    for single, sharded in zip(*scores, strict=True):
        for name in ("logprobs", "entropy", "sum_pi_squared"):
            torch.testing.assert_close(sharded[name], single[name], rtol=0, atol=2e-5, msg=name)


async def test_a_probe_does_not_depend_on_the_number_of_ranks(ranks: list[ProcessRank], tiny_model_path: Path) -> None:
    rows = random_batch(1).select([0, 1, 2])  # some ranks get fillers
    groups = [await load_policy(group_ranks, tiny_model_path) for group_ranks in ([single_rank()], ranks)]
    expected, probe = [(await group.probe(rows)).numbers() for group in groups]
    assert probe == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("ranks", "lora", "sequence_parallel_size"),
    [
        (2, {"rank": 4}, 1),
        (4, {}, 2),
        pytest.param(2, {}, 1, marks=pytest.mark.nightly),
        pytest.param(4, {"rank": 4}, 2, marks=pytest.mark.nightly),
    ],
    indirect=["ranks"],
)
async def test_a_reward_model_is_trained_as_in_one_process(
    ranks: list[ProcessRank], tiny_model_path: Path, lora: dict[str, Any], sequence_parallel_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 60, (n,), generator=generator).tolist() for n in (9, 4, 7, 7, 3, 12)]
    segments = [(build_rewarded_segment(row, 0),) for row in rows]
    pairs = enumerate(zip(segments[0::2], segments[1::2], strict=True))
    batch = build_supervised_batch([DrawnPrompt(i, pair, i) for i, pair in pairs], 0)
    cfg = config(policy={**LORA, "model": {"path": str(tiny_model_path), "lora": lora}}).trainer
    reward = replace(
        spec("reward", tiny_model_path, cfg, key="trainer.policy.model.path", pad_token_id=0),
        sequence_parallel_size=sequence_parallel_size,
    )
    ours, theirs = [await load_group(r, reward, RewardObjective()) for r in (ranks, [single_rank()])]
    for _ in range(3):
        expected, metrics = [(await group.update(batch)).numbers() for group in (theirs, ours)]
        assert metrics == pytest.approx(expected, rel=1e-4, abs=EXACT)
    assert metrics["loss"] < math.log(2) - 0.01
    values = [(await group.score(batch))["values"] for group in (theirs, ours)]
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-4)


# -- the placement of weights


TWO_COPIES = FSDPConfig(fsdp_size=1, cpu_offload=True)


@pytest.mark.parametrize(
    ("ranks", "fsdp"),
    [
        (2, FSDPConfig(reshard_after_forward=False)),
        (4, FSDPConfig(fsdp_size=2, cpu_offload=True)),  # two copies, each on two ranks
        (4, FSDPConfig(reshard_after_forward=2)),
        pytest.param(2, TWO_COPIES, marks=pytest.mark.nightly),
        pytest.param(4, FSDPConfig(reshard_after_forward=False), marks=pytest.mark.nightly),
    ],
    indirect=["ranks"],
    ids=["kept", "four, two copies", "four, kept by two", "two copies", "four, kept"],
)
async def test_the_placement_of_weights_changes_no_result(
    ranks: list[ProcessRank], tiny_model_path: Path, batch: TrainingBatch, tmp_path: Path, fsdp: FSDPConfig
) -> None:
    cfg = config(micro_train_batch_size_per_gpu=3, policy={"optimizer_config": {"lr": 1e-3}}).trainer
    placed = replace(spec("policy", tiny_model_path, cfg), fsdp=fsdp)
    group = await compare(ranks, placed, policy_objective(cfg), batch, tmp_path)
    expected = (await group.score(batch))["logprobs"]
    await group.update(batch)
    assert ((await group.score(batch))["logprobs"] - expected).abs().max() > 0.02
    for name, tolerance in (("single", 5e-3), ("divided", 1e-5)):
        await group.load_state(tmp_path / name)
        assert await group.is_finite()
        torch.testing.assert_close((await group.score(batch))["logprobs"], expected, rtol=0, atol=tolerance)
    await group.export(tmp_path / "export")
    assert (tmp_path / "export/model.safetensors").exists()


async def test_a_model_that_moves_between_calls_trains_bit_for_bit_alike(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    batches = [random_batch(seed) for seed in range(2)]
    settings: dict[str, Any] = {"max_grad_norm": 0.5, "policy": {"optimizer_config": {"lr": 1e-3}}}
    for index, fsdp in enumerate([FSDPConfig(), FSDPConfig(reshard_after_forward=False), TWO_COPIES]):
        stationary = await load_policy(ranks, tiny_model_path, fsdp=fsdp, **settings)
        expected = [(await stationary.update(batch)).numbers() for batch in batches]
        before = await save(stationary, tmp_path / f"{index}/stationary")
        moved = await load_policy(ranks, tiny_model_path, fsdp=fsdp, **settings)
        assert await train_with_moves(moved, batches) == expected
        after = await save(moved, tmp_path / f"{index}/moved")
        for path in before.glob("*.distcp"):
            assert (after / path.name).read_bytes() == path.read_bytes(), path.name


async def test_nan_weights_on_any_rank_are_found(ranks: list[ProcessRank], tiny_model_path: Path) -> None:
    rank = single_rank()
    diverged, group = await load_policy([rank], tiny_model_path), await load_policy(ranks, tiny_model_path)
    with torch.no_grad():  # one value, in the slice of the last rank
        rank.worker.module.get_parameter("model.model.layers.1.mlp.up_proj.weight")[-1, -1] = torch.nan
    assert await group.is_finite()
    await WeightSync(diverged, {"group": group}, SyncOptions("gloo", timeout_s=60))(1)
    assert not await group.is_finite()


# -- precision


async def test_blocks_compute_in_bfloat16_and_gradients_add_up_in_float32(
    ranks: list[ProcessRank], tiny_model_path: Path, batch: TrainingBatch, tmp_path: Path
) -> None:
    cfg = config(micro_train_batch_size_per_gpu=3).trainer
    exact, objective = spec("policy", tiny_model_path, cfg), policy_objective(cfg)
    scores, gradients = [], []
    for name, fsdp in (("exact", exact.fsdp), ("rounded", FSDPConfig(param_dtype="bfloat16"))):
        group = await load_group(ranks, replace(exact, fsdp=fsdp), objective)
        scores.append((await group.score(batch))["logprobs"])
        await group.update(batch)
        gradients.append(read_gradient(await save(group, tmp_path / name)))
    assert 1e-4 < (scores[0] - scores[1]).abs().max() < 0.1, "blocks do not compute in bfloat16"
    assert {values.dtype for values in gradients[1].values()} == {torch.float32}
    largest = max(values.abs().max().item() for values in gradients[0].values())
    assert 1e-4 * largest < largest_difference(*gradients) < 0.5 * largest  # processors round differently
    rounded = torch.cat([values.flatten() for values in gradients[1].values()])
    assert (rounded != rounded.bfloat16()).float().mean() > 0.5, "the sum over ranks was rounded to bfloat16"


async def test_weights_loaded_in_bfloat16_are_trained_in_float32(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, batch: TrainingBatch, tmp_path: Path
) -> None:
    """The files are float32: each rank rounds its part of them. A step of 2e-6 changes few bfloat16 numbers."""
    cfg = config(policy={"optimizer_config": {"lr": 2e-6}}).trainer
    rounded, objective = spec("policy", tiny_model_path, cfg, dtype=torch.bfloat16), policy_objective(cfg)
    await compare(ranks, rounded, objective, batch, tmp_path)

    results = []
    for name, other, group_ranks in (("single", "divided", [single_rank()]), ("divided", "single", ranks)):
        group = await load_group(group_ranks, rounded, objective)
        await group.load_state(tmp_path / other)
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
