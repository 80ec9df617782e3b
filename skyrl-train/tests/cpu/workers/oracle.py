"""A specification of the update in plain torch and float64: rollouts as lists in, gradients out.

It is written from the papers, one trajectory at a time, to be compared with the trainer. It shares no code with the
trainer, uses neither padding nor micro-batches, and computes the whole vocabulary at every position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Floats = list[float]


@dataclass(frozen=True)
class OracleRow:
    """One row of tokens: a prompt, then sampled tokens and observations."""

    prompt_ids: list[int]
    response_ids: list[int]
    was_sampled: list[bool]
    rewards: Floats
    logprobs: Floats | None = None
    """Log-probs from the engine for the response tokens."""


@dataclass(frozen=True)
class OracleTrajectory:
    """One rollout; it has several rows if its history was rewritten between turns."""

    prompt_uid: str
    rows: list[OracleRow]
    greedy_reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Sum of all rewards, including those of unsampled tokens."""
        return sum(sum(row.rewards) for row in self.rows)

    @property
    def turns(self) -> list[list[tuple[int, int]]]:
        """Sampled tokens of each turn, as (row, column)."""
        turns: list[list[tuple[int, int]]] = []
        for r, row in enumerate(self.rows):
            before = False
            for c, sampled in enumerate(row.was_sampled):
                if sampled and not before:
                    turns.append([])
                if sampled:
                    turns[-1].append((r, c))
                before = sampled
        return turns

    @property
    def token_rewards(self) -> Floats:
        """Reward of each sampled token, over all rows."""
        return [self.rows[r].rewards[c] for turn in self.turns for r, c in turn]


@dataclass(frozen=True)
class Settings:
    """Settings of one update, named as in `trainer.algorithm`; some defaults differ so that a term has an effect."""

    advantage_estimator: str = "grpo"
    policy_loss_type: str = "regular"
    loss_reduction: str = "token_mean"
    max_seq_len: int = 40
    eps_clip_low: float = 0.1
    eps_clip_high: float = 0.3
    clip_ratio_c: float = 1.5
    gamma: float = 1.0
    lambd: float = 1.0
    grpo_norm_by_std: bool = True
    advantage_batch_normalize: bool = False
    use_kl_in_reward: bool = False
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.05
    kl_estimator_type: str = "k3"
    use_bias_correction_kl: bool = False
    use_entropy_loss: bool = False
    entropy_loss_coef: float = 0.02
    top_entropy_quantile: float = 1.0
    off_policy_sequence_mask_threshold: float | None = None
    tis_ratio_type: str | None = None
    tis_cap: float = 1.1
    value_clip: float | None = 0.2


@dataclass
class Scores:
    """Values of one row's sampled tokens, in order; (n,) each."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    sum_pi_squared: torch.Tensor


def score_row(model: torch.nn.Module, row: OracleRow, temperature: float) -> Scores:
    """Score the sampled tokens of a row with a language model."""
    token_ids = row.prompt_ids + row.response_ids
    logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]  # (L, V)
    logprobs, entropies, squares = [], [], []
    for i, sampled in enumerate(row.was_sampled):
        position = len(row.prompt_ids) + i
        if sampled:
            distribution = torch.log_softmax(logits[position - 1] / temperature, dim=-1)
            logprobs.append(distribution[token_ids[position]])
            entropies.append(-(distribution.exp() * distribution).sum())
            squares.append((2 * distribution).exp().sum().detach())
    if not logprobs:
        return Scores(*(logits.new_zeros(0) for _ in range(3)))
    return Scores(torch.stack(logprobs), torch.stack(entropies), torch.stack(squares))


def value_row(model: torch.nn.Module, row: OracleRow) -> torch.Tensor:
    """Return the critic's value (n,) of the state before each sampled token of a row."""
    outputs = model(input_ids=torch.tensor([row.prompt_ids + row.response_ids]), use_cache=False).logits[0, :, 0]
    columns = [len(row.prompt_ids) + i - 1 for i, sampled in enumerate(row.was_sampled) if sampled]
    return outputs[columns]


# -- advantages


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


Advantages = tuple[list[Floats], list[Floats]]
"""Advantages and returns of the sampled tokens of each trajectory."""


def estimate_advantages(inputs: EstimatorInputs, s: Settings, weights: dict[str, float] | None = None) -> Advantages:
    """Return advantages and returns of `advantage_estimator`; `weights` are those of gdpo."""
    name = s.advantage_estimator
    if name in BY_SCORE:
        whole = [BY_SCORE[name](inputs, i, s) for i in range(len(inputs.trajectories))]
        spread = [[a] * len(r) for a, r in zip(whole, inputs.rewards, strict=True)]
        spread = whiten(spread) if name == "reinforce++-baseline" else spread
        return spread, spread
    if name == "gdpo":
        return _gdpo(inputs, weights or {})
    if name.endswith("_per_turn"):
        return _per_turn(inputs, s)
    returns = [_reward_to_go(r, s.gamma) for r in inputs.rewards]
    match name:
        case "reinforce++":
            return whiten(returns), returns
        case "remax":
            greedy = [t.greedy_reward for t in inputs.trajectories]
            return [[g - b for g in row] for row, b in zip(returns, greedy, strict=True)], returns
        case "token_rewards":
            return inputs.rewards, inputs.rewards
        case "on_policy_distillation":
            gaps = [
                [r - o for o, r in zip(*pair, strict=True)]
                for pair in zip(inputs.old_logprobs, inputs.ref_logprobs, strict=True)
            ]
            return gaps, gaps
        case "gae":
            raw = [_gae(r, v, s) for r, v in zip(inputs.rewards, inputs.values, strict=True)]
            return whiten(raw), [
                [a + v for a, v in zip(*pair, strict=True)] for pair in zip(raw, inputs.values, strict=True)
            ]
        case "optimal_token_baseline":
            return _token_baseline(inputs, returns), returns
    raise AssertionError(f"no specification of {name}")


def whiten(values: list[Floats]) -> list[Floats]:
    """Shift and scale all tokens to mean 0 and unbiased variance 1; equal values become 0."""
    flat = [x for row in values for x in row]
    mean = sum(flat) / max(len(flat), 1)
    variance = sum((x - mean) ** 2 for x in flat) / max(len(flat) - 1, 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in values]


def _statistics(values: Floats) -> tuple[float, float]:
    """Return mean and unbiased standard deviation (0 for a single value)."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / max(len(values) - 1, 1))


def _reward_to_go(rewards: Floats, gamma: float) -> Floats:
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def _gae(rewards: Floats, values: Floats, s: Settings) -> Floats:
    """Return Σ_k (γλ)^k δ_{t+k} as an explicit sum."""
    ahead = [*values, 0.0][1:]
    delta = [r + s.gamma * after - v for r, v, after in zip(rewards, values, ahead, strict=True)]
    return _reward_to_go(delta, s.gamma * s.lambd)


def _group_scores(inputs: EstimatorInputs, i: int) -> Floats:
    return [inputs.scores[j] for j in inputs.group(i)]


def _grpo(inputs: EstimatorInputs, i: int, s: Settings) -> float:
    return _normalized(inputs.scores[i], _group_scores(inputs, i), s.grpo_norm_by_std)


def _normalized(score: float, group: Floats, by_std: bool = True) -> float:
    mean, std = _statistics(group)
    if len(group) == 1:
        return score
    return (score - mean) / (std + 1e-6) if by_std else score - mean


def _rloo(inputs: EstimatorInputs, i: int, _: Settings) -> float:
    others = [inputs.scores[j] for j in inputs.group(i) if j != i]
    return inputs.scores[i] - sum(others) / len(others) if others else 0.0


def _centred(inputs: EstimatorInputs, i: int, _: Settings) -> float:
    return inputs.scores[i] - _statistics(_group_scores(inputs, i))[0]


def _opo(inputs: EstimatorInputs, i: int, _: Settings) -> float:
    lengths = {j: len(inputs.rewards[j]) for j in inputs.group(i)}
    total = sum(lengths.values())
    return inputs.scores[i] - sum(n * inputs.scores[j] for j, n in lengths.items()) / total if total else 0.0


def _gpg(inputs: EstimatorInputs, i: int, s: Settings) -> float:
    trained = [j for j, rewards in enumerate(inputs.rewards) if rewards]
    n_scored = sum(abs(inputs.scores[j]) > 1e-6 for j in trained)
    return _centred(inputs, i, s) * len(trained) / max(n_scored, 1)


def _maxrl(inputs: EstimatorInputs, i: int, _: Settings) -> float:
    group = _group_scores(inputs, i)
    mean = sum(group) / len(group)
    if len(group) == 1:
        return inputs.scores[i]
    return (inputs.scores[i] - mean) / (mean - min(0.0, *group) + 1e-6) if len(set(group)) > 1 else 0.0


def _grpo_passk(inputs: EstimatorInputs, i: int, s: Settings) -> float:
    group = sorted(_group_scores(inputs, i), reverse=True)
    if len(group) == 1 or inputs.scores[i] < group[0]:
        return 0.0
    std = _statistics(group)[1]
    return (group[0] - group[1]) / ((std + 1e-6) if s.grpo_norm_by_std else 1.0)


BY_SCORE: dict[str, Callable[[EstimatorInputs, int, Settings], float]] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce++-baseline": _centred,
    "opo": _opo,
    "gpg": _gpg,
    "maxrl": _maxrl,
    "grpo_passk": _grpo_passk,
}
"""Estimators that give every token of a trajectory the same advantage."""


def _gdpo(inputs: EstimatorInputs, weights: dict[str, float]) -> Advantages:
    totals = []
    for i, t in enumerate(inputs.trajectories):
        group = [inputs.trajectories[j].components for j in inputs.group(i)]
        parts = (weights.get(c, 1.0) * _normalized(x, [g[c] for g in group]) for c, x in t.components.items())
        totals.append(sum(parts))
    advantages = whiten([[a] * len(r) for a, r in zip(totals, inputs.rewards, strict=True)])
    return advantages, advantages


def _token_baseline(inputs: EstimatorInputs, returns: list[Floats]) -> list[Floats]:
    weights: list[Floats] = []
    for old, squares in zip(inputs.old_logprobs, inputs.sum_pi_squared, strict=True):
        energies = [max(1 - 2 * math.exp(o) + q, 0.0) for o, q in zip(old, squares, strict=True)]
        weights.append([sum(energies[: t + 1]) + 1e-8 for t in range(len(energies))])
    advantages = []
    for i, row_returns in enumerate(returns):
        advantages.append([])
        for t, g in enumerate(row_returns):
            reached = [j for j in inputs.group(i) if len(returns[j]) > t]
            baseline = sum(returns[j][t] * weights[j][t] for j in reached) / sum(weights[j][t] for j in reached)
            advantages[-1].append(g - baseline if len(reached) > 1 else 0.0)
    return advantages


def _per_turn(inputs: EstimatorInputs, s: Settings) -> Advantages:
    lengths = [[len(turn) for turn in t.turns] for t in inputs.trajectories]

    def split_turns(tokens: Floats, sizes: list[int]) -> list[Floats]:
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        return [tokens[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def to_tokens(per_turn: list[Floats]) -> list[Floats]:
        return [
            [x for x, n in zip(*pair, strict=True) for _ in range(n)] for pair in zip(per_turn, lengths, strict=True)
        ]

    rewards = [[sum(turn) for turn in split_turns(r, n)] for r, n in zip(inputs.rewards, lengths, strict=True)]
    if s.advantage_estimator == "gae_per_turn":
        values = [[turn[0] for turn in split_turns(v, n)] for v, n in zip(inputs.values, lengths, strict=True)]
        raw = [_gae(r, v, s) for r, v in zip(rewards, values, strict=True)]
        returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(raw, values, strict=True)]
        return whiten(to_tokens(raw)), to_tokens(returns)
    returns = [_reward_to_go(r, s.gamma) for r in rewards]
    advantages: list[Floats] = []
    for i, turn_returns in enumerate(returns):
        advantages.append([])
        for k, g in enumerate(turn_returns):
            peers = [returns[j][k] for j in inputs.group(i) if len(returns[j]) > k]
            mean, std = _statistics(peers)
            if s.advantage_estimator == "rloo_per_turn":
                advantages[-1].append((g - mean) * len(peers) / max(len(peers) - 1, 1))
            else:
                advantages[-1].append((g - mean) / (std + 1e-6 if s.grpo_norm_by_std else 1.0))
    return to_tokens(advantages), to_tokens(returns)


def normalize(advantages: list[Floats]) -> list[Floats]:
    """Shift and scale the advantages of all sampled tokens to mean 0 and biased variance 1."""
    flat = [x for row in advantages for x in row]
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / len(flat)
    return [[(x - mean) / math.sqrt(max(variance, 1e-8)) for x in row] for row in advantages]


# -- losses


@dataclass
class RowTokens:
    """Sampled tokens of one row, as read by a loss; (n,) each."""

    new: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    rollout: torch.Tensor
    covariance: torch.Tensor
    """(A - mean A)(log π - mean log π), with means over the mini-batch."""
    is_highest: torch.Tensor
    """True for the fifth of the mini-batch's tokens with the highest covariance."""

    @property
    def ratio(self) -> torch.Tensor:
        """π / π_old."""
        return torch.exp(self.new - self.old)


def policy_loss(t: RowTokens, s: Settings) -> torch.Tensor:  # noqa: C901, one case per loss
    """Return the loss (n,) of each sampled token of a row, with the default settings of each loss."""
    a, new, ratio, detached = t.advantages, t.new, t.ratio, t.ratio.detach()

    def surrogate(ratio: torch.Tensor) -> torch.Tensor:
        clipped = torch.clamp(ratio, 1 - s.eps_clip_low, 1 + s.eps_clip_high)
        return -torch.min(ratio * a, clipped * a)

    match s.policy_loss_type:
        case "regular":
            return surrogate(ratio)
        case "dual_clip":
            return torch.where(a < 0, torch.min(surrogate(ratio), -s.clip_ratio_c * a), surrogate(ratio))
        case "policy_gradient":
            return -a * new
        case "cross_entropy":
            return -new
        case "importance_sampling":
            return -ratio * a
        case "rollout_is":
            weight = torch.exp(new - t.rollout).detach()
            return -torch.where((weight >= 0.5) & (weight <= 2.0), weight, 0.0) * a * new
        case "cispo":
            return -detached.clamp(0.0, 5.0) * a * new
        case "sapo":
            tau = torch.where(a > 0, 1.0, 1.05).to(a.dtype)
            return -(4 / tau) / (1 + torch.exp(-tau * (ratio - 1))) * a
        case "dro":
            return -(a * new - 0.05 * (new - t.old) ** 2)
        case "dppo":
            moved = new.exp() - t.rollout.exp()
            outside = ((a > 0) & (moved > 0.2)) | ((a < 0) & (moved < -0.2))
            return -torch.where(outside, 0.0, torch.exp(new - t.rollout).detach().clamp(max=20)) * a * new
        case "gspo" | "gspo_token":
            mean = (new - t.old).detach().mean()
            return surrogate(torch.exp(mean + new - new.detach()))
        case "luspo":
            return len(a) * surrogate(torch.exp((new - t.old).mean()).expand(len(a)))
        case "gmpo":
            gap = new - t.old
            clipped = torch.where(a < 0, torch.clamp(gap, min=-0.4), torch.clamp(gap, max=0.4))
            return -torch.exp(clipped.mean()) * a
        case "vespo":
            w = torch.exp((new - t.old).sum().detach())
            phi = torch.where(a >= 0, w**2 * torch.exp(3 * (1 - w)), w**3 * torch.exp(2 * (1 - w)))
            return -phi * a * new
        case "clip_cov":  # with clip_ratio=1, every candidate is masked
            not_clipped = (surrogate(ratio) + ratio * a).abs() == 0
            is_candidate = not_clipped & (t.covariance > 1) & (t.covariance < 5)
            return torch.where(is_candidate, 0.0, surrogate(ratio))
        case "kl_cov":
            return -ratio * a + t.is_highest * (new - t.old).abs()
    raise AssertionError(f"no specification of {s.policy_loss_type}")


def kl_estimate(new: torch.Tensor, ref: torch.Tensor, old: torch.Tensor, s: Settings) -> torch.Tensor:
    """Return the KL estimate (n,) whose gradient is that of the configured estimator."""
    d, name = ref - new, s.kl_estimator_type
    values = {"k1": -d, "abs": d.abs(), "k2": d**2 / 2, "k3": torch.exp(d) - 1 - d}
    k2 = values["k2"]
    estimate = values[name] if name in values else values[name[:-1]].detach() + k2 - k2.detach()
    if not s.use_bias_correction_kl:
        return estimate
    ratio = torch.exp(new - old)
    return (ratio.detach() if name == "k2" or name.endswith("+") else ratio) * estimate


def reduce_tokens(losses: list[list[torch.Tensor]], uids: Sequence[str], reduction: str, max_len: int) -> torch.Tensor:
    """Reduce the token losses of the trajectories, each a list of one tensor (n,) per row, to a scalar."""
    trajectories = [(torch.cat(rows), uid) for rows, uid in zip(losses, uids, strict=True) if sum(map(len, rows))]
    zero = losses[0][0].new_zeros(())
    if not trajectories:
        return zero
    tokens = torch.cat([losses for losses, _ in trajectories])
    match reduction:
        case "token_mean":
            return tokens.mean()
        case "token_sum":
            return tokens.sum()
        case "sequence_mean":
            return torch.stack([losses.mean() for losses, _ in trajectories]).mean()
        case "seq_mean_token_sum":
            return torch.stack([losses.sum() for losses, _ in trajectories]).mean()
        case "seq_mean_token_sum_norm":
            return torch.stack([losses.sum() / max_len for losses, _ in trajectories]).mean()
        case "prompt_mean":
            prompts = [
                torch.cat([losses for losses, other in trajectories if other == uid])
                for uid in {u for _, u in trajectories}
            ]
            return torch.stack([prompt.mean() for prompt in prompts]).mean()
    raise AssertionError(f"no specification of {reduction}")


@dataclass
class Update:
    """Losses of one update, differentiable in the parameters of the policy (`critic`: of the critic)."""

    final: torch.Tensor
    policy: torch.Tensor
    kl: torch.Tensor
    entropy: torch.Tensor
    critic: torch.Tensor
    advantages: list[Floats]
    returns: list[Floats]


@dataclass
class OracleScores:
    """Scores of every row of every trajectory by all models."""

    new: list[list[Scores]]
    old: list[list[Scores]]
    ref: list[list[Scores]]
    values: list[list[torch.Tensor]]
    old_values: list[list[torch.Tensor]]


def update(trajectories: list[OracleTrajectory], scored: OracleScores, s: Settings) -> Update:
    """Return the losses of one update on one mini-batch of valid trajectories."""
    inputs = _estimator_inputs(trajectories, scored, s)
    advantages, returns = estimate_advantages(inputs, s)
    advantages = normalize(advantages) if s.advantage_batch_normalize else advantages
    flat_new = torch.cat([row.logprobs for rows in scored.new for row in rows]).detach()
    flat_advantages = torch.tensor([a for row in advantages for a in row], dtype=flat_new.dtype)
    covariance = (flat_advantages - flat_advantages.mean()) * (flat_new - flat_new.mean())
    n_highest = max(int(0.2 * len(covariance)), 1)
    is_highest = covariance >= covariance.sort(descending=True).values[n_highest - 1]
    entropies = torch.cat([row.entropies for rows in scored.old for row in rows]).detach()
    n_kept = math.ceil(s.top_entropy_quantile * len(entropies) - 1e-6)
    is_kept = entropies >= entropies.sort(descending=True).values[n_kept - 1]

    policy, kl, entropy, critic = [], [], [], []
    start = 0
    for i, t in enumerate(trajectories):
        parts: tuple[list[torch.Tensor], ...] = ([], [], [], [])
        offset = start
        for r, row in enumerate(t.rows):
            new, old = scored.new[i][r], scored.old[i][r]
            n = len(new.logprobs)
            tokens = slice(start, start + n)
            within = slice(start - offset, start - offset + n)
            engine = [x for x, sampled in zip(row.logprobs or [], row.was_sampled, strict=False) if sampled]
            rollout = torch.tensor(engine, dtype=flat_new.dtype) if engine else old.logprobs
            a = flat_advantages[tokens]
            row_tokens = RowTokens(new.logprobs, old.logprobs, a, rollout, covariance[tokens], is_highest[tokens])
            loss = policy_loss(row_tokens, s) if n else new.logprobs
            parts[0].append(loss * _factor(row_tokens, s) * is_kept[tokens])
            parts[1].append(kl_estimate(new.logprobs, scored.ref[i][r].logprobs, old.logprobs, s))
            parts[2].append(new.entropies)
            target = torch.tensor(returns[i][within], dtype=flat_new.dtype)
            parts[3].append(_value_loss(scored.values[i][r], scored.old_values[i][r], target, s.value_clip))
            start += n
        for terms, part in zip((policy, kl, entropy, critic), parts, strict=True):
            terms.append(part)

    uids = [t.prompt_uid for t in trajectories]

    def over_trajectories(terms: list[list[torch.Tensor]]) -> torch.Tensor:
        return reduce_tokens(terms, uids, "sequence_mean", 0)

    final = loss = reduce_tokens(policy, uids, s.loss_reduction, s.max_seq_len)
    if s.use_kl_loss:
        final = final + s.kl_loss_coef * over_trajectories(kl)
    if s.use_entropy_loss:
        final = final - s.entropy_loss_coef * over_trajectories(entropy)
    return Update(
        final, loss, over_trajectories(kl), over_trajectories(entropy), over_trajectories(critic), advantages, returns
    )


def _factor(t: RowTokens, s: Settings) -> torch.Tensor:
    """Return the off-policy weight (n,) of each token loss of a row."""
    factor = torch.ones_like(t.old)
    gap = t.old - t.rollout
    if s.tis_ratio_type == "token":
        factor = torch.exp(gap).clamp(max=s.tis_cap)
    elif s.tis_ratio_type == "sequence":
        factor = torch.exp(gap.sum()).clamp(max=s.tis_cap).expand_as(gap)
    threshold = s.off_policy_sequence_mask_threshold
    if threshold is not None and len(gap) and t.advantages.mean() < 0 and (t.rollout - t.new).mean() > threshold:
        factor = torch.zeros_like(factor)
    return factor


def _value_loss(values: torch.Tensor, old: torch.Tensor, target: torch.Tensor, clip: float | None) -> torch.Tensor:
    error = (values - target) ** 2
    if clip is not None:
        error = torch.max(error, (old + torch.clamp(values - old, -clip, clip) - target) ** 2)
    return error / 2


def _estimator_inputs(trajectories: list[OracleTrajectory], scored: OracleScores, s: Settings) -> EstimatorInputs:
    def flat(rows: list[list[torch.Tensor]]) -> list[Floats]:
        return [[x for row in one_trajectory for x in row.tolist()] for one_trajectory in rows]

    def logprobs(scores: list[list[Scores]]) -> list[Floats]:
        return flat([[row.logprobs for row in rows] for rows in scores])

    old, ref = logprobs(scored.old), logprobs(scored.ref)
    rewards, scores = [t.token_rewards for t in trajectories], [t.score for t in trajectories]
    if s.use_kl_in_reward:
        reward_settings = Settings(kl_estimator_type=s.kl_estimator_type)
        for i, (log_old, log_ref) in enumerate(zip(old, ref, strict=True)):
            x, y = torch.tensor(log_old, dtype=torch.float64), torch.tensor(log_ref, dtype=torch.float64)
            penalties = (s.kl_loss_coef * kl_estimate(x, y, x, reward_settings)).tolist()
            rewards[i] = [r - p for r, p in zip(rewards[i], penalties, strict=True)]
            scores[i] -= sum(penalties)
    squares = flat([[row.sum_pi_squared for row in rows] for rows in scored.old])
    return EstimatorInputs(trajectories, rewards, scores, flat(scored.old_values), old, ref, squares)


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of `loss` by parameter name; the graph of `loss` is kept."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True))
