"""SkyRL's helper functions around a training step."""

from collections.abc import Sequence
from enum import Enum

from skyrl_train.algorithms.filters import informative_groups
from skyrl_train.compat.skyrl.generator import GeneratorInput, GeneratorOutput, to_requests, to_trajectories

TOLERANCE = 1e-6


class ResumeMode(Enum):
    """The values of `trainer.resume_mode`."""

    NONE = "none"
    LATEST = "latest"
    FROM_PATH = "from_path"


def validate_generator_output(num_prompts: int, generator_output: GeneratorOutput) -> None:
    """Raise DataError unless the lists have `num_prompts` trajectories and one value per token."""
    prompts = GeneratorInput(prompts=[[]] * num_prompts, env_classes=[None] * num_prompts)  # type: ignore[typeddict-item]
    to_trajectories({**generator_output, "trajectory_ids": None}, to_requests(prompts))


def zero_variance_filter(rewards: Sequence[float | Sequence[float]], uids: Sequence[str]) -> list[int]:
    """Return the indices of responses to keep: groups (by uid) with unequal rewards, or with only one response."""
    groups = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
    totals = [float(reward) if isinstance(reward, int | float) else float(sum(reward)) for reward in rewards]
    kept = informative_groups(totals, [groups[uid] for uid in uids], TOLERANCE)
    return [index for index, uid in enumerate(uids) if groups[uid] in kept]
