"""Evaluated trajectories, read from `evals/global_step_N/<data_source>.jsonl`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skyrl_report.errors import DataError
from skyrl_report.remote import RemoteFolder
from skyrl_report.run_folder import AGGREGATED, IMAGE_NAME


@dataclass(frozen=True)
class EvaluatedTrajectory:
    """One evaluated episode. `score` is the sum of its rewards, or None if the rollout is invalid."""

    prompt: str
    response: str
    score: float | None
    stop_reason: str
    env_class: str
    data_source: str
    extras: str
    error: str
    images: tuple[str, ...] = ()  # names of files in evals/images/
    uid: str = ""
    reason: str = ""  # category of a failed episode, see `episodes.classify`


@dataclass(frozen=True)
class Example:
    """The best, median or worst trajectory. `before` is the first evaluation's trajectory for the same prompt."""

    role: str
    trajectory: EvaluatedTrajectory
    before: EvaluatedTrajectory | None


def pick_examples(newest: list[EvaluatedTrajectory], first: list[EvaluatedTrajectory]) -> list[Example]:
    """Return the best, median and worst of the `newest` trajectories, each with the `first` one for its prompt."""
    scored = sorted((t for t in newest if t.score is not None), key=lambda t: -(t.score or 0.0))
    if not scored:
        return []
    earlier = {trajectory.prompt: trajectory for trajectory in reversed(first)}
    indices = {"best": 0, "median": len(scored) // 2, "worst": len(scored) - 1}
    chosen = {index: role for role, index in reversed(indices.items())}  # a small evaluation has fewer than three
    return [Example(chosen[index], scored[index], earlier.get(scored[index].prompt)) for index in sorted(chosen)]


def read_rows(folder: RemoteFolder) -> Iterator[dict[str, Any]]:
    """Yield the trajectory rows of an evaluation's folder. DataError for a line that is not a JSON object."""
    for name in folder.names():
        if not name.endswith(".jsonl") or name == AGGREGATED:
            continue
        path, text = (folder / name).url, (folder.read(name) or b"").decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}:{number} is not JSON ({error}); remove the line to report on the rest"
                ) from error
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise DataError(f"{path}:{number} is {kind}, not an object; remove it to report on the rest")
            yield row


def parse_trajectory(row: dict[str, Any]) -> EvaluatedTrajectory:
    """Parse a trajectory row as written by this project or by SkyRL."""
    return EvaluatedTrajectory(
        prompt=_text(row.get("input_prompt")),
        response=_text(row.get("output_response")),
        score=_score(row.get("total_reward", row.get("score"))),  # over all segments
        stop_reason=str(row.get("stop_reason") or "unknown"),
        env_class=str(row.get("env_class") or "unknown"),
        data_source=str(row.get("data_source") or "unknown"),
        extras=json.dumps(row["env_extras"], indent=2, ensure_ascii=False) if row.get("env_extras") else "",
        error=str(row.get("error") or ""),
        uid=str(row.get("uid") or ""),
        images=tuple(name for name in row.get("images") or () if IMAGE_NAME.fullmatch(str(name))),
    )


def _text(value: object) -> str:
    """Format a list of chat messages as `role: content` blocks. Strings are unchanged, None is ""."""
    if isinstance(value, list):
        return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in value)
    return "" if value is None else str(value)


def _score(value: object) -> float | None:
    """Return a number, or the sum of a list of rewards. None for anything else, or if a reward is missing."""
    if isinstance(value, list):
        parts = [_score(part) for part in value]
        return None if None in parts else sum(part for part in parts if part is not None)
    return float(value) if isinstance(value, int | float) else None
