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


SUPERVISED = {
    "sft": ("skyrl_train.config.supervised:SFT", "skyrl_train.entrypoints.sft:SFTExp"),
    "dpo": ("skyrl_train.config.supervised:DPO", "skyrl_train.entrypoints.preferences:DPOExp"),
    "reward": ("skyrl_train.config.supervised:REWARD", "skyrl_train.entrypoints.preferences:RewardExp"),
}
"""Commands that train on fixed data: their schema and their experiment."""


def start_rl(
    overrides: Sequence[str],
    config: Path | None,
    print_config: bool,
    dry_run: bool,
    *,
    trains: bool,
    fit: bool = False,
    program: Program = Program(),
) -> None:
    """Check the configuration, then print it, print the plan of the run, train, or evaluate."""
    from skyrl_train.config import to_yaml
    from skyrl_train.entrypoints.preflight import check_data, find_missing

    cfg = program.parse(overrides, config, partial(find_missing, trains=trains))
    cfg = _fit(cfg) if fit else cfg
    if print_config:
        typer.echo(to_yaml(cfg), nl=False)
        return
    is_checked = program.experiment is None and check_data(cfg, trains=trains)  # other experiments may read other data
    if dry_run:
        with importing_torch():
            from skyrl_train.entrypoints.describe_plan import print_plan

            print_plan(cfg, is_custom=program.experiment is not None)
    elif program.experiment is not None:
        program.experiment(cfg).run()
    else:
        name = "experiment:RLExperiment" if trains else "evaluation:EvaluationExperiment"
        with importing_torch():
            experiment = load_attribute(f"skyrl_train.entrypoints.{name}")
        experiment(cfg, data_is_checked=is_checked).run()


def _fit(cfg: Any) -> Any:
    """Return the settings with which the run fits. Raise ConfigError if none are known."""
    with importing_torch():
        from skyrl_train.entrypoints.memory_plan import fit_to_machine

    return fit_to_machine(cfg)


def parse_for_plan(command: str, overrides: Sequence[str], config: Path | None) -> SkyRLConfig | SupervisedConfig:
    """Parse the settings of `skyrl COMMAND` for any machine: files and packages need not exist on this one.

    Raise ConfigError if a setting is invalid.
    """
    from skyrl_train.algorithms.rules import ALGORITHM_RULES
    from skyrl_train.config.cli import parse

    if command != "train" and command not in SUPERVISED:
        raise ConfigError(f"--command {command} is not a kind of run; use one of train, {', '.join(SUPERVISED)}")
    name = "skyrl_train.config.loading:RL" if command == "train" else SUPERVISED[command][0]
    rules = (import_modules, *ALGORITHM_RULES) if command == "train" else ()
    return parse(overrides, replace(load_attribute(name), machine_rules=()), rules, config)


def start_supervised(
    command: str,
    overrides: Sequence[str],
    config: Path | None,
    print_config: bool,
    dry_run: bool,
    torchrun_flags: Sequence[str] = (),
    *,
    fit: bool = False,
    is_checked: bool = False,
) -> None:
    """Check the configuration, then print it, print the plan of the run, or train (here or under torchrun).

    Set `is_checked` if another process has already checked the files and their rows.
    """
    from skyrl_train.config import to_yaml
    from skyrl_train.config.cli import parse
    from skyrl_train.entrypoints.preflight import check_answers, find_missing_for_supervised

    schema, experiment_name = SUPERVISED[command]
    rules = () if is_checked else (find_missing_for_supervised,)
    cfg: SupervisedConfig = parse(overrides, load_attribute(schema), rules, config)
    cfg = _fit(cfg) if fit else cfg
    if print_config:
        typer.echo(to_yaml(cfg), nl=False)
        return
    if not is_checked:
        check_answers(cfg)
    if dry_run:
        from skyrl_train.entrypoints.describe_plan import print_plan

        print_plan(cfg, is_custom=False)
    elif cfg.trainer.placement.uses_torchrun and "TORCHELASTIC_RUN_ID" not in os.environ:
        file = [] if config is None else ["--config", str(config)]
        replace_by_torchrun(
            [command, "--checked", *(["--fit"] if fit else []), *file, *overrides],
            cfg.trainer.placement,
            torchrun_flags,
        )
    else:
        with importing_torch():
            experiment = load_attribute(experiment_name)
        experiment(cfg).run()


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
