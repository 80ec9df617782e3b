"""Conversion of trajectories to training batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_train.types import TrainingBatch, Trajectory, all_or_none


def build_training_batch(trajectories: Sequence[Trajectory], pad_token_id: int) -> TrainingBatch:
    """Return a batch of B rows, one for each segment of the valid trajectories, in their order.

    Prompts are padded on the left to the longest one, responses on the right.
    """
    segments = [segment for t in trajectories for segment in t.segments]
    owners = [t for t in trajectories for _ in t.segments]
    prompt_length = max(segment.n_prompt for segment in segments)
    response_length = max(len(segment.loss_mask) for segment in segments)

    def padded(values: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (response_length - len(row))] for row in values], dtype=torch.float32)

    sequences, attention_mask = [], []
    for segment in segments:
        n_tokens = len(segment.token_ids)
        left = prompt_length - segment.n_prompt
        right = prompt_length + response_length - left - n_tokens
        sequences.append([pad_token_id] * left + segment.token_ids + [pad_token_id] * right)
        attention_mask.append([0] * left + [1] * n_tokens + [0] * right)
    versions = torch.full((len(segments), response_length), -1, dtype=torch.int32)
    for row, segment in enumerate(segments):
        for turn in segment.turns:
            start = turn.start
            for span in turn.weight_spans:
                versions[row, start : start + span.n_tokens] = span.version
                start += span.n_tokens
    logprobs = all_or_none([segment.logprobs for segment in segments])
    greedy_rewards = all_or_none([t.greedy_reward for t in owners])
    names = sorted({name for t in trajectories for name in t.reward_components})
    return TrainingBatch(
        sequences=torch.tensor(sequences),
        attention_mask=torch.tensor(attention_mask),
        loss_mask=padded([segment.loss_mask for segment in segments]),
        draws=torch.tensor([t.id.draw for t in owners]),
        trajectories=torch.tensor([i for i, t in enumerate(trajectories) for _ in t.segments]),
        rewards=padded([segment.rewards for segment in segments]),
        versions=versions,
        rollout_logprobs=None if logprobs is None else padded(logprobs),
        greedy_rewards=None if greedy_rewards is None else torch.tensor(greedy_rewards),
        reward_components={name: torch.tensor([t.reward_components.get(name, 0.0) for t in owners]) for name in names},
    )
