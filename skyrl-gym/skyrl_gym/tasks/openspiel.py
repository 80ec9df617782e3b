"""The task family `openspiel`: single moves from `skyrl_gym.envs.openspiel`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from skyrl_gym.envs.openspiel.env import OpenSpielEnv
from skyrl_gym.envs.openspiel.rewards import move_value
from skyrl_gym.envs.openspiel.tasks import OpenSpielTasks, TaskConfig
from skyrl_gym.envs.row import to_python
from skyrl_gym.tasks.base import Task, TaskFamily


class OpenSpielFamily(TaskFamily):
    """The positions of `OpenSpielTasks`. The options are the same as in `TaskConfig.from_options`."""

    env: ClassVar[str] = "openspiel"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._tasks = OpenSpielTasks(TaskConfig.from_options(options))

    @property
    def options(self) -> dict[str, Any]:
        """The resolved options. `game_types` is empty, so that GAME_TYPES does not select among them again."""
        config = to_python(dataclasses.asdict(self._tasks.config) | {"cases": list(self._tasks.config.cases)})
        return {**config, "game_types": []}

    @property
    def task_ids(self) -> Sequence[int]:
        """All ids: `num_tasks_per_case` of the first case, then of the second, and so on."""
        return range(self._tasks.total)

    def _generate(self, task_id: int) -> Task:
        if task_id >= self._tasks.total:
            raise ValueError(
                f"task_id={task_id} of openspiel is too high: {len(self._tasks.config.cases)} cases with "
                f"num_tasks_per_case={self._tasks.config.num_tasks_per_case} have the ids 0 to {self._tasks.total - 1}"
            )
        task = self._tasks.generate(task_id)
        return Task(task_id, f"openspiel_{task.game.get_type().short_name}", task.prompt)

    def solve(self, task: Task) -> str:
        """Return the first legal move or, with ``reward_mode=outcome``, the move with the best outcome."""
        config, position = self._tasks.config, self._tasks.generate(task.task_id)
        best = position.legal.moves[0]
        if config.reward_mode == "outcome":
            seed = f"{config.seed}/{task.task_id}"
            best = max(
                position.legal.moves,
                key=lambda move: move_value(position.state, position.player, move.action, config.n_playouts, seed),
            )
        return f"\\boxed{{{best.text}}}"

    def score(self, reply: str, task: Task) -> float:
        """Return the reward of the `openspiel` environment."""
        env = OpenSpielEnv(self.options, {"extra_info": {"task_id": task.task_id}})
        return float(env.step(reply)["reward"] or 0.0)
