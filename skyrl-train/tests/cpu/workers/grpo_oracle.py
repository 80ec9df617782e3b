"""GRPO in plain torch, one trajectory and one token at a time: rollout tokens in, gradient out.

Written from the papers, to be compared with the trainer. It shares no code with it, pads nothing, splits nothing,
and takes the whole vocabulary at every position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OracleTrajectory:
    """What a rollout leaves: token ids, which of them were sampled, and the reward of the whole."""

    prompt_uid: str
    prompt_ids: list[int]
    response_ids: list[int]
    was_sampled: list[bool]
    reward: float


def token_logprobs(model: torch.nn.Module, t: OracleTrajectory, temperature: float) -> list[torch.Tensor]:
    """The log-prob of each sampled token, in order."""
    token_ids = t.prompt_ids + t.response_ids
    logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]  # (L, V)
    logprobs = []
    for i, was_sampled in enumerate(t.was_sampled):
        position = len(t.prompt_ids) + i
        if was_sampled:
            distribution = torch.log_softmax(logits[position - 1] / temperature, dim=-1)
            logprobs.append(distribution[token_ids[position]])
    return logprobs


def advantages(trajectories: list[OracleTrajectory]) -> list[float]:
    """(reward - mean) / (std + 1e-6) within the trajectories of each prompt."""
    result = []
    for t in trajectories:
        group = torch.tensor([other.reward for other in trajectories if other.prompt_uid == t.prompt_uid])
        spread = group.std() if len(set(group.tolist())) > 1 else torch.tensor(0.0)
        result.append(float((t.reward - group.mean()) / (spread + 1e-6)) if spread > 0 else 0.0)
    return result


def grpo_loss(
    policy: torch.nn.Module,
    old_policy: torch.nn.Module,
    reference: torch.nn.Module,
    trajectories: list[OracleTrajectory],
    *,
    temperature: float,
    eps_low: float,
    eps_high: float,
    kl_coef: float,
) -> torch.Tensor:
    """Mean clipped surrogate over all sampled tokens, plus the mean over trajectories of their mean k3 divergence."""
    token_losses, divergences = [], []
    for t, advantage in zip(trajectories, advantages(trajectories), strict=True):
        new = token_logprobs(policy, t, temperature)
        with torch.no_grad():
            old = token_logprobs(old_policy, t, temperature)
            ref = token_logprobs(reference, t, temperature)
        for log_p, log_old in zip(new, old, strict=True):
            ratio = torch.exp(log_p - log_old)
            clipped = torch.clamp(ratio, 1 - eps_low, 1 + eps_high)
            token_losses.append(-torch.min(ratio * advantage, clipped * advantage))
        k3 = [torch.exp(log_ref - log_p) - (log_ref - log_p) - 1 for log_p, log_ref in zip(new, ref, strict=True)]
        divergences.append(torch.stack(k3).mean())
    return torch.stack(token_losses).mean() + kl_coef * torch.stack(divergences).mean()


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of `loss` by parameter name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
