"""Trajectories to the padded tensors of a training batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_train.types import TrainingBatch, Trajectory, all_or_none


def build_training_batch(trajectories: Sequence[Trajectory], pad_token_id: int) -> TrainingBatch:
    """A batch (B, L) of valid trajectories, prompts padded left and responses right. Rows keep their order."""
    prompt_length = max(len(t.prompt_ids) for t in trajectories)
    response_length = max(len(t.response_ids) for t in trajectories)

    def padded(values: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (response_length - len(row))] for row in values], dtype=torch.float32)

    sequences, attention_mask = [], []
    for t in trajectories:
        left, right = prompt_length - len(t.prompt_ids), response_length - len(t.response_ids)
        sequences.append([pad_token_id] * left + t.prompt_ids + t.response_ids + [pad_token_id] * right)
        attention_mask.append([0] * left + [1] * (len(t.prompt_ids) + len(t.response_ids)) + [0] * right)
    logprobs = all_or_none([t.logprobs for t in trajectories])
    greedy_rewards = all_or_none([t.greedy_reward for t in trajectories])
    return TrainingBatch(
        sequences=torch.tensor(sequences),
        attention_mask=torch.tensor(attention_mask),
        loss_mask=padded([t.loss_mask for t in trajectories]),
        rewards=padded([t.valid_rewards for t in trajectories]),
        rollout_logprobs=None if logprobs is None else padded(logprobs),
        greedy_rewards=None if greedy_rewards is None else torch.tensor(greedy_rewards),
        reward_components=_reward_components(trajectories),
        uids=[t.id.instance_id for t in trajectories],
    )


def _reward_components(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Total of each component (B,); one that a trajectory does not report is 0 there."""
    names = sorted({name for t in trajectories for name in t.reward_components})
    return {name: torch.tensor([t.reward_components.get(name, 0.0) for t in trajectories]) for name in names}


def micro_batches(lengths: Sequence[int], max_tokens: int, max_rows: int | None = None) -> list[list[int]]:
    """Split rows into parts of at most `max_tokens` tokens after padding, rows of similar length together.

    A row longer than `max_tokens` gets a part of its own. With `max_rows`, no part has more rows than that.
    """
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):  # the newest row is the longest
        part = parts[-1] if parts else None
        is_full = part is None or lengths[row] * (len(part) + 1) > max_tokens or len(part) == max_rows
        if is_full:
            parts.append([row])
        elif part is not None:
            part.append(row)
    return parts
