"""Registry of task families, and the reward function for their rows."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from skyrl_gym.envs.entry_point import load_attribute, suggest_name
from skyrl_gym.envs.row import read_extra_info, to_python, whole_number
from skyrl_gym.tasks.base import Task, TaskFamily

FAMILIES = {
    "lgc-v2": "skyrl_gym.tasks.logic.family:LGCV2Tasks",
    "trace": "skyrl_gym.tasks.trace:TraceTasks",
    "openspiel": "skyrl_gym.tasks.openspiel:OpenSpielFamily",
    "swe-synth": "skyrl_gym.tasks.swe_synth.family:SweSynthTasks",
}
"""Task families by the name in `extra_info["env"]`. A family's module is imported on first use."""

ALIASES = {
    "lgc_v2": "lgc-v2",
    "logic-v2": "lgc-v2",
    "logic_v2": "lgc-v2",
    "swe_synth": "swe-synth",
    "swesynth": "swe-synth",
}


def task_family(env: str, adapter_config: Mapping[str, Any] | None = None) -> TaskFamily:
    """Return the family `env` with these options. Families are cached.

    Raises:
        ValueError: the family or the option does not exist.

    >>> family = task_family("lgc-v2", {"task_types": ["sudoku"]})
    >>> task = family.generate(family.block(0)[0])
    >>> family.score(family.solve(task), task)
    1.0
    """
    name = str(env).strip().lower()
    name = ALIASES.get(name, name)
    if name not in FAMILIES:
        raise ValueError(
            f"env={env!r} is not a task family.{suggest_name(name, list(FAMILIES))} Known: {', '.join(FAMILIES)}"
        )
    return _family(name, json.dumps(to_python(adapter_config or {}), sort_keys=True))


@lru_cache(maxsize=32)
def _family(name: str, options: str) -> TaskFamily:
    family: TaskFamily = load_attribute(FAMILIES[name])(json.loads(options))
    return family


def task_row(family: TaskFamily, task: Task, split: str) -> dict[str, Any]:
    """Return a task's dataset row. `compute_score` regenerates the task from its `extra_info`."""
    return {
        "data_source": task.task_type,
        "prompt": [{"role": "user", "content": task.prompt}],
        "reward_spec": {"method": "rule", "ground_truth": task.ground_truth},
        "extra_info": {
            "env": family.env,
            "adapter_config": json.dumps(family.options),
            "task_id": task.task_id,
            "task_type": task.task_type,
            "fingerprint": task.fingerprint,
            "split": split,
        },
    }


def read_task(extra_info: Mapping[str, Any]) -> tuple[TaskFamily, Task]:
    """Return a row's family and task.

    Raises:
        ValueError: the row has no family or no task, or its prompt differs from the one that the id generates today.
    """
    missing = [name for name in ("env", "task_id") if extra_info.get(name) is None]
    if missing:
        raise ValueError(f"extra_info has no {' and no '.join(missing)}; it has {sorted(extra_info)}")
    config = extra_info.get("adapter_config")
    family = task_family(extra_info["env"], json.loads(config) if isinstance(config, str) else config)
    task = family.generate(whole_number(extra_info["task_id"], "extra_info.task_id"))
    recorded = extra_info.get("fingerprint")
    if recorded is not None and recorded != task.fingerprint:
        raise ValueError(
            f"task {task.task_id} of {family.env} has changed since the row was written "
            f"(fingerprint {task.fingerprint}, not {recorded}); generate the dataset again"
        )
    return family, task


def compute_score(
    data_source: str | None, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | str
) -> float:
    """Return the score of a reply to the task in `extra_info`, from 0 to 1.

    Set `custom_reward_function.name` to this function. ``extra_info["env"]`` selects the family. The verifier reads
    neither `data_source` nor `ground_truth`.

    Raises:
        ValueError: the row does not belong to a task family.
    """
    family, task = read_task(read_extra_info({"extra_info": extra_info}))
    return family.score(solution_str, task)


compute_lgc_v2_score = compute_score
"""Name of `compute_score` in LGC-v2 recipes."""
