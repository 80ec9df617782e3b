"""Look at runs without a trainer: `skyrl-report …`, or `skyrl report …`."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from threading import Event
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperGroup

from skyrl_gym.runtime.console import guard_console
from skyrl_report.errors import DataError, SkyRLError

Parameters = ParamSpec("Parameters")


def _as_command(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Decorate a function to print a SkyRLError as one message, and to exit with its status."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        guard_console()
        try:
            function(*args, **kwargs)
        except SkyRLError as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(error.exit_status)
        except KeyboardInterrupt:
            sys.exit(130)

    return run


class _ReportGroup(TyperGroup):
    """A command group that treats `skyrl report RUN_FOLDER` as `skyrl report run RUN_FOLDER`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


report = typer.Typer(
    cls=_ReportGroup, help="Write the report of a run, or compare runs or trajectories.", no_args_is_help=True
)


@report.command("run")
@_as_command
def report_run(folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="e.g. outputs/skyrl/my-run")]) -> None:
    """Write the report of a run, finished or not. Short form: `skyrl report RUN_FOLDER`."""
    from skyrl_report.page import report_run
    from skyrl_report.run_folder import RunFolder

    page = report_run(RunFolder(folder))
    if page is None:
        raise DataError(f"{folder} has no metrics.jsonl with a step in it; pass the folder of a run")
    typer.echo(page)


@report.command("compare")
@_as_command
def report_compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_FOLDER...", help="e.g. outputs/skyrl/lr-1e-5 …")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("comparison.html"),
) -> None:
    """Write a page with the results and curves of several runs, and the settings that differ."""
    from skyrl_report.comparison import compare_runs

    typer.echo(compare_runs(folders, output))


@report.command("trajectories")
@_as_command
def report_trajectories(
    source: Annotated[str, typer.Argument(metavar="FOLDER_OR_URL", help="A run folder, or s3://bucket/evals/my-run.")],
    first: Annotated[
        int | None, typer.Option("--from", metavar="STEP", help="Earlier step, by default the first.")
    ] = None,
    last: Annotated[int | None, typer.Option("--to", metavar="STEP", help="Later step, by default the last.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Samples of each category of failures.")] = 2,
) -> None:
    """Compare the evaluated trajectories of two steps, as Markdown.

    Turns, tool calls, success and pass@n of each data source, and the failures by category.
    """
    from skyrl_report.trajectories import compare_evaluations

    typer.echo(compare_evaluations(source, first, last, samples), nl=False)


@report.command("watch")
@_as_command
def watch(
    source: Annotated[str, typer.Argument(metavar="RUN_FOLDER_OR_URL", help="e.g. outputs/skyrl/my-run")],
    terminal: Annotated[bool, typer.Option("--terminal", "-t", help="Show the run here, until it ends.")] = False,
    host: Annotated[str, typer.Option(help="Interface to serve on. If not loopback, with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on, 0 for any free one.")] = 8300,
) -> None:
    """Follow a run while it lives, in a browser or with --terminal in this terminal. Reads only."""
    from rich.console import Console

    from skyrl_report.watch.mirror import open_run

    with open_run(source) as (folder, mirror):
        if terminal:
            from skyrl_report.watch.terminal import watch_terminal

            watch_terminal(folder, mirror, Console())
        else:
            from skyrl_report.watch.server import Site, serving

            with serving(Site(folder, mirror), host, port) as server:
                typer.echo(f"{server.address} shows {source}. Stop with Ctrl-C")
                Event().wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run `skyrl-report` and return the exit status. `argv` defaults to the arguments of the process."""
    try:
        report(argv, prog_name="skyrl-report")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def run() -> None:
    """Run the console script `skyrl-report`."""
    sys.exit(main())
