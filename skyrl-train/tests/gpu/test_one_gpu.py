"""The tiny model on one GPU: scores, the engine contract, and whole runs."""

import copy
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from train_kit.engine_contract import EngineContract
from train_kit.engines import EngineKit
from train_kit.runs import train
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.models import linear_head
from skyrl_train.models.fused import fuse_operations
from skyrl_train.models.linear_head import can_compile
from skyrl_train.models.loading import autocast, checkpointed_layers
from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.models.offload import OffloadedTensors
from skyrl_train.models.prefix_sharing import use_attention
from skyrl_train.workers.random_state import random_state, set_random_state


@pytest.fixture(scope="session")
def tiny_head_dim() -> int:
    """A head dimension that vLLM's attention supports."""
    return 64


@pytest.fixture
def gpu_model(tiny_model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the tiny model on the GPU, whose weights a test may change."""
    return copy.deepcopy(tiny_model).to("cuda")


def test_logprobs_equal_those_of_the_cpu(tiny_model: PreTrainedModel, gpu_model: PreTrainedModel) -> None:
    sequences = torch.randint(10, tiny_model.config.vocab_size, (8, 48), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.ones_like(sequences)
    attention_mask[:4, :7] = 0
    loss_mask = torch.ones(8, 16)
    batch = (sequences, attention_mask, loss_mask)
    expected = response_logprobs(tiny_model, *batch, temperature=1.0)
    result = response_logprobs(gpu_model, *(tensor.to("cuda") for tensor in batch), temperature=1.0)
    torch.testing.assert_close(result.logprobs.cpu(), expected.logprobs, atol=1e-4, rtol=0)


def score_and_differentiate(model: PreTrainedModel, bf16: bool, *, entropy_grad: bool) -> list[torch.Tensor]:
    """Return log-probs, entropies and the gradients of all weights."""
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(10, model.config.vocab_size, (8, 48), generator=generator).to(model.device)
    loss_mask = torch.ones(8, 16, device=model.device)
    model.zero_grad()
    with autocast(model.device, bf16):
        scores = response_logprobs(
            model,
            sequences,
            torch.ones_like(sequences),
            loss_mask,
            0.9,
            entropy_grad=entropy_grad,
            shares_prefixes=True,
        )
    with use_attention(model):  # layers are computed again
        (scores.logprobs.mean() + (0.1 * scores.entropy.mean() if entropy_grad else 0)).backward()
    return [scores.logprobs.detach(), scores.entropy.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_fused_operations_change_no_gradient(
    tiny_model: PreTrainedModel,
    gpu_model: PreTrainedModel,
    bf16: bool,
    checkpoints: bool,
    entropy_grad: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert can_compile()
    monkeypatch.setattr(linear_head, "GPU_POSITIONS", 37)
    monkeypatch.setattr(linear_head, "GPU_LOGITS", 37 * 300)
    expected = score_and_differentiate(tiny_model, False, entropy_grad=entropy_grad)
    fuse_operations(gpu_model)
    if checkpoints:
        gpu_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with checkpointed_layers(gpu_model):
        result = score_and_differentiate(gpu_model, bf16, entropy_grad=entropy_grad)
    for values, reference in zip(result, expected, strict=True):
        difference = (values.cpu() - reference).norm() / reference.norm()
        assert difference < (0.03 if bf16 else 1e-4)


class TestContractOnAGPU(EngineContract):
    """The engine contract, with the embedded engine's model and cache on the GPU."""

    @pytest.fixture
    async def engine_kit(
        self, gpu_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> AsyncIterator[EngineKit]:
        engines = []

        def new(max_num_seqs: int = 32, max_num_batched_tokens: int = 1024) -> PackedEngine:
            limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
            engines.append(PackedEngine(gpu_model, tiny_tokenizer, max_cache_bytes=1 << 28, **limits))
            return engines[-1]

        yield EngineKit(new, gpu_model, tiny_tokenizer, tolerance=1e-4, cache_block_size=1)
        for engine in engines:
            await engine.close()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_run_trains_and_samples_with_the_trained_weights(catch_run: list[str], backend: str, bf16: bool) -> None:
    run = train(*catch_run, f"generator.backend={backend}", f"trainer.bf16={bf16}")
    assert run.steps == [0, 1, 2]
    for row in run.metrics[1:]:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["policy/rollout_train_logprobs_abs_diff_mean"] < (0.05 if bf16 else 1e-3)
        assert row["policy/grad_norm"] > 0


def test_offloaded_tensors_release_the_memory_of_the_gpu() -> None:
    tensors = [torch.randn(1 << 20, device="cuda") for _ in range(8)]
    expected, allocated = [tensor.cpu() for tensor in tensors], torch.cuda.memory_allocated()
    offloaded = OffloadedTensors(tensors, torch.device("cuda"))
    assert allocated - torch.cuda.memory_allocated() == offloaded.n_bytes == 8 * 4 << 20
    offloaded.restore()
    assert torch.cuda.memory_allocated() == allocated
    assert all(torch.equal(tensor.cpu(), values) for tensor, values in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_offloading_changes_no_result(backend: str, catch_run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray  # the only tests that need it

    monkeypatch.setenv("RAY_ADDRESS", "local")
    settings = [f"generator.backend={backend}", "trainer.bf16=false", "trainer.placement.launcher=ray"]
    runs = []
    for offloads in ("false", "true"):
        switch = [f"trainer.placement.offload_idle={offloads}", f"trainer.run_name={offloads}"]
        try:
            runs.append(train(*catch_run, *settings, *switch))
        finally:
            ray.shutdown()
    for expected, row in zip(*(run.metrics for run in runs), strict=True):
        for name in expected.keys() & {"reward/avg_raw_reward", "policy/final_loss", "policy/grad_norm"}:
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
        assert row["sync/logprob_gap"] < 1e-3


@pytest.mark.parametrize("is_old", [False, True])
def test_the_generator_of_the_gpu_continues_after_a_round_trip_through_a_file(tmp_path: Path, is_old: bool) -> None:
    state = random_state("cuda")
    if is_old:  # of a process that saw two GPUs
        state["cuda"] = [state["cuda"], torch.zeros_like(state["cuda"])]
    torch.save(state, tmp_path / "rng.pt")
    expected = torch.randn(3, device="cuda")
    assert not torch.equal(torch.randn(3, device="cuda"), expected)
    set_random_state(torch.load(tmp_path / "rng.pt", weights_only=True), "cuda")
    assert torch.equal(torch.randn(3, device="cuda"), expected)
    assert "cuda" not in random_state()
