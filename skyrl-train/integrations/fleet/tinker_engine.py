"""A Tinker service as rollout engine, and trajectories as its training data."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import tinker
import torch

from skyrl_train.algorithms.advantages.by_group import grpo
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult
from skyrl_train.types import Segment, Trajectory, WeightSpan

SEED_MASK = 2**31 - 1


class TinkerEngine:
    """The part of `InferenceEngine` that a generator calls, on a Tinker sampling client that changes with each step."""

    def __init__(self, context_length: int) -> None:
        self.info = EngineInfo(context_length, context_length)
        self._client: tinker.SamplingClient | None = None
        self._version = 0

    def load(self, client: tinker.SamplingClient, version: int) -> None:
        """Sample from new weights."""
        self._client, self._version = client, version

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """Return one result for each request, in order; EngineError if a request has other settings than Tinker's."""
        return list(await asyncio.gather(*map(self._sample, requests)))

    async def end_session(self, session_id: str) -> None:
        """Do nothing: Tinker has no sessions."""

    async def _sample(self, request: EngineRequest) -> EngineResult:
        sampling = request.sampling
        if sampling.penalizes or sampling.min_p or sampling.stop_token_ids or sampling.min_new_tokens:
            raise EngineError(f"Tinker samples without penalties, min_p, min_tokens and stop tokens; got {sampling}")
        assert self._client is not None
        response = await self._client.sample(
            tinker.ModelInput.from_ints(request.prompt_ids),
            1,
            tinker.SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=request.seed & SEED_MASK,
                stop=list(sampling.stop) or None,
            ),
        )
        (sequence,) = response.sequences
        tokens, logprobs = list(sequence.tokens), sequence.logprobs
        return EngineResult(
            tokens,
            None if logprobs is None else list(logprobs),
            "stop" if sequence.stop_reason == "stop" else "length",
            (WeightSpan(self._version, len(tokens)),),
        )


def apply_overlong_filtering(segment: Segment, max_sequence_length: int) -> Segment:
    """Return a segment that is longer than `max_sequence_length` truncated, with a loss mask of 0; others unchanged.

    Source: overlong filtering in DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.4.
    """
    if len(segment.token_ids) <= max_sequence_length:
        return segment
    n_kept = max(0, max_sequence_length - segment.n_prompt)
    return replace(
        segment,
        token_ids=segment.token_ids[: segment.n_prompt + n_kept],
        loss_mask=[0] * n_kept,
        rewards=segment.rewards[:n_kept],
        logprobs=None if segment.logprobs is None else segment.logprobs[:n_kept],
        sampling_logprobs=None,
        turns=(),
    )


def grpo_advantages(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return the advantage of each valid trajectory over the valid ones of its prompt."""
    if not trajectories:
        return []
    rewards = torch.tensor([[t.total_reward] for t in trajectories], dtype=torch.float32)  # (B, 1)
    index = [f"{t.id.draw}/{t.id.instance_id}" for t in trajectories]
    advantages, _ = grpo(rewards, torch.ones_like(rewards), index)
    return [float(value) for value in advantages[:, 0]]


def training_data(
    trajectories: Sequence[Trajectory], max_sequence_length: int
) -> tuple[list[tinker.Datum], dict[str, float]]:
    """Return the data of a step, for the loss `ppo`, and metrics. Invalid trajectories are in no baseline and no datum.

    A segment without advantage or trained token has no datum.

    Raises:
        EngineError: the service reported no log-probs.
    """
    valid = [t for t in trajectories if t.is_valid]
    advantages = grpo_advantages(valid)
    data, n_overlong = [], 0
    for t, advantage in zip(valid, advantages, strict=True):
        for segment in t.segments:
            kept = apply_overlong_filtering(segment, max_sequence_length)
            n_overlong += kept is not segment
            if advantage and any(kept.loss_mask):
                data.append(_datum(kept, advantage))
    metrics = {"rollouts/truncated_overlong": float(n_overlong)}
    if advantages:
        values = torch.tensor(advantages)
        metrics |= {"advantage/mean": float(values.mean()), "advantage/std": float(values.std(correction=0))}
    return data, metrics


def _datum(segment: Segment, advantage: float) -> tinker.Datum:
    """Return the datum of a segment; the target of a position is the next token."""
    if segment.logprobs is None:
        raise EngineError(
            "the Tinker service reported no log-probs, which the loss ppo needs; check the sampling client"
        )
    n_before = segment.n_prompt - 1
    zeros = [0.0] * n_before
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(segment.token_ids[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=segment.token_ids[1:], dtype="int64"),
            "logprobs": tinker.TensorData(data=[*zeros, *segment.logprobs], dtype="float32"),
            "advantages": tinker.TensorData(
                data=[*zeros, *(advantage * mask for mask in segment.loss_mask)], dtype="float32"
            ),
        },
    )
