"""The command `skyrl`: our own commands, and `skyrl verl` for verl's command lines."""

import sys
from typing import Annotated

import typer

from skyrl_train.entrypoints.cli import app, main
from skyrl_train.entrypoints.command import as_command
from skyrl_train.entrypoints.start import RUN_SETTINGS, DryRun, PrintConfig, start


@app.command(context_settings=RUN_SETTINGS)
@as_command
def verl(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM KEY=VALUE",
            help="main_ppo or fsdp_sft_trainer, followed by overrides, or a complete verl command.",
        ),
    ],
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
) -> None:
    """Run a verl command line.

    Prints how each option is translated. Rejects options that have no SkyRL counterpart.
    """
    from skyrl_train.compat.verl.command import find_torchrun_flags, read_command
    from skyrl_train.compat.verl.programs import MAIN_PPO

    program, overrides = read_command(command)
    name, flags = ("train", []) if program is MAIN_PPO else ("sft", find_torchrun_flags(command))
    start(name, overrides, None, print_config, dry_run, torchrun_flags=flags)


def run() -> None:
    """Run the console script `skyrl`."""
    sys.exit(main())


if __name__ == "__main__":
    run()
