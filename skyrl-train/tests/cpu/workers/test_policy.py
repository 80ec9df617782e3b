"""The policy worker against an independent oracle, and its promises about micro-batches, bad gradients and memory."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from workers.grpo_oracle import OracleTrajectory, gradient, grpo_loss

from skyrl_train.algorithms import advantage_estimator, policy_loss
from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.errors import CheckpointError
from skyrl_train.types import TrainingBatch, Trajectory, TrajectoryID
from skyrl_train.workers.policy import PolicyWorker
from skyrl_train.workers.scoring import score_logprobs

TEMPERATURE = 0.7
EPS_LOW, EPS_HIGH, KL_COEF = 0.1, 0.3, 0.05


def config(**trainer: Any) -> SkyRLConfig:
    algorithm = {"eps_clip_low": EPS_LOW, "eps_clip_high": EPS_HIGH, "kl_loss_coef": KL_COEF}
    return load_config(
        {
            "trainer": {"algorithm": algorithm, **trainer},
            "generator": {"sampling_params": {"temperature": TEMPERATURE}},
        }
    )


def make_worker(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **trainer: Any) -> PolicyWorker:
    return PolicyWorker(model, tokenizer, config(**trainer).trainer, policy_loss("regular"), n_optimizer_steps=10)


def random_trajectories(n_prompts: int, n_samples: int, n_tokens: int, seed: int) -> list[OracleTrajectory]:
    """Ragged conversations: prompts of 2 to 9 tokens, one to three turns with observations in between."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(3, n_tokens) for _ in range(rng.randint(low, high))]

    trajectories = []
    for prompt in range(n_prompts):
        prompt_ids = ids(2, 9)
        for _ in range(n_samples):
            response, was_sampled = ids(1, 5), []
            was_sampled += [True] * len(response)
            for _ in range(rng.randint(0, 2)):
                observation, turn = ids(1, 6), ids(1, 4)
                response += observation + turn
                was_sampled += [False] * len(observation) + [True] * len(turn)
            reward = rng.choice([-1.0, 0.0, 0.5, 1.0])
            trajectories.append(OracleTrajectory(f"p{prompt}", prompt_ids, response, was_sampled, reward))
    return trajectories


def as_batch(trajectories: list[OracleTrajectory], cfg: SkyRLConfig) -> TrainingBatch:
    """The trainer's own way from rollouts to a batch with advantages."""
    batch = build_training_batch(
        [
            Trajectory(
                id=TrajectoryID(t.prompt_uid, i),
                env_class="test",
                data_source="test",
                prompt_ids=t.prompt_ids,
                response_ids=t.response_ids,
                loss_mask=[int(sampled) for sampled in t.was_sampled],
                logprobs=[0.0] * len(t.response_ids),
                rewards=[0.0] * (len(t.response_ids) - 1) + [t.reward],
                stop_reason="stop",
            )
            for i, t in enumerate(trajectories)
        ],
        pad_token_id=0,
    )
    batch.advantages, batch.returns = advantage_estimator("grpo")(
        token_level_rewards=batch.rewards,
        response_mask=batch.loss_mask,
        index=batch.uids,
        values=None,
        config=cfg.trainer.algorithm,
    )
    return batch


def perturbed(model: PreTrainedModel, scale: float, seed: int) -> PreTrainedModel:
    """A copy whose weights have moved a little, as after an update."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


def gradients(worker: PolicyWorker, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    worker.model.zero_grad()
    worker.forward_backward(batch)
    return {name: p.grad.clone() for name, p in worker.model.named_parameters() if p.grad is not None}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.fixture
def policy(tiny_model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(tiny_model)


@pytest.mark.parametrize("on_policy", [True, False], ids=["old log-probs are the current ones", "old policy differs"])
def test_one_grpo_step_agrees_with_the_oracle(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, on_policy: bool
) -> None:
    cfg = config()
    reference = perturbed(policy, 0.02, seed=1)
    old_policy = policy if on_policy else perturbed(policy, 0.02, seed=2)
    trajectories = random_trajectories(n_prompts=3, n_samples=4, n_tokens=len(tiny_tokenizer), seed=0)
    batch = as_batch(trajectories, cfg)
    batch.ref_logprobs = score_logprobs(reference, batch, cfg.trainer)
    batch.old_logprobs = None if on_policy else score_logprobs(old_policy, batch, cfg.trainer)

    worker = make_worker(policy, tiny_tokenizer)
    ours = gradients(worker, batch)
    loss = grpo_loss(
        policy,
        old_policy,
        reference,
        trajectories,
        temperature=TEMPERATURE,
        eps_low=EPS_LOW,
        eps_high=EPS_HIGH,
        kl_coef=KL_COEF,
    )

    assert largest_difference(ours, gradient(policy, loss)) < 1e-6
    assert worker.forward_backward(batch)["policy/final_loss"] == pytest.approx(loss.item(), abs=1e-6)


def test_the_oracle_would_notice_a_missing_kl_gradient(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    cfg = config()
    batch = as_batch(random_trajectories(2, 4, len(tiny_tokenizer), seed=3), cfg)
    worker = make_worker(policy, tiny_tokenizer)
    without = gradients(worker, batch)
    batch.ref_logprobs = score_logprobs(perturbed(policy, 0.02, seed=1), batch, cfg.trainer)
    assert largest_difference(gradients(worker, batch), without) > 1e-5


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_micro_batches_of_1_3_and_16_rows_have_the_same_gradient(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, reduction: str
) -> None:
    cfg = config()
    batch = as_batch(random_trajectories(4, 4, len(tiny_tokenizer), seed=4), cfg)
    batch.ref_logprobs = score_logprobs(perturbed(policy, 0.02, seed=1), batch, cfg.trainer)
    algorithm = {"loss_reduction": reduction, "max_seq_len": 40, "use_entropy_loss": True}
    results = [
        gradients(make_worker(policy, tiny_tokenizer, algorithm=algorithm, **split), batch)
        for split in (
            {"micro_train_batch_size_per_gpu": 16},
            {"micro_train_batch_size_per_gpu": 3},
            {"micro_train_batch_size_per_gpu": 1},
            {"max_tokens_per_microbatch": 50},
        )
    ]
    for other in results[1:]:
        assert largest_difference(results[0], other) < 1e-6


def test_gradient_checkpointing_changes_memory_and_nothing_else(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = as_batch(random_trajectories(2, 3, len(tiny_tokenizer), seed=5), config())
    plain = gradients(make_worker(policy, tiny_tokenizer), batch)
    n_forward_passes = 0

    def count(*_: object) -> None:
        nonlocal n_forward_passes
        n_forward_passes += 1

    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.base_model.layers[0].mlp.register_forward_pre_hook(count)
    assert largest_difference(gradients(make_worker(policy, tiny_tokenizer), batch), plain) < 1e-7
    assert n_forward_passes == 2, "activations were not recomputed"
    assert not any(module.training for module in policy.modules())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    worker = make_worker(policy, tiny_tokenizer)
    batch = as_batch(random_trajectories(1, 2, len(tiny_tokenizer), seed=6), config())
    before = copy.deepcopy(policy.state_dict())
    assert batch.advantages is not None
    batch.advantages[0, 0] = float("inf")
    metrics = worker.update(batch)
    assert metrics["policy/skipped_updates"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
    batch.advantages[0, 0] = 1.0
    assert worker.update(batch)["policy/skipped_updates"] == 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


def test_a_batch_without_trained_tokens_changes_nothing(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = as_batch(random_trajectories(1, 2, len(tiny_tokenizer), seed=6), config())
    batch.loss_mask.zero_()
    metrics = make_worker(policy, tiny_tokenizer).update(batch)
    assert metrics["policy/grad_norm"] == 0


def test_save_and_load_continue_bit_for_bit(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    schedule = {"policy": {"optimizer_config": {"scheduler": "linear", "lr": 1e-3, "num_warmup_steps": 2}}}
    batches = [as_batch(random_trajectories(2, 3, len(tiny_tokenizer), seed), config()) for seed in range(4)]
    first = make_worker(policy, tiny_tokenizer, **schedule)
    for batch in batches[:2]:
        first.update(batch)
    first.save(tmp_path / "policy")
    second = make_worker(perturbed(policy, 0.1, seed=9), tiny_tokenizer, **schedule)
    second.load(tmp_path / "policy")
    for batch in batches[2:]:
        assert first.update(batch) == second.update(batch)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_loading_an_incomplete_folder_names_it(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    worker = make_worker(policy, tiny_tokenizer)
    worker.save(tmp_path / "policy")
    (tmp_path / "policy" / "optim_world_size_1_rank_0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optim_world_size_1_rank_0\.pt"):
        worker.load(tmp_path / "policy")
