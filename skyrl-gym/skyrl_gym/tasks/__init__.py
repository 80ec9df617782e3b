"""Generated tasks with verifiers: logic puzzles, program outputs, game moves and bug repairs.

    family = task_family("lgc-v2", {"task_types": ["sudoku"]})
    task = family.generate(700_000_012)         # always the same task
    family.score(reply, task)                   # 0.0 … 1.0

`DynamicEnvDataset` turns tasks into dataset rows, and `compute_score` scores replies to those rows.
"""

from skyrl_gym.tasks.base import Split, Task, TaskFamily
from skyrl_gym.tasks.dataset import DynamicEnvDataset, LGCV2DynamicDataset, OpenSpielDataset
from skyrl_gym.tasks.registry import FAMILIES, compute_lgc_v2_score, compute_score, read_task, task_family, task_row

__all__ = [
    "FAMILIES",
    "DynamicEnvDataset",
    "LGCV2DynamicDataset",
    "OpenSpielDataset",
    "Split",
    "Task",
    "TaskFamily",
    "compute_lgc_v2_score",
    "compute_score",
    "read_task",
    "task_family",
    "task_row",
]
