"""The generator interface, and SkyRL's parallel-list view of what flows through it."""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import takewhile
from typing import Any, Literal, NotRequired, TypedDict, TypeVar

from skyrl_gym.metrics import default_aggregate_metrics
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import DataError
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import Message, PromptRow, Segment, Trajectory, TrajectoryID, Turn, all_or_none, last_sampled

T = TypeVar("T")

TrainingPhase = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Which step a batch of rollouts belongs to, e.g. `BatchMetadata(12, "train", seed=42)`."""

    global_step: int
    training_phase: TrainingPhase
    seed: int = 0  # of the run

    def rollout_seed(self, id: TrajectoryID) -> int:
        """The randomness of one rollout: a function of what it is, not of when or beside what it runs."""
        return seed_of(f"{self.seed}/{self.training_phase}/{self.global_step}/{id.to_string()}")


def seed_of(identity: str) -> int:
    """64 bits of randomness that follow from what tells a rollout, or a reply, from others."""
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
    """SkyRL's input: n prompts as parallel lists of length n. The trainer fills in all of it.

    Whoever calls `generate` may leave the last four out, or None.
    """

    prompts: list[list[Message]]
    env_classes: list[str | None]
    env_extras: list[dict[str, Any]]
    sampling_params: dict[str, Any]  # under vLLM's names; None: as the generator was configured
    trajectory_ids: list[TrajectoryID]  # None: new ones
    batch_metadata: BatchMetadata  # None: of step 0


class GeneratorOutput(TypedDict):
    """SkyRL's output: n trajectories as parallel lists of length n, in input order. Other keys are ignored.

    Step-wise trajectories have several entries each, side by side, which `trajectory_ids` and `is_last_step` tell
    apart; the last one speaks for the trajectory. The last five carry what SkyRL's lists have no place for.
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
    rollout_metrics: NotRequired[dict[str, Any] | None]  # numbers to log beside the trainer's own
    sampling_logprobs: NotRequired[list[list[float] | None]]
    turns: NotRequired[list[tuple[Turn, ...]]]
    timing: NotRequired[list[dict[str, float]]]
    n_attempts: NotRequired[list[int]]
    error: NotRequired[list[str | None]]


CARRIED = ("env_metrics", "reward_components", "turns", "timing", "n_attempts")
"""Lists of a `GeneratorOutput` that are fields of a `Trajectory` as they are."""


class GeneratorInterface:
    """Plays rollouts. Implement `generate`, or `rollout`, which the trainer calls: the other is made out of it.

    So the most derived class that overrides one of them decides what both do; if it overrides both, `rollout` decides.
    """

    generator_cfg: GeneratorConfig  # if there is one, `generate` without sampling parameters takes them from it
    _reported: Sequence[Mapping[str, Any]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the other method out of the one that is overridden."""
        super().__init_subclass__(**kwargs)
        new = takewhile(lambda base: base is cls or not issubclass(base, GeneratorInterface), cls.__mro__)
        overridden = {name for base in new for name in vars(base)}
        if "rollout" in overridden:
            cls.generate = _generate_by(cls.rollout)  # type: ignore[assignment, method-assign]
        elif "generate" in overridden:
            cls.rollout = _rollout_by(cls.generate)  # type: ignore[assignment, method-assign]

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """One trajectory for each prompt, in order."""
        raise NotImplementedError(f"{type(self).__name__} has neither `generate` nor `rollout`; implement one of them")

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """One trajectory for each request, in order."""
        raise NotImplementedError(f"no class above {type(self).__name__} has `generate` or `rollout`")

    def take_metrics(self) -> dict[str, float]:
        """What `generate` has returned as `rollout_metrics` since the last time, averaged over its calls."""
        reported, self._reported = self._reported, ()
        return default_aggregate_metrics(reported)

    async def close(self) -> None:
        """Release what the generator holds. Nothing by default."""


Generate = Callable[[GeneratorInterface, GeneratorInput], Coroutine[Any, Any, GeneratorOutput]]
Rollout = Callable[
    [GeneratorInterface, Sequence[RolloutRequest], SamplingParams, BatchMetadata], Coroutine[Any, Any, list[Trajectory]]
]


def _generate_by(rollout: Rollout) -> Generate:
    """A `generate` that calls `rollout`."""

    async def generate(self: GeneratorInterface, input_batch: GeneratorInput) -> GeneratorOutput:
        sampling = to_sampling(input_batch.get("sampling_params"), getattr(self, "generator_cfg", None))
        metadata = input_batch.get("batch_metadata") or BatchMetadata(0, "train")
        return to_generator_output(await rollout(self, to_requests(input_batch), sampling, metadata))

    return generate


def _rollout_by(generate: Generate) -> Rollout:
    """A `rollout` that calls `generate`."""

    async def rollout(
        self: GeneratorInterface, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        input_batch = to_generator_input(requests, sampling, metadata)
        output = await generate(self, input_batch)
        if reported := output.get("rollout_metrics"):
            self._reported = [*self._reported, reported]
        return to_trajectories(output, input_batch)

    return rollout


def to_generator_input(
    requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
) -> GeneratorInput:
    """The parallel-list view of rollout requests."""
    return GeneratorInput(
        prompts=[request.row.prompt for request in requests],
        env_classes=[request.row.env_class for request in requests],
        env_extras=[request.row.env_extras for request in requests],
        sampling_params=to_sampling_params(sampling),
        trajectory_ids=[request.id for request in requests],
        batch_metadata=metadata,
    )


def to_requests(input_batch: GeneratorInput) -> list[RolloutRequest]:
    """The rollout requests behind a parallel-list view."""
    prompts, env_classes = input_batch["prompts"], input_batch["env_classes"]
    ids = input_batch.get("trajectory_ids") or [TrajectoryID(uuid.uuid4().hex, 0) for _ in prompts]
    all_extras = input_batch.get("env_extras") or [{} for _ in prompts]
    rows = zip(ids, prompts, env_classes, all_extras, strict=True)
    return [RolloutRequest(id, PromptRow(id.instance_id, prompt, env, extras)) for id, prompt, env, extras in rows]


OTHER_NAMES = {"max_tokens": "max_new_tokens", "max_generate_length": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""Of sampling parameters, in SkyRL and in vLLM."""

FIXED = {
    "logprobs": (None, 0, 1),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (True,),
    "no_stop_trim": (True,),
}
"""Sampling parameters of SkyRL's that have one meaning here, and the values that ask for it."""


def to_sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as SkyRL gives them to generators: under vLLM's names."""
    of_ours = {"max_new_tokens", "min_new_tokens", "n_top_logprobs", "with_raw_logprobs"}  # rollouts read no others
    return {
        **{name: value for name, value in asdict(sampling).items() if name not in of_ours},
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
    }


def to_sampling(params: Mapping[str, Any] | None, cfg: GeneratorConfig | None) -> SamplingParams:
    """The sampling parameters behind SkyRL's, whichever of their names they have; None are those of the configuration.

    Raises:
        DataError: a parameter that is unknown, or there is no limit of tokens.
    """
    configured = None if cfg is None else SamplingParams.from_config(cfg.sampling_params)
    if params is None and configured is not None:
        return configured
    known = {field.name for field in fields(SamplingParams)}
    found: dict[str, Any] = {} if configured is None else {"max_new_tokens": configured.max_new_tokens}
    for name, value in (params or {}).items():
        if name in FIXED and value in FIXED[name]:
            continue
        ours = OTHER_NAMES.get(name, name)
        if ours not in known:
            raise DataError(f"sampling_params has {name}={value!r}, which no engine here follows; leave it out")
        if value is not None:
            found[ours] = value
    for name in found.keys() & {"stop", "stop_token_ids"}:
        found[name] = (found[name],) if isinstance(found[name], str) else tuple(found[name])
    if "max_new_tokens" not in found:
        raise DataError("sampling_params has no max_tokens, and the generator no configuration to take it from")
    return SamplingParams(**found)


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
        rollout_metrics={},  # the trainer computes its own
        sampling_logprobs=[row.sampling_logprobs for _, row in pairs],
        turns=[t.turns for t, _ in pairs],
        timing=[t.timing for t, _ in pairs],
        n_attempts=[t.n_attempts for t, _ in pairs],
        error=[t.error for t, _ in pairs],
    )
    if len(pairs) > len(trajectories):
        output["trajectory_ids"] = [t.id for t, _ in pairs]
        output["is_last_step"] = [row is t for t, row in pairs]
    return output


def to_trajectories(output: GeneratorOutput, input_batch: GeneratorInput) -> list[Trajectory]:
    """The trajectories behind a parallel-list view, identified by the input they answer.

    Turns and `sampling_logprobs` that do not fit a response any more, which a `generate` has shortened, are left out.

    Raises:
        DataError: lists of different lengths, named with both; or other trajectories than those that were asked for.
    """
    requests = to_requests(input_batch)
    is_last = output.get("is_last_step") or [True] * len(requests)
    ends = [row for row, ends_here in enumerate(is_last, start=1) if ends_here]
    if len(ends) != len(requests) or (ends and ends[-1] != len(is_last)):
        raise DataError(f"the generator's is_last_step ends {len(ends)} trajectories for {len(requests)} prompts")
    required = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons")
    for name in (*required, "rollout_logprobs", "trajectory_ids", "sampling_logprobs", "error", *CARRIED):
        values = output.get(name)
        n_values = len(values or ())  # type: ignore[arg-type]
        if n_values != len(is_last) and (values is not None or name in required):
            raise DataError(f"the generator returned {n_values} {name} for {len(is_last)} prompts; return one for each")
    trajectories = []
    for request, start, end in zip(requests, [0, *ends], ends, strict=False):
        *earlier, last = [_trajectory(output, request, row) for row in range(start, end)]
        whole = replace(last, earlier=tuple(_segment(t) for t in earlier))
        trajectories.append(whole if _turns_fit(whole) else replace(whole, turns=()))
    return trajectories


def _turns_fit(trajectory: Trajectory) -> bool:
    """Whether the turns are inside of their rows."""
    lengths = [len(row.response_ids) for row in trajectory.rows]
    return all(turn.segment < len(lengths) and turn.end <= lengths[turn.segment] for turn in trajectory.turns)


def _segment(trajectory: Trajectory) -> Segment:
    """An earlier row, which was read as a trajectory of its own."""
    return Segment(
        prompt_ids=trajectory.prompt_ids,
        response_ids=trajectory.response_ids,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        rewards=trajectory.rewards or [0.0] * len(trajectory.response_ids),
        sampling_logprobs=trajectory.sampling_logprobs,
    )


def _trajectory(output: GeneratorOutput, request: RolloutRequest, i: int) -> Trajectory:
    """Row `i` as a trajectory."""
    id = _at(output.get("trajectory_ids"), i)
    if id is not None and id != request.id:
        raise DataError(f"trajectory_ids[{i}]={id} where {request.id} was asked for; keep the order of the prompts")
    response_ids, loss_mask = output["response_ids"][i], output["loss_masks"][i]
    rewards, stop_reason = output["rewards"][i], output["stop_reasons"][i]
    logprobs, sampling_logprobs = _at(output.get("rollout_logprobs"), i), _at(output.get("sampling_logprobs"), i)
    columns: dict[str, Sequence[float] | None] = {
        "loss_masks": loss_mask,
        "rollout_logprobs": logprobs,
        "rewards": rewards if isinstance(rewards, list) else None,
    }
    for name, values in columns.items():
        if values is not None and len(values) != len(response_ids):
            raise DataError(f"{name}[{i}] has {len(values)} values for {len(response_ids)} response tokens")
    per_token = _per_token(rewards, loss_mask)
    if per_token is not None and not all(map(math.isfinite, per_token)):
        raise DataError(f"rewards[{i}]={rewards!r} are not all finite; return None for a trajectory without a reward")
    return Trajectory(
        id=request.id,
        env_class=request.row.env_class or "unknown",
        data_source=request.row.data_source,
        prompt_ids=output["prompt_token_ids"][i],
        response_ids=response_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        rewards=per_token,
        stop_reason=stop_reason,
        env_extras=request.row.env_extras,
        sampling_logprobs=sampling_logprobs if len(sampling_logprobs or ()) == len(response_ids) else None,
        error=None if rewards is not None else _at(output.get("error"), i) or stop_reason,
        **{name: output[name][i] for name in CARRIED if output.get(name) is not None},  # type: ignore[literal-required]
    )


def _at(values: Sequence[T] | None, i: int) -> T | None:
    return None if values is None else values[i]


def _per_token(rewards: list[float] | float | None, loss_mask: Sequence[int]) -> list[float] | None:
    """A reward of the whole response stands on its last sampled token."""
    if rewards is None or isinstance(rewards, list):
        return rewards
    per_token = [0.0] * len(loss_mask)
    if per_token:
        per_token[last_sampled(loss_mask)] = float(rewards)
    return per_token
