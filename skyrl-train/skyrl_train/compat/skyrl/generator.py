"""SkyRL's interface for generators: `generate` takes and returns parallel lists."""

import math
import uuid
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, NotRequired, TypedDict, TypeVar

from transformers import PreTrainedTokenizerBase

from skyrl_gym.images import IMAGE_TYPES
from skyrl_gym.metrics import default_aggregate_metrics
from skyrl_train.algorithms.reward_pipeline import EMPTY_RESPONSE, Reward
from skyrl_train.compat.skyrl.sampling_params import to_sampling, to_sampling_params
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.root import SkyRLGymConfig
from skyrl_train.errors import DataError
from skyrl_train.generators.base import BatchMetadata, RolloutGenerator, RolloutRequest, sanitize
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.inference_engines.base import InferenceEngine, SamplingParams
from skyrl_train.types import Message, PromptRow, Segment, Trajectory, TrajectoryID, Turn, all_or_none, last_sampled
from skyrl_train.types.tokens import Phase

T = TypeVar("T")
TrainingPhase = Phase
ConversationType = list[Message]


class GeneratorInput(TypedDict):
    """SkyRL's input: n prompts as parallel lists of length n. The last four fields may be missing or None."""

    prompts: list[ConversationType]
    env_classes: list[str | None]
    env_extras: list[dict[str, Any]]
    sampling_params: dict[str, Any]  # under vLLM's names; None: from the configuration
    trajectory_ids: list[TrajectoryID]  # None: random IDs
    batch_metadata: BatchMetadata  # None: step 0


class GeneratorOutput(TypedDict):
    """SkyRL's output: n trajectories as parallel lists of length n, in input order. Other keys are ignored.

    A step-wise trajectory has several adjacent entries. They share a trajectory ID, and the last entry has
    `is_last_step` set. Fields of the whole trajectory come from its last entry. The last five lists are our additions.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[list[float] | float | None]  # per token, or for the response; None: an invalid trajectory
    loss_masks: list[list[int]]
    stop_reasons: list[str]
    rollout_logprobs: list[list[float]] | None  # None when the engine does not report them
    env_metrics: NotRequired[list[dict[str, Any]]]
    reward_components: NotRequired[list[dict[str, float]]]  # totals by name
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    is_last_step: NotRequired[list[bool] | None]
    rollout_metrics: NotRequired[dict[str, Any] | None]  # numbers to log with the trainer's own
    sampling_logprobs: NotRequired[list[list[float] | None]]
    turns: NotRequired[list[tuple[Turn, ...]]]
    timing: NotRequired[list[dict[str, float]]]
    n_attempts: NotRequired[list[int]]
    error: NotRequired[list[str | None]]


NO_IMAGES = (
    "which SkyRL's parallel lists cannot contain; override `rollout` instead of `generate`, and do not override "
    "`postprocess_generator_output`"
)

COPIED = ("env_metrics", "reward_components", "timing", "n_attempts")
"""Lists of a `GeneratorOutput` whose entries are fields of a `Trajectory`."""


class GeneratorInterface(RolloutGenerator):
    """Base class for generators that implement SkyRL's `generate` or our `rollout`. Each defaults to calling the other.

    If both are overridden, the trainer calls the method of the most derived class, or `rollout` if that class has both.
    """

    generator_cfg: GeneratorConfig  # optional; its sampling parameters are the default of `generate`
    _reported: Mapping[Phase, Sequence[Mapping[str, Any]]] = {}
    _returned_totals: bool | None = None  # by the last call of `generate`, if a subclass implements it

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return one trajectory per prompt, in order."""
        self._check_implemented()
        sampling = to_sampling(input_batch.get("sampling_params"), getattr(self, "generator_cfg", None))
        metadata = input_batch.get("batch_metadata") or BatchMetadata(0, "train")
        trajectories = await self.rollout(to_requests(input_batch), sampling, metadata)
        return to_generator_output(trajectories, with_totals=returns_totals(self))

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """Return one trajectory per request, in order."""
        self._check_implemented()
        return await self._rollout_by_generate(requests, sampling, metadata)

    async def play(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """Play rollouts with `generate` or `rollout`, whichever is overridden in the more derived class."""
        overridden = next(cls for cls in type(self).__mro__ if {"generate", "rollout"} & vars(cls).keys())
        if "rollout" not in vars(overridden):
            return [sanitize(t) for t in await self._rollout_by_generate(requests, sampling, metadata)]
        return await super().play(requests, sampling, metadata)

    def take_metrics(self, phase: Phase = "train") -> dict[str, float]:
        """Return the mean of the `rollout_metrics` that `generate` reported in a phase since the last call."""
        reported, self._reported = self._reported.get(phase, ()), {**self._reported, phase: ()}
        return default_aggregate_metrics(reported)

    async def _rollout_by_generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        output = await self.generate(to_generator_input(requests, sampling, metadata))
        self._returned_totals = any(isinstance(rewards, int | float) for rewards in output["rewards"])
        if reported := output.get("rollout_metrics"):
            phase = metadata.training_phase
            self._reported = {**self._reported, phase: [*self._reported.get(phase, ()), reported]}
        return to_trajectories(output, requests)

    def _check_implemented(self) -> None:
        """Raise NotImplementedError if neither method is overridden, because they would call each other forever."""
        cls = type(self)
        if cls.generate is GeneratorInterface.generate and cls.rollout is GeneratorInterface.rollout:
            raise NotImplementedError(f"{cls.__name__} has neither `generate` nor `rollout`; implement one of them")


class SkyRLGymGenerator(GymGenerator, GeneratorInterface):
    """A `GymGenerator` with SkyRL's constructor. Subclasses may override `generate`."""

    def __init__(
        self,
        generator_cfg: GeneratorConfig,
        skyrl_gym_cfg: SkyRLGymConfig,
        inference_engine_client: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str | None = None,
    ) -> None:
        """Create the generator. `model_name` has no effect."""
        super().__init__(generator_cfg, skyrl_gym_cfg, inference_engine_client, tokenizer)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError if the subclass defines SkyRL's `agent_loop`, because nothing calls it here."""
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "agent_loop"):
            raise TypeError(
                f"{cls.__name__}.agent_loop would never be called, because this generator has no such method. Override "
                "generate(input_batch), or rollout(requests, sampling, metadata), and play the episodes there"
            )


def returns_totals(generator: RolloutGenerator) -> bool:
    """Return True if lists have one reward per response instead of one per token.

    For a custom `generate`, its last output decides. Otherwise SkyRL's rule applies: totals with `generator.batched`
    and a single turn.
    """
    if isinstance(generator, GeneratorInterface) and generator._returned_totals is not None:
        return generator._returned_totals
    cfg: GeneratorConfig | None = getattr(generator, "generator_cfg", None)
    return cfg is not None and cfg.batched and cfg.max_turns == 1


def to_generator_input(
    requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
) -> GeneratorInput:
    """Convert rollout requests to parallel lists.

    Raise DataError for an image in a prompt, because `GeneratorOutput` could not contain it.
    """
    for request in requests:
        contents: list[Any] = [message.get("content") for message in request.row.prompt]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        if any(isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES for part in parts):
            raise DataError(f"the prompt of trajectory {request.id.to_string()} has an image, {NO_IMAGES}")
    return GeneratorInput(
        prompts=[request.row.prompt for request in requests],
        env_classes=[request.row.env_class for request in requests],
        env_extras=[request.row.env_extras for request in requests],
        sampling_params=to_sampling_params(sampling),
        trajectory_ids=[request.id for request in requests],
        batch_metadata=metadata,
    )


def to_requests(input_batch: GeneratorInput) -> list[RolloutRequest]:
    """Convert parallel lists to rollout requests."""
    prompts, env_classes = input_batch["prompts"], input_batch["env_classes"]
    ids = input_batch.get("trajectory_ids") or [TrajectoryID(uuid.uuid4().hex, 0) for _ in prompts]
    all_extras = input_batch.get("env_extras") or [{} for _ in prompts]
    rows = zip(ids, prompts, env_classes, all_extras, strict=True)
    return [RolloutRequest(id, PromptRow(id.instance_id, prompt, env, extras)) for id, prompt, env, extras in rows]


def to_generator_output(trajectories: Sequence[Trajectory], *, with_totals: bool = False) -> GeneratorOutput:
    """Convert trajectories to parallel lists. `with_totals` gives one reward per response instead of one per token.

    Raise DataError for an image, because the lists contain only its placeholder tokens.
    """
    if t := next((t for t in trajectories if any(segment.images for segment in t.segments)), None):
        raise DataError(f"trajectory {t.id.to_string()} has an image, {NO_IMAGES}")
    pairs = [(t, segment) for t in trajectories for segment in t.segments]
    output = GeneratorOutput(
        prompt_token_ids=[segment.prompt_ids for _, segment in pairs],
        response_ids=[segment.response_ids for _, segment in pairs],
        rewards=[
            (sum(segment.rewards) if with_totals else segment.rewards) if t.is_valid else None for t, segment in pairs
        ],
        loss_masks=[segment.loss_mask for _, segment in pairs],
        stop_reasons=[t.stop_reason for t, _ in pairs],
        rollout_logprobs=all_or_none([segment.logprobs for _, segment in pairs]),
        env_metrics=[t.env_metrics for t, _ in pairs],
        reward_components=[t.reward_components for t, _ in pairs],
        rollout_metrics={},  # the trainer computes its own
        sampling_logprobs=[segment.sampling_logprobs for _, segment in pairs],
        turns=[segment.turns for _, segment in pairs],
        timing=[t.timing for t, _ in pairs],
        n_attempts=[t.n_attempts for t, _ in pairs],
        error=[t.error for t, _ in pairs],
    )
    if len(pairs) > len(trajectories):
        output["trajectory_ids"] = [t.id for t, _ in pairs]
        output["is_last_step"] = [segment is t.segments[-1] for t, segment in pairs]
    return output


def edit_as_lists(
    trajectories: Sequence[Trajectory], edit: Callable[[GeneratorOutput], GeneratorOutput], *, with_totals: bool
) -> list[Trajectory]:
    """Convert valid trajectories to lists, apply `edit`, and convert back. `edit` may change the lists in place.

    Raises:
        DataError: a trajectory has an image, the edited lists have different lengths or lack a reward, or `edit`
            returned something else.
    """
    lists = to_generator_output(trajectories, with_totals=with_totals)
    copied: Any = {
        name: [list(row) if isinstance(row, list) else row for row in rows] if isinstance(rows, list) else rows
        for name, rows in lists.items()
    }
    edited: Any = edit(copied)
    if not isinstance(edited, Mapping):
        raise DataError(f"it returned a {type(edited).__name__}; return the rollouts' dictionary")
    requests = [RolloutRequest(t.id, PromptRow(t.id.instance_id, [], t.env_class, t.env_extras)) for t in trajectories]
    changed = to_trajectories({**lists, **edited}, requests)
    for t in changed:
        if not t.is_valid:
            raise DataError(f"trajectory {t.id.to_string()} has no reward; set its loss mask to 0 to leave it out")
    return [
        replace(new, data_source=old.data_source, greedy_reward=old.greedy_reward)
        for new, old in zip(changed, trajectories, strict=True)
    ]


def to_trajectories(output: GeneratorOutput, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
    """Convert parallel lists to the trajectories of the requests, in order.

    `generate` may shorten responses. Turns and `sampling_logprobs` that no longer fit are dropped. A reward for an
    empty response makes the trajectory invalid.

    Raises:
        DataError: lists have different lengths, or their IDs are not the requested ones.
    """
    is_last = output.get("is_last_step") or [True] * len(requests)
    ends = [end for end, ends_here in enumerate(is_last, start=1) if ends_here]
    if len(ends) != len(requests) or (ends and ends[-1] != len(is_last)):
        raise DataError(f"the generator's is_last_step ends {len(ends)} trajectories for {len(requests)} prompts")
    required = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons")
    for name in (*required, "rollout_logprobs", "trajectory_ids", "sampling_logprobs", "turns", "error", *COPIED):
        values = output.get(name)
        n_values = len(values or ())  # type: ignore[arg-type]
        if n_values != len(is_last) and (values is not None or name in required):
            raise DataError(f"the generator returned {n_values} {name} for {len(is_last)} prompts; return one for each")
    trajectories = []
    for request, start, end in zip(requests, [0, *ends], ends, strict=False):
        last = end - 1
        stop_reason, error = output["stop_reasons"][last], None
        if not isinstance(stop_reason, str):
            raise DataError(f"stop_reasons[{last}]={stop_reason!r} is not text; return one such as 'stop' or 'length'")
        if output["rewards"][last] is None:
            error = _at(output.get("error"), last) or stop_reason
        elif any(not output["response_ids"][i] and output["rewards"][i] for i in range(start, end)):
            stop_reason, error = EMPTY_RESPONSE
        trajectory = Trajectory(
            id=request.id,
            env_class=request.row.env_class or "unknown",
            data_source=request.row.data_source,
            segments=tuple(_segment(output, request, i) for i in range(start, end)),
            stop_reason=stop_reason,
            error=error,
            env_extras=request.row.env_extras,
            **{name: output[name][last] for name in COPIED if output.get(name) is not None},  # type: ignore[literal-required]
        )
        trajectories.append(trajectory)
    return trajectories


def _segment(output: GeneratorOutput, request: RolloutRequest, i: int) -> Segment:
    """Convert entry `i` of the lists to a segment."""
    id = _at(output.get("trajectory_ids"), i)
    if id is not None and (id.instance_id, id.repetition_id) != (request.id.instance_id, request.id.repetition_id):
        raise DataError(f"trajectory_ids[{i}]={id}, but {request.id} was requested; keep the order of the prompts")
    prompt_ids, response_ids = output["prompt_token_ids"][i], output["response_ids"][i]
    loss_mask, rewards = output["loss_masks"][i], output["rewards"][i]
    logprobs, sampling_logprobs = _at(output.get("rollout_logprobs"), i), _at(output.get("sampling_logprobs"), i)
    for name, values in (("loss_masks", loss_mask), ("rollout_logprobs", logprobs), ("rewards", rewards)):
        if isinstance(values, Sized) and len(values) != len(response_ids):
            raise DataError(
                f"{name}[{i}] has {len(values)} values for {len(response_ids)} response tokens; return one per token"
            )
    per_token = place_reward(0.0 if rewards is None else rewards, loss_mask)
    if not all(map(math.isfinite, per_token)):
        raise DataError(f"rewards[{i}]={rewards!r} are not all finite; return None for a trajectory without a reward")
    turns = _at(output.get("turns"), i) or ()
    return Segment(
        token_ids=[*prompt_ids, *response_ids],
        n_prompt=len(prompt_ids),
        loss_mask=loss_mask,
        rewards=per_token,
        logprobs=logprobs,
        sampling_logprobs=sampling_logprobs if len(sampling_logprobs or ()) == len(response_ids) else None,
        turns=tuple(turns) if all(turn.end <= len(response_ids) for turn in turns) else (),
    )


def place_reward(reward: Reward, loss_mask: Sequence[int]) -> list[float]:
    """Return per-token rewards [r]. A reward for the whole response goes to its last sampled token."""
    if isinstance(reward, list):
        return reward
    rewards = [0.0] * len(loss_mask)
    if rewards:
        rewards[last_sampled(loss_mask)] = float(reward)
    return rewards


def _at(values: Sequence[T] | None, i: int) -> T | None:
    return None if values is None else values[i]
