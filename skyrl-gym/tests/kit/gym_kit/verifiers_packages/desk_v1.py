"""A taskset whose reward reads a file of the agent, and an environment with a second agent, who checks the first."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DeskTaskset"]


class DeskTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def filed(self, runtime: vf.Runtime) -> float:
        listing = await runtime.run(["cat", "answer.txt"], {})
        return float(listing.stdout.strip() == "right")


class DeskTaskset(vf.Taskset[DeskTask]):
    def load(self) -> Iterator[DeskTask]:
        for i in range(2):
            yield DeskTask(vf.TaskData(prompt=f"Write right to answer.txt, task {i}."), self.config.task)
