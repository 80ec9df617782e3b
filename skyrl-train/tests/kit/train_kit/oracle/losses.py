"""Losses of the sampled tokens, and their reduction to the loss of the mini-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from train_kit.oracle.settings import Settings


@dataclass(frozen=True)
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


def policy_loss(t: RowTokens, s: Settings) -> torch.Tensor:  # noqa: C901, one case per loss
    """Return the loss (n,) of each sampled token of a row, with the default settings of each loss."""
    a, new = t.advantages, t.new
    ratio = torch.exp(new - t.old)

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
            return -ratio.detach().clamp(0.0, 5.0) * a * new
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


def off_policy_weight(t: RowTokens, s: Settings) -> torch.Tensor:
    """Return the factor (n,) of each token loss of a row that corrects for the engine's policy."""
    factor, gap = torch.ones_like(t.old), t.old - t.rollout
    if s.tis_ratio_type == "token":
        factor = torch.exp(gap).clamp(max=s.tis_cap)
    elif s.tis_ratio_type == "sequence":
        factor = torch.exp(gap.sum()).clamp(max=s.tis_cap).expand_as(gap)
    threshold = s.off_policy_sequence_mask_threshold
    if threshold is not None and len(gap) and t.advantages.mean() < 0 and (t.rollout - t.new).mean() > threshold:
        factor = torch.zeros_like(factor)
    return factor


def kl_estimate(new: torch.Tensor, ref: torch.Tensor, old: torch.Tensor, s: Settings) -> torch.Tensor:
    """Return the KL estimate (n,) whose gradient is that of the configured estimator."""
    d, name = ref - new, s.kl_estimator_type
    values = {"k1": -d, "abs": d.abs(), "k2": d**2 / 2, "k3": (torch.exp(d) - 1 - d).clamp(max=10)}
    k2 = values["k2"]
    estimate = values[name] if name in values else values[name[:-1]].detach() + k2 - k2.detach()
    if not s.use_bias_correction_kl:
        return estimate
    ratio = torch.exp(new - old)
    return (ratio.detach() if name == "k2" or name.endswith("+") else ratio) * estimate


def value_loss(values: torch.Tensor, old: torch.Tensor, target: torch.Tensor, clip: float | None) -> torch.Tensor:
    """Return the critic's loss (n,) of each sampled token of a row."""
    error = (values - target) ** 2
    if clip is not None:
        error = torch.max(error, (old + torch.clamp(values - old, -clip, clip) - target) ** 2)
    return error / 2


def reduce_tokens(losses: list[list[torch.Tensor]], uids: Sequence[str], reduction: str, max_len: int) -> torch.Tensor:
    """Reduce the token losses of the trajectories, each a list of one tensor (n,) per row, to a scalar."""
    trajectories = [(torch.cat(rows), uid) for rows, uid in zip(losses, uids, strict=True) if sum(map(len, rows))]
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
