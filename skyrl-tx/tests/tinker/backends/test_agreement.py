"""The backends agree with each other and with peft, and read each other's files."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM
from tx_kit.backends import (
    assert_close_arrays,
    assert_close_tensors,
    assert_same,
    load,
    random_data,
    random_datum,
    run_pass,
    sample,
    sample_request,
    saved_tensors,
    target_logprobs,
    train,
)
from tx_kit.models import save_minimal_model

from tx.models.config import AdapterConfig
from tx.tinker.backends.base import Backend
from tx.tinker.losses import LOSSES
from tx.tinker.types import AdamParams, Datum, SampleRequest, UserError

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
STEP = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=5.0)
PEFT_STEP = AdamParams(learning_rate=1e-3, eps=1e-3, weight_decay=0.1, grad_clip_norm=1.0)
DATA = random_data(seed=1)
KINDS = [
    ("llama", 6),
    ("qwen3_moe", 6),
    ("qwen3", 0),
    pytest.param(("qwen3", 6), marks=pytest.mark.nightly),
    pytest.param(("llama", 12), marks=pytest.mark.nightly),  # padded to another rank
]
ADAPTER, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"

Pair = tuple[Backend, Backend]  # JAX, PyTorch


def load_both(folder: Path) -> Pair:
    return load("jax", folder), load("torch", folder)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-rank{kind[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[str, int]:
    """A model family, and the rank of the adapter."""
    family, rank = request.param
    return family, rank


@pytest.fixture(scope="module")
def both(kind: tuple[str, int], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Both backends with the model `m`, which has taken one step in each."""
    family, rank = kind
    backends = load_both(models / family)
    backends[0].create_model("m", AdapterConfig(rank=rank, seed=5))
    train(backends[0], "m", DATA, STEP)
    hand_over(*backends, tmp_path_factory.mktemp("first"))
    train(backends[1], "m", DATA[::-1], STEP)
    hand_over(*backends[::-1], tmp_path_factory.mktemp("second"))
    return backends


def hand_over(giver: Backend, taker: Backend, folder: Path) -> None:
    """Save the model `m` in one backend, and load it in the other."""
    giver.capture("m", with_optimizer=True)(folder)
    taker.delete_model("m")
    taker.load_model("m", folder, with_optimizer=True)
    assert_close_arrays(target_logprobs(giver, "m", DATA), target_logprobs(taker, "m", DATA))


def policy_data(loss_fn: str, logprobs: Sequence[np.ndarray]) -> list[Datum]:
    """Return data that were sampled slightly earlier, so that some ratios are clipped."""
    rng = np.random.default_rng(0)
    data = []
    for datum, lp in zip(DATA, logprobs, strict=True):
        inputs = {"target_tokens": datum.inputs["target_tokens"]}
        inputs["logprobs"] = lp + rng.normal(0, 0.4, lp.shape).astype(np.float32)
        inputs["advantages"] = rng.normal(size=lp.shape).astype(np.float32)
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = (rng.random(lp.shape) < 0.7).astype(np.float32)
        data.append(Datum(datum.tokens, inputs))
    return data


def greedy_request(length: int, max_tokens: int) -> SampleRequest:
    prompt = random_datum(length).tokens.tolist()
    return sample_request(prompt, max_tokens=max_tokens, temperature=0.0, scores_prompt=True)


def test_losses_and_steps_agree(both: Pair, tmp_path: Path) -> None:
    sampled = target_logprobs(both[0], "m", DATA)
    assert_close_arrays(sampled, target_logprobs(both[1], "m", DATA))
    for loss_fn in LOSSES:
        data = DATA if loss_fn == "cross_entropy" else policy_data(loss_fn, sampled)
        ours, theirs = (run_pass(backend, "m", data, loss_fn) for backend in both)
        np.testing.assert_allclose(ours.loss, theirs.loss, **CLOSE)
        assert_close_arrays(ours.logprobs, theirs.logprobs)
        assert_close_arrays(ours.token_losses, theirs.token_losses)
        norms = [backend.optim_step("m", STEP)["skyrl.ai/grad_norm"] for backend in both]
        np.testing.assert_allclose(*norms, rtol=1e-4)
    assert_close_arrays(*(target_logprobs(backend, "m", DATA) for backend in both))
    assert_close_tensors(*(saved_tensors(one, "m", tmp_path / type(one).__name__) for one in both))


def test_greedy_samples_agree(both: Pair) -> None:
    for length in (1, 9, 30):
        request = replace(greedy_request(length, max_tokens=12), n_top_prompt=3, n_top_sampled=2)
        ours, theirs = (sample(backend, (request, backend.weights_of("m")))[0] for backend in both)
        assert list(ours.samples[0].tokens) == list(theirs.samples[0].tokens)
        np.testing.assert_allclose(ours.samples[0].logprobs, theirs.samples[0].logprobs, **CLOSE)
        np.testing.assert_allclose(ours.prompt_logprobs, theirs.prompt_logprobs, **CLOSE)
        for one, other in ((ours.top_prompt, theirs.top_prompt), (ours.samples[0].top, theirs.samples[0].top)):
            assert one is not None
            assert other is not None
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, **CLOSE)


def test_at_most_the_whole_vocabulary_is_reported(tmp_path: Path) -> None:
    save_minimal_model(tmp_path, vocab_size=20)
    request = replace(greedy_request(1, max_tokens=1), prompt=[5, 6, 7], n_top_prompt=25, n_top_sampled=25)
    for backend in load_both(tmp_path):
        (found,) = sample(backend, (request, backend.base_weights()))
        assert found.samples[0].top is not None
        assert found.top_prompt is not None
        for row in (found.samples[0].top.tokens[0], *found.top_prompt.tokens[1:]):
            assert sorted(row.tolist()) == list(range(20))


@pytest.mark.parametrize("kind", [("qwen3_moe", 6)], indirect=True)
def test_mixtures_of_experts_are_interchangeable(both: Pair, tmp_path: Path) -> None:
    """Files contain experts one by one; each backend stacks the experts of a layer in its own way."""
    ours, theirs = both
    theirs.create_model("whole", AdapterConfig(rank=0))
    train(theirs, "whole", DATA, STEP)
    written = saved_tensors(theirs, "whole", tmp_path / "torch")
    ours.load_model("whole", tmp_path / "torch", with_optimizer=True)
    again = saved_tensors(ours, "whole", tmp_path / "jax")
    theirs.load_model("again", tmp_path / "jax", with_optimizer=True)
    assert written.keys() == again.keys()
    for name, one in written.items():
        np.testing.assert_array_equal(one, again[name], err_msg=name)
    assert_same(target_logprobs(theirs, "whole", DATA), target_logprobs(theirs, "again", DATA))


@pytest.mark.parametrize("kind", [("qwen3", 0)], indirect=True)
def test_an_adapter_with_nothing_to_train_is_refused(both: Pair) -> None:
    for backend in both:
        with pytest.raises(UserError, match="has nothing to train with train_unembed"):
            backend.create_model("head", AdapterConfig(rank=4, train_attn=False, train_mlp=False))  # tied to embeddings
        assert "head" not in backend.models()


# -- peft with torch.optim.AdamW


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.nightly), 1], ids=["jax", "torch"])
def test_gradients_and_a_step_equal_those_of_peft(
    kind: tuple[str, int], both: Pair, models: Path, tmp_path: Path, number: int
) -> None:
    (family, rank), backend = kind, both[number]
    before, after, gradients = (tmp_path / name for name in ("before", "after", "gradients"))
    for folder in (before, after):
        folder.mkdir()
    backend.create_model("peft", AdapterConfig(rank=rank or 8, seed=4))
    train(backend, "peft", DATA)  # B must not be 0, so that A has a gradient
    backend.capture("peft", with_optimizer=False)(before)
    backend.load_model("stepped", before, with_optimizer=False)
    result = run_pass(backend, "stepped", DATA)
    norm = backend.optim_step("stepped", PEFT_STEP)["skyrl.ai/grad_norm"]
    backend.capture("stepped", with_optimizer=True)(after)
    for name in ("peft", "stepped"):
        backend.delete_model(name)
    write_gradients(after, gradients)

    theirs = peft_model(models / family, before)
    loss, expected_norm, expected = peft_step(theirs)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-4)
    assert norm > PEFT_STEP.grad_clip_norm
    assert_close_tensors(factors(peft_model(models / family, gradients)), expected)
    assert_close_tensors(factors(peft_model(models / family, after)), factors(theirs))


def peft_model(base: Path, adapter: Path) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True)


def factors(model: PeftModel) -> Mapping[str, np.ndarray]:
    return {name: one.detach().numpy() for name, one in model.named_parameters() if one.requires_grad}


def write_gradients(model: Path, folder: Path) -> None:
    """Save gradients like an adapter: the first moments of the first step, up to a factor."""
    shutil.copytree(model, folder)
    moments, names = load_file(model / OPTIMIZER), load_file(model / ADAPTER).keys()
    save_file({name: moments[f"first.{name}"] / (1 - PEFT_STEP.beta1) for name in names}, folder / ADAPTER)


def peft_step(model: PeftModel) -> tuple[float, float, Mapping[str, np.ndarray]]:
    """Return the loss of the model, the norm of its gradients, and the clipped gradients."""
    loss = torch.zeros(())
    for datum in DATA:
        logprobs = model(torch.tensor(datum.tokens[None]).long()).logits[0].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(datum.inputs["target_tokens"]).long()[:, None])[:, 0]
        loss = loss - (torch.tensor(datum.inputs["weights"]) * chosen).sum()
    loss.backward()
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, one in named.items():
        if ".experts." in name:  # peft has a matrix per layer, whose off-diagonal blocks are always 0
            one.grad *= one != 0
    norm = torch.nn.utils.clip_grad_norm_(named.values(), PEFT_STEP.grad_clip_norm)
    torch.optim.AdamW(
        named.values(),
        lr=PEFT_STEP.learning_rate,
        betas=(PEFT_STEP.beta1, PEFT_STEP.beta2),
        eps=PEFT_STEP.eps,
        weight_decay=PEFT_STEP.weight_decay,
    ).step()
    return loss.item(), norm.item(), {name: one.grad.numpy() for name, one in named.items()}
