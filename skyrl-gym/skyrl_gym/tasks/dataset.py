"""Dataset rows that are generated from task ids when they are drawn."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from skyrl_gym.envs.options import one_of, reject_unknown
from skyrl_gym.envs.row import to_python, whole_number
from skyrl_gym.tasks.base import Split, TaskFamily
from skyrl_gym.tasks.registry import task_family, task_row

OPTIONS = ("env", "adapter_config", "task_types", "num_train_tasks", "num_val_tasks")
N_TRAIN, N_VALIDATION = 1_000_000, 256


class DynamicEnvDataset:
    """A family's tasks as dataset rows. Row i is the same in every process, and the splits have no task in common.

    `data.custom_cls.config` has the options:

    env: the task family, by default `lgc-v2`.
    adapter_config: the options of the family.
    task_types: the task types of `lgc-v2`; the same as `adapter_config.task_types`.
    num_train_tasks, num_val_tasks: number of rows per split, by default 1,000,000 and 256. A limited family puts
        all its training tasks into training and at most 256 tasks into validation by default.

    Raises:
        ValueError: an option is unknown or has an invalid value, or a split has no tasks.
    """

    default_env: ClassVar[str] = "lgc-v2"

    def __init__(
        self,
        data_files: Sequence[str] | str = (),
        tokenizer: Any = None,
        processor: Any = None,
        config: Mapping[str, Any] | None = None,
        max_samples: int = -1,
        split: Split = "train",
    ) -> None:
        """Choose the tasks. `data_files`, `tokenizer` and `processor` are ignored, since rows are generated as text."""
        self.split: Split = "validation" if one_of(split, "split", ("train", "validation")) == "validation" else "train"
        section = to_python((to_python(config or {}).get("custom_cls") or {}).get("config") or {})
        reject_unknown(section, OPTIONS, "data.custom_cls.config")
        self._env = section.get("env") or self.default_env
        adapter_config = dict(section.get("adapter_config") or {})
        if section.get("task_types"):
            adapter_config["task_types"] = section["task_types"]
        family = task_family(self._env, adapter_config)
        self._adapter_config = family.options
        name = "num_train_tasks" if self.split == "train" else "num_val_tasks"
        wanted = section.get(name)
        if wanted is not None:
            whole_number(wanted, f"data.custom_cls.config.{name}", at_least=1)
        self._ids: list[int] | None = None
        if family.task_ids is None:
            self._length = wanted or min(family.n_blocks, N_TRAIN if self.split == "train" else N_VALIDATION)
            if self._length > family.n_blocks:
                raise ValueError(
                    f"data.custom_cls.config.{name}={wanted} is more than the {family.n_blocks} tasks of either split "
                    f"that env={family.env} has with adapter_config={adapter_config}; lower it"
                )
        else:
            self._ids = self._limited_ids(family, family.task_ids, wanted)
            self._length = len(self._ids)
        if max_samples >= 0:
            self._length = min(self._length, max_samples)
        if self._length == 0:
            raise ValueError(
                f"env={family.env} has no task in the split {self.split!r} with adapter_config={adapter_config}; raise "
                "the number of tasks, e.g. num_tasks_per_case"
            )

    @property
    def fingerprint(self) -> str:
        """Hash of the options that determine all rows. A run cannot resume with different options."""
        identity = json.dumps([self._env, self._adapter_config, self.split, self._length], sort_keys=True)
        return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

    def task_id(self, index: int) -> int:
        """Return the task id of a row."""
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        if self._ids is not None:
            return self._ids[index]
        family = self._family
        for task_id in family.block(index):
            if family.split_of(task_id) == self.split:
                return task_id
        raise ValueError(
            f"env={family.env} has no task number {index} in the split {self.split!r}: too few are distinct"
        )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        family = self._family
        row = task_row(family, family.generate(self.task_id(index)), self.split)
        row["extra_info"]["index"] = index
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(self._length))

    @property
    def _family(self) -> TaskFamily:
        return task_family(self._env, self._adapter_config)  # cached per process, because families are not pickled

    def _limited_ids(self, family: TaskFamily, task_ids: Sequence[int], wanted: int | None) -> list[int]:
        """Return at most `wanted` distinct ids of this split."""
        ids = [task_id for task_id in dict.fromkeys(task_ids) if family.split_of(task_id) == self.split]
        if wanted is not None and wanted > len(ids):
            raise ValueError(
                f"the split {self.split!r} needs {wanted} tasks, but env={family.env} has {len(ids)} with "
                "these options; lower num_train_tasks or num_val_tasks, or configure more tasks"
            )
        if wanted is None and self.split == "validation":
            wanted = N_VALIDATION
        if wanted is None or wanted >= len(ids):
            return ids
        step = len(ids) / wanted  # spread over all ids
        return [ids[int(i * step)] for i in range(wanted)]


LGCV2DynamicDataset = DynamicEnvDataset
"""Name of `DynamicEnvDataset` in LGC-v2 recipes."""


class OpenSpielDataset(DynamicEnvDataset):
    """A `DynamicEnvDataset` of OpenSpiel positions."""

    default_env: ClassVar[str] = "openspiel"
