"""Ranks that divide the tokens of rows train like one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_kit.batches import (
    as_batch,
    fill_in_values,
    off_policy_batch,
    random_row,
    random_trajectories,
    score_off_policy,
)
from train_kit.models import PREFIX_SHARING_ARCHITECTURES, SMALL, create_model, load_on_cpu
from train_kit.oracle import OracleRow, OracleTrajectory
from train_kit.ranks import compare, load_group, save, single_rank, spec
from train_kit.workers import config, policy_objective
from transformers import Lfm2Config, PreTrainedModel, Qwen3Config

from skyrl_train.algorithms.objectives import CrossEntropyObjective, Objective, ValueObjective
from skyrl_train.config.policy import FSDPConfig
from skyrl_train.errors import ConfigError
from skyrl_train.launch.process import ProcessRank
from skyrl_train.types import TrainingBatch
from skyrl_train.types.specs import Role
from skyrl_train.workers.group import WorkerGroup

EXACT = 1e-5


def step_wise_rows(n_turns: int, rng: random.Random) -> list[OracleRow]:
    """Return the rows of a trajectory in which each turn begins with all before it."""
    rows = [random_row(rng, 7, 3)]
    for _ in range(n_turns - 1):
        turn = random_row(rng, 4, 5)
        rows.append(replace(turn, prompt_ids=rows[-1].token_ids + turn.prompt_ids))
    return rows


@pytest.fixture(scope="module")
def batches(tiny_model: PreTrainedModel) -> list[TrainingBatch]:
    """Batches of several turns, of step-wise rows, of a row longer than all others, of rows of one token after a prompt
    of one token, and of a row whose first half has no trained token.
    """
    rng = random.Random(0)
    rollouts = [
        random_trajectories(3, 3, seed=1),
        [OracleTrajectory(f"p{i // 2}", step_wise_rows(1 + i % 4, rng)) for i in range(6)],
        [OracleTrajectory(f"p{i // 2}", [random_row(rng, 5, 301 if i == 1 else 4)]) for i in range(4)],
        [OracleTrajectory(f"p{i // 2}", [random_row(rng, 1, 1)]) for i in range(6)],
        [OracleTrajectory("p0", [random_row(rng, *lengths)]) for lengths in ((2, 3), (30, 2))],
    ]
    scored = [score_off_policy(tiny_model, as_batch(trajectories)) for trajectories in rollouts]
    return [fill_in_values(batch, seed) for seed, batch in enumerate(scored, start=10)]


@dataclass(frozen=True)
class Case:
    """A model that is trained."""

    role: Role = "policy"
    objective: Callable[..., Objective] = policy_objective
    trainer: dict[str, Any] = field(default_factory=dict)
    fsdp: FSDPConfig | None = None
    n_batches: int = 2


LR = {"optimizer_config": {"lr": 1e-4}}
LORA = LR | {"model": {"lora": {"rank": 4, "merge_on_export": True}}}
CASES = {
    "GRPO": Case(n_batches=5),
    "entropies": Case(trainer={"algorithm": {"use_entropy_loss": True, "loss_reduction": "sequence_mean"}}),
    "a whole-batch loss": Case(objective=partial(policy_objective, loss="clip_cov")),
    "a critic": Case("critic", lambda _: ValueObjective(0.2)),
    "supervised fine-tuning": Case(objective=lambda _: CrossEntropyObjective()),
    "LoRA": Case(trainer={"policy": LORA}),
    "gradient checkpointing": Case(trainer={"gradient_checkpointing": True}),
    "offloaded": Case(fsdp=FSDPConfig(cpu_offload=True, reshard_after_forward=False)),
}


async def train(group: WorkerGroup, batches: list[TrainingBatch], folder: Path) -> tuple[list[dict[str, float]], Any]:
    """Return the metrics of a step on each batch, and the weights after them."""
    torch.manual_seed(0)  # clip_cov chooses tokens at random
    steps = [(await group.update(batch)).numbers() for batch in batches]
    await group.export(folder)
    return steps, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", CASES)
async def test_steps_equal_those_of_one_process(
    ranks: list[ProcessRank], tiny_model_path: Path, batches: list[TrainingBatch], tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    cfg = config(**{"policy": LR, "micro_train_batch_size_per_gpu": 3} | case.trainer).trainer
    whole = spec(case.role, tiny_model_path, cfg)
    divided = replace(whole, sequence_parallel_size=2, fsdp=case.fsdp or whole.fsdp)
    results = []
    for group_ranks, model in (([single_rank()], whole), (ranks, divided)):
        group = await load_group(group_ranks, model, case.objective(cfg))
        results.append(await train(group, batches[: case.n_batches], tmp_path / str(len(results))))
    (expected, weights), (steps, divided_weights) = results
    for index, (step, expected_step) in enumerate(zip(steps, expected, strict=True)):
        assert step == pytest.approx(expected_step, rel=EXACT, abs=EXACT), f"step {index}"
        assert step["grad_norm"] > 1e-3
    assert divided_weights.keys() == weights.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(divided_weights[key], tensor, rtol=0, atol=EXACT, msg=key)


ON_FOUR_RANKS = ("qwen3",)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, n_ranks, marks=() if (name in ON_FOUR_RANKS) == (n_ranks == 4) else pytest.mark.nightly)
        for name in PREFIX_SHARING_ARCHITECTURES
        for n_ranks in (2, 4)
    ],
    indirect=["ranks"],
)
async def test_gradients_of_every_architecture(ranks: list[ProcessRank], tmp_path: Path, name: str) -> None:
    """Models with two key and value heads copy them for four ranks."""
    create_model(PREFIX_SHARING_ARCHITECTURES[name]).save_pretrained(tmp_path / "model")
    batch = off_policy_batch(load_on_cpu(tmp_path / "model"), 3, n_tokens=SMALL["vocab_size"])
    cfg = config(micro_train_batch_size_per_gpu=3).trainer
    divided = replace(spec("policy", tmp_path / "model", cfg), sequence_parallel_size=len(ranks))
    await compare(ranks, divided, policy_objective(cfg), batch, tmp_path, 2e-5)


async def test_a_checkpoint_resumes_with_another_division(
    ranks: list[ProcessRank], tiny_model_path: Path, batches: list[TrainingBatch], tmp_path: Path
) -> None:
    cfg = config(policy=LR).trainer
    objective, (first, second, *_) = policy_objective(cfg), batches
    divided = replace(spec("policy", tiny_model_path, cfg), sequence_parallel_size=2)
    group = await load_group(ranks, divided, objective)
    await group.update(first)
    folder = await save(group, tmp_path / "policy")
    expected = (await group.update(second)).numbers()
    for others, size in ((ranks, 1), (ranks, len(ranks)), ([single_rank()], 1)):
        resumed = await load_group(others, replace(divided, sequence_parallel_size=size), objective)
        await resumed.load_state(folder)
        assert (await resumed.update(second)).numbers() == pytest.approx(expected, rel=EXACT, abs=EXACT), size


async def test_blocks_exchange_heads_in_bfloat16(
    ranks: list[ProcessRank], tiny_model_path: Path, batches: list[TrainingBatch]
) -> None:
    whole = replace(spec("policy", tiny_model_path, config().trainer), fsdp=FSDPConfig(param_dtype="bfloat16"))
    results = []
    for size in (1, 2):
        group = await load_group(ranks, replace(whole, sequence_parallel_size=size), policy_objective(config().trainer))
        results.append(((await group.score(batches[0]))["logprobs"], (await group.update(batches[0])).numbers()))
    (logprobs, metrics), (divided_logprobs, divided_metrics) = results
    torch.testing.assert_close(divided_logprobs, logprobs, rtol=0, atol=0.02)
    assert divided_metrics == pytest.approx(metrics, rel=0.02, abs=1e-3)


async def test_the_reference_is_divided_on_its_own(
    ranks: list[ProcessRank], tiny_model_path: Path, batches: list[TrainingBatch]
) -> None:
    """Policy and reference share processes, but not the size of their groups."""
    policy = spec("policy", tiny_model_path, config().trainer)
    ref = replace(policy, role="ref", optimizer=None, sequence_parallel_size=2)
    scores = []
    for model, objective in ((policy, policy_objective(config().trainer)), (ref, None)):
        group = await load_group([rank.share() for rank in ranks], model, objective)
        scores.append(await group.score(batches[0]))
    assert scores[0]["logprobs"].any()
    for name, values in scores[0].items():
        torch.testing.assert_close(scores[1][name], values, rtol=0, atol=2e-5, msg=name)


def test_ranks_that_are_not_a_multiple_of_the_size_are_refused(tiny_model_path: Path) -> None:
    divided = replace(spec("policy", tiny_model_path, config().trainer), sequence_parallel_size=2)
    with pytest.raises(ConfigError, match=r"trainer\.policy\.sequence_parallel_size=2 must divide the 1 rank of the"):
        WorkerGroup(divided, [single_rank()])


UNSUITED = {
    r"must divide the 5 attention heads of the model; try 1 or 5": Qwen3Config(
        **SMALL | {"num_attention_heads": 5, "num_key_value_heads": 1}
    ),
    "the tokens of a Lfm2ForCausalLM cannot be divided among ranks, because shared prefixes would change": Lfm2Config(
        **SMALL, layer_types=["conv", "full_attention"], block_ff_dim=24
    ),
}


@pytest.mark.parametrize("reason", UNSUITED)
async def test_a_model_that_cannot_be_divided_is_refused(ranks: list[ProcessRank], tmp_path: Path, reason: str) -> None:
    create_model(UNSUITED[reason]).save_pretrained(tmp_path)
    cfg, size = config().trainer, len(ranks)
    divided = replace(spec("policy", tmp_path, cfg), sequence_parallel_size=size)
    with pytest.raises(ConfigError, match=rf"trainer\.policy\.sequence_parallel_size={size}:? {reason}"):
        await load_group(ranks, divided, policy_objective(cfg))
    await load_group(ranks, replace(divided, sequence_parallel_size=1), policy_objective(cfg))
