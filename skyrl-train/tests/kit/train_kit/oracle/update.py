"""The losses of one update on one mini-batch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from train_kit.oracle.advantages import EstimatorInputs, estimate_advantages, normalize
from train_kit.oracle.losses import RowTokens, kl_estimate, off_policy_weight, policy_loss, reduce_tokens, value_loss
from train_kit.oracle.rollouts import Floats, OracleRow, OracleTrajectory
from train_kit.oracle.scores import OracleScores
from train_kit.oracle.settings import Settings


@dataclass(frozen=True)
class OracleUpdate:
    """Losses of one update, differentiable in the scores of the policy (`critic`: in the values of the critic)."""

    final: torch.Tensor
    policy: torch.Tensor
    kl: torch.Tensor
    entropy: torch.Tensor
    critic: torch.Tensor
    advantages: list[Floats]
    returns: list[Floats]


def update(trajectories: list[OracleTrajectory], scored: OracleScores, s: Settings) -> OracleUpdate:
    """Return the losses of one update on one mini-batch of valid trajectories."""
    advantages, returns = estimate_advantages(_estimator_inputs(trajectories, scored, s), s)
    advantages = normalize(advantages) if s.advantage_batch_normalize else advantages
    sizes = [len(row.logprobs) for row in scored.new]
    flat_advantages, flat_returns = (
        torch.tensor([x for row in values for x in row], dtype=torch.float64) for values in (advantages, returns)
    )
    flat_new = torch.cat([row.logprobs for row in scored.new]).detach()
    covariance = (flat_advantages - flat_advantages.mean()) * (flat_new - flat_new.mean())
    is_highest = _highest(covariance, max(int(0.2 * len(covariance)), 1))
    entropies = torch.cat([row.entropies for row in scored.old])
    is_kept = _highest(entropies, math.ceil(s.top_entropy_quantile * len(entropies) - 1e-6))

    terms: dict[str, list[torch.Tensor]] = {"policy": [], "kl": [], "entropy": [], "critic": []}
    parts = zip(
        *(x.split(sizes) for x in (flat_advantages, flat_returns, covariance, is_highest, is_kept)), strict=True
    )
    for r, (row, (a, target, row_covariance, row_is_highest, row_is_kept)) in enumerate(
        zip((row for t in trajectories for row in t.rows), parts, strict=True)
    ):
        new, old = scored.new[r], scored.old[r]
        rollout = _engine_logprobs(row) if row.logprobs else old.logprobs
        tokens = RowTokens(new.logprobs, old.logprobs, a, rollout, row_covariance, row_is_highest)
        loss = policy_loss(tokens, s) if len(a) else new.logprobs
        terms["policy"].append(loss * off_policy_weight(tokens, s) * row_is_kept)
        terms["kl"].append(kl_estimate(new.logprobs, scored.ref[r].logprobs, old.logprobs, s))
        terms["entropy"].append(new.entropies)
        terms["critic"].append(value_loss(scored.values[r], scored.old_values[r], target, s.value_clip))

    def reduce(name: str, reduction: str = "sequence_mean") -> torch.Tensor:
        losses = _by_trajectory(trajectories, terms[name])
        return reduce_tokens(losses, [t.prompt_uid for t in trajectories], reduction, s.max_seq_len)

    policy, kl, entropy = reduce("policy", s.loss_reduction), reduce("kl"), reduce("entropy")
    final = policy
    if s.use_kl_loss:
        final = final + s.kl_loss_coef * kl
    if s.use_entropy_loss:
        final = final - s.entropy_loss_coef * entropy
    return OracleUpdate(final, policy, kl, entropy, reduce("critic"), advantages, returns)


def _highest(values: torch.Tensor, n: int) -> torch.Tensor:
    """Return True for the `n` highest values."""
    return values >= values.sort(descending=True).values[n - 1]


def _engine_logprobs(row: OracleRow) -> torch.Tensor:
    """Return the engine's log-probs (n,) of the sampled tokens."""
    pairs = zip(row.logprobs or [], row.was_sampled, strict=True)
    return torch.tensor([logprob for logprob, sampled in pairs if sampled], dtype=torch.float64)


def _by_trajectory(trajectories: list[OracleTrajectory], rows: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide a list over all rows among the trajectories."""
    remaining = iter(rows)
    return [[next(remaining) for _ in t.rows] for t in trajectories]


def _estimator_inputs(trajectories: list[OracleTrajectory], scored: OracleScores, s: Settings) -> EstimatorInputs:
    def flat(rows: Iterable[torch.Tensor]) -> list[Floats]:
        return [torch.cat(parts).tolist() for parts in _by_trajectory(trajectories, rows)]

    old, ref = (flat(row.logprobs for row in scores) for scores in (scored.old, scored.ref))
    rewards = [[reward for turn in t.turns for reward in turn] for t in trajectories]
    scores = [t.score for t in trajectories]
    if s.use_kl_in_reward:
        reward_settings = Settings(kl_estimator_type=s.kl_estimator_type)
        for i, (log_old, log_ref) in enumerate(zip(old, ref, strict=True)):
            x, y = torch.tensor(log_old, dtype=torch.float64), torch.tensor(log_ref, dtype=torch.float64)
            penalties = (s.kl_loss_coef * kl_estimate(x, y, x, reward_settings)).tolist()
            rewards[i] = [r - p for r, p in zip(rewards[i], penalties, strict=True)]
            scores[i] -= sum(penalties)
    squares = flat(row.sum_pi_squared for row in scored.old)
    return EstimatorInputs(trajectories, rewards, scores, flat(scored.old_values), old, ref, squares)
