from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from train_kit import runs
from train_kit.architectures import tiny_config
from train_kit.batches import random_batch
from train_kit.engines import LIMITS
from train_kit.models import create_model, load_on_cpu
from train_kit.runs import assert_close_runs, expect_error, train
from train_kit.workers import complete, make_worker
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.models.last_layer import narrow_last_layer
from skyrl_train.models.prefix_sharing import use_attention
from skyrl_train.models.routing import Routers
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.types import UNKNOWN_EXPERT, Segment, TrainingBatch, Trajectory, TrajectoryID
from skyrl_train.workers.group import WorkerGroup

PACKED = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")
SENSITIVE = {"num_experts": 64, "num_experts_per_tok": 1, "norm_topk_prob": True, "num_hidden_layers": 8}
SENSITIVE |= {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64, "layer_types": ["full_attention"] * 8}
"""Top-1 of 64 experts with weight 1, so a flipped choice changes the log-prob a lot."""


async def roll_out(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TrainingBatch:
    """Roll out four samples of each of five prompts. The cache is too small for all, so some are preempted."""
    options = LIMITS | {"max_num_batched_tokens": 64, "records_experts": True}
    bytes_per_token = PackedEngine(model, tokenizer, **options)._bytes_per_token
    engine = PackedEngine(model, tokenizer, **options | {"max_cache_bytes": 640 * bytes_per_token})
    prompts = [list(range(3, 8 + 9 * n)) for n in range(5)]
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    requests = [EngineRequest(list(p), sampling, seed=9 * i + j) for i, p in enumerate(prompts) for j in range(4)]
    trajectories = []
    for number, (request, result) in enumerate(zip(requests, await engine.generate(requests), strict=True)):
        segment = Segment.start(list(request.prompt_ids))
        segment.append_sampled(result.token_ids, result.logprobs, None)
        segment.experts = result.experts
        trajectories.append(Trajectory(TrajectoryID("0", number, number // 4), "env", "data", (segment,), "stop"))
    await engine.close()
    return build_training_batch(trajectories, tokenizer.pad_token_id)


def score(model: PreTrainedModel, batch: TrainingBatch, *, replays: bool, shares: bool) -> torch.Tensor:
    """Return the log-probs (N,) of the sampled tokens."""
    module = ScoringModule(model, replays_experts=replays)
    module.shares_prefixes = shares
    return module(batch).logprobs[batch.loss_mask.bool()]


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("is_narrowed", [False, True])
async def test_the_engine_records_the_experts_that_the_trainer_chooses(
    name: str, is_narrowed: bool, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = create_model(tiny_config(name, tiny_tokenizer)).eval()
    if is_narrowed:
        narrow_last_layer(model)
    batch = await roll_out(model, tiny_tokenizer)
    assert batch.experts is not None
    is_read = batch.attention_mask.bool() & (batch.experts != UNKNOWN_EXPERT).any(dim=-1).any(dim=-1)
    assert is_read.sum() == batch.attention_mask.sum() - len(batch), "all but the last token of each row"
    for row, mask in enumerate(is_read):
        recorded = batch.experts[row, mask]  # (t, layers, K)
        chosen = [torch.full_like(part, UNKNOWN_EXPERT) for part in recorded.unbind(1)]
        with torch.no_grad(), Routers.of(model).recording(chosen.__setitem__):
            model.base_model(input_ids=batch.sequences[row, mask][None], use_cache=False)
        torch.testing.assert_close(recorded, torch.stack(chosen, dim=1), check_dtype=False)


@pytest.mark.parametrize("shares", [False, True])
async def test_replay_lowers_the_gap_in_bfloat16_fivefold(
    shares: bool, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    config = tiny_config("qwen3_moe", tiny_tokenizer)
    config.update(SENSITIVE)
    model = create_model(config).to(torch.bfloat16).eval()
    batch = await roll_out(model, tiny_tokenizer)
    assert batch.rollout_logprobs is not None
    expected = batch.rollout_logprobs[batch.loss_mask.bool()]
    with torch.no_grad():
        usual, replayed = (
            (score(model, batch, replays=replays, shares=shares) - expected).abs().mean() for replays in (False, True)
        )
    assert replayed < usual / 5, f"{usual:.1e} and {replayed:.1e}"


@pytest.mark.parametrize("shares", [False, True])
async def test_replayed_experts_are_used_in_the_forward_and_backward_pass(
    shares: bool, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = create_model(tiny_config("qwen3_moe", tiny_tokenizer))
    batch = await roll_out(model.eval(), tiny_tokenizer)
    assert batch.experts is not None
    gradients = []
    for replays, checkpoints, shift in ((False, False, 0), (True, False, 0), (True, False, 1), (True, True, 1)):
        batch.experts = torch.where(batch.experts == UNKNOWN_EXPERT, batch.experts, (batch.experts + shift) % 4)
        model.zero_grad()
        model.train()
        (model.gradient_checkpointing_enable if checkpoints else model.gradient_checkpointing_disable)()
        with use_attention(model) if shares else nullcontext():  # the backward pass recomputes layers inside it
            score(model, batch, replays=replays, shares=shares).sum().backward()
        gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
        batch.experts = torch.where(batch.experts == UNKNOWN_EXPERT, batch.experts, (batch.experts - shift) % 4)
    own, replayed, shifted, shifted_recomputed = gradients
    torch.testing.assert_close(replayed, own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shifted_recomputed, shifted, rtol=1e-4, atol=1e-5)
    router = "model.layers.0.mlp.gate.weight"
    assert (shifted[router] - own[router]).abs().max() > 1e-2 * own[router].abs().max()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["generator.step_wise_trajectories=true"],
        ["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.target_modules=[o_proj]"],
    ],
    ids=["one row", "a row per turn", "an adapter"],
)
def test_a_run_in_float32_is_the_same_with_replay(
    overrides: list[str], catch: None, tmp_path: Path, catch_data: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = tmp_path / "model"
    create_model(tiny_config("qwen3_moe", tiny_tokenizer)).save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    overrides = [*overrides, "trainer.hf_save_interval=2"]
    usual, replayed = (
        train(
            *runs.catch_run(tmp_path, *overrides, model=model, data=catch_data, name=f"replay_{replays}"),
            f"trainer.algorithm.router_replay={replays}",
        )
        for replays in ("false", "true")
    )
    assert_close_runs(replayed, usual)


def test_routers_without_topk_are_refused(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    routers = Routers.of(create_model(tiny_config("qwen3_moe", tiny_tokenizer)))
    with (
        pytest.raises(ConfigError, match=r"do not choose experts with torch\.topk"),
        routers.recording(lambda *_: None),
    ):
        torch.ones(1, 4).topk(2)


def test_a_model_without_experts_is_refused(catch_run: list[str]) -> None:
    message = expect_error(*catch_run, "trainer.algorithm.router_replay=true")
    assert "trainer.algorithm.router_replay=true found no experts in a Qwen3ForCausalLM: it needs one of num" in message
    assert "topk in its configuration, and its layers in `base_model.layers`; set trainer" in message


@pytest.mark.parametrize("shares", [False, True])
def test_the_load_of_experts_is_the_one_counted_by_hand(shares: bool, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """Positions 1 to 3 predict trained tokens. The experts get 0, 3, 2 and 1 of them, and an equal share is 1.5."""
    module = ScoringModule(create_model(tiny_config("qwen3_moe", tiny_tokenizer)).eval(), replays_experts=True)
    module.shares_prefixes = shares
    experts = torch.tensor([[0, 3], [1, 2], [1, 2], [1, 3], [0, 3]])[None, :, None].repeat(1, 1, 4, 1)
    tokens, loss_mask = torch.tensor([[5, 6, 7, 8, 9]]), torch.ones(1, 3)
    batch = TrainingBatch(tokens, torch.ones_like(tokens), loss_mask, draws=torch.zeros(1), experts=experts)
    module(batch)  # nothing is counted outside the context
    with module.measuring_experts() as metrics:
        module(batch)
    assert metrics.numbers() == {"expert_load_max": 2.0, "expert_load_min": 0.0, "experts_unused": 0.25}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_the_counts_of_a_step_do_not_depend_on_micro_batches_and_ranks(
    name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """They equal the choices in each row alone. Scoring and recomputed layers are not counted."""
    create_model(tiny_config(name, tiny_tokenizer)).save_pretrained(tmp_path)
    model, batch = load_on_cpu(tmp_path, gradient_checkpointing=True), random_batch(1)
    counts: dict[int, torch.Tensor] = {}
    is_predicting = torch.zeros_like(batch.attention_mask, dtype=torch.bool)
    is_predicting[:, -batch.response_length - 1 : -1] = batch.loss_mask.bool()
    for tokens, is_token, is_counted in zip(batch.sequences, batch.attention_mask.bool(), is_predicting, strict=True):
        chosen: dict[int, torch.Tensor] = {}
        with torch.no_grad(), Routers.of(model).recording(chosen.__setitem__):
            model.base_model(input_ids=tokens[is_token][None], use_cache=False)
        for layer, experts in chosen.items():
            counts[layer] = counts.get(layer, 0) + experts[is_counted[is_token]].flatten().bincount(minlength=4)
    for n_rows, n_ranks in ((6, 1), (2, 1), (1, 1), (2, 2)):  # 1, 3 and 6 micro-batches, and 2 on each of two ranks
        worker = make_worker(model, micro_train_batch_size_per_gpu=n_rows)
        group = WorkerGroup(worker.group._spec, [worker.rank] * n_ranks, worker.group._objective)
        complete(group.load())
        complete(group.score(batch))
        metric = complete(group.forward_backward(batch))["experts_unused"]
        assert torch.equal(metric.counts, torch.stack(list(counts.values())))
