"""Advantages and returns of the sampled tokens, estimator by estimator."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from train_kit.oracle.rollouts import Floats, OracleTrajectory
from train_kit.oracle.settings import Settings

Advantages = tuple[list[Floats], list[Floats]]
"""Advantages and returns of the sampled tokens of each trajectory."""


@dataclass
class EstimatorInputs:
    """Inputs of the estimators: lists over trajectories, and over the sampled tokens of each."""

    trajectories: list[OracleTrajectory]
    rewards: list[Floats]
    scores: Floats
    values: list[Floats]
    old_logprobs: list[Floats]
    ref_logprobs: list[Floats]
    sum_pi_squared: list[Floats]

    def group(self, i: int) -> list[int]:
        """Return the indices of the trajectories with the same prompt as trajectory `i`."""
        uid = self.trajectories[i].prompt_uid
        return [j for j, other in enumerate(self.trajectories) if other.prompt_uid == uid]

    def group_scores(self, i: int) -> Floats:
        return [self.scores[j] for j in self.group(i)]


def estimate_advantages(inputs: EstimatorInputs, s: Settings) -> Advantages:
    """Return advantages and returns of `advantage_estimator`."""
    name = s.advantage_estimator
    if name in BY_SCORE:
        whole = [BY_SCORE[name](inputs, i, s) for i in range(len(inputs.trajectories))]
        spread = [[a] * len(r) for a, r in zip(whole, inputs.rewards, strict=True)]
        spread = whiten(spread) if name in ("reinforce++-baseline", "gdpo") else spread
        return spread, spread
    if name.endswith("_per_turn"):
        return _per_turn(inputs, s)
    returns = [_reward_to_go(r, s.gamma) for r in inputs.rewards]
    match name:
        case "reinforce++":
            return whiten(returns), returns
        case "remax":
            greedy = [[t.greedy_reward] * len(row) for t, row in zip(inputs.trajectories, returns, strict=True)]
            return _minus(returns, greedy), returns
        case "token_rewards":
            return inputs.rewards, inputs.rewards
        case "on_policy_distillation":
            gaps = _minus(inputs.ref_logprobs, inputs.old_logprobs)
            return gaps, gaps
        case "gae":
            raw = [_gae(r, v, s) for r, v in zip(inputs.rewards, inputs.values, strict=True)]
            return whiten(raw), _plus(raw, inputs.values)
        case "optimal_token_baseline":
            return _token_baseline(inputs, returns), returns
    raise AssertionError(f"no specification of {name}")


def whiten(values: list[Floats]) -> list[Floats]:
    """Shift and scale all tokens to mean 0 and unbiased variance 1; equal values become 0."""
    mean, std = _statistics([x for row in values for x in row])
    return [[(x - mean) / math.sqrt(std**2 + 1e-8) for x in row] for row in values]


def normalize(advantages: list[Floats]) -> list[Floats]:
    """Shift and scale the advantages of all sampled tokens to mean 0 and biased variance 1."""
    flat = [x for row in advantages for x in row]
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / len(flat)
    return [[(x - mean) / math.sqrt(max(variance, 1e-8)) for x in row] for row in advantages]


def _statistics(values: Floats) -> tuple[float, float]:
    """Return mean and unbiased standard deviation (0 for a single value)."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / max(len(values) - 1, 1))


def _plus(left: list[Floats], right: list[Floats]) -> list[Floats]:
    return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(left, right, strict=True)]


def _minus(left: list[Floats], right: list[Floats]) -> list[Floats]:
    return _plus(left, [[-y for y in row] for row in right])


# -- one advantage per trajectory


def _normalized(score: float, group: Floats, by_std: bool = True) -> float:
    mean, std = _statistics(group)
    if len(group) == 1:
        return score
    return (score - mean) / (std + 1e-6) if by_std else score - mean


def _grpo(inputs: EstimatorInputs, i: int, s: Settings) -> float:
    return _normalized(inputs.scores[i], inputs.group_scores(i), s.grpo_norm_by_std)


def _gdpo(inputs: EstimatorInputs, i: int, _: Settings) -> float:
    group = [inputs.trajectories[j].components for j in inputs.group(i)]
    return sum(_normalized(x, [g[name] for g in group]) for name, x in inputs.trajectories[i].components.items())


def _rloo(inputs: EstimatorInputs, i: int, _: Settings) -> float:
    others = [inputs.scores[j] for j in inputs.group(i) if j != i]
    return inputs.scores[i] - sum(others) / len(others) if others else 0.0


def _centered(inputs: EstimatorInputs, i: int, _: Settings) -> float:
    return inputs.scores[i] - _statistics(inputs.group_scores(i))[0]


def _opo(inputs: EstimatorInputs, i: int, _: Settings) -> float:
    lengths = {j: len(inputs.rewards[j]) for j in inputs.group(i)}
    total = sum(lengths.values())
    return inputs.scores[i] - sum(n * inputs.scores[j] for j, n in lengths.items()) / total if total else 0.0


def _gpg(inputs: EstimatorInputs, i: int, s: Settings) -> float:
    trained = [j for j, rewards in enumerate(inputs.rewards) if rewards]
    n_scored = sum(abs(inputs.scores[j]) > 1e-6 for j in trained)
    return _centered(inputs, i, s) * len(trained) / max(n_scored, 1)


def _maxrl(inputs: EstimatorInputs, i: int, _: Settings) -> float:
    group = inputs.group_scores(i)
    mean = sum(group) / len(group)
    if len(group) == 1:
        return inputs.scores[i]
    return (inputs.scores[i] - mean) / (mean - min(0.0, *group) + 1e-6) if len(set(group)) > 1 else 0.0


def _grpo_passk(inputs: EstimatorInputs, i: int, s: Settings) -> float:
    group = sorted(inputs.group_scores(i), reverse=True)
    if len(group) == 1 or inputs.scores[i] < group[0]:
        return 0.0
    std = _statistics(group)[1]
    return (group[0] - group[1]) / ((std + 1e-6) if s.grpo_norm_by_std else 1.0)


BY_SCORE: dict[str, Callable[[EstimatorInputs, int, Settings], float]] = {
    "grpo": _grpo,
    "gdpo": _gdpo,
    "rloo": _rloo,
    "reinforce++-baseline": _centered,
    "opo": _opo,
    "gpg": _gpg,
    "maxrl": _maxrl,
    "grpo_passk": _grpo_passk,
}
"""Estimators that give every token of a trajectory the same advantage."""


# -- one advantage per token or turn


def _reward_to_go(rewards: Floats, gamma: float) -> Floats:
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def _gae(rewards: Floats, values: Floats, s: Settings) -> Floats:
    """Return Σ_k (γλ)^k δ_{t+k} as an explicit sum."""
    ahead = [*values, 0.0][1:]
    delta = [r + s.gamma * after - v for r, v, after in zip(rewards, values, ahead, strict=True)]
    return _reward_to_go(delta, s.gamma * s.lambd)


def _token_baseline(inputs: EstimatorInputs, returns: list[Floats]) -> list[Floats]:
    weights: list[Floats] = []
    for old, squares in zip(inputs.old_logprobs, inputs.sum_pi_squared, strict=True):
        energies = [max(1 - 2 * math.exp(o) + q, 0.0) for o, q in zip(old, squares, strict=True)]
        weights.append([sum(energies[: t + 1]) + 1e-8 for t in range(len(energies))])

    def baseline(i: int, t: int) -> float:
        """Return the weighted mean return of the trajectories of the group that reach token `t`."""
        reached = [j for j in inputs.group(i) if len(returns[j]) > t]
        if len(reached) == 1:
            return returns[i][t]
        return sum(returns[j][t] * weights[j][t] for j in reached) / sum(weights[j][t] for j in reached)

    return [[g - baseline(i, t) for t, g in enumerate(row)] for i, row in enumerate(returns)]


def _per_turn(inputs: EstimatorInputs, s: Settings) -> Advantages:
    lengths = [[len(turn) for turn in t.turns] for t in inputs.trajectories]

    def split_turns(tokens: list[Floats]) -> list[list[Floats]]:
        return [
            [row[sum(sizes[:k]) :][: sizes[k]] for k in range(len(sizes))]
            for row, sizes in zip(tokens, lengths, strict=True)
        ]

    def to_tokens(turns: list[Floats]) -> list[Floats]:
        return [
            [x for x, n in zip(row, sizes, strict=True) for _ in range(n)]
            for row, sizes in zip(turns, lengths, strict=True)
        ]

    rewards = [[sum(turn) for turn in turns] for turns in split_turns(inputs.rewards)]
    if s.advantage_estimator == "gae_per_turn":
        values = [[turn[0] for turn in turns] for turns in split_turns(inputs.values)]
        raw = [_gae(r, v, s) for r, v in zip(rewards, values, strict=True)]
        return whiten(to_tokens(raw)), to_tokens(_plus(raw, values))
    returns = [_reward_to_go(r, s.gamma) for r in rewards]

    def advantage(i: int, k: int) -> float:
        """Compare the return of turn `k` with those of the trajectories of the group that reach it."""
        peers = [returns[j][k] for j in inputs.group(i) if len(returns[j]) > k]
        mean, std = _statistics(peers)
        if s.advantage_estimator == "rloo_per_turn":
            return (returns[i][k] - mean) * len(peers) / max(len(peers) - 1, 1)
        return (returns[i][k] - mean) / (std + 1e-6 if s.grpo_norm_by_std else 1.0)

    return to_tokens([[advantage(i, k) for k in range(len(row))] for i, row in enumerate(returns)]), to_tokens(returns)
