"""Train on Fleet tasks, with the model on a Tinker service:

    python -m integrations.fleet.entrypoints.main_fleet_tinker --train_data train.parquet --tasks_file tasks.json

Reads TINKER_API_KEY and TINKER_BASE_URL. Rollouts, context limits, rewards and metrics are the same as in `main_fleet`.
Needs `skyrl-agent[tinker]`. Rerun the command with the same `--run_name` to resume.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from integrations.fleet.entrypoints.main_fleet import register_fleet
from integrations.fleet.env import ENV_CLASS
from integrations.fleet.metrics import find_tool_errors, fleet_metrics, send_alert
from skyrl_agent.integrations.tinker.options import TinkerOptions, parse_options
from skyrl_agent.integrations.tinker.run import TinkerRun
from skyrl_train.entrypoints.command import run_command
from skyrl_train.types import Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FleetTinkerOptions(TinkerOptions):
    """The command line.

    ttl_seconds: seconds after which Fleet stops the software of an episode, and a rollout ends.
    env_python: interpreter for the environments, with OpenEnv installed. Defaults to this program's interpreter.
    """

    tasks_file: str
    model_name: str = "Qwen/Qwen3-VL-30B-A3B-Instruct"
    max_turns: int = 50
    ttl_seconds: int = 7200
    env_python: str = ""
    project_name: str = "fleet-tinker-grpo"
    run_name: str = "fleet_tinker"

    def settings(self) -> dict[str, Any]:
        """Return the configuration keys, including the environment and the end of a tool call."""
        settings = super().settings()
        for name in ("sampling_params", "eval_sampling_params"):
            settings["generator"][name]["stop"] = ["</tool_call>"]
        settings["generator"]["trajectory_timeout_seconds"] = self.ttl_seconds
        section: dict[str, Any] = {ENV_CLASS: {"tasks_file": self.tasks_file, "ttl_seconds": self.ttl_seconds}}
        if self.env_python:
            section |= {"isolation": "process", "python": self.env_python}
        return settings | {"environment": {"env_class": ENV_CLASS, "skyrl_gym": section}}


class FleetTinkerRun(TinkerRun):
    """A run on Fleet tasks, with metrics by environment and alerts on failing tools."""

    def step_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return a step's rollout metrics, overall and by environment."""
        return super().step_metrics(trajectories) | fleet_metrics(trajectories, self.options.n_samples_per_prompt)

    async def alert(self, step: int, metrics: dict[str, float]) -> None:
        """Report failing tools in the log and on Slack."""
        if problems := find_tool_errors(metrics):
            logger.warning("Step %d: %s", step, "; ".join(problems))
            await send_alert(f"{self.options.run_name}, step {step}: {'; '.join(problems)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    register_fleet()
    description = (__doc__ or "").partition(":")[0]
    run_command(lambda: FleetTinkerRun(parse_options(FleetTinkerOptions, argv, description)).run())


if __name__ == "__main__":
    main()
