import copy
import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from train_kit.architectures import each_architecture, stated, tiny_config
from train_kit.batches import as_batch, fill_in_values, random_batch, random_row, random_trajectories, score_off_policy
from train_kit.models import create_model, load_on_cpu
from train_kit.oracle import OracleRow, OracleTrajectory
from train_kit.ranks import load_group, read_gradient, single_rank, train_with_moves
from train_kit.strategies import (
    MEGATRON,
    MERGED,
    N_TOKENS,
    Case,
    Strategies,
    assert_same_gradient,
    assert_same_weights,
    batch_for,
    layouts,
    param,
)
from train_kit.vision_models import image_batch, save_vision_model
from train_kit.workers import largest_difference, policy_objective
from transformers import AutoConfig, PreTrainedTokenizerBase

from skyrl_train.algorithms.objectives import (
    CrossEntropyObjective,
    PreferenceObjective,
    RewardObjective,
    ValueObjective,
)
from skyrl_train.config.algorithm import LossReduction
from skyrl_train.config.policy import FSDPConfig
from skyrl_train.dataset.supervised import build_rewarded_segment, build_supervised_batch
from skyrl_train.errors import ConfigError
from skyrl_train.models.lora import WEIGHTS
from skyrl_train.types import DrawnPrompt, TrainingBatch
from skyrl_train.types.specs import Role
from skyrl_train.weight_sync import SyncOptions, WeightSync

# -- batches


def step_wise_rows(n_turns: int, rng: random.Random) -> list[OracleRow]:
    """Return the rows of a trajectory whose turns each begin with all earlier turns."""
    rows = [random_row(rng, 7, 3, n_tokens=N_TOKENS)]
    for _ in range(n_turns - 1):
        turn = random_row(rng, 4, 5, n_tokens=N_TOKENS)
        rows.append(replace(turn, prompt_ids=rows[-1].token_ids + turn.prompt_ids))
    return rows


@cache
def batches_for(path: Path, kind: str) -> list[TrainingBatch]:
    """Return batches for a model, a step each."""
    rng = random.Random(0)

    def rows(*lengths: tuple[int, int, int]) -> list[OracleTrajectory]:
        return [OracleTrajectory(f"p{i // 2}", [random_row(rng, *n, n_tokens=N_TOKENS)]) for i, n in enumerate(lengths)]

    uneven = rows((1, 1, 0), (3, 90, 0), (2, 5, 2), (7, 13, 0), (40, 1, 0))
    rollouts = {
        "conversations": [random_trajectories(3, 3, seed, N_TOKENS) for seed in range(2)],
        "context": [
            uneven,
            rows((30, 2, 0), (29, 3, 0)),  # of four chunks, all predictions are in the last one, of the first rank
            rows((9, 3, 12), (8, 4, 11)),  # all predictions are in the second one, of the second rank
        ],
        "tokens": [
            uneven,
            [OracleTrajectory(f"p{i // 2}", step_wise_rows(1 + i % 4, rng)) for i in range(6)],
            rows(*[(5, 301 if i == 1 else 4, 0) for i in range(4)]),
            rows(*[(1, 1, 0)] * 6),
            rows((2, 3, 0), (30, 2, 0)),  # the first half of a row has no trained token
        ],
    }
    model = load_on_cpu(path)
    return [
        fill_in_values(score_off_policy(model, as_batch(trajectories)), seed)
        for seed, trajectories in enumerate(rollouts[kind])
    ]


# -- equal to one process


def with_reduction(name: str) -> dict[str, Any]:
    algorithm = {"loss_reduction": name, "max_seq_len": 40, "use_entropy_loss": True, "top_entropy_quantile": 0.5}
    return {"algorithm": algorithm}


CLIP_COV = {"objective": partial(policy_objective, loss="clip_cov"), "what": "a whole-batch loss"}
CRITIC = {"role": "critic", "objective": lambda _: ValueObjective(0.2), "what": "a critic"}
ANSWERS = {"objective": lambda _: CrossEntropyObjective(), "what": "cross entropy"}
RECOMPUTED = {"loading": {"gradient_checkpointing": True}, "what": "recomputed"}
ADAPTER = {"lora": {"adapter": True}, "what": "an adapter"}
MATRICES = ["all-linear", ["q_proj", "v_proj"], ["k_proj", "up_proj"], ["o_proj"]]


def cases(layout: str, models: str, *, nightly: str = "", **case: Any) -> list[Case]:
    """Return a case for each model."""
    by_default = [Case(layout, model, **case) for model in models.split()]
    return by_default + [Case(layout, model, **case, is_nightly=True) for model in nightly.split()]


CASES = [
    *cases("fsdp2", "qwen3", trainer={"micro_train_batch_size_per_gpu": 16}, what="all rows at once"),
    *cases("fsdp2", "", nightly="qwen3", trainer={"micro_train_batch_size_per_gpu": 1}, what="1 row at a time"),
    *cases("fsdp2", "qwen2", trainer=with_reduction("prompt_mean"), what="prompt_mean"),
    *(
        case
        for name in sorted({*get_args(LossReduction)} - {"prompt_mean"})
        for case in cases("fsdp2", "", nightly="qwen2", trainer=with_reduction(name), what=name)
    ),
    *cases("fsdp2", "qwen3", **CRITIC),
    *cases("fsdp2", "qwen3", **CRITIC | {"lora": {"rank": 4}, "what": "the adapter of a critic"}),
    *cases("fsdp2", "qwen2", **ADAPTER),
    *cases("fsdp2", "", nightly="qwen3", **ANSWERS),
    *cases("fsdp2", "", nightly="qwen3", **RECOMPUTED),
    *cases("fsdp2, kept", "llama", **CLIP_COV),
    *cases("fsdp2, two copies", "", nightly="llama"),
    *cases("four, fsdp2", "", nightly="qwen3"),
    *cases("four, fsdp2, two copies", "llama"),
    *cases("four, fsdp2, kept by two", "qwen2"),
    # Ranks divide the tokens of rows.
    *cases("tokens", "qwen3", batches="tokens", what="rows of all kinds"),
    *cases("tokens", "qwen3_moe", trainer=with_reduction("sequence_mean"), what="entropies"),
    *cases("tokens", "gemma", **CLIP_COV),
    *cases("tokens", "qwen3", **CRITIC),
    *cases("tokens", "mistral", **ANSWERS),
    *cases("tokens", "llama", **ADAPTER),
    *cases("tokens", "gpt2", nightly="qwen3", **RECOMPUTED),
    *cases("tokens", "", nightly="llama qwen2 qwen3_moe gemma mistral gpt2"),
    *cases("tokens, offloaded", "qwen2"),
    *cases("four, tokens × data", "", nightly="llama"),
    *cases("four, tokens", "qwen3", nightly="llama qwen2 qwen3_moe gemma mistral gpt2"),  # copies key and value heads
    # Megatron-Core
    *cases("tensor", "qwen3", nightly="qwen2 llama"),
    *cases("sequence", "qwen2", nightly="qwen3 llama"),
    *cases("pipeline", "llama", nightly="qwen3 qwen2"),
    *cases("data", "qwen3", nightly="qwen2 llama"),
    *cases("context", "qwen2", nightly="qwen3 llama", batches="context"),
    *cases("tensor", "llama", nightly="qwen3 qwen2", **ADAPTER),
    *cases("sequence", "qwen3", nightly="qwen2 llama", **ADAPTER),
    *cases("pipeline", "qwen2", nightly="qwen3 llama", **ADAPTER),
    *cases("data", "", nightly="qwen3 qwen2 llama", **ADAPTER),
    *cases("context", "", nightly="qwen3 qwen2 llama", **ADAPTER),
    *(
        case
        for layout in ("tensor", "sequence", "pipeline")
        for modules in MATRICES
        for case in cases(
            layout,
            "",
            nightly="qwen2",
            lora={"rank": 3, "init_method": "gaussian", "target_modules": modules},
            what=f"an adapter of {modules}",
        )
    ),
    *cases("tensor", "", nightly="qwen2", **RECOMPUTED),
    *cases("pipeline", "qwen2", **RECOMPUTED),
    *cases("context", "", nightly="qwen2", **RECOMPUTED),
    *cases("sequence", "", nightly="qwen3", **RECOMPUTED | {"lora": {"adapter": True}, "what": "a recomputed adapter"}),
    *cases("pipeline", "", nightly="qwen3", **RECOMPUTED | {"lora": {"adapter": True}, "what": "a recomputed adapter"}),
    *cases("four, context × sequence", "qwen2", batches="context"),
    *(
        case
        for layout in sorted(MEGATRON)
        if layout.startswith("four") and layout != "four, context × sequence"
        for case in (
            *cases(layout, "", nightly="qwen2", batches="context"),
            *cases(layout, "", nightly="qwen2", **ADAPTER),
        )
    ),
]


@pytest.mark.parametrize("case", [case.param for case in CASES])
async def test_steps_equal_those_of_one_process(strategies: Strategies, case: Case) -> None:
    """Compare the gradient of the first step, the metrics of each, and scores and weights after the last."""
    batches = batches_for(strategies.path(case.model), case.batches)
    lora = strategies.adapter(case.model) if case.lora == {"adapter": True} else case.lora
    lora = lora and lora | MERGED
    groups = []
    for layout in (None, case.layout):
        torch.manual_seed(0)  # clip_cov chooses tokens at random
        spec = strategies.spec(case.model, layout, lora, role=case.role, trainer=case.trainer, **case.loading)
        ranks = strategies.ranks(layout) if layout else [single_rank()]
        groups.append(await load_group(ranks, spec, case.objective(strategies.config(case.trainer))))
    alone, divided = groups
    for index, batch in enumerate(batches):
        torch.manual_seed(0)
        expected = (await alone.update(batch)).numbers()
        torch.manual_seed(0)
        assert (await divided.update(batch)).numbers() == pytest.approx(expected, rel=1e-4, abs=1e-5), f"step {index}"
        assert expected["grad_norm"] > 1e-3
        if index == 0:
            gradients = [read_gradient(await strategies.save(group)) for group in (divided, alone)]
            assert_same_gradient(*gradients)
    scores, expected_scores = await divided.score(batch), await alone.score(batch)
    for name in ("values",) if case.role == "critic" else ("logprobs", "entropy", "sum_pi_squared"):
        torch.testing.assert_close(scores[name], expected_scores[name], rtol=0, atol=2e-5, msg=name)
    assert await divided.is_finite()
    folders = [await strategies.export(group) for group in (divided, alone)]
    assert_same_weights(*(load_file(folder / "model.safetensors") for folder in folders))
    if lora:
        assert_same_weights(*(load_file(folder / "lora_adapter" / WEIGHTS) for folder in folders), atol=1e-4)


@each_architecture({"qwen3_5_text", "gpt_oss"})
@layouts("fsdp2", "tensor")
async def test_each_architecture_takes_a_step_as_in_one_process_or_is_rejected(
    strategies: Strategies, layout: str, name: str, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    folder = strategies.new_folder()
    create_model(tiny_config(name, tiny_tokenizer)).save_pretrained(folder)
    cell = stated()[name]["FSDP2" if layout == "fsdp2" else "Megatron"]
    if cell == "no":
        with pytest.raises(ConfigError, match="does not support"):
            await strategies.load(folder, layout)
        return
    assert cell == "yes"
    batch = batch_for(folder, seed=1)
    alone, divided = [await strategies.load(folder, each) for each in (None, layout)]
    expected = (await alone.update(batch)).numbers()
    assert (await divided.update(batch)).numbers() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    scores, expected_scores = await divided.score(batch), await alone.score(batch)
    torch.testing.assert_close(scores["logprobs"], expected_scores["logprobs"], rtol=0, atol=2e-5)


@layouts("fsdp2")
@pytest.mark.parametrize("trains_vision", [False, True])
@pytest.mark.parametrize("role", ["policy", "critic"])
async def test_rows_with_images_take_a_step_as_in_one_process(
    strategies: Strategies, layout: str, role: Role, *, trains_vision: bool
) -> None:
    folder = save_vision_model(strategies.new_folder(), "idefics3")
    batch = fill_in_values(image_batch(folder))
    settings: dict[str, Any] = {"change": lambda spec: replace(spec, trains_vision=trains_vision), "role": role}
    name = "logprobs"
    if role == "critic":
        critic = load_on_cpu(folder, role=role)
        torch.nn.init.normal_(critic.score.weight, std=0.2)
        critic.save_pretrained(folder)
        settings["objective"], name = ValueObjective(0.2), "values"
    alone, divided = [await strategies.load(folder, each, **settings) for each in (None, layout)]
    expected = (await alone.update(batch)).numbers()
    assert (await divided.update(batch)).numbers() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert expected["grad_norm"] > 1e-3
    scores, expected_scores = await divided.score(batch), await alone.score(batch)
    assert expected_scores[name].any()
    torch.testing.assert_close(scores[name], expected_scores[name], rtol=0, atol=2e-5)


@layouts("fsdp2", "pipeline", "data")
async def test_rows_without_trained_tokens_change_nothing(strategies: Strategies, layout: str) -> None:
    batch = copy.deepcopy(strategies.batch("qwen2"))
    batch.loss_mask[1:] = 0
    alone, divided = [await strategies.load("qwen2", each) for each in (None, layout)]
    expected, metrics = [(await group.update(batch)).numbers() for group in (alone, divided)]
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    batch.loss_mask.zero_()
    metrics = (await divided.update(batch)).numbers()
    assert metrics["skipped_updates"] == 0
    assert "grad_norm" not in metrics, "no rank has a gradient"


@layouts("fsdp2", "pipeline")
async def test_an_infinite_gradient_skips_the_step_on_all_ranks(strategies: Strategies, layout: str) -> None:
    batch = copy.deepcopy(strategies.batch("qwen2"))
    group = await strategies.load("qwen2", layout)
    before = await strategies.weights(group)
    batch.advantages[0] = torch.inf
    assert (await group.update(batch)).numbers()["skipped_updates"] == 1
    assert_same_weights(await strategies.weights(group), before, atol=0)
    assert await group.is_finite()


async def test_nan_weights_on_any_rank_are_found(strategies: Strategies) -> None:
    rank = single_rank()
    diverged = await load_group([rank], strategies.spec("qwen3"), policy_objective(strategies.config()))
    with torch.no_grad():  # one value, in the slice of the last rank
        rank.host.workers["policy"].module.get_parameter("model.model.layers.1.mlp.up_proj.weight")[-1, -1] = torch.nan
    group = await strategies.load("qwen3", "fsdp2")
    assert await group.is_finite()
    await WeightSync(diverged, {"group": group}, SyncOptions("gloo", timeout_s=60))(1)
    assert not await group.is_finite()


@layouts("fsdp2")
async def test_a_probe_does_not_depend_on_ranks(strategies: Strategies, layout: str) -> None:
    rows = strategies.batch("qwen3").select([0, 1, 2])  # some ranks get fillers
    expected, probe = [(await (await strategies.load("qwen3", each)).probe(rows)).numbers() for each in (None, layout)]
    assert probe == pytest.approx(expected, rel=1e-4)


@layouts(
    "fsdp2",
    "fsdp2, kept",
    "fsdp2, two copies",
    "sequence",
    "pipeline",
    nightly=["four, fsdp2, two copies", "four, fsdp2, kept by two"],
)
async def test_a_model_that_moves_between_calls_trains_bit_for_bit_alike(strategies: Strategies, layout: str) -> None:
    batches = [strategies.batch("qwen2", seed) for seed in range(2)]  # with tied embeddings
    stationary = await strategies.load("qwen2", layout)
    expected = [(await stationary.update(batch)).numbers() for batch in batches]
    weights, state = await strategies.weights(stationary), await strategies.save(stationary)
    moved = await strategies.load("qwen2", layout)
    assert await train_with_moves(moved, batches) == expected
    assert_same_weights(await strategies.weights(moved), weights, atol=0)
    if layout not in MEGATRON:
        after = await strategies.save(moved)
        for path in state.glob("*.distcp"):
            assert (after / path.name).read_bytes() == path.read_bytes(), path.name


async def test_ranks_of_context_parallelism_count_their_own_tokens(strategies: Strategies) -> None:
    batch = strategies.batch("qwen2")
    divided, whole = [
        await strategies.load(
            "qwen2", layout, change=lambda spec, n=n: replace(spec, max_rows_train=None, max_tokens_per_micro_batch=n)
        )
        for layout, n in (("context", 40), (None, 80))
    ]
    whole._shares_prefixes = False  # which Megatron-Core does not
    ((shard,), _), ((expected,), _) = (group._split(batch, None) for group in (divided, whole))
    assert shard.micro_batches == expected.micro_batches
    assert 1 < len(shard.micro_batches) < len(batch)


async def test_the_reference_is_divided_on_its_own(strategies: Strategies) -> None:
    """Policy and reference share processes, but not the size of their groups."""
    ranks, batch = strategies.ranks("tokens"), strategies.batch("qwen3")
    ref = replace(strategies.spec("qwen3", "tokens"), role="ref", optimizer=None)
    scores = []
    for model, objective in ((strategies.spec("qwen3"), policy_objective(strategies.config())), (ref, None)):
        group = await load_group(ranks, model, objective)
        scores.append(await group.score(batch))
    assert scores[0]["logprobs"].any()
    for name, values in scores[0].items():
        torch.testing.assert_close(scores[1][name], values, rtol=0, atol=2e-5, msg=name)


# -- objectives of pairs


@layouts("pipeline")
async def test_a_loss_of_pairs(strategies: Strategies, layout: str) -> None:
    batch = random_batch(1, n_prompts=4, n_samples=2, n_tokens=N_TOKENS)
    batch.ref_logprobs = torch.zeros_like(batch.loss_mask)
    batch.rewards = torch.zeros_like(batch.loss_mask)
    batch.rewards[::2, -1] = 1.0
    objective = PreferenceObjective(0.1, 0.0, "sigmoid")
    expected, metrics = [
        (await (await strategies.load("qwen3", each, objective=objective)).update(batch)).numbers()
        for each in (None, layout)
    ]
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "lora"),
    [
        param("fsdp2", {"rank": 4}),
        param("four, tokens × data", None),
        param("fsdp2", None, is_nightly=True),
        param("four, tokens × data", {"rank": 4}, is_nightly=True),
    ],
)
async def test_a_reward_model(strategies: Strategies, layout: str, lora: dict[str, Any] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 60, (n,), generator=generator).tolist() for n in (9, 4, 7, 7, 3, 12)]
    segments = [(build_rewarded_segment(row, 0),) for row in rows]
    pairs = enumerate(zip(segments[0::2], segments[1::2], strict=True))
    batch = build_supervised_batch([DrawnPrompt(i, pair, i) for i, pair in pairs], 0)
    settings: dict[str, Any] = {"role": "reward", "key": "trainer.policy.model.path", "pad_token_id": 0}
    alone, divided = [
        await strategies.load("qwen3", each, lora, objective=RewardObjective(), **settings) for each in (None, layout)
    ]
    losses = []
    for _ in range(3):
        expected, metrics = [(await group.update(batch)).numbers() for group in (alone, divided)]
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        losses.append(metrics["loss"])
    assert losses[-1] < losses[0] - 1e-4
    expected_values, values = [(await group.score(batch))["values"] for group in (alone, divided)]
    torch.testing.assert_close(values, expected_values, rtol=0, atol=1e-4)


# -- precision


async def test_blocks_compute_in_bfloat16_and_gradients_add_up_in_float32(strategies: Strategies) -> None:
    batch, scores, gradients = strategies.batch("qwen3"), [], []
    for precision in ({}, {"param_dtype": "bfloat16"}):
        group = await strategies.load(
            "qwen3", "fsdp2", max_grad_norm=1e9, change=lambda spec, p=precision: replace(spec, fsdp=FSDPConfig(**p))
        )
        scores.append((await group.score(batch))["logprobs"])
        await group.update(batch)
        gradients.append(read_gradient(await strategies.save(group)))
    assert 1e-4 < (scores[0] - scores[1]).abs().max() < 0.2, "blocks do not compute in bfloat16"
    assert {values.dtype for values in gradients[1].values()} == {torch.float32}
    largest = max(values.abs().max().item() for values in gradients[0].values())
    assert 1e-4 * largest < largest_difference(*gradients) < 0.5 * largest  # processors round differently
    rounded = torch.cat([values.flatten() for values in gradients[1].values()])
    assert (rounded != rounded.bfloat16()).float().mean() > 0.5, "the sum over ranks was rounded to bfloat16"


async def test_blocks_exchange_heads_in_bfloat16(strategies: Strategies) -> None:
    batch, results = strategies.batch("qwen3"), []
    for layout in ("fsdp2", "tokens"):
        group = await strategies.load(
            "qwen3", layout, change=lambda spec: replace(spec, fsdp=FSDPConfig(param_dtype="bfloat16"))
        )
        results.append(((await group.score(batch))["logprobs"], (await group.update(batch)).numbers()))
    (logprobs, metrics), (divided_logprobs, divided_metrics) = results
    torch.testing.assert_close(divided_logprobs, logprobs, rtol=0, atol=0.1)
    assert divided_metrics["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=0.05)


@layouts("fsdp2", "tensor", "pipeline")
async def test_weights_loaded_in_bfloat16_are_trained_in_float32(strategies: Strategies, layout: str) -> None:
    results, rounded = [], {"dtype": torch.bfloat16}
    for each in (None, layout):
        group = await strategies.load("llama", each, **rounded)
        for _ in range(2):
            await group.update(strategies.batch("llama"))
        assert {tensor.dtype for tensor in await group.tensor_specs()} == {torch.bfloat16}
        reader = single_rank()
        copy_ = await load_group([reader], strategies.spec("llama"), policy_objective(strategies.config()))
        await copy_.load_state(await strategies.save(group))
        model = reader.host.workers["policy"].module.hf_model
        trained = {name: p.detach().clone() for name, p in model.named_parameters()}
        results.append(trained)
        folder = await strategies.export(group)
        assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
        exported = load_file(folder / "model.safetensors")
        await WeightSync(group, {"copy": copy_}, SyncOptions("gloo", timeout_s=60))(1)
        for name, synced in model.named_parameters():
            assert torch.equal(exported[name], trained[name].bfloat16())
            assert torch.equal(exported[name].float(), synced)
    for name, start in load_on_cpu(strategies.path("llama"), **rounded).named_parameters():
        torch.testing.assert_close(results[1][name], results[0][name], rtol=0, atol=1e-6, msg=name)
        assert not torch.equal(results[0][name], results[0][name].bfloat16()), f"{name} was rounded"
        assert (results[0][name] - start).abs().max() < 1e-3, f"{name} did not start from the rounded weights"
