"""The state of a rollout in progress, its retries, and its conversion to a trajectory."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.runtime.env_pool import Episode
from skyrl_gym.runtime.text import describe_error
from skyrl_train.algorithms.reward_pipeline import place_turn_rewards
from skyrl_train.generators.base import BatchMetadata, RolloutRequest, request_seed
from skyrl_train.generators.conversation import TokenConversation
from skyrl_train.types import Segment, StopReason, Trajectory, Turn

logger = logging.getLogger(__name__)

NOT_RETRIED = frozenset({StopReason.PROMPT_TOO_LONG, StopReason.REWARD_UNKNOWN, StopReason.ABORT, StopReason.STALLED})
"""Stop reasons of invalid trajectories that a retry would not change."""


@dataclass(slots=True)
class Rollout:
    """One attempt at a rollout."""

    request: RolloutRequest
    run_seed: int
    attempt: int = 0
    episode: Episode | None = None
    conversation: TokenConversation | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    env_metrics: dict[str, Any] = field(default_factory=dict)
    generate_s: float = 0.0
    env_s: float = 0.0
    stop_reason: str | None = None  # set when the rollout is over
    error: str | None = None
    cause: BaseException | None = None  # of the error

    def __str__(self) -> str:
        return f"{self.env_class} {self.session_id}"

    @property
    def session_id(self) -> str:
        """The engine's session id for this attempt, e.g. "train-4711-17-3-0". It is unique in a run."""
        id = self.request.id
        return f"{id.phase}-{id.draw}-{id.instance_id}-{id.repetition_id}-{self.attempt}"

    @property
    def turns(self) -> list[Turn]:
        """Turns sampled so far."""
        return [] if self.conversation is None else self.conversation.turns

    @property
    def seed(self) -> int:
        """Seed of the next turn."""
        return request_seed(self.run_seed, self.request.id, len(self.turns))

    @property
    def env_class(self) -> str:
        """Name of the environment."""
        return self.request.row.env_class or "unknown"

    @property
    def is_over(self) -> bool:
        """True if no turn follows."""
        return self.stop_reason is not None

    def fail(self, stop_reason: str, error: str, cause: BaseException | None = None) -> None:
        """End the rollout as invalid. Only the first failure is recorded."""
        if self.error is None:
            self.stop_reason, self.error, self.cause = stop_reason, error, cause

    def finish(self) -> Trajectory:
        """Return the trajectory, which ends with the last sampled token. Call it once: it places the turns' rewards.

        A conversation that cannot be rendered, or has no token for its reward, makes the rollout fail.
        """
        segments: tuple[Segment, ...] = (Segment.start([]),)
        try:
            if self.conversation is not None:
                self.conversation.finish()
                segments, turns = tuple(self.conversation.rows), self.conversation.turns
                if turns and not segments[-1].response_length:
                    self.fail(
                        StopReason.EMPTY_RESPONSE,
                        "the environment replaced the reply with an empty string, so there is no token to reward",
                    )
                place_turn_rewards(segments, turns)
                for i, segment in enumerate(segments):
                    segment.turns = tuple(turn for turn in turns if turn.segment == i)
        except Exception as error:  # noqa: BLE001, one bad rollout must not abort the run
            self.fail(StopReason.ENV_ERROR, f"cannot make a trajectory of the rollout: {describe_error(error)}", error)
            segments = (Segment.start([]),)
        assert self.stop_reason is not None
        return Trajectory(
            id=self.request.id,
            env_class=self.env_class,
            data_source=self.request.row.data_source,
            segments=segments,
            stop_reason=self.stop_reason,
            error=self.error,
            reward_components=self.reward_components,
            env_metrics=self.env_metrics,
            env_extras=self.request.row.env_extras,
            timing={"generate": self.generate_s, "env": self.env_s},
            n_attempts=self.attempt + 1,
        )


async def play_until_valid(
    requests: Sequence[RolloutRequest],
    metadata: BatchMetadata,
    play: Callable[[Sequence[Rollout]], Awaitable[None]],
    *,
    n_retries: int,
) -> list[Trajectory]:
    """Return one trajectory per request, in order. Failed rollouts are retried up to `n_retries` times.

    `play` plays rollouts until they are over, valid or not.
    """
    rollouts: dict[int, Rollout] = {}  # by index of the request, as are the trajectories
    trajectories: dict[int, Trajectory] = {}
    shown: set[tuple[str | None, str]] = set()
    to_play: Sequence[int] = range(len(requests))
    for attempt in range(n_retries + 1):
        played = {i: Rollout(requests[i], metadata.seed, attempt) for i in to_play}
        await play(list(played.values()))
        rollouts |= played
        trajectories |= {i: rollout.finish() for i, rollout in played.items()}
        to_play = [i for i, rollout in played.items() if rollout.error and rollout.stop_reason not in NOT_RETRIED]
        if not to_play or attempt == n_retries:
            break
        _warn([rollouts[i] for i in to_play], len(requests), "are retried", shown)
    _warn([rollout for rollout in rollouts.values() if rollout.error], len(requests), "are invalid", shown)
    return list(trajectories.values())


def _warn(failed: Sequence[Rollout], n_rollouts: int, outcome: str, shown: set[tuple[str | None, str]]) -> None:
    """Log one warning per stop reason and type of error, with the first traceback unless the kind is in `shown`."""
    kinds: dict[tuple[str | None, str], list[Rollout]] = {}
    for rollout in failed:
        kinds.setdefault((rollout.stop_reason, type(rollout.cause).__name__), []).append(rollout)
    for kind, alike in kinds.items():
        first = alike[0]
        logger.warning(
            "%d of %d rollouts %s; the first, %s: %s",
            *(len(alike), n_rollouts, outcome, first.request.id.to_string(), first.error),
            exc_info=None if kind in shown else first.cause,
        )
        shown.add(kind)
