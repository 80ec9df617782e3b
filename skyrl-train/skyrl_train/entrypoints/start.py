"""Start runs for the command line: check the settings, then print them, print the plan, train or evaluate.

The commands `skyrl train` and `skyrl verl` share this. Heavy modules are imported only for what is started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from skyrl_gym.envs.entry_point import load_attribute
from skyrl_train.entrypoints.command import import_modules, importing_torch, parse_cli
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.config.run import RunPlacementConfig
    from skyrl_train.config.supervised import SupervisedConfig
    from skyrl_train.entrypoints.base import Experiment

DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the settings, print the plan of the run, and exit.")]
Fit = Annotated[bool, typer.Option("--fit", help="Apply the cheapest settings with which the run fits into memory.")]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved configuration as YAML, and exit.")
]
RUN_SETTINGS = {"ignore_unknown_options": True}  # `--trainer.epochs=3` is rejected by the configuration, with the fix


@dataclass(frozen=True)
class Program:
    """A script's own experiment and parser, run with the options of `skyrl train`."""

    experiment: Callable[[SkyRLConfig], Experiment] | None = None
    """Creates the experiment. None runs the experiment of `skyrl train`."""

    parse: Callable[..., SkyRLConfig] = parse_cli
    """Parses the overrides. Takes the arguments of `parse_cli`."""


COMMANDS = {
    "train": ("skyrl_train.config.loading:RL", "skyrl_train.entrypoints.experiment:RLExperiment"),
    "generate": ("skyrl_train.config.loading:RL", "skyrl_train.entrypoints.evaluation:EvaluationExperiment"),
    "eval": ("skyrl_train.config.loading:RL", "skyrl_train.entrypoints.evaluation:BenchmarkEvaluation"),
    "sft": ("skyrl_train.config.supervised:SFT", "skyrl_train.entrypoints.sft:SFTExp"),
    "dpo": ("skyrl_train.config.supervised:DPO", "skyrl_train.entrypoints.preferences:DPOExp"),
    "reward": ("skyrl_train.config.supervised:REWARD", "skyrl_train.entrypoints.preferences:RewardExp"),
}
"""Commands that start a run: their schema and their experiment."""

EVALUATIONS = ("generate", "eval")


def start(
    command: str,
    overrides: Sequence[str],
    config: Path | None = None,
    print_config: bool = False,
    dry_run: bool = False,
    *,
    fit: bool = False,
    is_checked: bool = False,
    program: Program = Program(),
    torchrun_flags: Sequence[str] = (),
) -> None:
    """Check the configuration, then print it, print the plan of the run, or run the command, maybe under torchrun.

    `program` applies to `train`. Set `is_checked` if another process has already checked the files and their rows.
    """
    from skyrl_train.config import to_yaml
    from skyrl_train.config.cli import parse
    from skyrl_train.entrypoints.preflight import check_answers, check_data, find_missing, find_missing_for_supervised

    (schema, experiment_name), trains, options = COMMANDS[command], command not in EVALUATIONS, dict[str, Any]()
    is_custom, is_supervised = program.experiment is not None, command not in ("train", *EVALUATIONS)
    cfg: Any
    if is_supervised:
        cfg = parse(overrides, load_attribute(schema), () if is_checked else (find_missing_for_supervised,), config)
    else:
        cfg = program.parse(overrides, config, partial(find_missing, trains=trains))
    if fit:
        with importing_torch():
            from skyrl_train.entrypoints.memory_plan import fit_to_machine

        cfg = fit_to_machine(cfg)
    if print_config:
        typer.echo(to_yaml(cfg), nl=False)
        return
    if is_supervised and not is_checked:
        check_answers(cfg)
    elif not is_supervised and not is_custom:  # a custom experiment may read other data
        options["data_is_checked"] = check_data(cfg, trains=trains)
    if dry_run:
        with importing_torch():
            from skyrl_train.entrypoints.describe_plan import print_plan

            print_plan(cfg, is_custom=is_custom)
    elif is_supervised and cfg.trainer.placement.uses_torchrun and "TORCHELASTIC_RUN_ID" not in os.environ:
        file = [] if config is None else ["--config", str(config)]
        arguments = [command, "--checked", *(["--fit"] if fit else []), *file, *overrides]
        replace_by_torchrun(arguments, cfg.trainer.placement, torchrun_flags)
    elif program.experiment is not None:
        program.experiment(cfg).run()
    else:
        with importing_torch():
            experiment = load_attribute(experiment_name)
        experiment(cfg, **options).run()


def parse_for_plan(command: str, overrides: Sequence[str], config: Path | None) -> SkyRLConfig | SupervisedConfig:
    """Parse the settings of `skyrl COMMAND` for any machine: files and packages need not exist on this one.

    Raise ConfigError if a setting is invalid.
    """
    from skyrl_train.algorithms.rules import ALGORITHM_RULES
    from skyrl_train.config.cli import parse

    if command not in COMMANDS or command in EVALUATIONS:
        names = ", ".join(name for name in COMMANDS if name not in EVALUATIONS)
        raise ConfigError(f"--command {command} is not a kind of run; use one of {names}")
    rules = (import_modules, *ALGORITHM_RULES) if command == "train" else ()
    return parse(overrides, replace(load_attribute(COMMANDS[command][0]), machine_rules=()), rules, config)


def replace_by_torchrun(arguments: Sequence[str], placement: RunPlacementConfig, flags: Sequence[str] = ()) -> NoReturn:
    """Replace this process by torchrun. Its processes run `skyrl` with these arguments.

    `flags` are additional flags of torchrun, such as `--node_rank=1`. Without a flag for the rendezvous, torchrun uses
    a free port of this machine. Raise ConfigError if there are several nodes and no such flag.
    """
    n_nodes, n_per_node = placement.size("policy")
    has_rendezvous = any(flag.startswith(("--standalone", "--rdzv", "--master")) for flag in flags)
    if n_nodes > 1 and not has_rendezvous:
        raise ConfigError(
            f"trainer.placement.policy_num_nodes={n_nodes}: trainer.placement.launcher=torchrun starts the ranks of "
            f"one node; run torchrun --nnodes={n_nodes} --nproc_per_node={n_per_node} --rdzv_backend=c10d "
            "--rdzv_endpoint=<first node>:29400 --no-python skyrl … on each node, or set trainer.placement.launcher=ray"
        )
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, n_cores // n_per_node)))  # otherwise torchrun sets 1 and warns
    counts = [f"--nnodes={n_nodes}", f"--nproc_per_node={n_per_node}"]
    torchrun = ["-m", "torch.distributed.run", *counts, *([] if has_rendezvous else ["--standalone"]), *flags]
    command = [sys.executable, *torchrun, "-m", "skyrl_train.entrypoints.cli", *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)
