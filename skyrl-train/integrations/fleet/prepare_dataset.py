"""Split Fleet's tasks into `train.parquet` and `validation.parquet`.

    python -m integrations.fleet.prepare_dataset --tasks-json all_tool_use.json --output-dir ~/data/fleet

The MD5 hash of its key decides a task's split, so every run gives the same split, whichever filters are set. The tasks
of an environment and modality form a stratum. A stratum with fewer than 5 expected evaluation tasks is only trained on.
A held-out stratum is only evaluated on.
"""

import argparse
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from tabulate import tabulate

from examples.prepare import MESSAGES, SPLITS, write_splits
from integrations.fleet.tasks import NEEDS_IMAGES, TOOL_USE, FleetTask, load_tasks
from skyrl_gym.data.files import Row
from skyrl_train.dataset.files import read_rows
from skyrl_train.errors import DataError, SkyRLError

T = TypeVar("T")
Split = str  # train or validation
Stratum = tuple[str, str]
"""Environment and modality, e.g. `("outlook", "tool_use")`."""

ENV_CLASS = "fleet_task"
MODALITY_CHOICES = ("tool_use", "computer_use", "all")
HELD_OUT = {("outlook", "tool_use"), ("instacart", "computer_use")}
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "env_class": pa.string(),
        "task_key": pa.string(),
        "modality": pa.string(),
        "difficulty": pa.int64(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """The rules of the split.

    eval_ratio: fraction of a stratum's tasks that is evaluated on.
    min_eval_samples: a stratum with fewer expected evaluation tasks is only trained on.
    held_out: strata that are only evaluated on.
    max_eval_per_env: evaluation tasks to keep per stratum: the ones with the lowest hashes. The rest is left out.
    max_eval_prompts: evaluation tasks to keep in total, taken from the strata in turn.
    max_env_ratio: maximum fraction of one environment in the training tasks. The rest is left out.
    """

    eval_ratio: float = 0.02
    min_eval_samples: int = 5
    held_out: frozenset[Stratum] = field(default=frozenset(HELD_OUT))
    max_eval_per_env: int | None = None
    max_eval_prompts: int | None = None
    max_env_ratio: float | None = None

    def __post_init__(self) -> None:
        """Raise DataError for a value out of range."""
        if not 0 <= self.eval_ratio < 1:
            raise DataError(f"--eval-ratio={self.eval_ratio} must be at least 0 and below 1; the default is 0.02")
        if self.max_env_ratio is not None and not 0 < self.max_env_ratio <= 1:
            raise DataError(f"--max-env-ratio={self.max_env_ratio} must be above 0 and at most 1")
        for name in ("min_eval_samples", "max_eval_per_env", "max_eval_prompts"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise DataError(f"--{name.replace('_', '-')}={value} must be at least 0")


def hash_fraction(key: str) -> float:
    """Return the first 8 bytes of the MD5 hash of a key as a fraction, from 0 to 1.

    >>> round(hash_fraction("github_task_0"), 6)
    0.255919
    """
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:8], "big") / 2**64


def assign_splits(
    tasks: Iterable[FleetTask], rules: SplitRules, previous: Mapping[str, Split] | None = None
) -> dict[str, Split]:
    """Return each task's split by key. It does not depend on the order of the tasks or on other strata.

    New tasks in a stratum do not move old ones, unless they lift the stratum above `min_eval_samples`. Given the
    `previous` splits by key, they never do.
    """
    strata: defaultdict[Stratum, list[FleetTask]] = defaultdict(list)
    for task in tasks:
        strata[task.env_key, task.modality].append(task)
    splits: dict[str, Split] = {}
    for stratum, members in strata.items():
        has_eval = len(members) * rules.eval_ratio >= rules.min_eval_samples
        for task in members:
            is_eval = stratum in rules.held_out or (has_eval and hash_fraction(task.key) < rules.eval_ratio)
            splits[task.key] = (previous or {}).get(task.key, "validation" if is_eval else "train")
    return splits


def limit_splits(splits: Mapping[Split, Sequence[FleetTask]], rules: SplitRules) -> dict[Split, list[FleetTask]]:
    """Apply the `max_…` rules. Tasks beyond a maximum are in neither split."""
    by_stratum: defaultdict[Stratum, list[FleetTask]] = defaultdict(list)
    for task in sorted(splits["validation"], key=lambda task: hash_fraction(task.key)):
        by_stratum[task.env_key, task.modality].append(task)
    limited = [by_stratum[stratum][: rules.max_eval_per_env] for stratum in sorted(by_stratum)]
    kept_eval = {task.key for task in take_in_turn(limited)[: rules.max_eval_prompts]}
    kept_train = {task.key for task in _limit_shares(splits["train"], rules.max_env_ratio)}
    return {
        "train": [task for task in splits["train"] if task.key in kept_train],
        "validation": [task for task in splits["validation"] if task.key in kept_eval],
    }


def take_in_turn(groups: Sequence[Sequence[T]]) -> list[T]:
    """Return the first item of each group, then the second of each, and so on."""
    return [group[i] for i in range(max(map(len, groups), default=0)) for group in groups if i < len(group)]


def _limit_shares(tasks: Sequence[FleetTask], max_ratio: float | None) -> Sequence[FleetTask]:
    """Limit every environment to `max_ratio` of the tasks, keeping the tasks with the lowest hashes."""
    if max_ratio is None or not tasks:
        return tasks
    counts = Counter(task.env_key for task in tasks)
    if len(counts) * max_ratio < 1:
        raise DataError(
            f"--max-env-ratio={max_ratio} is impossible with {len(counts)} environments; use at least "
            f"{1 / len(counts):.3g}, or leave it out"
        )
    total = len(tasks)
    while (shrunk := sum(min(n, max(1, int(total * max_ratio))) for n in counts.values())) < total:
        total = shrunk
    n_kept = max(1, int(total * max_ratio))
    groups: defaultdict[str, list[FleetTask]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: hash_fraction(task.key)):
        groups[task.env_key].append(task)
    return [task for group in groups.values() for task in group[:n_kept]]


def dataset_row(task: FleetTask) -> Row:
    """Return a task's dataset row."""
    return {
        "data_source": task.env_key,
        "prompt": [{"role": "user", "content": task.prompt}],
        "env_class": ENV_CLASS,
        "task_key": task.key,
        "modality": task.modality,
        "difficulty": task.difficulty,
    }


def read_previous(folder: Path) -> dict[str, Split]:
    """Return the tasks' splits in an earlier dataset's files."""
    files = {split: folder.expanduser() / f"{split}.parquet" for split in SPLITS}
    if not any(file.exists() for file in files.values()):
        raise DataError(f"--keep-split={folder} holds neither train.parquet nor validation.parquet")
    previous: dict[str, Split] = {}
    for split, file in files.items():
        for row in read_rows(str(file)) if file.exists() else []:
            previous[row["task_key"]] = "train" if split == "train" else "validation"
    return previous


def format_report(splits: Mapping[Split, Sequence[FleetTask]], tasks: Sequence[FleetTask], rules: SplitRules) -> str:
    """Format a table of tasks per environment and modality, with the reason if all are in one split."""
    counts = {split: Counter((task.env_key, task.modality) for task in chosen) for split, chosen in splits.items()}
    rows: list[list[object]] = []
    for stratum, n_tasks in sorted(Counter((task.env_key, task.modality) for task in tasks).items()):
        n_train, n_eval = counts["train"][stratum], counts["validation"][stratum]
        reason = "held out" if stratum in rules.held_out else ""
        if not reason and n_tasks * rules.eval_ratio < rules.min_eval_samples:
            reason = f"{n_tasks * rules.eval_ratio:.1f} expected, fewer than {rules.min_eval_samples}"
        rows.append([*stratum, n_tasks, n_train, n_eval, reason])
    totals = [len(tasks), len(splits["train"]), len(splits["validation"])]
    headers = ["environment", "modality", "tasks", "train", "validation", "note"]
    return str(tabulate([*rows, ["total", "", *totals, ""]], headers=headers))


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    rules = SplitRules()
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--tasks-json", type=Path, required=True, help="task file that Fleet exported")
    add("--output-dir", type=Path, default=Path("./data/fleet"), help="folder to write to")
    add("--modality", choices=MODALITY_CHOICES, default="all", help="tasks to write")
    add("--env-filter", type=comma_list, default=[], metavar="ENVS", help="environments to write, e.g. github,reddit")
    add("--difficulty-filter", type=comma_list, default=[], metavar="N", help="difficulties to write, e.g. 1,2")
    add("--exclude-envs", type=comma_list, default=[], metavar="ENVS", help="environments to leave out")
    add("--max-tasks", type=int, help="write only the first tasks of each split; %(default)s means all")
    add("--eval-ratio", type=float, default=rules.eval_ratio, help="fraction of an environment to evaluate on")
    add("--min-eval-samples", type=int, default=rules.min_eval_samples, help="fewer expected: all are trained on")
    held_out = ",".join(":".join(stratum) for stratum in sorted(rules.held_out))
    add("--held-out", default=held_out, metavar="ENV:MODALITY,…", help="only evaluated on; none for no environment")
    add("--max-eval-per-env", type=int, help="maximum of evaluation tasks of each environment")
    add("--max-eval-prompts", type=int, help="maximum of evaluation tasks in total")
    add("--max-env-ratio", type=float, help="largest fraction of one environment in the training tasks")
    add("--keep-split", type=Path, metavar="FOLDER", help="dataset whose tasks keep their split, for longer task files")
    return parser


def comma_list(text: str) -> list[str]:
    """Split `github, reddit` into its names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_held_out(text: str) -> frozenset[Stratum]:
    """Parse `outlook:tool_use,instacart:computer_use`, or `none`."""
    strata = set()
    for name in [] if text == "none" else comma_list(text):
        env_key, _, modality = name.partition(":")
        if not env_key or modality not in MODALITY_CHOICES[:2]:
            raise DataError(f"--held-out={name} must be environment:tool_use or environment:computer_use")
        strata.add((env_key, modality))
    return frozenset(strata)


def select_tasks(tasks: Iterable[FleetTask], args: argparse.Namespace) -> list[FleetTask]:
    """Return the tasks that the filters keep. Raise DataError if they keep none."""
    selected = [
        task
        for task in tasks
        if args.modality in (task.modality, "all")
        and (not args.env_filter or task.env_key in args.env_filter)
        and (not args.difficulty_filter or str(task.difficulty) in args.difficulty_filter)
        and task.env_key not in args.exclude_envs
    ]
    if not selected:
        raise DataError(
            f"no task passes --modality={args.modality}, --env-filter={','.join(args.env_filter) or '(all)'}, "
            f"--difficulty-filter={','.join(args.difficulty_filter) or '(all)'} and "
            f"--exclude-envs={','.join(args.exclude_envs) or '(none)'}; leave one of them out"
        )
    return selected


def prepare(args: argparse.Namespace) -> str:
    """Write the files that have tasks, remove those that have none, and return the report."""
    rules = SplitRules(
        eval_ratio=args.eval_ratio,
        min_eval_samples=args.min_eval_samples,
        held_out=parse_held_out(args.held_out),
        max_eval_per_env=args.max_eval_per_env,
        max_eval_prompts=args.max_eval_prompts,
        max_env_ratio=args.max_env_ratio,
    )
    if args.max_tasks is not None and args.max_tasks < 1:
        raise DataError(f"--max-tasks={args.max_tasks} must be at least 1")
    tasks, left_out = load_tasks(args.tasks_json)
    assigned = assign_splits(tasks, rules, read_previous(args.keep_split) if args.keep_split else None)
    selected = select_tasks(tasks, args)
    splits = limit_splits(
        {split: [task for task in selected if assigned[task.key] == split] for split in SPLITS}, rules
    )
    splits = {split: chosen[: args.max_tasks] for split, chosen in splits.items()}
    if not splits["train"]:
        raise DataError(
            f"all {len(selected)} tasks are evaluation tasks, so there is nothing to train on; choose other "
            "environments with --env-filter, or set --held-out none"
        )
    folder = args.output_dir.expanduser()
    rows = {split: [dataset_row(task) for task in chosen] for split, chosen in splits.items() if chosen}
    lines = write_splits(rows, folder, SCHEMA)
    if not splits["validation"]:
        (folder / "validation.parquet").unlink(missing_ok=True)  # from an earlier call
        lines.append("No task is evaluated on, so there is no validation.parquet: set trainer.eval_interval=-1")
    if n_visual := sum(task.modality != TOOL_USE for chosen in splits.values() for task in chosen):
        lines.append(f"A text model refuses {n_visual} tasks: they have a modality {NEEDS_IMAGES}")
    if left_out:
        lines.append(f"{len(left_out)} entries of {args.tasks_json} are left out; {left_out[0]}")
    return "\n".join([format_report(splits, selected, rules), "", *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line()
    args = parser.parse_args(argv)
    try:
        print(prepare(args))
    except (SkyRLError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
