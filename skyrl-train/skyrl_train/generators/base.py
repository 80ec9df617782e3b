"""The interface between the trainer and the generators that play its rollouts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_gym.runtime.text import clean_text, to_facts
from skyrl_train.algorithms.reward_pipeline import reject_unusable
from skyrl_train.inference_engines.base import SamplingParams, hash_seed
from skyrl_train.types import DrawnPrompt, PromptRow, Trajectory, TrajectoryID
from skyrl_train.types.tokens import Phase


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """The step that starts the rollouts, e.g. `BatchMetadata(12, "train", seed=42)`."""

    global_step: int
    training_phase: Phase
    seed: int = 0  # the run's seed


def request_seed(run_seed: int, id: TrajectoryID, turn: int) -> int:
    """Return the seed of a rollout's turn. It does not depend on training steps, batching or retries."""
    return hash_seed(f"{run_seed}/{id.phase}/{id.draw}/{id.instance_id}/{id.repetition_id}/{turn}")


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A rollout to play: its ID, and the dataset row it starts from."""

    id: TrajectoryID
    row: PromptRow


def rollout_requests(
    prompts: Sequence[DrawnPrompt], n_samples: int, env_class: str, phase: Phase = "train"
) -> list[RolloutRequest]:
    """Return `n_samples` adjacent requests per prompt. `env_class` is the default for rows without an environment."""
    return [
        RolloutRequest(
            TrajectoryID(prompt.row.uid, sample, prompt.draw, phase),
            replace(prompt.row, env_class=prompt.row.env_class or env_class),
        )
        for prompt in prompts
        for sample in range(n_samples)
    ]


class RolloutGenerator(ABC):
    """Base class of generators. Implement `rollout`; the trainer calls `play`.

    In asynchronous training, many calls run at once, each with the samples of one prompt. Evaluations run concurrently
    with them.
    """

    @abstractmethod
    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """Return one trajectory for each request, in order."""

    async def play(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """Call `rollout` and sanitize its trajectories for metrics, files and tensors.

        A trajectory becomes invalid if its response is empty or its reward is NaN, infinite or too large for float32.
        """
        return [sanitize(trajectory) for trajectory in await self.rollout(requests, sampling, metadata)]

    def take_metrics(self, phase: Phase = "train") -> dict[str, float]:
        """Return the generator's own metrics of a phase since the last call."""
        return {}

    async def close(self) -> None:  # noqa: B027, not every generator holds resources
        """Release all resources."""


def sanitize(trajectory: Trajectory) -> Trajectory:
    """Clean the trajectory's text and metrics so that they can be written. An unusable reward makes it invalid."""
    trajectory = reject_unusable(trajectory)
    return replace(
        trajectory,
        error=None if trajectory.error is None else clean_text(trajectory.error),
        stop_reason=clean_text(trajectory.stop_reason),
        env_metrics=to_facts(trajectory.env_metrics),
        reward_components={clean_text(str(name)): value for name, value in trajectory.reward_components.items()},
    )
