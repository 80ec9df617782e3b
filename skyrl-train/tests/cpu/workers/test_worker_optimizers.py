"""Workers with every optimizer, dtype and place of the optimizer state."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_kit.batches import random_batch
from train_kit.workers import SingleRankGroup, make_worker
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.offload import activations_in_host_memory
from skyrl_train.optimizers import hidden_matrices
from skyrl_train.types.training_memory import training_bytes

BATCHES = [random_batch(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model whose matrices are large enough for 8-bit moments."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=4096, num_hidden_layers=2, tie_word_embeddings=True, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


def worker(model: PreTrainedModel, dtype: str = "float32", **optimizer: Any) -> SingleRankGroup:
    policy = {"model": {"train_dtype": dtype}, "optimizer_config": {"lr": 1e-3, **optimizer}}
    return make_worker(copy.deepcopy(model), policy=policy, micro_train_batch_size_per_gpu=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "optimizer",
    [{"name": name} for name in ("adamw", "adamw_8bit", "muon")]
    + [{"name": name, "cpu_offload": True} for name in ("adamw", "adamw_8bit")],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_run_resumes_bit_for_bit_in_the_planned_memory(
    model: PreTrainedModel, tmp_path: Path, dtype: Any, optimizer: dict[str, Any]
) -> None:
    first = worker(model, dtype, **optimizer)
    first.update(BATCHES[0])
    first.save(tmp_path / "policy")

    first.forward_backward(BATCHES[1])
    matrices = set(hidden_matrices(first.model.parameters(), first.model))
    weights = list(first.model.parameters())
    name, is_offloaded = optimizer["name"], optimizer.get("cpu_offload", False)
    planned = [
        training_bytes(dtype, name, cpu_offload=is_offloaded, shape=weight.shape, is_hidden_matrix=weight in matrices)
        for weight in weights
    ]
    updated = first.optimizer.param_groups[0]["params"]
    state = [tensor for values in first.optimizer.state.values() for name, tensor in values.items() if name != "step"]
    assert sum(part.weights for part in planned) == sum(weight.nbytes for weight in weights)
    assert sum(part.gradients for part in planned) == sum(w.grad.nbytes for w in weights if w.grad is not None)
    assert sum(part.moments + part.host_moments for part in planned) == sum(tensor.nbytes for tensor in state)
    if is_offloaded:
        assert sum(part.host_weights for part in planned) == sum(weight.nbytes for weight in updated)
        assert sum(part.host_gradients for part in planned) == sum(weight.grad.nbytes for weight in updated)
    facts = first.worker.facts()
    assert facts.checkpoint_bytes == sum(part.in_checkpoint for part in planned)
    assert facts.update_bytes == sum(
        part.gradients + part.moments + part.host_gradients + part.host_moments for part in planned
    )
    for weight in updated:
        weight.grad = None

    second = worker(model, dtype, **optimizer)
    second.load(tmp_path / "policy")
    for batch in BATCHES[1:]:
        assert second.update(batch) == first.update(batch)
    for key, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[key]), key
        assert tensor.dtype == getattr(torch, dtype)
    first.worker.export(tmp_path / "export")
    exported = load_file(tmp_path / "export/model.safetensors")
    for key, parameter in first.model.named_parameters():
        assert torch.equal(exported[key], parameter.float()), "trainer.policy.model.dtype is float32"


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_an_offloaded_optimizer_computes_the_same_bit_for_bit(model: PreTrainedModel, name: str) -> None:
    plain, offloaded = worker(model, name=name), worker(model, name=name, cpu_offload=True)
    batch = copy.deepcopy(BATCHES[1])
    for advantage in (1.0, math.nan, -1.0):
        batch.advantages[0, 0] = advantage
        metrics = plain.update(batch)
        assert offloaded.update(batch) == pytest.approx(metrics, rel=0, abs=0, nan_ok=True)
        assert metrics["policy/skipped_updates"] == math.isnan(advantage)
        for parameter, other in zip(plain.model.parameters(), offloaded.model.parameters(), strict=True):
            assert torch.equal(parameter, other)
            assert other.grad is None


def test_master_weights_keep_updates_that_bfloat16_loses(model: PreTrainedModel, tmp_path: Path) -> None:
    trained = worker(model, "bfloat16", cpu_offload=True, lr=1e-6)
    before = copy.deepcopy(trained.model.state_dict())
    trained.update(BATCHES[0])
    masters = trained.optimizer.param_groups[0]["params"]
    weight, master = trained.model.model.embed_tokens.weight, masters[0]
    assert (weight == before["model.embed_tokens.weight"]).float().mean() > 0.9
    assert (weight == master).float().mean() < 0.5
    trained.save(tmp_path)
    resumed = worker(model, "float32")
    resumed.load(tmp_path)  # the checkpoint has the master weights
    for parameter, master in zip(resumed.model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master)


def test_gradients_of_bfloat16_weights_are_added_up_in_float32(model: PreTrainedModel) -> None:
    """The sum over six micro-batches has bits that a bfloat16 sum would lose."""
    trained = worker(model, "bfloat16")
    trained.forward_backward(BATCHES[0])
    for name, parameter in trained.model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert not torch.equal(parameter.grad, parameter.grad.bfloat16().float()), name


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (
            ("float32", "adamw"),
            ("float32", "adamw_8bit"),
            "optimizer_config.name=adamw, but this run has name=adamw_8bit",
        ),
        (("bfloat16", "adamw_8bit"), ("bfloat16", "muon"), "name=adamw_8bit, but this run has name=muon"),
        (("float32", "adamw"), ("bfloat16", "adamw"), "trained weights are float32, but .* model.train_dtype=bfloat16"),
    ],
)
def test_a_checkpoint_of_another_optimizer_or_of_wider_weights_is_refused(
    model: PreTrainedModel, tmp_path: Path, saved: tuple[str, str], loaded: tuple[str, str], message: str
) -> None:
    first = worker(model, saved[0], name=saved[1])
    first.update(BATCHES[0])
    first.save(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        worker(model, loaded[0], name=loaded[1]).load(tmp_path)


def test_bfloat16_weights_resume_exactly_in_float32(model: PreTrainedModel, tmp_path: Path) -> None:
    first, second = worker(model, "bfloat16"), worker(model, "float32")
    first.update(BATCHES[0])
    first.save(tmp_path)
    second.load(tmp_path)
    for parameter, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(parameter.float(), other)
        assert torch.equal(first.optimizer.state[parameter]["exp_avg"], second.optimizer.state[other]["exp_avg"])


def test_offloaded_activations_give_the_same_gradient(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU refuses the setting, but its hooks also work there: what is saved is copied."""
    monkeypatch.setattr("skyrl_train.models.offload.MIN_ACTIVATION_BYTES", 1)
    gradients = []
    for is_offloaded in (False, True):
        trained = copy.deepcopy(model)
        outputs: list[torch.Tensor] = []
        hook = trained.model.norm.register_forward_hook(lambda *args, outputs=outputs: outputs.append(args[2]))
        if is_offloaded:
            with activations_in_host_memory(trained):
                loss = trained(BATCHES[0].sequences).logits.square().mean()
            with torch.no_grad():
                outputs[0].zero_()  # the backward pass reads its copy
        else:
            loss = trained(BATCHES[0].sequences).logits.square().mean()
        hook.remove()
        loss.backward()
        gradients.append([parameter.grad for parameter in trained.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))  # type: ignore[arg-type]
    group = worker(model).worker
    group._spec = replace(group._spec, activation_offload=True)
    with pytest.raises(ConfigError, match=r"trainer\.activation_offload=true moves .* this run uses the CPU"):
        group._strategy.build(group._spec, entropy_grad=False)
