"""A step of each backend equals one of peft with `torch.optim.AdamW`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM
from tx_kit.backends import MIDDLE, assert_close_tensors, learn, run, some_data

from tx.models.config import LoraConfig
from tx.tinker.backends.base import Backend
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.backends.torch.backend import TorchBackend
from tx.tinker.backends.torch.config import TorchConfig
from tx.tinker.types import AdamParams, Pass

DATA = some_data(lengths=MIDDLE)
STEP = AdamParams(learning_rate=1e-3, eps=1e-3, weight_decay=0.1, grad_clip_norm=1.0)
ADAPTER, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"


def jax_backend(folder: Path) -> Backend:
    return JaxBackend(folder, "org/tiny", JaxConfig(sample_lanes=8, sample_groups=3, cache_gib=0.005))


def torch_backend(folder: Path) -> Backend:
    return TorchBackend(folder, "org/tiny", TorchConfig(cache_gib=0.005))


@pytest.mark.parametrize("new", [jax_backend, torch_backend])
@pytest.mark.parametrize(("kind", "rank"), [("qwen3", 8), ("llama", 12), ("qwen3_moe", 8)])
def test_gradients_and_a_step(
    models: Path, tmp_path: Path, kind: str, rank: int, new: Callable[[Path], Backend]
) -> None:
    backend = new(models / kind)
    before, after, gradients = (tmp_path / name for name in ("before", "after", "gradients"))
    for folder in (before, after):
        folder.mkdir()
    backend.create_model("m", LoraConfig(rank=rank, seed=4))
    learn(backend, "m", DATA)  # B must not be 0, so that A has a gradient
    backend.save_weights("m", before)
    backend.load_model("n", before, with_optimizer=False)
    (result,) = run(backend, Pass("n", DATA, "cross_entropy"))
    norm = backend.optim_step("n", STEP)["skyrl.ai/grad_norm"]
    backend.save_model("n", after)
    write_gradients(after, gradients)

    theirs = peft_model(models / kind, before)
    loss, expected_norm, expected = step(theirs)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-4)
    assert norm > STEP.grad_clip_norm
    assert_close_tensors(factors(peft_model(models / kind, gradients)), expected)
    assert_close_tensors(factors(peft_model(models / kind, after)), factors(theirs))


def peft_model(base: Path, adapter: Path) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True)


def factors(model: PeftModel) -> Mapping[str, np.ndarray]:
    return {name: one.detach().numpy() for name, one in model.named_parameters() if one.requires_grad}


def write_gradients(model: Path, folder: Path) -> None:
    """Save gradients like an adapter: the first moments of the first step, up to a factor."""
    shutil.copytree(model, folder)
    moments = load_file(model / OPTIMIZER)
    save_file(
        {name: moments[f"first.{name}"] / (1 - STEP.beta1) for name in load_file(model / ADAPTER)}, folder / ADAPTER
    )


def step(model: PeftModel) -> tuple[float, float, Mapping[str, np.ndarray]]:
    """Return the loss of the model, the norm of its gradients, and the clipped gradients."""
    loss = torch.zeros(())
    for one in DATA:
        logprobs = model(torch.tensor(one.tokens[None]).long()).logits[0].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(one.inputs["target_tokens"]).long()[:, None])[:, 0]
        loss = loss - (torch.tensor(one.inputs["weights"]) * chosen).sum()
    loss.backward()
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, one in named.items():
        if ".experts." in name:  # peft has a matrix per layer, whose off-diagonal blocks are always 0
            one.grad *= one != 0
    norm = torch.nn.utils.clip_grad_norm_(named.values(), STEP.grad_clip_norm)
    torch.optim.AdamW(
        named.values(),
        lr=STEP.learning_rate,
        betas=(STEP.beta1, STEP.beta2),
        eps=STEP.eps,
        weight_decay=STEP.weight_decay,
    ).step()
    return loss.item(), norm.item(), {name: one.grad.numpy() for name, one in named.items()}
