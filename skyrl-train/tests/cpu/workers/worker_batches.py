"""Mini-batches for tests of workers, from ragged conversations, and what is compared: gradients by parameter name."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from workers.grpo_oracle import OracleTrajectory

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms.contract import check_policy_loss
from skyrl_train.algorithms.registry import POLICY_LOSSES, PolicyLoss
from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.types import TrainingBatch, Trajectory, TrajectoryID
from skyrl_train.workers.policy import PolicyWorker
from skyrl_train.workers.scoring import score_tokens

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


def make_worker(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, loss: str | PolicyLoss = "regular", **trainer: Any
) -> PolicyWorker:
    """A worker with a registered loss, by its name, or with any function."""
    cfg = config(**trainer).trainer
    function, traits = (POLICY_LOSSES.get(loss), POLICY_LOSSES.traits(loss)) if isinstance(loss, str) else (loss, None)
    resolved = check_policy_loss(function, cfg.algorithm, traits)
    return PolicyWorker(model, tokenizer, cfg, resolved, n_optimizer_steps=10)


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


def rounding(gradient: dict[str, torch.Tensor]) -> float:
    """What may differ in float32: losses that sum over tokens have larger gradients than means."""
    return 1e-6 + 1e-6 * max(values.abs().max().item() for values in gradient.values())


def off_policy_batch(policy: PreTrainedModel, n_tokens: int, seed: int) -> TrainingBatch:
    """Tokens that one policy sampled, another one started the update from, and a third has now reached."""
    cfg = config()
    batch = as_batch(random_trajectories(4, 4, n_tokens, seed), cfg)
    batch.ref_logprobs = score_tokens(perturbed(policy, 0.02, seed=1), batch, cfg.trainer).logprobs
    old = score_tokens(perturbed(policy, 0.02, seed=2), batch, cfg.trainer)
    batch.old_logprobs, batch.entropies, _ = old
    batch.rollout_logprobs = score_tokens(perturbed(policy, 0.02, seed=3), batch, cfg.trainer).logprobs
    return batch
