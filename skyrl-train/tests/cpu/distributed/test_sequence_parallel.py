"""Ranks that divide the tokens of rows train like one process."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from models.test_prefix_sharing import CONFIGS, SIZES, make_model
from safetensors.torch import load_file
from train_kit.batches import as_batch, off_policy_batch, random_trajectories, score_off_policy
from train_kit.oracle import OracleRow, OracleTrajectory
from train_kit.ranks import compare, load_group, save, single_rank, spec
from train_kit.workers import config, policy_objective
from transformers import Lfm2Config, PreTrainedModel, Qwen3Config

from skyrl_train.algorithms.objectives import CrossEntropyObjective, Objective, ValueObjective
from skyrl_train.config.policy import FSDPConfig
from skyrl_train.errors import ConfigError
from skyrl_train.launch.process import ProcessRank, start_ranks
from skyrl_train.models.loading import load_model
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.group import WorkerGroup

EXACT = 1e-5
N_TOKENS = 400
"""Vocabulary of random rows."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
async def ranks(request: pytest.FixtureRequest) -> AsyncIterator[list[ProcessRank]]:
    """Two or four rank processes, shared by the tests of this module."""
    started = start_ranks(request.param)
    yield started
    for rank in started:
        await rank.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


def row(n_prompt: int, n_response: int, rng: random.Random) -> OracleRow:
    """Return a row of random tokens, all of whose response was sampled."""
    prompt, response = ([rng.randrange(3, N_TOKENS) for _ in range(n)] for n in (n_prompt, n_response))
    rewards = [*[0.0] * (n_response - 1), rng.random()]
    return OracleRow(prompt, response, [True] * n_response, rewards, [0.0] * n_response)


def step_wise_rows(n_turns: int, rng: random.Random) -> list[OracleRow]:
    """Return the rows of a trajectory in which each turn begins with all before it."""
    rows = [row(7, 3, rng)]
    for _ in range(n_turns - 1):
        turn = row(4, 5, rng)
        rows.append(replace(turn, prompt_ids=rows[-1].prompt_ids + rows[-1].response_ids + turn.prompt_ids))
    return rows


def make_batches(policy: PreTrainedModel) -> list[TrainingBatch]:
    """Return a batch for each step: several turns, step-wise rows, a row longer than all others, rows of one token
    after a prompt of one token, and a row whose first half has no trained token.
    """
    rng = random.Random(0)
    rollouts = [
        random_trajectories(4, 4, seed=1, n_tokens=N_TOKENS),
        [OracleTrajectory(f"p{i // 2}", step_wise_rows(1 + i % 4, rng)) for i in range(6)],
        [OracleTrajectory(f"p{i // 2}", [row(5, 301 if i == 1 else 4, rng)]) for i in range(4)],
        [OracleTrajectory(f"p{i // 2}", [row(1, 1, rng)]) for i in range(6)],
        [OracleTrajectory("p0", [row(2, 3, rng)]), OracleTrajectory("p0", [row(30, 2, rng)])],
    ]
    batches = [score_off_policy(policy, as_batch(trajectories, config())) for trajectories in rollouts]
    for seed, batch in enumerate(batches, start=10):
        noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(seed)) * batch.loss_mask
        batch.values, batch.returns = noise, noise.roll(1) * batch.loss_mask
    return batches


@dataclass
class Case:
    """A model that is trained in five steps."""

    role: Any = "policy"
    objective: Callable[..., Objective] = policy_objective
    trainer: dict[str, Any] | None = None
    fsdp: FSDPConfig | None = None


LR = {"optimizer_config": {"lr": 1e-4}}
LORA = LR | {"model": {"lora": {"rank": 4, "merge_on_export": True}}}
CASES = {
    "GRPO": Case(),
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
async def test_five_steps_equal_those_of_one_process(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    settings = {"policy": LR, "micro_train_batch_size_per_gpu": 3} | (case.trainer or {})
    cfg = config(**settings).trainer
    whole = spec(case.role, tiny_model_path, cfg)
    divided = replace(whole, sequence_parallel_size=2, fsdp=case.fsdp or whole.fsdp)
    objective, batches = case.objective(cfg), make_batches(tiny_model)
    expected, weights = await train(await load_group([single_rank()], whole, objective), batches, tmp_path / "whole")
    steps, divided_weights = await train(await load_group(ranks, divided, objective), batches, tmp_path / "divided")
    for index, (step, expected_step) in enumerate(zip(steps, expected, strict=True)):
        assert step == pytest.approx(expected_step, rel=EXACT, abs=EXACT), f"step {index}"
        assert step["grad_norm"] > 1e-3
    assert divided_weights.keys() == weights.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(divided_weights[key], tensor, rtol=0, atol=EXACT, msg=key)


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("name", CONFIGS)
async def test_gradients_of_every_architecture(ranks: list[ProcessRank], tmp_path: Path, name: str) -> None:
    """Models with two key and value heads copy them for four ranks."""
    make_model(CONFIGS[name]).save_pretrained(tmp_path / "model")
    model = load_model(str(tmp_path / "model"), dtype=torch.float32, device=torch.device("cpu"))
    batch = off_policy_batch(model, 3, n_tokens=40)
    cfg = config(micro_train_batch_size_per_gpu=3).trainer
    divided = replace(spec("policy", tmp_path / "model", cfg), sequence_parallel_size=len(ranks))
    await compare(ranks, divided, policy_objective(cfg), batch, tmp_path, 2e-5)


async def test_a_checkpoint_resumes_with_another_division(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(policy=LR).trainer
    objective, (first, second, *_) = policy_objective(cfg), make_batches(tiny_model)
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
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    whole = replace(spec("policy", tiny_model_path, config().trainer), fsdp=FSDPConfig(param_dtype="bfloat16"))
    batch, objective = off_policy_batch(tiny_model, 4, n_tokens=N_TOKENS), policy_objective(config().trainer)
    results = []
    for size in (1, 2):
        group = await load_group(ranks, replace(whole, sequence_parallel_size=size), objective)
        results.append(((await group.score(batch))["logprobs"], (await group.update(batch)).numbers()))
    (logprobs, metrics), (divided_logprobs, divided_metrics) = results
    torch.testing.assert_close(divided_logprobs, logprobs, rtol=0, atol=0.02)
    assert divided_metrics == pytest.approx(metrics, rel=0.02, abs=1e-3)


async def test_the_reference_is_divided_on_its_own(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    """Policy and reference share processes, but not the size of their groups."""
    policy = spec("policy", tiny_model_path, config().trainer)
    ref = replace(policy, role="ref", optimizer=None, sequence_parallel_size=2)
    batch = off_policy_batch(tiny_model, 5, n_tokens=N_TOKENS)
    groups = [
        WorkerGroup(policy, [rank.share() for rank in ranks], policy_objective(config().trainer)),
        WorkerGroup(ref, [rank.share() for rank in ranks]),
    ]
    scores = []
    for group in groups:
        await group.load()
        scores.append(await group.score(batch))
    assert scores[0]["logprobs"].any()
    for name, values in scores[0].items():
        torch.testing.assert_close(scores[1][name], values, rtol=0, atol=2e-5, msg=name)


async def test_ranks_that_are_not_a_multiple_of_the_size_are_refused(tiny_model_path: Path) -> None:
    divided = replace(spec("policy", tiny_model_path, config().trainer), sequence_parallel_size=2)
    with pytest.raises(ConfigError, match=r"trainer\.policy\.sequence_parallel_size=2 must divide the 1 rank of the"):
        WorkerGroup(divided, [single_rank()])


UNSUITED = {
    r"must divide the 5 attention heads of the model; try 1 or 5": Qwen3Config(
        **SIZES | {"num_attention_heads": 5, "num_key_value_heads": 1}
    ),
    "the tokens of a Lfm2ForCausalLM cannot be divided among ranks, because shared prefixes would change": Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention"], block_ff_dim=24
    ),
}


@pytest.mark.parametrize("reason", UNSUITED)
async def test_a_model_that_cannot_be_divided_is_refused(ranks: list[ProcessRank], tmp_path: Path, reason: str) -> None:
    make_model(UNSUITED[reason]).save_pretrained(tmp_path / "model")
    size = len(ranks)
    divided = replace(spec("policy", tmp_path / "model", config().trainer), sequence_parallel_size=size)
    with pytest.raises(ConfigError, match=rf"trainer\.policy\.sequence_parallel_size={size}:? {reason}"):
        await load_group(ranks, divided, policy_objective(config().trainer))
    await load_group(ranks, replace(divided, sequence_parallel_size=1), policy_objective(config().trainer))
