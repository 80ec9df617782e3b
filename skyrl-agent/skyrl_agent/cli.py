"""The `skyrl-agent` command."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from skyrl_train.entrypoints.command import as_command, importing_torch

app = typer.Typer(
    name="skyrl-agent",
    help="Train and evaluate agents on long tasks.",
    epilog="""Examples:

\b
  skyrl-agent train task.yaml data.train_data=train.jsonl trainer.policy.model.path=Qwen/Qwen3-8B
  skyrl-agent generate task.yaml data.val_data=test.jsonl trainer.policy.model.path=Qwen/Qwen3-8B
""",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
TaskFile = Annotated[Path, typer.Argument(metavar="TASK", help="The task file.", show_default=False, exists=True)]
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
        from skyrl_agent.integrations.skyrl_train import AgentExp, parse_task
        from skyrl_train.entrypoints.describe_plan import print_plan
        from skyrl_train.entrypoints.preflight import find_missing

    agent, cfg = parse_task(task, overrides or [], config, partial(find_missing, trains=True))
    if dry_run:
        print_plan(cfg, is_custom=True)
    else:
        AgentExp(agent, cfg).run()


@app.command(context_settings=RUN_SETTINGS)
@as_command
def generate(task: TaskFile, overrides: Overrides = None, config: ConfigFile = None) -> None:
    """Evaluate an agent without training it."""
    with importing_torch():
        from skyrl_agent.integrations.skyrl_train import AgentEvaluation, parse_task
        from skyrl_train.entrypoints.preflight import find_missing

    agent, cfg = parse_task(task, overrides or [], config, partial(find_missing, trains=False))
    AgentEvaluation(agent, cfg).run()


def run() -> None:
    """Run the command line. Tasks and tools may be modules in the current folder."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    app()


if __name__ == "__main__":
    run()
