"""Mini-batches of ragged conversations, with the scores that an update reads."""

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.types import Segment, TrainingBatch, Trajectory, TrajectoryID
from train_kit.models import perturbed
from train_kit.oracle import OracleRow, OracleTrajectory
from train_kit.workers import config, score_tokens

N_TOKENS = 400
"""Tokens of random rows, fewer than the tiny model has."""


def random_trajectories(n_prompts: int, n_samples: int, seed: int, n_tokens: int = N_TOKENS) -> list[OracleTrajectory]:
    """Generate ragged conversations: prompts of 2 to 9 tokens, one to three turns separated by observations."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(3, n_tokens) for _ in range(rng.randint(low, high))]

    trajectories = []
    for prompt in range(n_prompts):
        prompt_ids = ids(2, 9)
        for _ in range(n_samples):
            response = ids(1, 5)
            was_sampled = [True] * len(response)
            for _ in range(rng.randint(0, 2)):
                observation, turn = ids(1, 6), ids(1, 4)
                response += observation + turn
                was_sampled += [False] * len(observation) + [True] * len(turn)
            rewards = [0.0] * (len(response) - 1) + [rng.choice([-1.0, 0.0, 0.5, 1.0])]
            row = OracleRow(prompt_ids, response, was_sampled, rewards, logprobs=[0.0] * len(response))
            trajectories.append(OracleTrajectory(f"p{prompt}", [row]))
    return trajectories


def random_row(
    rng: random.Random, n_prompt: int, n_sampled: int, n_observed: int = 0, n_tokens: int = N_TOKENS
) -> OracleRow:
    """Return a row of random tokens: a prompt, sampled tokens, and an observation."""
    prompt, response = ([rng.randrange(3, n_tokens) for _ in range(n)] for n in (n_prompt, n_sampled + n_observed))
    was_sampled = [True] * n_sampled + [False] * n_observed
    rewards = [*[0.0] * (len(response) - 1), rng.random()]
    return OracleRow(prompt, response, was_sampled, rewards, [0.0] * len(response))


def as_trajectories(trajectories: Sequence[OracleTrajectory]) -> list[Trajectory]:
    """Return the rollouts as trajectories, as a generator returns them."""
    draws = {uid: draw for draw, uid in enumerate(dict.fromkeys(t.prompt_uid for t in trajectories))}
    return [
        Trajectory(
            id=TrajectoryID(t.prompt_uid, i, draw=draws[t.prompt_uid]),
            env_class="test",
            data_source="test",
            segments=tuple(
                Segment(
                    token_ids=row.token_ids,
                    n_prompt=len(row.prompt_ids),
                    loss_mask=[int(sampled) for sampled in row.was_sampled],
                    rewards=row.rewards,
                    logprobs=row.logprobs,
                )
                for row in t.rows
            ),
            stop_reason="stop",
            greedy_reward=t.greedy_reward,
            reward_components=t.components,
        )
        for i, t in enumerate(trajectories)
    ]


def as_batch(trajectories: Sequence[OracleTrajectory], cfg: SkyRLConfig | None = None) -> TrainingBatch:
    """Build a batch with GRPO advantages as the trainer does."""
    batch = build_training_batch(as_trajectories(trajectories), pad_token_id=0)
    batch.advantages, batch.returns = advantage_estimator("grpo")(
        token_level_rewards=batch.rewards,
        response_mask=batch.loss_mask,
        index=[str(draw) for draw in batch.draws.tolist()],
        values=None,
        config=(cfg or config()).trainer.algorithm,
    )
    return batch


def random_batch(seed: int, *, n_prompts: int = 2, n_samples: int = 3, n_tokens: int = N_TOKENS) -> TrainingBatch:
    """Return a batch of random conversations with GRPO advantages."""
    return as_batch(random_trajectories(n_prompts, n_samples, seed, n_tokens))


def off_policy_batch(policy: PreTrainedModel, seed: int, n_tokens: int = N_TOKENS) -> TrainingBatch:
    """Return a batch of nine rows whose old policy, rollout policy and reference all differ from `policy`."""
    return score_off_policy(policy, random_batch(seed, n_prompts=3, n_samples=3, n_tokens=n_tokens))


def score_off_policy(policy: PreTrainedModel, batch: TrainingBatch) -> TrainingBatch:
    """Fill in log-probs of an old policy, a rollout policy and a reference that all differ from `policy`."""
    ref, old, rollout = (score_tokens(perturbed(policy, 0.02, seed), batch, config().trainer) for seed in (1, 2, 3))
    batch.ref_logprobs, batch.rollout_logprobs = ref.logprobs, rollout.logprobs
    batch.old_logprobs, batch.entropies, _ = old
    return batch


def fill_in_values(batch: TrainingBatch, seed: int = 0) -> TrainingBatch:
    """Fill in random values and returns, for a critic."""
    generator = torch.Generator().manual_seed(seed)
    batch.values, batch.returns = (
        torch.randn(batch.loss_mask.shape, generator=generator) * batch.loss_mask for _ in range(2)
    )
    return batch
