"""The command `skyrl`. Each subcommand imports what it needs when it runs, so that mistakes are answered at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from skyrl_train.config.loading import Schema

app = typer.Typer(
    name="skyrl",
    help="Train language-model agents with reinforcement learning.",
    epilog="""Examples:

\b
  skyrl train data.train_data=train.jsonl trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct
  skyrl train --dry-run --config run.yaml trainer.epochs=2
  skyrl train --help trainer.algorithm
  skyrl sft data.train_data=chats.jsonl trainer.policy.model.path=Qwen/Qwen2.5-0.5B
  skyrl dpo data.train_data=pairs.jsonl trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct
  skyrl verl main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
  skyrl env check my_env:MyEnv --data train.jsonl
""",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _complete_key(incomplete: str) -> list[str]:
    """Return the configuration keys that start with what was typed, one level at a time."""
    from skyrl_train.config.problems import FIELDS

    return _complete(incomplete, FIELDS)


def _complete_supervised_key(context: typer.Context, incomplete: str) -> list[str]:
    """Return the keys of the configuration of a run on fixed data, as `_complete_key`."""
    return _complete(incomplete, _supervised_schema(str(context.command.name)).fields)


def _complete(incomplete: str, fields: Mapping[str, Any]) -> list[str]:
    from skyrl_train.config.base import as_section

    depth = incomplete.count(".") + 1
    keys = (key for key in fields if key.startswith(incomplete) and key.count(".") < depth)
    return [f"{key}." if as_section(fields[key].annotation) else f"{key}=" for key in keys]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        autocompletion=_complete_key,
        help="Settings, e.g. trainer.epochs=3.",
        show_default=False,
    ),
]
SupervisedOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        autocompletion=_complete_supervised_key,
        help="Settings, e.g. trainer.epochs=3.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Read settings from a YAML file first.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the settings, print the plan of the run, and exit.")]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved configuration as YAML, and exit.")
]
Help = Annotated[
    bool, typer.Option("--help", "-h", help="Show this message; with a key or a section, its keys and their meaning.")
]
RUN_SETTINGS = {"ignore_unknown_options": True}  # `--trainer.epochs=3` is answered by the configuration, with the fix


@app.command(context_settings=RUN_SETTINGS, add_help_option=False)
def train(
    context: typer.Context,
    overrides: Overrides = None,
    config: ConfigFile = None,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    help: Help = False,
) -> None:
    """Train a policy on its own rollouts."""
    _run(context, overrides or [], config, print_config, help, dry_run, trains=True)


def train_on_data(
    context: typer.Context,
    overrides: SupervisedOverrides = None,
    config: ConfigFile = None,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    help: Help = False,
) -> None:
    """Run one of the commands in `SUPERVISED`."""
    from skyrl_train.entrypoints.command import run_command

    def run() -> None:
        from skyrl_train.config.generate import describe_keys, describe_sections

        command = str(context.command.name)
        if help:
            fields = _supervised_schema(command).fields
            sections = f"{context.get_help()}\n\n{describe_sections(fields, command)}"
            typer.echo(describe_keys(overrides, fields) if overrides else sections)
        else:
            _start_supervised(command, overrides or [], config, print_config, dry_run)

    run_command(run)


for _name, _help in (
    ("sft", "Fine-tune a model on demonstrations."),
    ("dpo", "Train a model on preferences by direct preference optimization."),
    ("reward", "Train a reward model on preferences."),
):
    app.command(_name, help=_help, context_settings=RUN_SETTINGS, add_help_option=False)(train_on_data)


@app.command(context_settings=RUN_SETTINGS)
def doctor(
    overrides: Overrides = None,
    config: ConfigFile = None,
    task: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also check a SkyPilot task: workdir.ref and variables.")
    ] = None,
) -> None:
    """Check what a training run needs, and say how to fix what is missing.

    Versions, configuration, data, model, disk, memory, remote storage, keys and ports. The exit status is 1 if a
    check fails.
    """
    from skyrl_train.entrypoints.command import run_command

    def run() -> None:
        from skyrl_train.entrypoints.doctor import run_doctor

        run_doctor(overrides or [], config, task, typer.echo)

    run_command(run)


@app.command(context_settings=RUN_SETTINGS)
def verl(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM KEY=VALUE", help="main_ppo or fsdp_sft_trainer, or a whole command line with one of them."
        ),
    ],
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
) -> None:
    """Run a command line of verl.

    A line says what each option became; options that have no counterpart here are refused by name.
    """
    from skyrl_train.entrypoints.command import run_command

    def run() -> None:
        from skyrl_train.config.verl import MAIN_PPO, read_command

        program, overrides = read_command(command)
        if program is MAIN_PPO:
            _start_rl(overrides, None, print_config, dry_run, trains=True)
        else:
            _start_supervised("sft", overrides, None, print_config, dry_run)

    run_command(run)


@app.command(context_settings=RUN_SETTINGS, add_help_option=False)
def generate(
    context: typer.Context,
    overrides: Overrides = None,
    config: ConfigFile = None,
    print_config: PrintConfig = False,
    help: Help = False,
) -> None:
    """Evaluate a model without training it."""
    _run(context, overrides or [], config, print_config, help, trains=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
def env(context: typer.Context) -> None:
    """Check, play or list environments."""
    from skyrl_gym.cli import main as env_main

    raise typer.Exit(env_main(context.args, prog="skyrl env"))


@app.command()
def tiny(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; it must not exist.")],
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Dataset whose prompts the tokenizer is trained on.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny random model.

    A Qwen3 and its tokenizer, for first runs and tests without a download.
    """
    from skyrl_train.entrypoints.command import run_command

    def write() -> None:
        from skyrl_train.models.tiny import write_tiny_model

        n_parameters = write_tiny_model(folder, str(data) if data else None, seed)
        typer.echo(f"{folder}: a Qwen3 of {n_parameters:,} random parameters; trainer.policy.model.path={folder}")

    run_command(write)


class _ReportGroup(TyperGroup):
    """A group whose first argument may be a run folder."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


report = typer.Typer(
    cls=_ReportGroup, help="Write the report of a run, or compare its trajectories.", no_args_is_help=True
)
app.add_typer(report, name="report")


@report.command("run")
def report_run(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="e.g. outputs/skyrl/my-run")],
) -> None:
    """Write the report of a run, finished or not; `skyrl report RUN_FOLDER` is the same."""
    from skyrl_train.entrypoints.command import run_command

    def write() -> None:
        from skyrl_train.errors import DataError
        from skyrl_train.report import report_run
        from skyrl_train.tracking import RunFolder

        page = report_run(RunFolder(folder))
        if page is None:
            raise DataError(f"{folder} has no metrics.jsonl with a step in it; pass the folder of a run")
        typer.echo(page)

    run_command(write)


@report.command("trajectories")
def report_trajectories(
    source: Annotated[str, typer.Argument(metavar="FOLDER_OR_URL", help="A run folder, or s3://bucket/evals/my-run.")],
    first: Annotated[int | None, typer.Option("--from", metavar="STEP", help="Earlier step; the first one.")] = None,
    last: Annotated[int | None, typer.Option("--to", metavar="STEP", help="Later step; the last one.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Samples of each category of failures.")] = 2,
) -> None:
    """Compare the evaluated trajectories of two steps, as Markdown.

    Turns, tool calls, success and pass@n of each environment, and the failures by category.
    """
    from skyrl_train.entrypoints.command import run_command

    def write() -> None:
        from skyrl_train.report.trajectories import describe_trajectories

        typer.echo(describe_trajectories(source, first, last, samples), nl=False)

    run_command(write)


merge = typer.Typer(help="Merge an adapter, a checkpoint or several models into one model.", no_args_is_help=True)
app.add_typer(merge, name="merge")

Target = Annotated[Path, typer.Argument(metavar="TARGET_DIR", help="Folder to write; it must not exist.")]
Base = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Base model of the adapter, a folder or a Hub name, if not the one it names."),
]
MergedType = Annotated[
    str, typer.Option(metavar="TYPE", help="Type of the weights: auto (as stored), float32, bfloat16 or float16.")
]


@merge.command("adapter")
def merge_adapter(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Folder or Hub name of an adapter of peft.")],
    target: Target,
    base: Base = None,
    dtype: MergedType = "auto",
) -> None:
    """Merge an adapter into its base: W + (alpha / rank) · B·A."""
    _merge("merge_adapter", adapter, target, base=base, dtype=dtype)


@merge.command("checkpoint")
def merge_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="e.g. outputs/skyrl/my-run/ckpts")],
    target: Target,
    base: Base = None,
    dtype: MergedType = "auto",
    role: Annotated[
        str, typer.Option(metavar="ROLE", help="The model of the checkpoint: policy, critic or reward.")
    ] = "policy",
) -> None:
    """Write a model of a training checkpoint, saved by any number of ranks, as one folder."""
    _merge("merge_checkpoint", checkpoint, target, base=base, dtype=dtype, role=role)


@merge.command("average")
def average_models(
    models: Annotated[list[str], typer.Argument(metavar="MODEL MODEL…", help="Folders or Hub names.")],
    target: Target,
    weight: Annotated[
        list[float] | None, typer.Option(metavar="NUMBER", help="Weight of a model, once for each; equal by default.")
    ] = None,
    dtype: MergedType = "auto",
) -> None:
    """Average the weights of models of the same architecture."""
    _merge("average_models", models, target, weights=weight, dtype=dtype)


def _merge(function: str, source: object, target: Path, **options: object) -> None:
    from skyrl_train.entrypoints.command import run_command

    def run() -> None:
        from skyrl_train.config.problems import config_error

        allowed = {"dtype": ("auto", "float32", "bfloat16", "float16"), "role": ("policy", "critic", "reward")}
        for name, values in allowed.items():
            if name in options and options[name] not in values:
                raise config_error([f"--{name}={options[name]} must be one of {', '.join(values)}"])
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        from skyrl_train.checkpoint import merge as merging

        disable_progress_bar()
        set_verbosity_error()
        report = getattr(merging, function)(source, target, **options)
        changed = f", {report.n_changed:,} of them changed" if report.n_changed else ""
        typer.echo(
            f"{report.folder}: {report.n_tensors:,} tensors{changed}; the logits are those of the sources up to "
            f"{report.logit_gap:.1g} of their norm"
        )

    run_command(run)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"skyrl {metadata.version('skyrl-train')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _run(
    context: typer.Context,
    overrides: Sequence[str],
    config: Path | None,
    print_config: bool,
    help: bool,
    dry_run: bool = False,
    *,
    trains: bool,
) -> None:
    """Answer `--help`, or start a run of reinforcement learning."""
    from skyrl_train.entrypoints.command import run_command

    def run() -> None:
        if help:
            from skyrl_train.config.generate import describe_keys, describe_sections

            typer.echo(describe_keys(overrides) if overrides else f"{context.get_help()}\n\n{describe_sections()}")
        else:
            _start_rl(overrides, config, print_config, dry_run, trains=trains)

    run_command(run)


def _start_rl(
    overrides: Sequence[str], config: Path | None, print_config: bool, dry_run: bool, *, trains: bool
) -> None:
    """Check the configuration, and then print it, plan the run, train, or evaluate."""
    from skyrl_train.config.problems import raise_problems
    from skyrl_train.entrypoints.command import parse_cli
    from skyrl_train.entrypoints.preflight import check_data, find_missing

    cfg = parse_cli(overrides, config)
    raise_problems(find_missing(cfg, trains=trains))
    if print_config:
        from skyrl_train.config import to_yaml

        typer.echo(to_yaml(cfg), nl=False)
        return
    data_is_checked = check_data(cfg, trains=trains)
    if dry_run:
        from skyrl_train.entrypoints.plan import describe_plan

        typer.echo(describe_plan(cfg))
    elif trains:
        from skyrl_train.entrypoints.experiment import BasePPOExp

        BasePPOExp(cfg, data_is_checked=data_is_checked).run()
    else:
        from skyrl_train.entrypoints.evaluation import EvalOnlyEntrypoint

        EvalOnlyEntrypoint(cfg, data_is_checked=data_is_checked).run()


SUPERVISED = {
    "sft": ("skyrl_train.config.sft", "SFT", "skyrl_train.entrypoints.sft", "SFTExp"),
    "dpo": ("skyrl_train.config.preferences", "DPO", "skyrl_train.entrypoints.preferences", "DPOExp"),
    "reward": ("skyrl_train.config.preferences", "REWARD", "skyrl_train.entrypoints.preferences", "RewardExp"),
}
"""Module and name of the schema and of the experiment of each command that trains on fixed data."""


def _supervised_schema(command: str) -> Schema[Any]:
    module, name, *_ = SUPERVISED[command]
    schema: Schema[Any] = getattr(import_module(module), name)
    return schema


def _start_supervised(
    command: str, overrides: Sequence[str], config: Path | None, print_config: bool, dry_run: bool
) -> None:
    """Check the configuration, and then print it, plan the run, or train."""
    from skyrl_train.config.cli import parse
    from skyrl_train.config.problems import raise_problems
    from skyrl_train.entrypoints.preflight import check_answers, find_missing_for_supervised

    cfg = parse(overrides, _supervised_schema(command), file=config)
    raise_problems(find_missing_for_supervised(cfg))
    if print_config:
        from skyrl_train.config import to_yaml

        typer.echo(to_yaml(cfg), nl=False)
        return
    check_answers(cfg)
    if dry_run:
        from skyrl_train.entrypoints.plan import describe_supervised_plan

        typer.echo(describe_supervised_plan(cfg))
    else:
        *_, module, name = SUPERVISED[command]
        getattr(import_module(module), name)(cfg).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run `skyrl` with these arguments, those of the process by default; return the exit status."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # a configuration may name modules in the current folder, as with python -m
    try:
        app(argv, prog_name="skyrl")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def run() -> None:
    """Run the console script `skyrl`."""
    sys.exit(main())
