"""Convert trajectories to training data of a Tinker service."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import tinker
import torch

from skyrl_agent.integrations.tinker.inputs import model_input
from skyrl_train.algorithms.advantages.by_group import grpo
from skyrl_train.errors import EngineError
from skyrl_train.types import Segment, Trajectory


def apply_overlong_filtering(segment: Segment, max_sequence_length: int) -> Segment:
    """Truncate a segment that is longer than `max_sequence_length`, and set its loss mask to 0. Others stay as is.

    Source: overlong filtering in DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.4.
    """
    if len(segment.token_ids) <= max_sequence_length:
        return segment
    kept = deepcopy(segment)
    kept.truncate(max(0, max_sequence_length - segment.n_prompt))
    return replace(kept, loss_mask=[0] * kept.response_length, turns=())


def training_data(
    trajectories: Sequence[Trajectory], max_sequence_length: int
) -> tuple[list[tinker.Datum], dict[str, float]]:
    """Return the data of a step for the loss `ppo`, and metrics.

    Invalid trajectories are in no baseline and no datum. A segment with advantage 0 or without a trained token has no
    datum. The metrics `advantage/*` cover all valid trajectories.

    Raises:
        EngineError: the service reported no log-probs.
    """
    valid = [t for t in trajectories if t.is_valid]
    rewards = torch.tensor([[t.total_reward] for t in valid], dtype=torch.float32).view(-1, 1)  # (B, 1)
    advantages, _ = grpo(rewards, torch.ones_like(rewards), [f"{t.id.draw}/{t.id.instance_id}" for t in valid])
    data, n_overlong = [], 0
    for t, advantage in zip(valid, advantages[:, 0].tolist(), strict=True):
        for segment in t.segments:
            kept = apply_overlong_filtering(segment, max_sequence_length)
            n_overlong += kept is not segment
            if advantage and any(kept.loss_mask):
                data.append(_datum(kept, advantage))
    metrics = {"rollouts/truncated_overlong": float(n_overlong)}
    if valid:
        metrics |= {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std(correction=0))}
    return data, metrics


def _datum(segment: Segment, advantage: float) -> tinker.Datum:
    """Return the datum of a segment. The target at a position is the next token."""
    if segment.logprobs is None:
        text = "the Tinker service reported no log-probs, which the loss ppo needs; check the sampling client"
        raise EngineError(text)
    zeros = [0.0] * (segment.n_prompt - 1)
    advantages = [*zeros, *(advantage * mask for mask in segment.loss_mask)]
    return tinker.Datum(
        model_input=model_input(segment.token_ids[:-1], segment.images),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=segment.token_ids[1:], dtype="int64"),
            "logprobs": tinker.TensorData(data=[*zeros, *segment.logprobs], dtype="float32"),
            "advantages": tinker.TensorData(data=advantages, dtype="float32"),
        },
    )
