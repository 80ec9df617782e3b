"""Megatron-Core over gloo ranks: results equal those of one process, in every layout."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from distributed.rank_groups import train_with_moves
from safetensors.torch import load_file
from small_models import SMALL
from train_kit.weight_sync import MirroredSink
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from workers.oracle import OracleRow, OracleTrajectory
from workers.worker_batches import (
    as_batch,
    config,
    off_policy_batch,
    policy_objective,
    random_trajectories,
    score_off_policy,
)

from skyrl_train.algorithms.objectives import Objective, PreferenceObjective
from skyrl_train.checkpoint.merge import merge_checkpoint
from skyrl_train.config.policy import LoraConfig, MegatronConfig
from skyrl_train.distributed import SingleStrategy
from skyrl_train.errors import ConfigError
from skyrl_train.launch.process import ProcessRank, start_ranks
from skyrl_train.launch.specs import model_spec, optimizer_spec
from skyrl_train.models.loading import load_model
from skyrl_train.models.lora import WEIGHTS, add_adapter, save_adapter, trained_parameters
from skyrl_train.types import TrainingBatch
from skyrl_train.types.specs import LoraSpec, ModelSpec, World, lora_spec
from skyrl_train.weight_sync import SyncOptions, WeightSync
from skyrl_train.workers.group import WorkerGroup
from skyrl_train.workers.ranks import LocalRank

pytest.importorskip("megatron.core", reason="needs megatron-core, the extra mcore of skyrl-train")
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.megatron]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PADDING = 7  # a token that rows contain: its embedding is not trained
MODELS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL | {"head_dim": 16}, tie_word_embeddings=False, pad_token_id=PADDING),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True, pad_token_id=PADDING),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
}
N_TOKENS = SMALL["vocab_size"]  # odd: the last rank's part of the vocabulary is padded

TENSOR = MegatronConfig(tensor_model_parallel_size=2)
SEQUENCE = MegatronConfig(tensor_model_parallel_size=2, sequence_parallel=True)
PIPELINE = MegatronConfig(pipeline_model_parallel_size=2)
CONTEXT = MegatronConfig(context_parallel_size=2)
DATA = MegatronConfig()
LAYOUTS = {"tensor": TENSOR, "sequence": SEQUENCE, "pipeline": PIPELINE, "context": CONTEXT}
CASES_IN_CI = [("tensor", "qwen3"), ("sequence", "qwen2"), ("pipeline", "llama")]  # context: with rows of any length
ADAPTERS_IN_CI = [("tensor", "llama"), ("sequence", "qwen3"), ("pipeline", "qwen2")]
MERGED = {"merge_on_export": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_ranks() -> AsyncIterator[list[ProcessRank]]:
    """Two rank processes, shared by the tests of this module."""
    ranks = start_ranks(2)
    yield ranks
    for rank in ranks:
        await rank.close()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of models with random weights."""
    folders = {}
    for name, settings in MODELS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(settings)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def adapters(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of adapters with random weights."""
    folders = {}
    for name, path in paths.items():
        model = load(path)
        add_adapter(model, LoraSpec(LoraConfig(rank=3, alpha=12), "lora", str(path)))
        tensors = trained_parameters(model)
        generator = torch.Generator().manual_seed(1)
        for tensor in tensors.values():
            tensor.data.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
        folders[name] = tmp_path_factory.mktemp("adapter")
        save_adapter(model, tensors, str(path), folders[name])
    return folders


def load(path: Path, *, dtype: torch.dtype = torch.float32, gradient_checkpointing: bool = False) -> PreTrainedModel:
    cpu = torch.device("cpu")
    return load_model(str(path), dtype=dtype, device=cpu, gradient_checkpointing=gradient_checkpointing)


def save_nothing(folder: str) -> None:
    """Do nothing; there is no tokenizer to save."""


def spec(
    path: Path, megatron: MegatronConfig | None = None, lora: dict[str, Any] | None = None, **loading: Any
) -> ModelSpec:
    """Return the spec of a policy, or of its adapter, whose gradients are clipped in most steps."""
    optimizer = {"lr": 1e-4 if lora is None else 1e-3, "scheduler": "linear", "num_warmup_steps": 2}
    policy = {"optimizer_config": optimizer, "model": {"path": str(path), "lora": lora or {}}}
    cfg = config(micro_train_batch_size_per_gpu=3, policy=policy).trainer
    of_policy = replace(
        optimizer_spec(cfg.policy.optimizer_config, "trainer.policy.optimizer_config", 10), max_grad_norm=0.5
    )
    made = model_spec(
        "policy",
        partial(load, path, **loading),
        save_nothing,
        cfg,
        cfg.algorithm.temperature,
        of_policy,
        lora_spec(cfg.policy.model, "trainer.policy.model.lora", cfg.seed),
    )
    return replace(made, megatron=megatron)


def single_rank() -> LocalRank:
    return LocalRank(ThreadPoolExecutor(1), SingleStrategy(World()))


async def load_group(ranks: Any, spec: ModelSpec, objective: Objective | None = None) -> WorkerGroup:
    """Load a model with an objective, by default GRPO's with a bonus for entropy."""
    group = WorkerGroup(
        spec, ranks, objective or policy_objective(config(algorithm={"use_entropy_loss": True}).trainer)
    )
    await group.load()
    return group


async def save(group: WorkerGroup, folder: Path) -> Path:
    await (await group.save(folder))
    return folder


async def tensors(group: WorkerGroup, folder: Path) -> dict[str, torch.Tensor]:
    """Return the exported weights of a group."""
    await group.export(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


async def train(
    group: WorkerGroup, batches: Sequence[TrainingBatch]
) -> list[tuple[dict[str, torch.Tensor], dict[str, float]]]:
    """Return scores before and metrics of a step on each batch."""
    return [(await group.score(batch), (await group.update(batch)).numbers()) for batch in batches]


async def compare(
    ranks: list[ProcessRank],
    path: Path,
    megatron: MegatronConfig,
    tmp_path: Path,
    lora: dict[str, Any] | None = None,
    batches: Sequence[TrainingBatch] | None = None,
    **loading: Any,
) -> None:
    """Assert that steps on batches, by default five, have the scores, metrics and weights of one process."""
    batches = batches or [off_policy_batch(load(path), N_TOKENS, seed=seed) for seed in range(5)]
    single = await load_group([single_rank()], spec(path, lora=lora))
    divided = await load_group(ranks, spec(path, megatron, lora, **loading))
    steps = zip(await train(single, batches), await train(divided, batches), strict=True)
    for (expected, expected_metrics), (scores, metrics) in steps:
        for name in ("logprobs", "entropy", "sum_pi_squared"):
            torch.testing.assert_close(scores[name], expected[name], rtol=0, atol=2e-5, msg=name)
        assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)
    before, after = load(path).state_dict(), await tensors(single, tmp_path / "single")
    assert max((after[name] - before[name]).abs().max().item() for name in after) > 1e-4, "nothing was trained"
    for name, tensor in (await tensors(divided, tmp_path / "divided")).items():
        torch.testing.assert_close(tensor, after[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("megatron", "model"),
    [
        pytest.param(
            megatron, model, marks=() if (kind, model) in CASES_IN_CI else pytest.mark.nightly, id=f"{kind}-{model}"
        )
        for kind, megatron in LAYOUTS.items()
        for model in MODELS
    ],
)
async def test_five_steps_equal_those_of_one_process(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, model: str, megatron: MegatronConfig
) -> None:
    await compare(two_ranks, paths[model], megatron, tmp_path)


async def test_data_parallel_ranks_sum_their_gradients(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path
) -> None:
    await compare(two_ranks, paths["qwen3"], DATA, tmp_path)


@pytest.mark.parametrize(
    ("megatron", "model"),
    [
        pytest.param(
            megatron, model, marks=() if (kind, model) in ADAPTERS_IN_CI else pytest.mark.nightly, id=f"{kind}-{model}"
        )
        for kind, megatron in (LAYOUTS | {"data": DATA}).items()
        for model in MODELS
    ],
)
async def test_five_steps_of_an_adapter_equal_those_of_one_process(
    two_ranks: list[ProcessRank],
    paths: dict[str, Path],
    adapters: dict[str, Path],
    tmp_path: Path,
    model: str,
    megatron: MegatronConfig,
) -> None:
    await compare(two_ranks, paths[model], megatron, tmp_path, {"lora_path": str(adapters[model])} | MERGED)
    adapter_files = [load_file(tmp_path / name / "lora_adapter" / WEIGHTS) for name in ("single", "divided")]
    assert adapter_files[0].keys() == adapter_files[1].keys()
    for name, tensor in adapter_files[0].items():
        torch.testing.assert_close(adapter_files[1][name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize("megatron", [TENSOR, SEQUENCE, PIPELINE], ids=["tensor", "sequence", "pipeline"])
@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "v_proj"], ["k_proj", "up_proj"], ["o_proj"]], ids=str)
async def test_a_new_adapter_of_some_matrices(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, megatron: MegatronConfig, modules: Any
) -> None:
    lora = {"rank": 3, "alpha": 6, "target_modules": modules, "init_method": "gaussian"} | MERGED
    await compare(two_ranks, paths["qwen2"], megatron, tmp_path, lora)


@pytest.mark.nightly
@pytest.mark.parametrize("megatron", [SEQUENCE, PIPELINE], ids=["sequence", "pipeline"])
async def test_gradient_checkpointing_of_an_adapter(
    two_ranks: list[ProcessRank], paths: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, megatron: Any
) -> None:
    lora = {"lora_path": str(adapters["qwen3"])} | MERGED
    await compare(two_ranks, paths["qwen3"], megatron, tmp_path, lora, gradient_checkpointing=True)


@pytest.mark.parametrize(
    "megatron",
    [
        pytest.param(TENSOR, id="tensor"),
        pytest.param(PIPELINE, id="pipeline"),
        pytest.param(CONTEXT, id="context", marks=pytest.mark.nightly),
    ],
)
async def test_gradient_checkpointing_changes_nothing(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, megatron: MegatronConfig
) -> None:
    await compare(two_ranks, paths["qwen2"], megatron, tmp_path, gradient_checkpointing=True)


@pytest.mark.nightly
@pytest.mark.parametrize("trains_adapter", [False, True])
async def test_all_kinds_of_parallelism_at_once(
    paths: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, trains_adapter: bool
) -> None:
    ranks = start_ranks(4)
    qwen2, qwen3 = (
        {"lora_path": str(adapters[name])} | MERGED if trains_adapter else None for name in ("qwen2", "qwen3")
    )
    try:
        await compare(ranks, paths["qwen2"], TENSOR, tmp_path / "tensor × data", qwen2)
        everything = MegatronConfig(
            tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True
        )
        await compare(ranks, paths["qwen2"], everything, tmp_path / "tensor × pipeline", qwen2)
        await compare(ranks, paths["qwen3"], PIPELINE, tmp_path / "pipeline × data", qwen3)
    finally:
        for rank in ranks:
            await rank.close()


def make_batch(path: Path, lengths: Sequence[tuple[int, int, int]]) -> TrainingBatch:
    """Return a batch of random rows, each a prompt, sampled tokens and an observation of the given lengths."""
    rng, trajectories = random.Random(0), []
    for n_prompt, n_sampled, n_observed in lengths:
        prompt, response = ([rng.randrange(3, N_TOKENS) for _ in range(n)] for n in (n_prompt, n_sampled + n_observed))
        was_sampled = [True] * n_sampled + [False] * n_observed
        rewards = [*[0.0] * (len(response) - 1), rng.random()]
        row = OracleRow(prompt, response, was_sampled, rewards, [0.0] * len(response))
        trajectories.append(OracleTrajectory("p0", [row]))
    return score_off_policy(load(path), as_batch(trajectories, config()))


UNEVEN_ROWS = [(1, 1, 0), (3, 90, 0), (2, 5, 2), (7, 13, 0), (40, 1, 0)]
ROWS_OF_FIRST_CONTEXT_RANK = [(30, 2, 0), (29, 3, 0)]  # all predictions are in the last of four chunks
ROWS_OF_SECOND_CONTEXT_RANK = [(9, 3, 12), (8, 4, 11)]  # all predictions are in the second one


async def test_context_parallelism_with_rows_of_any_length(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path
) -> None:
    path = paths["qwen2"]
    batches = [
        make_batch(path, rows) for rows in (UNEVEN_ROWS, ROWS_OF_FIRST_CONTEXT_RANK, ROWS_OF_SECOND_CONTEXT_RANK)
    ]
    await compare(two_ranks, path, CONTEXT, tmp_path, batches=batches)


@pytest.mark.parametrize(
    ("model", "megatron"),
    [
        pytest.param(
            "qwen2",
            MegatronConfig(context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True),
            id="sequence",
        ),
        pytest.param(
            "qwen3",
            MegatronConfig(context_parallel_size=2, tensor_model_parallel_size=2),
            id="tensor",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "qwen2",
            MegatronConfig(context_parallel_size=2, pipeline_model_parallel_size=2),
            id="pipeline",
            marks=pytest.mark.nightly,
        ),
        pytest.param("qwen2", CONTEXT, id="data", marks=pytest.mark.nightly),
        pytest.param("llama", MegatronConfig(context_parallel_size=4), id="context", marks=pytest.mark.nightly),
    ],
)
async def test_context_parallelism_with_other_kinds(
    paths: dict[str, Path], tmp_path: Path, model: str, megatron: MegatronConfig
) -> None:
    batches = [
        make_batch(paths[model], UNEVEN_ROWS),
        make_batch(paths[model], ROWS_OF_SECOND_CONTEXT_RANK),
        off_policy_batch(load(paths[model]), N_TOKENS, seed=0),
    ]
    ranks = start_ranks(4)
    try:
        await compare(ranks, paths[model], megatron, tmp_path, batches=batches)
    finally:
        for rank in ranks:
            await rank.close()


async def test_context_ranks_count_their_own_tokens(two_ranks: list[ProcessRank], paths: dict[str, Path]) -> None:
    batch = off_policy_batch(load(paths["qwen2"]), N_TOKENS, seed=1)
    limited = replace(spec(paths["qwen2"]), max_rows_train=None, max_tokens_per_micro_batch=40)
    divided = await load_group(two_ranks, replace(limited, megatron=CONTEXT))
    whole = await load_group([single_rank()], replace(limited, max_tokens_per_micro_batch=80))
    whole._shares_prefixes = False  # which Megatron-Core does not
    ((shard,), _), ((expected,), _) = (group._split(batch, None) for group in (divided, whole))
    assert shard.micro_batches == expected.micro_batches
    assert 1 < len(shard.micro_batches) < len(batch)


@pytest.mark.parametrize("megatron", [SEQUENCE, PIPELINE], ids=["sequence", "pipeline"])
async def test_a_model_that_moves_between_calls_trains_bit_for_bit_alike(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, megatron: MegatronConfig
) -> None:
    path = paths["qwen2"]  # with tied embeddings
    batches = [off_policy_batch(load(path), N_TOKENS, seed=seed) for seed in range(3)]
    stationary = await load_group(two_ranks, spec(path, megatron))
    expected = [(await stationary.update(batch)).numbers() for batch in batches]
    weights = await tensors(stationary, tmp_path / "stationary")
    moved = await load_group(two_ranks, spec(path, megatron))
    assert await train_with_moves(moved, batches) == expected
    for name, tensor in (await tensors(moved, tmp_path / "moved")).items():
        assert torch.equal(tensor, weights[name]), name


async def test_a_loss_of_pairs(two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path) -> None:
    batch = as_batch(random_trajectories(4, 2, N_TOKENS, seed=1), config())
    batch.ref_logprobs = torch.zeros_like(batch.loss_mask)
    batch.rewards = torch.zeros_like(batch.loss_mask)
    batch.rewards[::2, -1] = 1.0
    metrics = []
    for ranks, megatron in (([single_rank()], None), (two_ranks, PIPELINE)):
        group = await load_group(ranks, spec(paths["qwen3"], megatron), PreferenceObjective(0.1, 0.0, "sigmoid"))
        metrics.append((await group.update(batch)).numbers())
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)


async def test_rows_without_trained_tokens_change_nothing(two_ranks: list[ProcessRank], paths: dict[str, Path]) -> None:
    batch = off_policy_batch(load(paths["qwen2"]), N_TOKENS, seed=1)
    batch.loss_mask[1:] = 0
    norms = []
    for ranks, megatron in (([single_rank()], None), (two_ranks, DATA), (two_ranks, PIPELINE)):
        group = await load_group(ranks, spec(paths["qwen2"], megatron))
        norms.append((await group.update(batch)).numbers()["grad_norm"])
    assert norms[1:] == pytest.approx([norms[0], norms[0]], rel=1e-4)
    batch.loss_mask.zero_()
    metrics = (await group.update(batch)).numbers()
    assert metrics["skipped_updates"] == 0
    assert "grad_norm" not in metrics, "no rank has a gradient"


async def test_an_infinite_gradient_skips_the_step_on_all_ranks(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path
) -> None:
    batch = off_policy_batch(load(paths["qwen2"]), N_TOKENS, seed=1)
    group = await load_group(two_ranks, spec(paths["qwen2"], PIPELINE))
    before = await tensors(group, tmp_path / "before")
    assert batch.advantages is not None
    batch.advantages[0] = torch.inf
    assert (await group.update(batch)).numbers()["skipped_updates"] == 1
    after = await tensors(group, tmp_path / "after")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert await group.is_finite()


@pytest.mark.parametrize(
    ("first", "second", "trains_adapter"),
    [
        (TENSOR, PIPELINE, False),
        (PIPELINE, TENSOR, False),
        (TENSOR, None, False),
        (None, SEQUENCE, False),
        (SEQUENCE, None, True),
        pytest.param(TENSOR, PIPELINE, True, marks=pytest.mark.nightly),
        pytest.param(PIPELINE, TENSOR, True, marks=pytest.mark.nightly),
        pytest.param(None, PIPELINE, True, marks=pytest.mark.nightly),
        pytest.param(CONTEXT, TENSOR, False, marks=pytest.mark.nightly),
        pytest.param(PIPELINE, CONTEXT, True, marks=pytest.mark.nightly),
    ],
)
async def test_a_checkpoint_resumes_in_another_layout(
    two_ranks: list[ProcessRank],
    paths: dict[str, Path],
    adapters: dict[str, Path],
    tmp_path: Path,
    first: MegatronConfig | None,
    second: MegatronConfig | None,
    trains_adapter: bool,
) -> None:
    path = paths["qwen2"]  # with tied embeddings
    lora = {"lora_path": str(adapters["qwen2"])} | MERGED if trains_adapter else None
    batches = [off_policy_batch(load(path), N_TOKENS, seed=seed) for seed in range(2)]
    group = await load_group(two_ranks, spec(path, first, lora))  # None: FSDP2
    await group.update(batches[0])
    folder = await save(group, tmp_path / "policy")
    expected = (await group.update(batches[1])).numbers()
    weights = await tensors(group, tmp_path / "expected")
    for ranks, megatron in ((two_ranks, first), (two_ranks, second), ([single_rank()], None)):
        resumed = await load_group(ranks, spec(path, megatron, lora))
        await resumed.load_state(folder)
        assert (await resumed.update(batches[1])).numbers() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for name, tensor in (await tensors(resumed, tmp_path / "resumed")).items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-5, msg=name)


async def test_the_same_layout_resumes_exactly(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path
) -> None:
    batches = [off_policy_batch(load(paths["qwen3"]), N_TOKENS, seed=seed) for seed in range(2)]
    group = await load_group(two_ranks, spec(paths["qwen3"], TENSOR))
    await group.update(batches[0])
    folder = await save(group, tmp_path / "policy")
    expected = (await group.update(batches[1])).numbers()
    resumed = await load_group(two_ranks, spec(paths["qwen3"], TENSOR))
    await resumed.load_state(folder)
    assert (await resumed.update(batches[1])).numbers() == expected
    weights, again = [await tensors(g, tmp_path / name) for g, name in ((group, "a"), (resumed, "b"))]
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


@pytest.mark.nightly
@pytest.mark.parametrize("megatron", [TENSOR, SEQUENCE, PIPELINE], ids=["tensor", "sequence", "pipeline"])
async def test_a_float32_adapter_on_a_bfloat16_model(
    two_ranks: list[ProcessRank], paths: dict[str, Path], adapters: dict[str, Path], megatron: MegatronConfig
) -> None:
    path, lora = paths["qwen3"], {"lora_path": str(adapters["qwen3"])}
    batch, metrics = off_policy_batch(load(path), N_TOKENS, seed=1), []
    for ranks, layout in (([single_rank()], None), (two_ranks, megatron)):
        group = await load_group(ranks, spec(path, layout, lora, dtype=torch.bfloat16))
        metrics.append((await group.update(batch)).numbers())
        assert {tensor.dtype for tensor in await group.tensor_specs("adapter")} == {torch.float32}
        assert {tensor.dtype for tensor in await group.tensor_specs()} == {torch.bfloat16}
    for name in ("grad_norm", "adapter_norm"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=2e-2)


async def test_a_checkpoint_that_lacks_a_killed_rank_is_incomplete(paths: dict[str, Path], tmp_path: Path) -> None:
    ranks = start_ranks(2)
    try:
        group = await load_group(ranks, spec(paths["qwen3"], TENSOR))
        await group.update(off_policy_batch(load(paths["qwen3"]), N_TOKENS, seed=0))
        folder = await save(group, tmp_path / "first")
        ranks[1]._process.kill()
        with pytest.raises(Exception, match=r"rank 1 .*ended|could not be written|Connection closed"):
            await asyncio.wait_for(save(group, tmp_path / "second"), 60)
        assert not (tmp_path / "second/.metadata").exists(), "it would be taken for complete"
    finally:
        for rank in ranks:
            await rank.close()
    resumed = await load_group([single_rank()], spec(paths["qwen3"]))
    await resumed.load_state(folder)


async def test_an_export_has_the_weights_that_were_loaded(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path
) -> None:
    for model, path in paths.items():
        for megatron in (TENSOR, PIPELINE):
            exported = await tensors(await load_group(two_ranks, spec(path, megatron)), tmp_path / model)
            for name, tensor in load(path).state_dict().items():
                assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize("megatron", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
async def test_weights_loaded_in_bfloat16_are_trained_in_float32(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, megatron: MegatronConfig
) -> None:
    path, results = paths["qwen2"], []
    batch = off_policy_batch(load(path), N_TOKENS, seed=1)
    for name, ranks, layout in (("single", [single_rank()], None), ("divided", two_ranks, megatron)):
        group = await load_group(ranks, spec(path, layout, dtype=torch.bfloat16))
        for _ in range(3):
            await group.update(batch)
        assert {tensor.dtype for tensor in await group.tensor_specs()} == {torch.bfloat16}
        reader = single_rank()
        await (await load_group([reader], spec(path))).load_state(await save(group, tmp_path / name))
        weights = dict(reader.worker.module.hf_model.named_parameters())
        exported = await tensors(group, tmp_path / f"{name}_export")
        assert all(torch.equal(exported[key], value.bfloat16().float()) for key, value in weights.items())
        results.append(weights)
    for key, start in load(path, dtype=torch.bfloat16).named_parameters():
        torch.testing.assert_close(results[1][key], results[0][key], rtol=0, atol=1e-6, msg=key)
        assert not torch.equal(results[0][key], results[0][key].bfloat16()), f"{key} was rounded"
        assert (results[0][key] - start).abs().max() < 1e-3, f"{key} did not start from the rounded weights"


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4} | MERGED, marks=pytest.mark.nightly)])
async def test_a_checkpoint_is_merged_into_a_hugging_face_folder(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    group = await load_group(two_ranks, spec(paths["qwen2"], PIPELINE, lora))
    batch = off_policy_batch(load(paths["qwen2"]), N_TOKENS, seed=0)
    for _ in range(2):  # the learning rate starts at 0
        await group.update(batch)
    merge_checkpoint(await save(group, tmp_path / "policy"), tmp_path / "merged")
    exported = await tensors(group, tmp_path / "export")
    merged = load(tmp_path / "merged").state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in exported.items())


@pytest.mark.parametrize(
    "megatron",
    [
        pytest.param(TENSOR, id="tensor"),
        pytest.param(PIPELINE, id="pipeline"),
        pytest.param(CONTEXT, id="context", marks=pytest.mark.nightly),
    ],
)
async def test_weights_are_sent_to_and_received_by_other_groups(
    two_ranks: list[ProcessRank], paths: dict[str, Path], megatron: MegatronConfig
) -> None:
    path = paths["qwen2"]
    batch = off_policy_batch(load(path), N_TOKENS, seed=1)
    group = await load_group(two_ranks, spec(path, megatron))
    other = await load_group([single_rank()], spec(path))
    await group.update(batch)  # the learning rate starts at 0
    await group.update(batch)
    await WeightSync(group, {"other": other}, SyncOptions("broadcast", chunk_bytes=5_000, timeout_s=60))(1)
    scores = await other.score(batch)
    torch.testing.assert_close((await group.score(batch))["logprobs"], scores["logprobs"], rtol=0, atol=2e-5)
    await other.update(batch)
    await other.update(batch)
    await WeightSync(other, {"group": group}, SyncOptions("broadcast", chunk_bytes=5_000, timeout_s=60))(2)
    expected = (await other.score(batch))["logprobs"]
    assert not torch.equal(expected, scores["logprobs"])
    torch.testing.assert_close((await group.score(batch))["logprobs"], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "megatron", [SEQUENCE, pytest.param(PIPELINE, marks=pytest.mark.nightly)], ids=["sequence", "pipeline"]
)
async def test_an_adapter_is_sent_and_switched_off(
    two_ranks: list[ProcessRank], paths: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, megatron: Any
) -> None:
    path, lora = paths["qwen3"], {"lora_path": str(adapters["qwen3"])}
    batch = off_policy_batch(load(path), N_TOKENS, seed=1)
    group = await load_group(two_ranks, spec(path, megatron, lora))
    base, adapted = (
        await load_group([single_rank()], spec(path)),
        await load_group([single_rank()], spec(path, None, lora)),
    )
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
    merged = await tensors(base, tmp_path)
    assert all(torch.equal(mirrored.tensors[name], merged[name]) for name in mirrored.tensors)
    await adapted.update(batch)
    await adapted.update(batch)
    await WeightSync(adapted, {"group": group}, options, kind="adapter")(2)
    received = (await group.score(batch))["logprobs"]
    torch.testing.assert_close(received, (await adapted.score(batch))["logprobs"], rtol=0, atol=2e-5)
    assert not torch.equal(received, expected)


@pytest.mark.parametrize(
    "megatron", [TENSOR, pytest.param(SEQUENCE, marks=pytest.mark.nightly)], ids=["tensor", "sequence"]
)
async def test_ranks_that_share_a_matrix_drop_the_same_inputs_of_its_adapter(
    two_ranks: list[ProcessRank], paths: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, megatron: Any
) -> None:
    path, lora = paths["qwen3"], {"lora_path": str(adapters["qwen3"])}
    batch = off_policy_batch(load(path), N_TOKENS, seed=1)

    def with_dropout(spec: ModelSpec, dropout: float) -> ModelSpec:
        assert spec.lora is not None
        settings = spec.lora.config.model_copy(update={"dropout": dropout})
        return replace(spec, lora=replace(spec.lora, config=settings))

    other = await load_group(two_ranks, with_dropout(spec(path, None, lora), 0.5))  # FSDP2: ranks differ
    await other.update(batch)
    folder = await save(other, tmp_path / "other")
    norms = []
    for dropout, recomputes in ((0.0, False), (0.5, False), (0.5, True)):
        exact = spec(path, megatron, lora, gradient_checkpointing=recomputes)
        group = await load_group(two_ranks, with_dropout(exact, dropout))
        await group.load_state(folder)
        norms.append([(await group.update(batch)).numbers()["grad_norm"] for _ in range(2)])
    assert norms[1] == pytest.approx(norms[2], rel=1e-4), "layers that are recomputed drop other inputs"
    assert norms[1] != pytest.approx(norms[0], rel=1e-4), "nothing was dropped"
    scores = await group.score(batch)
    assert torch.equal((await group.score(batch))["logprobs"], scores["logprobs"]), "scores are random"
    single = await load_group([single_rank()], spec(path, None, lora))
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
        await load_group(two_ranks, spec(paths["llama"], megatron, {"rank": 2, "target_modules": modules}))


@pytest.mark.parametrize(
    ("change", "megatron", "message"),
    [
        (
            {"num_key_value_heads": 1},
            TENSOR,
            r"tensor_model_parallel_size=2 must divide the 1 key-value heads of .*_size=1",
        ),
        ({"num_hidden_layers": 3}, PIPELINE, r"pipeline_model_parallel_size=2 must divide the 3 layers of .*_size=1"),
        ({"hidden_act": "gelu"}, TENSOR, "does not support the activation gelu; set trainer.strategy=fsdp2"),
        (
            {"attention_bias": True},
            TENSOR,
            r"does not support the tensor model\.layers\.0\.self_attn\..*bias of a Llama",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, TENSOR, "of type dynamic"),
    ],
)
async def test_models_that_cannot_be_divided_are_refused(
    two_ranks: list[ProcessRank], tmp_path: Path, change: dict[str, Any], megatron: MegatronConfig, message: str
) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL | change)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        await load_group(two_ranks, spec(tmp_path, megatron))


async def test_other_architectures_are_refused(two_ranks: list[ProcessRank], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(MistralConfig(**SMALL)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"strategy=megatron does not support a MistralForCausalLM; set .*=fsdp2"):
        await load_group(two_ranks, spec(tmp_path, TENSOR))
