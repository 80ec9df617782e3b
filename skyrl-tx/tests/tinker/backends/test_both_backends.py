"""The backends agree with each other, and read each other's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tx_kit.backends import assert_close_tensors, assert_same, datum, learn, losses, run, sample, some_data, tensors_of
from tx_kit.models import new_model

from tx.models.config import LoraConfig
from tx.tinker.backends.base import Backend
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.backends.torch.backend import TorchBackend
from tx.tinker.backends.torch.config import TorchConfig
from tx.tinker.losses import LOSSES
from tx.tinker.types import AdamParams, Datum, Pass, SampleRequest, SamplingParams

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
STEP = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=5.0)
DATA = [one for one in some_data(seed=1) if len(one.tokens) < 64]  # 9 in 16 rows, and 3 in 4
KINDS = [pytest.param(("qwen3", 6), marks=pytest.mark.nightly), ("llama", 6), ("qwen3_moe", 6), ("qwen3", 0)]

Pair = tuple[JaxBackend, TorchBackend]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-rank{kind[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[str, int]:
    family, rank = request.param
    return family, rank


@pytest.fixture(scope="module")
def both(kind: tuple[str, int], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Create the model `m` in both backends, and take one step in each."""
    family, rank = kind
    backends = load(models / family)
    backends[0].create_model("m", LoraConfig(rank=rank, seed=5))
    learn(backends[0], "m", DATA, STEP)
    hand_over(*backends, tmp_path_factory.mktemp("first"))
    learn(backends[1], "m", DATA[::-1], STEP)
    hand_over(*backends[::-1], tmp_path_factory.mktemp("second"))
    return backends


def load(folder: Path) -> Pair:
    """Load both backends; JAX with the shapes of its own tests, whose programs are compiled anyway."""
    return (
        JaxBackend(folder, "org/tiny", JaxConfig(sample_lanes=8, sample_groups=3, cache_gib=0.005)),
        TorchBackend(folder, "org/tiny", TorchConfig(sample_lanes=8, cache_gib=0.005)),
    )


def hand_over(giver: Backend, taker: Backend, folder: Path) -> None:
    giver.save_model("m", folder)
    taker.delete_model("m")
    taker.load_model("m", folder, with_optimizer=True)
    assert_close(losses(giver, "m", DATA), losses(taker, "m", DATA))


def policy_data(loss_fn: str, logprobs: Sequence[np.ndarray]) -> list[Datum]:
    """Return data that were sampled slightly earlier, so that some ratios are clipped."""
    rng = np.random.default_rng(0)
    some = []
    for one, lp in zip(DATA, logprobs, strict=True):
        inputs = {"target_tokens": one.inputs["target_tokens"]}
        inputs["logprobs"] = lp + rng.normal(0, 0.4, lp.shape).astype(np.float32)
        inputs["advantages"] = rng.normal(size=lp.shape).astype(np.float32)
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = (rng.random(lp.shape) < 0.7).astype(np.float32)
        some.append(Datum(one.tokens, inputs))
    return some


def request_of(length: int, max_tokens: int) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return SampleRequest(datum(length).tokens.tolist(), params, wants_prompt_logprobs=True)


def assert_close(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


def test_losses_and_steps_agree(both: Pair, tmp_path: Path) -> None:
    sampled = losses(both[0], "m", DATA)
    assert_close(sampled, losses(both[1], "m", DATA))
    for loss_fn in LOSSES:
        data = DATA if loss_fn == "cross_entropy" else policy_data(loss_fn, sampled)
        ours, theirs = (run(backend, Pass("m", data, loss_fn))[0] for backend in both)
        np.testing.assert_allclose(ours.loss, theirs.loss, **CLOSE)
        assert_close(ours.logprobs, theirs.logprobs)
        assert_close(ours.token_losses, theirs.token_losses)
        norms = [backend.optim_step("m", STEP)["skyrl.ai/grad_norm"] for backend in both]
        np.testing.assert_allclose(*norms, rtol=1e-4)
    assert_close(losses(both[0], "m", DATA), losses(both[1], "m", DATA))
    ours, theirs = (tensors_of(backend, "m", tmp_path / type(backend).__name__) for backend in both)
    assert_close_tensors(ours, theirs)


def test_greedy_samples_agree(both: Pair) -> None:
    for length in (1, 9, 30):
        ask = request_of(length, max_tokens=12)
        ours, theirs = (sample(backend, (ask, backend.weights_of("m")))[0] for backend in both)
        assert list(ours.samples[0].tokens) == list(theirs.samples[0].tokens)
        np.testing.assert_allclose(ours.samples[0].logprobs, theirs.samples[0].logprobs, **CLOSE)
        np.testing.assert_allclose(ours.prompt_logprobs, theirs.prompt_logprobs, **CLOSE)


def test_the_most_likely_tokens_agree(both: Pair) -> None:
    ask = replace(request_of(20, max_tokens=5), n_top_prompt=3, n_top_sampled=2)
    ours, theirs = (sample(backend, (ask, backend.base_weights()))[0] for backend in both)
    for one, other in ((ours.top_prompt, theirs.top_prompt), (ours.samples[0].top, theirs.samples[0].top)):
        assert one is not None
        assert other is not None
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, **CLOSE)


def test_at_most_the_whole_vocabulary_is_reported(tmp_path: Path) -> None:
    new_model("llama", vocab_size=20).save_pretrained(tmp_path)
    ask = replace(request_of(3, max_tokens=1), prompt=[5, 6, 7], n_top_prompt=25, n_top_sampled=25)
    for backend in load(tmp_path):
        (found,) = sample(backend, (ask, backend.base_weights()))
        assert found.samples[0].top is not None
        assert found.top_prompt is not None
        for row in (found.samples[0].top.tokens[0], *found.top_prompt.tokens[1:]):
            assert sorted(row.tolist()) == list(range(20))


def test_weights_alone_are_interchangeable(both: Pair, tmp_path: Path) -> None:
    ask = request_of(20, max_tokens=1)
    for giver, taker in (both, both[::-1]):
        folder = tmp_path / type(giver).__name__
        folder.mkdir()
        giver.save_weights("m", folder)
        (there,), (here,) = (
            sample(giver, (ask, giver.weights_of("m"))),
            sample(taker, (ask, taker.load_weights(folder))),
        )
        np.testing.assert_allclose(there.prompt_logprobs, here.prompt_logprobs, **CLOSE)


def test_mixtures_of_experts_are_interchangeable(models: Path, tmp_path: Path) -> None:
    """Files contain experts one by one; each backend stacks the experts of a layer in its own way."""
    jax, torch = load(models / "qwen3_moe")
    torch.create_model("m", LoraConfig(rank=0))
    learn(torch, "m", DATA, STEP)
    written = tensors_of(torch, "m", tmp_path / "torch")
    jax.load_model("m", tmp_path / "torch", with_optimizer=True)
    again = tensors_of(jax, "m", tmp_path / "jax")
    torch.load_model("again", tmp_path / "jax", with_optimizer=True)
    assert written.keys() == again.keys()
    for name, one in written.items():
        np.testing.assert_array_equal(one, again[name], err_msg=name)
    assert_same(losses(torch, "m", DATA), losses(torch, "again", DATA))
