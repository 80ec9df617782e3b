"""Check a SkyPilot task before you launch it: `python -m integrations.skypilot TASK.yaml`.

Checks the task's variables, its `workdir.ref`, and the balance at its clouds. Without a task, checks the balance at all
clouds with a key in the environment. The exit status is 1 if a check fails.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from integrations.skypilot.clouds import check_wallets
from integrations.skypilot.task import check_task, read_clouds
from skyrl_train.entrypoints.command import as_command
from skyrl_train.entrypoints.doctor import CheckResult, print_checks


def examine(task: Path | None) -> Iterator[CheckResult]:
    """Yield the result of each check."""
    if task is not None:
        yield from check_task(task)
    yield from check_wallets([] if task is None else read_clouds(task))


@as_command
def main(task: Annotated[Path | None, typer.Argument(metavar="TASK", help="A SkyPilot task file.")] = None) -> None:
    """Check a SkyPilot task: its variables, workdir.ref, and the balance at its clouds."""
    print_checks(examine(task))


if __name__ == "__main__":
    typer.run(main)
