import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from train_kit.batches import random_batch
from train_kit.models import perturbed
from train_kit.trajectories import make_trajectory
from train_kit.workers import TEMPERATURE, complete, config, gradients, largest_difference, make_worker, score_tokens
from transformers import PreTrainedModel

from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.errors import CheckpointError
from skyrl_train.models.logprobs import response_logprobs


def test_gradient_checkpointing_recomputes_activations_and_keeps_gradients(policy: PreTrainedModel) -> None:
    batch = random_batch(5)
    plain = gradients(make_worker(policy), batch)
    n_forward_passes = 0

    def count(*_: object) -> None:
        nonlocal n_forward_passes
        n_forward_passes += 1

    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    worker = make_worker(policy)
    policy.base_model.layers[0].mlp.register_forward_pre_hook(count)
    assert largest_difference(gradients(worker, batch), plain) < 1e-7
    assert n_forward_passes == 2, "activations were not recomputed"
    assert not any(module.training for module in policy.modules())


def test_updates_with_an_infinite_gradient_are_skipped_counted_and_warned_of_once_in_a_row(
    policy: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(policy)
    batch = random_batch(6, n_prompts=1, n_samples=2)
    for advantage in (float("inf"), float("nan"), 1.0, float("inf")):
        before = copy.deepcopy(policy.state_dict())
        batch.advantages[0, 0] = advantage
        is_skipped = advantage != 1.0
        assert worker.update(batch)["policy/skipped_updates"] == is_skipped
        is_same = all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
        assert is_same == is_skipped
    assert caplog.text.count("updates are skipped until it is finite") == 2


def test_a_batch_without_trained_tokens_changes_nothing(policy: PreTrainedModel) -> None:
    batch = random_batch(6, n_prompts=1, n_samples=2)
    worker = make_worker(policy)
    worker.update(batch)  # creates momentum
    before = copy.deepcopy(policy.state_dict())
    batch.loss_mask.zero_()
    metrics = worker.update(batch)
    assert "policy/grad_norm" not in metrics
    assert metrics["policy/skipped_updates"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize("has_learned", [True, False])
def test_save_and_load_continue_bit_for_bit(policy: PreTrainedModel, tmp_path: Path, has_learned: bool) -> None:
    """A run without a gradient so far, as of groups of equal rewards, has only advanced its schedule."""
    schedule = {"policy": {"optimizer_config": {"scheduler": "linear", "lr": 1e-3, "num_warmup_steps": 4}}}
    batches = [random_batch(seed) for seed in range(4)]
    first = make_worker(policy, **schedule)
    for batch in batches[:2]:
        first.update(batch if has_learned else replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))
    first.save(tmp_path / "policy")
    second = make_worker(perturbed(policy, 0.1, seed=9), **schedule)
    second.load(tmp_path / "policy")
    for batch, lr in zip(batches[2:], (5e-4, 7.5e-4), strict=True):
        metrics = first.update(batch)
        assert second.update(batch) == metrics
        assert metrics["policy/policy_lr"] == pytest.approx(lr)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_a_checkpoint_of_bfloat16_weights_resumes_in_float32(policy: PreTrainedModel, tmp_path: Path) -> None:
    """Earlier versions trained weights in bfloat16 and saved them and their moments so."""
    batch = random_batch(5)
    worker = make_worker(policy)
    worker.update(batch)
    state = worker.worker._strategy.copy(worker.worker._state)
    rounded = {
        part: {
            key: value.bfloat16() if torch.is_tensor(value) and value.ndim else value for key, value in items.items()
        }
        for part, items in state.items()
    }
    worker.save(tmp_path)
    dcp.save(rounded, checkpoint_id=tmp_path, no_dist=True)
    expected = {name: parameter.detach().bfloat16().float() for name, parameter in policy.named_parameters()}
    worker.load(tmp_path)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in policy.named_parameters())
    assert {moment["exp_avg_sq"].dtype for moment in worker.optimizer.state.values()} == {torch.float32}
    worker.update(batch)
    assert any(not torch.equal(parameter, parameter.bfloat16()) for parameter in policy.parameters())


def test_loading_an_incomplete_folder_names_the_file(policy: PreTrainedModel, tmp_path: Path) -> None:
    worker = make_worker(policy)
    for name in ("__0_0.distcp", "schedule.pt", ".metadata"):
        worker.save(tmp_path / name)
        (tmp_path / name / name).unlink()
        with pytest.raises(CheckpointError, match=rf"cannot resume the policy from .*{name}"):
            worker.load(tmp_path / name)


@pytest.mark.parametrize("max_tokens", [12, 4096])
def test_a_probe_returns_mean_and_gradient_norm_and_changes_nothing(policy: PreTrainedModel, max_tokens: int) -> None:
    batches = [random_batch(seed) for seed in range(2)]
    worker = make_worker(policy, max_tokens_per_microbatch=max_tokens)
    undisturbed = make_worker(copy.deepcopy(policy), max_tokens_per_microbatch=max_tokens)
    assert worker.update(batches[0]) == undisturbed.update(batches[0])

    total = worker.worker.module(batches[0])[0].sum()
    gradient = torch.autograd.grad(total, list(policy.parameters()))
    norm = torch.stack([part.norm() for part in gradient]).norm().item()
    probe = complete(worker.group.probe(batches[0])).numbers()
    assert probe["mean"] == pytest.approx((total / batches[0].loss_mask.sum()).item(), rel=1e-5)
    assert probe["grad_norm"] == pytest.approx(norm, rel=1e-4)

    assert worker.update(batches[1]) == undisturbed.update(batches[1])


def test_nan_or_infinite_weights_are_found(policy: PreTrainedModel) -> None:
    worker = make_worker(policy)
    assert complete(worker.group.is_finite())
    for value in (float("nan"), float("inf"), -float("inf")):
        with torch.no_grad():
            policy.base_model.layers[1].mlp.up_proj.weight[3, 4] = value
        assert not complete(worker.group.is_finite())


def test_a_frozen_parameter_has_neither_gradient_nor_moments(policy: PreTrainedModel, tmp_path: Path) -> None:
    """This is the case of adapters on a frozen base model."""
    policy.requires_grad_(False)
    for layer in policy.base_model.layers:
        layer.self_attn.q_proj.requires_grad_(True)
    batch = random_batch(8)
    worker = make_worker(policy)
    before = copy.deepcopy(policy.state_dict())
    assert worker.update(batch)["policy/grad_norm"] > 0
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "q_proj" in name}
    worker.save(tmp_path / "policy")
    resumed = make_worker(copy.deepcopy(policy))
    resumed.load(tmp_path / "policy")
    assert resumed.update(batch) == worker.update(batch)


# -- scores


@pytest.mark.parametrize(
    ("budget", "expected_n_rows"),
    [
        ({}, [4]),
        ({"micro_forward_batch_size_per_gpu": 1}, [1, 1, 1, 1]),
        ({"micro_forward_batch_size_per_gpu": 3}, [3, 1]),
        ({"max_tokens_per_microbatch": 10}, [3, 1]),  # rows of 3, 4, 4 and 9 tokens, which share the first
    ],
)
def test_log_probs_do_not_depend_on_the_budget(
    policy: PreTrainedModel, budget: dict[str, Any], expected_n_rows: list[int]
) -> None:
    rewards = [[0.0] * n_tokens for n_tokens in (7, 1, 5, 2, 2)]
    trajectories = [make_trajectory(str(uid), values) for uid, values in enumerate(rewards)]
    trajectories[2] = make_trajectory("2", rewards[2], loss_mask=[0] * 5)
    batch = build_training_batch(trajectories, pad_token_id=0)
    rows = (batch.sequences, batch.attention_mask, batch.loss_mask)
    with torch.no_grad():
        expected, *_ = response_logprobs(policy, *rows, TEMPERATURE)
    n_rows: list[int] = []
    hook = policy.base_model.register_forward_pre_hook(
        lambda _, __, inputs: n_rows.append(len(inputs["prefix_tree"].index)) if "prefix_tree" in inputs else None,
        with_kwargs=True,
    )
    logprobs = score_tokens(policy, batch, config(**budget).trainer).logprobs
    hook.remove()
    torch.testing.assert_close(logprobs, expected)
    assert not logprobs.requires_grad
    assert not logprobs[2].any()
    assert n_rows[2:] == expected_n_rows  # two passes check that the model can share prefixes
