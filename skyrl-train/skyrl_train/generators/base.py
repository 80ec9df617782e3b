"""The generator interface, and SkyRL's parallel-list view of what flows through it."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NotRequired, TypedDict

from skyrl_train.errors import DataError
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import Message, PromptRow, Segment, Trajectory, TrajectoryID, all_or_none

TrainingPhase = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Which step a batch of rollouts belongs to, e.g. `BatchMetadata(12, "train", seed=42)`."""

    global_step: int
    training_phase: TrainingPhase
    seed: int = 0  # of the run

    def rollout_seed(self, id: TrajectoryID) -> int:
        """The randomness of one rollout: a function of what it is, not of when or beside what it runs."""
        identity = f"{self.seed}/{self.training_phase}/{self.global_step}/{id.to_string()}"
        return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout to play: which sample of which prompt, and the row it starts from."""

    id: TrajectoryID
    row: PromptRow


def rollout_requests(rows: Sequence[PromptRow], n_samples: int, env_class: str) -> list[RolloutRequest]:
    """Each prompt `n_samples` times, samples of one prompt side by side. `env_class` is of rows that name none."""
    named = [replace(row, env_class=row.env_class or env_class) for row in rows]
    return [RolloutRequest(TrajectoryID(row.uid, i), row) for row in named for i in range(n_samples)]


class GeneratorInput(TypedDict):
    """SkyRL's input: n prompts as parallel lists of length n."""

    prompts: list[list[Message]]
    env_classes: list[str | None]
    env_extras: list[dict[str, Any]]
    sampling_params: dict[str, Any]  # the fields of SamplingParams
    trajectory_ids: list[TrajectoryID]
    batch_metadata: BatchMetadata


class GeneratorOutput(TypedDict):
    """SkyRL's output: n trajectories as parallel lists of length n, in input order. Other keys are ignored.

    Step-wise trajectories have several entries each, side by side, which `trajectory_ids` and `is_last_step` tell
    apart; the last one speaks for the trajectory.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[list[float] | float | None]  # per token, or one for the response; None marks an invalid trajectory
    loss_masks: list[list[int]]
    stop_reasons: list[str]
    rollout_logprobs: list[list[float]] | None  # None when the engine does not report them
    env_metrics: NotRequired[list[dict[str, Any]]]
    reward_components: NotRequired[list[dict[str, float]]]  # totals by name
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    is_last_step: NotRequired[list[bool] | None]


class GeneratorInterface(ABC):
    """Plays rollouts. Implement `generate`, or override `rollout`, which the trainer calls."""

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """One trajectory for each prompt, in order."""

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """One trajectory for each request, in order."""
        input_batch = to_generator_input(requests, sampling, metadata)
        return to_trajectories(await self.generate(input_batch), input_batch)

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Release what the generator holds. Nothing by default."""


def to_generator_input(
    requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
) -> GeneratorInput:
    """The parallel-list view of rollout requests."""
    return GeneratorInput(
        prompts=[request.row.prompt for request in requests],
        env_classes=[request.row.env_class for request in requests],
        env_extras=[request.row.env_extras for request in requests],
        sampling_params=asdict(sampling),
        trajectory_ids=[request.id for request in requests],
        batch_metadata=metadata,
    )


def to_requests(input_batch: GeneratorInput) -> list[RolloutRequest]:
    """The rollout requests behind a parallel-list view."""
    columns = ("trajectory_ids", "prompts", "env_classes", "env_extras")
    rows = zip(*(input_batch[name] for name in columns), strict=True)  # type: ignore[literal-required]
    return [RolloutRequest(id, PromptRow(id.instance_id, prompt, env, extras)) for id, prompt, env, extras in rows]


def to_generator_output(trajectories: Sequence[Trajectory]) -> GeneratorOutput:
    """The parallel-list view of trajectories."""
    pairs = [(t, row) for t in trajectories for row in t.rows]
    output = GeneratorOutput(
        prompt_token_ids=[row.prompt_ids for _, row in pairs],
        response_ids=[row.response_ids for _, row in pairs],
        rewards=[row.rewards if t.is_valid else None for t, row in pairs],
        loss_masks=[row.loss_mask for _, row in pairs],
        stop_reasons=[t.stop_reason for t, _ in pairs],
        rollout_logprobs=all_or_none([row.logprobs for _, row in pairs]),
        env_metrics=[t.env_metrics for t, _ in pairs],
        reward_components=[t.reward_components for t, _ in pairs],
    )
    if len(pairs) > len(trajectories):
        output["trajectory_ids"] = [t.id for t, _ in pairs]
        output["is_last_step"] = [row is t for t, row in pairs]
    return output


def to_trajectories(output: GeneratorOutput, input_batch: GeneratorInput) -> list[Trajectory]:
    """The trajectories behind a parallel-list view, identified by the input they answer.

    Raises:
        DataError: lists of different lengths, named with both.
    """
    requests = to_requests(input_batch)
    is_last = output.get("is_last_step") or [True] * len(requests)
    ends = [row for row, ends_here in enumerate(is_last, start=1) if ends_here]
    if len(ends) != len(requests) or (ends and ends[-1] != len(is_last)):
        raise DataError(f"the generator's is_last_step ends {len(ends)} trajectories for {len(requests)} prompts")
    required = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons")
    for name in (*required, "rollout_logprobs", "env_metrics", "reward_components", "trajectory_ids"):
        values = output.get(name)
        n_values = len(values or ())  # type: ignore[arg-type]
        if n_values != len(is_last) and (values is not None or name in required):
            raise DataError(f"the generator returned {n_values} {name} for {len(is_last)} prompts; return one for each")
    trajectories = []
    for request, start, end in zip(requests, [0, *ends], ends, strict=False):
        last = _trajectory(output, request, end - 1)
        earlier = [_trajectory(output, request, row) for row in range(start, end - 1)]
        trajectories.append(replace(last, earlier=tuple(_segment(t) for t in earlier)))
    return trajectories


def _segment(trajectory: Trajectory) -> Segment:
    """An earlier row, which was read as a trajectory of its own."""
    return Segment(
        prompt_ids=trajectory.prompt_ids,
        response_ids=trajectory.response_ids,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        rewards=trajectory.rewards or [0.0] * len(trajectory.response_ids),
    )


def _trajectory(output: GeneratorOutput, request: RolloutRequest, i: int) -> Trajectory:
    response_ids = output["response_ids"][i]
    loss_mask = output["loss_masks"][i]
    rewards = _per_token(output["rewards"][i], len(response_ids), loss_mask)
    all_logprobs = output.get("rollout_logprobs")
    logprobs = None if all_logprobs is None else all_logprobs[i]
    columns: dict[str, Sequence[float] | None] = {
        "loss_masks": loss_mask,
        "rollout_logprobs": logprobs,
        "rewards": rewards,
    }
    for name, values in columns.items():
        if values is not None and len(values) != len(response_ids):
            raise DataError(f"{name}[{i}] has {len(values)} values for {len(response_ids)} response tokens")
    if rewards is not None and not all(map(math.isfinite, rewards)):
        raise DataError(f"rewards[{i}]={rewards!r} are not all finite; return None for a trajectory without a reward")
    return Trajectory(
        id=request.id,
        env_class=request.row.env_class or "unknown",
        data_source=request.row.data_source,
        prompt_ids=output["prompt_token_ids"][i],
        response_ids=response_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        rewards=rewards,
        stop_reason=output["stop_reasons"][i],
        reward_components=output["reward_components"][i] if "reward_components" in output else {},
        env_metrics=output["env_metrics"][i] if "env_metrics" in output else {},
        env_extras=request.row.env_extras,
        error=None if rewards is not None else output["stop_reasons"][i],
    )


def _per_token(rewards: list[float] | float | None, n_tokens: int, loss_mask: Sequence[int]) -> list[float] | None:
    """A reward of the whole response stands on its last sampled token."""
    if rewards is None or isinstance(rewards, list):
        return rewards
    sampled = [position for position in range(min(n_tokens, len(loss_mask))) if loss_mask[position]]
    per_token = [0.0] * n_tokens
    if n_tokens:
        per_token[sampled[-1] if sampled else -1] = float(rewards)
    return per_token
