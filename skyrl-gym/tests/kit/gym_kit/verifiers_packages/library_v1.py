"""A taskset with tools, which run in a separate process and share state with the task."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LibraryTaskset"]


class LibraryState(vf.State):
    n_lookups: int = 0


class LibraryData(vf.TaskData):
    answer: str


class LibraryTools(vf.Toolset[vf.ToolsetConfig, LibraryState]):
    TOOL_PREFIX = "library"

    @vf.tool
    async def look_up(self, word: str, n_lines: int = 1) -> str:
        """Look a word up.

        The meaning is secret."""
        self.state.n_lookups += 1
        return f"{word} means ANSWER: 42" * n_lines

    @vf.tool
    async def burn(self) -> str:
        """Burn the library."""
        raise ValueError("it does not burn")


class LibraryTask(vf.Task[LibraryData, LibraryState]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [LibraryTools(vf.ToolsetConfig())]

    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return float(f"ANSWER: {self.data.answer}" in trace.last_reply)

    @vf.metric
    async def lookups(self, trace: vf.Trace) -> float:
        return trace.state.n_lookups


class LibraryTaskset(vf.Taskset[LibraryTask]):
    def load(self) -> Iterator[LibraryTask]:
        yield LibraryTask(LibraryData(prompt="What is the meaning?", answer="42"), self.config.task)


if __name__ == "__main__":
    LibraryTools.run()
