"""The command `skyrl`. Subcommands import heavy modules only when they run, so that mistakes are reported fast."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyrl_gym.envs.entry_point import load_attribute
from skyrl_gym.error import Error
from skyrl_report.cli import report, watch
from skyrl_train.entrypoints.command import as_command, importing_torch
from skyrl_train.entrypoints.merge import merge
from skyrl_train.entrypoints.start import COMMANDS, RUN_SETTINGS, DryRun, Fit, PrintConfig, Program, start
from skyrl_train.errors import ConfigError, DataError

if TYPE_CHECKING:
    from skyrl_train.config.problems import Fields

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
  skyrl eval gsm8k aime25 --samples 4 trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct
  skyrl env check my_env:MyEnv --data train.jsonl
""",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _complete_key(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a configuration key, one level at a time."""
    from skyrl_train.config.base import as_section

    fields = _fields(context)
    depth = incomplete.count(".") + 1
    keys = (key for key in fields if key.startswith(incomplete) and key.count(".") < depth)
    return [f"{key}." if as_section(fields[key].annotation) else f"{key}=" for key in keys]


def _fields(context: typer.Context) -> Fields:
    """Return the keys of a command's configuration."""
    schema, _ = COMMANDS.get(str(context.command.name), COMMANDS["train"])
    fields: Fields = load_attribute(schema).fields
    return fields


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", autocompletion=_complete_key, help="Settings, e.g. trainer.epochs=3.", show_default=False
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Read settings from a YAML file first.")
]
Help = Annotated[
    bool, typer.Option("--help", "-h", help="Show this message; with a key or a section, its keys and their meaning.")
]


@as_command
def train(
    context: typer.Context,
    overrides: Overrides = None,
    config: ConfigFile = None,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    fit: Fit = False,
    help: Help = False,
    is_checked: Annotated[
        bool, typer.Option("--checked", hidden=True, help="Another process has checked the settings and logged them.")
    ] = False,
) -> None:
    """Run one of the commands in `COMMANDS` that train."""
    if is_checked:
        logging.getLogger("skyrl_train.config").setLevel(logging.ERROR)
    if help:
        _print_help(context, overrides)
    else:
        command, program = str(context.command.name), context.obj or Program()
        start(command, overrides or [], config, print_config, dry_run, fit=fit, is_checked=is_checked, program=program)


for _name, _help in {
    "train": "Train a policy on its own rollouts.",
    "sft": "Fine-tune a model on demonstrations.",
    "dpo": "Train a model on preferences by direct preference optimization.",
    "reward": "Train a reward model on preferences.",
}.items():
    app.command(_name, help=_help, context_settings=RUN_SETTINGS, add_help_option=False)(train)


@app.command(context_settings=RUN_SETTINGS, add_help_option=False)
@as_command
def generate(
    context: typer.Context,
    overrides: Overrides = None,
    config: ConfigFile = None,
    print_config: PrintConfig = False,
    help: Help = False,
) -> None:
    """Evaluate a model without training it."""
    if help:
        _print_help(context, overrides)
    else:
        start("generate", overrides or [], config, print_config)


@app.command("eval", context_settings=RUN_SETTINGS)
@as_command
def evaluate_benchmarks(
    benchmarks: Annotated[
        list[str],
        typer.Argument(
            metavar="BENCHMARK...",
            help="gsm8k, math500, aime24, aime25, gpqa, ifeval or mmlu-pro, from the Hub; NAME=FILE, or NAME=sample "
            "for a few problems of this project. Settings KEY=VALUE follow.",
            show_default=False,
        ),
    ],
    samples: Annotated[int, typer.Option(min=1, help="Samples per problem.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Evaluate only the first problems of each.")] = None,
    config: ConfigFile = None,
    print_config: PrintConfig = False,
) -> None:
    """Evaluate a model on benchmarks, with confidence intervals."""
    from skyrl_gym.benchmarks.suite import benchmark_rows
    from skyrl_train.dataset.files import reading_rows, write_temporary

    names = [argument for argument in benchmarks if "." not in argument.partition("=")[0]]
    if not names:
        raise ConfigError("there is no benchmark; write skyrl eval gsm8k KEY=VALUE …")
    try:
        with reading_rows():
            rows = [row for name in names for row in benchmark_rows(name, limit)]
    except (Error, ImportError, ValueError) as error:
        raise DataError(str(error)) from error
    settings = [
        f"data.val_data=['{write_temporary(rows)}']",
        f"generator.eval_n_samples_per_prompt={samples}",
        "trainer.max_prompt_length=4096",
        *(argument for argument in benchmarks if argument not in names),
    ]
    start("eval", settings, config, print_config)


@app.command(context_settings=RUN_SETTINGS)
@as_command
def plan(
    overrides: Overrides = None,
    config: ConfigFile = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Plan for this GPU, e.g. 4090 or H100.")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Plan for a GPU with this much free memory.")
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Plan for a node with this much free memory.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of a GPU and hour, for the cost of a step.")] = None,
    fit: Fit = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the memory as PNG or SVG.")] = None,
    command: Annotated[str, typer.Option(help="Kind of run: train, sft, dpo or reward.")] = "train",
) -> None:
    """Show the memory, time and cost of a run, on this machine or another, without loading a model.

    If the run does not fit, the plan names the cheapest settings with which it does. The exit status is then 1.
    """
    from skyrl_train.entrypoints.start import parse_for_plan

    cfg = parse_for_plan(command, overrides or [], config)
    with importing_torch():
        from skyrl_train.entrypoints.memory_plan import choose_hardware, show_plan

    hardware = choose_hardware(gpu, gpu_memory, host_memory)
    show_plan(cfg, hardware, price=price, applies_fit=fit, as_json=as_json, picture=picture)


@app.command(context_settings=RUN_SETTINGS)
@as_command
def doctor(overrides: Overrides = None, config: ConfigFile = None) -> None:
    """Check what a training run needs, and say how to fix what is missing.

    Versions, configuration, data, model, disk, memory, remote storage, keys and ports. The exit status is 1 if a
    check fails.
    """
    from skyrl_train.entrypoints.doctor import examine, print_checks

    print_checks(examine(overrides or [], config))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
def env(context: typer.Context) -> None:
    """Check, play or list environments."""
    from skyrl_gym.cli import main as env_main

    raise typer.Exit(env_main(context.args, prog="skyrl env"))


@app.command()
@as_command
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
    from skyrl_train.config.problems import raise_problems
    from skyrl_train.entrypoints.preflight import find_missing_data

    problems = [f"{folder} already exists; choose a new folder"] if folder.exists() else []
    raise_problems([*problems, *(find_missing_data("--data", [str(data)]) if data else ())])
    with importing_torch():
        from skyrl_train.entrypoints.tiny import write_tiny_model

    n_parameters = write_tiny_model(folder, str(data) if data else None, seed)
    typer.echo(f"{folder}: a Qwen3 of {n_parameters:,} random parameters; trainer.policy.model.path={folder}")


app.add_typer(report, name="report")
app.command()(watch)
app.add_typer(merge, name="merge")


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"skyrl {metadata.version('skyrl-train')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _print_help(context: typer.Context, names: Sequence[str] | None) -> None:
    """Print the help of a command and its sections, or the help of the keys and sections in `names`."""
    from skyrl_train.config.help import describe_keys, describe_sections

    fields = _fields(context)
    sections = describe_sections(fields, str(context.command.name))
    typer.echo(describe_keys(names, fields) if names else f"{context.get_help()}\n\n{sections}")


def main(argv: Sequence[str] | None = None, program: Program | None = None) -> int:
    """Run `skyrl` and return the exit status. `argv` defaults to the arguments of the process.

    `program` replaces the experiment and parser of `skyrl train`.
    """
    try:
        app(argv, prog_name="skyrl", obj=program)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def run_subcommand(command: str, argv: Sequence[str] | None = None, program: Program | None = None) -> None:
    """Run `skyrl COMMAND` with `argv`, by default the arguments of the process. Exit the process if it fails."""
    if status := main([command, *(sys.argv[1:] if argv is None else argv)], program):
        sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
