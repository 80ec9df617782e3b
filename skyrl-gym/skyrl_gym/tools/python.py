"""A tool that runs Python programs in `skyrl_gym.isolation`."""

from skyrl_gym.isolation.program import Isolation, ProgramLimits, ProgramResult, level_for, run_once
from skyrl_gym.tools.core import ToolGroup, tool

OUTPUT_BYTES = 20_000
FAILURE = "Error executing Python code: "


class PythonCodeExecutorToolGroup(ToolGroup):
    """The tool `python`."""

    def __init__(self, timeout: float = 10.0, memory_bytes: int = 1 << 30, isolation: Isolation = "best") -> None:
        """Limit each program to `timeout` seconds and `memory_bytes` of memory.

        Raises:
            OSError: this machine does not support the level that `isolation` requires.
        """
        super().__init__(name="PythonCodeExecutorToolGroup")
        self._level = level_for(isolation)
        self._limits = ProgramLimits(seconds=timeout, memory_bytes=memory_bytes, output_bytes=OUTPUT_BYTES)

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: the program; no state of earlier programs remains
        """
        result = run_once(code, limits=self._limits, level=self._level)
        return result.stdout.strip() if result.is_success else FAILURE + self._reason(result)

    def _reason(self, result: ProgramResult) -> str:
        if result.end == "exit":
            return result.stderr.strip() or f"it ended with status {result.status}"
        return {
            "time": f"Execution timed out after {self._limits.seconds:g} seconds.",
            "memory": f"it used more than {self._limits.memory_bytes >> 20} MiB of memory.",
            "disk": f"its files took more than {self._limits.disk_bytes >> 20} MiB.",
            "processes": f"it started more than {self._limits.n_processes} processes.",
            "output": f"it printed more than {OUTPUT_BYTES} bytes, starting with: {result.stdout[:200]}",
            "lost": "it was killed.",
        }[result.end]
