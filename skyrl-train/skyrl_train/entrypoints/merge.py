"""The commands `skyrl merge`: write an adapter, a checkpoint or several models as one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from skyrl_train.entrypoints.command import as_command
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from skyrl_train.checkpoint.merge import MergeReport

ALLOWED = {"dtype": ("auto", "float32", "bfloat16", "float16"), "role": ("policy", "critic", "reward")}


class _MergeGroup(TyperGroup):
    """A command group that suggests `merge checkpoint` if it gets the folder of a run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and (Path(args[0]) / "ckpts").is_dir():
            ctx.fail(f"{args[0]} is the folder of a run; write skyrl merge checkpoint {args[0]}/ckpts <new folder>")
        return super().resolve_command(ctx, args)


merge = typer.Typer(
    cls=_MergeGroup, help="Merge an adapter, a checkpoint or several models into one model.", no_args_is_help=True
)

Target = Annotated[Path, typer.Argument(metavar="TARGET_DIR", help="Folder to write; it must not exist.")]
Base = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Model that training started from, if not the one that is named there."),
]
MergedType = Annotated[
    str,
    typer.Option(
        metavar="TYPE", help="Type of the weights: auto (as exported or stored), float32, bfloat16 or float16."
    ),
]


@merge.command("adapter")
@as_command
def merge_adapter(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Folder or Hub name of an adapter of peft.")],
    target: Target,
    base: Base = None,
    dtype: MergedType = "auto",
) -> None:
    """Merge an adapter into its base: W + (alpha / rank) · B·A."""
    _print_report(_load_merging(dtype=dtype).merge_adapter(adapter, target, base, dtype))


@merge.command("checkpoint")
@as_command
def merge_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="e.g. outputs/skyrl/my-run/ckpts")],
    target: Target,
    base: Base = None,
    dtype: MergedType = "auto",
    role: Annotated[
        str, typer.Option(metavar="ROLE", help="The model of the checkpoint: policy, critic or reward.")
    ] = "policy",
    allow_unchanged: Annotated[
        bool, typer.Option("--allow-unchanged", help="Accept a checkpoint with the weights that the run started from.")
    ] = False,
) -> None:
    """Write a model of a training checkpoint, saved by any number of ranks, as one folder."""
    merging = _load_merging(dtype=dtype, role=role)
    _print_report(merging.merge_checkpoint(checkpoint, target, base, dtype, role, allow_unchanged=allow_unchanged))


@merge.command("average")
@as_command
def average_models(
    models: Annotated[list[str], typer.Argument(metavar="MODEL MODEL…", help="Folders or Hub names.")],
    target: Target,
    weight: Annotated[
        list[float] | None, typer.Option(metavar="NUMBER", help="Weight of a model, once for each; equal by default.")
    ] = None,
    dtype: MergedType = "auto",
) -> None:
    """Average the weights of models of the same architecture."""
    _print_report(_load_merging(dtype=dtype).average_models(models, target, weight, dtype))


def _load_merging(**options: str) -> Any:
    """Check the options before the slow import of the merging functions and PyTorch."""
    for name, value in options.items():
        if value not in ALLOWED[name]:
            raise ConfigError(f"--{name}={value} must be one of {', '.join(ALLOWED[name])}")
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from skyrl_train.checkpoint import merge as merging

    disable_progress_bar()
    set_verbosity_error()
    return merging


def _print_report(report: MergeReport) -> None:
    changed = "not compared with the base" if report.n_changed is None else f"{report.n_changed:,} of them changed"
    typer.echo(
        f"{report.folder}: {report.n_tensors:,} tensors, {changed}; the logits differ from the sources by "
        f"{report.logit_gap:.1g} of their norm"
    )
