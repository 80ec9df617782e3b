"""The `skyrl-agent` command."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyrl_train.entrypoints.command import as_command, importing_torch

if TYPE_CHECKING:
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.entrypoints.experiment import RLExperiment

app = typer.Typer(
    name="skyrl-agent",
    help="Train and evaluate agents on long tasks.",
    epilog="""Examples:

\b
  skyrl-agent train task.yaml data.train_data=train.jsonl trainer.policy.model.path=Qwen/Qwen3-8B
  skyrl-agent generate task.yaml data.val_data=test.jsonl trainer.policy.model.path=Qwen/Qwen3-8B
  skyrl-agent train mini-swe-agent data.train_data=harbor:tasks trainer.policy.model.path=Qwen/Qwen3-8B
""",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
TaskFile = Annotated[
    Path,
    typer.Argument(
        metavar="TASK",
        help="A task file, a harness file, or a known agent: mini-swe-agent, pi, opencode, codex or claude-code.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of skyrl train.", show_default=False)
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Read settings of skyrl train from a YAML file first.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the settings, print the plan of the run, and exit.")]
RUN_SETTINGS = {"ignore_unknown_options": True}


@app.command(context_settings=RUN_SETTINGS)
@as_command
def train(task: TaskFile, overrides: Overrides = None, config: ConfigFile = None, dry_run: DryRun = False) -> None:
    """Train an agent on its own trajectories."""
    with importing_torch():
        from skyrl_train.entrypoints.describe_plan import print_plan

    experiment, cfg = _open_run(task, overrides or [], config, trains=True)
    if dry_run:
        print_plan(cfg, is_custom=True)
    else:
        experiment().run()


@app.command(context_settings=RUN_SETTINGS)
@as_command
def generate(task: TaskFile, overrides: Overrides = None, config: ConfigFile = None) -> None:
    """Evaluate an agent without training it."""
    experiment, _ = _open_run(task, overrides or [], config, trains=False)
    experiment().run()


def _open_run(
    task: Path, overrides: list[str], config: Path | None, *, trains: bool
) -> tuple[Callable[[], "RLExperiment"], "SkyRLConfig"]:
    """Return a function that creates the run of a task file or a harness, and its checked configuration."""
    with importing_torch():
        from skyrl_agent.config import read_settings
        from skyrl_agent.harness.training import HarnessEvaluation, HarnessExp, parse_harness
        from skyrl_agent.integrations.skyrl_train import AgentEvaluation, AgentExp, parse_task
        from skyrl_train.entrypoints.preflight import find_missing

    if not task.is_file() or "harness" in read_settings(task):
        harness, cfg = parse_harness(task, overrides, config, trains=trains)
        return partial(HarnessExp if trains else HarnessEvaluation, harness, cfg), cfg
    agent, cfg = parse_task(task, overrides, config, partial(find_missing, trains=trains))
    return partial(AgentExp if trains else AgentEvaluation, agent, cfg), cfg


def run() -> None:
    """Run the command line. Tasks and tools may be modules in the current folder."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    app()


if __name__ == "__main__":
    run()
