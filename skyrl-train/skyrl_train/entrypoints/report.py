"""The commands `skyrl report`: report of a run, comparison of runs, comparison of a run's trajectories at two steps."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from skyrl_train.entrypoints.command import as_command
from skyrl_train.errors import DataError


class _ReportGroup(TyperGroup):
    """A command group that treats `skyrl report RUN_FOLDER` as `skyrl report run RUN_FOLDER`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


report = typer.Typer(
    cls=_ReportGroup, help="Write the report of a run, or compare runs or trajectories.", no_args_is_help=True
)


@report.command("run")
@as_command
def report_run(folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="e.g. outputs/skyrl/my-run")]) -> None:
    """Write the report of a run, finished or not. Short form: `skyrl report RUN_FOLDER`."""
    from skyrl_train.report import report_run
    from skyrl_train.tracking import RunFolder

    page = report_run(RunFolder(folder))
    if page is None:
        raise DataError(f"{folder} has no metrics.jsonl with a step in it; pass the folder of a run")
    typer.echo(page)


@report.command("compare")
@as_command
def report_compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_FOLDER...", help="e.g. outputs/skyrl/lr-1e-5 …")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("comparison.html"),
) -> None:
    """Write a page with the results and curves of several runs, and the settings that differ."""
    from skyrl_train.report.comparison import compare_runs

    typer.echo(compare_runs(folders, output))


@report.command("trajectories")
@as_command
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
    from skyrl_train.report.trajectories import compare_evaluations

    typer.echo(compare_evaluations(source, first, last, samples), nl=False)
