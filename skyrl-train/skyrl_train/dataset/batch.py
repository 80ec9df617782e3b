"""Trajectories to the padded tensors of a training batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_train.types import TrainingBatch, Trajectory, all_or_none


def build_training_batch(trajectories: Sequence[Trajectory], pad_token_id: int) -> TrainingBatch:
    """A batch (B, L) of valid trajectories, prompts padded left and responses right. Rows keep their order.

    A trajectory with earlier rows has them before its last one, which carries the reward of all of them.
    """
    rows = [row for t in trajectories for row in t.rows]
    of_row = [t for t in trajectories for _ in t.rows]
    prompt_length = max(len(row.prompt_ids) for row in rows)
    response_length = max(len(row.response_ids) for row in rows)

    def padded(values: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (response_length - len(row))] for row in values], dtype=torch.float32)

    sequences, attention_mask = [], []
    for row in rows:
        left, right = prompt_length - len(row.prompt_ids), response_length - len(row.response_ids)
        sequences.append([pad_token_id] * left + row.prompt_ids + row.response_ids + [pad_token_id] * right)
        attention_mask.append([0] * left + [1] * (len(row.prompt_ids) + len(row.response_ids)) + [0] * right)
    logprobs = all_or_none([row.logprobs for row in rows])
    greedy_rewards = all_or_none([t.greedy_reward for t in of_row])
    is_last_row = torch.tensor([isinstance(row, Trajectory) for row in rows])
    return TrainingBatch(
        sequences=torch.tensor(sequences),
        attention_mask=torch.tensor(attention_mask),
        loss_mask=padded([row.loss_mask for row in rows]),
        rewards=padded([_rewards_with_earlier(row) if isinstance(row, Trajectory) else [] for row in rows]),
        rollout_logprobs=None if logprobs is None else padded(logprobs),
        greedy_rewards=None if greedy_rewards is None else torch.tensor(greedy_rewards),
        is_last_row=None if bool(is_last_row.all()) else is_last_row,
        reward_components=_reward_components(of_row),
        uids=[t.id.instance_id for t in of_row],
    )


def _rewards_with_earlier(trajectory: Trajectory) -> list[float]:
    """The rewards of the last row; those of the rows before are added to that of its last token."""
    rewards = trajectory.valid_rewards
    if not trajectory.earlier or not rewards:
        return rewards
    return [*rewards[:-1], rewards[-1] + trajectory.total_reward - sum(rewards)]


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
