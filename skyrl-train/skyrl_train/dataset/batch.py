"""Conversion of trajectories to training batches."""

from collections.abc import Sequence

import torch

from skyrl_train.types import UNKNOWN_EXPERT, Segment, TrainingBatch, Trajectory, all_or_none


def build_training_batch(trajectories: Sequence[Trajectory], pad_token_id: int) -> TrainingBatch:
    """Build a batch of B rows: one per segment of the trajectories, in order. The trajectories must be valid."""
    segments = [segment for t in trajectories for segment in t.segments]
    owners = [t for t in trajectories for _ in t.segments]
    response_length = max(len(segment.loss_mask) for segment in segments)
    sequences, attention_mask = pad_tokens([(s.token_ids, s.n_prompt) for s in segments], pad_token_id)
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
        sequences=sequences,
        attention_mask=attention_mask,
        loss_mask=pad_right([segment.loss_mask for segment in segments]),
        draws=torch.tensor([t.id.draw for t in owners]),
        trajectories=torch.tensor([i for i, t in enumerate(trajectories) for _ in t.segments]),
        rewards=pad_right([segment.rewards for segment in segments]),
        versions=versions,
        rollout_logprobs=None if logprobs is None else pad_right(logprobs),
        greedy_rewards=None if greedy_rewards is None else torch.tensor(greedy_rewards),
        experts=_pad_experts(segments, sequences.shape[1], response_length),
        images=[segment.images for segment in segments] if any(segment.images for segment in segments) else None,
        reward_components={name: torch.tensor([t.reward_components.get(name, 0.0) for t in owners]) for name in names},
    )


def _pad_experts(segments: Sequence[Segment], length: int, response_length: int) -> torch.Tensor | None:
    """Return the recorded experts (B, L, layers, K), or None if no segment has any."""
    shapes = [segment.experts.shape[1:] for segment in segments if segment.experts is not None]
    if not shapes:
        return None
    padded = torch.full((len(segments), length, *shapes[0]), UNKNOWN_EXPERT, dtype=torch.int16)
    for row, segment in enumerate(segments):
        if segment.experts is not None:
            start = length - response_length - segment.n_prompt
            padded[row, start : start + len(segment.experts)] = torch.from_numpy(segment.experts)
    return padded


def pad_tokens(rows: Sequence[tuple[Sequence[int], int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens (B, L) and attention mask (B, L). Each row is (token ids, prompt length).

    Prompts are padded on the left to the longest prompt, responses on the right to the longest response.
    """
    prompt_length = max(n_prompt for _, n_prompt in rows)
    response_length = max(len(tokens) - n_prompt for tokens, n_prompt in rows)
    sequences, attention_mask = [], []
    for tokens, n_prompt in rows:
        left = prompt_length - n_prompt
        right = prompt_length + response_length - left - len(tokens)
        sequences.append([pad_token_id] * left + list(tokens) + [pad_token_id] * right)
        attention_mask.append([0] * left + [1] * len(tokens) + [0] * right)
    return torch.tensor(sequences), torch.tensor(attention_mask)


def pad_right(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return rows of numbers as a float tensor (B, R), padded with zeros on the right."""
    length = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], dtype=torch.float32)
