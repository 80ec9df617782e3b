"""A tool that runs Python programs, closed off from everything else: see `skyrl_gym.isolation`."""

from __future__ import annotations

from skyrl_gym.isolation.program import Demand, Limits, Outcome, level_for, run_once
from skyrl_gym.tools.core import ToolGroup, tool

OUTPUT_BYTES = 20_000
FAILURE = "Error executing Python code: "


class PythonCodeExecutorToolGroup(ToolGroup):
    """The tool `python`."""

    def __init__(self, timeout: float = 10.0, memory_bytes: int = 1 << 30, isolation: Demand = "best") -> None:
        """A program has `timeout` seconds and `memory_bytes` of memory.

        Raises:
            OSError: `isolation` is `namespaces`, and this machine has none.
        """
        super().__init__(name="PythonCodeExecutorToolGroup")
        self._level = level_for(isolation)
        self._limits = Limits(seconds=timeout, memory_bytes=memory_bytes, output_bytes=OUTPUT_BYTES)

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: the program; nothing of an earlier one is left
        """
        outcome = run_once(code, limits=self._limits, level=self._level)
        return outcome.stdout.strip() if outcome.is_success else FAILURE + self._reason(outcome)

    def _reason(self, outcome: Outcome) -> str:
        if outcome.end == "exit":
            return outcome.stderr.strip() or f"it ended with status {outcome.status}"
        return {
            "time": f"Execution timed out after {self._limits.seconds:g} seconds.",
            "memory": f"it took more than {self._limits.memory_bytes >> 20} MiB of memory.",
            "processes": f"it started more than {self._limits.n_processes} processes.",
            "output": f"it printed more than {OUTPUT_BYTES} bytes, which began: {outcome.stdout[:200]}",
            "lost": "it was ended.",
        }[outcome.end]
