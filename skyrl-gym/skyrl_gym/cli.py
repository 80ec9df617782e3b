"""`skyrl env …`: environments without a trainer.

check   drive one through everything that training will do to it
play    take the place of the model in a terminal
list    the environments that come with skyrl-gym
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_gym.checkup import RULES, TIMEOUT_SECONDS, Checkup, Finding
from skyrl_gym.entry_point import load_attribute
from skyrl_gym.envs.registration import EnvSpec, registry, spec
from skyrl_gym.error import Error
from skyrl_gym.leftovers import child_processes, end_soon
from skyrl_gym.play import play
from skyrl_gym.rows import read_row

SIGNS = {"kept": "✓", "broken": "✗", "advice": "!"}


def main(argv: Sequence[str] | None = None, prog: str = "skyrl-gym") -> int:
    """The command line. The exit status is 1 where a rule is broken, and 2 where the command is wrong."""
    options = _parser(prog).parse_args(argv)
    try:
        return COMMANDS[options.command](options)
    except (Error, AssertionError, ImportError, OSError, ValueError) as error:  # a row's lack is an AssertionError
        sys.stderr.write(f"{error}\n")
        return 2


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="drive an environment through training's demands")
    check.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=TIMEOUT_SECONDS,
        help=f"a call that takes longer hangs, and ends the check (default: {TIMEOUT_SECONDS:g})",
    )
    for command in (check, commands.add_parser("play", help="play it by hand")):
        command.add_argument("env", help="module:Class, or the name of one that is registered")
        command.add_argument("--data", type=Path, help="a .parquet, .json or .jsonl dataset; its first row is played")
        command.add_argument("--row", type=int, default=0, help="which row of it")
        command.add_argument(
            "--set", metavar="KEY=VALUE", action="append", default=[], help="of env_config, e.g. topk=5"
        )
    commands.add_parser("list", help="list the environments that come with skyrl-gym")
    return parser


def _check(options: argparse.Namespace) -> int:
    """Where a call hangs, this process is ended soon after."""
    processes = child_processes()
    checkup = Checkup(_spec(options.env), _row(options), _settings(options), options.timeout)
    findings: list[Finding] = []
    for finding in checkup.run():
        sys.stdout.write(_line(finding, is_told=any(finding.told == earlier.told for earlier in findings)))
        sys.stdout.flush()
        findings.append(finding)
    sys.stdout.write(f"\n{options.env}: {_counts(findings)}\n")
    sys.stdout.flush()
    status = int(any(finding.verdict == "broken" for finding in findings))
    if checkup.is_stuck:
        end_soon(status, child_processes() - processes)
    return status


def _play(options: argparse.Namespace) -> int:
    play(_spec(options.env), _row(options), _settings(options), sys.stdin, sys.stdout)
    return 0


def _list(_: argparse.Namespace) -> int:
    for id, env_spec in sorted(registry.items()):
        sys.stdout.write(f"{id:<18} {env_spec.entry_point}\n")
    return 0


def run() -> None:
    """The script `skyrl-gym`."""
    sys.exit(main())


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {"check": _check, "play": _play, "list": _list}


def _line(finding: Finding, is_told: bool) -> str:
    told = "as above" if finding.told and is_told else finding.told
    indented = textwrap.indent(told, "    ") + "\n" if told else ""
    printable = indented.encode("utf-8", "backslashreplace").decode()  # it may quote half a character
    return f"{SIGNS[finding.verdict]} {finding.rule}\n{printable}"


def _counts(findings: Sequence[Finding]) -> str:
    verdicts = [finding.verdict for finding in findings]
    counted = (
        f"{verdicts.count('kept')} kept, {verdicts.count('broken')} broken, {verdicts.count('advice')} to consider"
    )
    n_unchecked = len(RULES) - len(findings)
    return f"{counted}, {n_unchecked} not checked" if n_unchecked else counted


def _spec(name: str) -> EnvSpec:
    """How to make the environment; a module is looked for in the current folder too."""
    if ":" not in name:
        return spec(name)
    sys.path.insert(0, "")
    return EnvSpec(name.rpartition(":")[2], load_attribute(name))


def _row(options: argparse.Namespace) -> Mapping[str, Any]:
    return {} if options.data is None else read_row(options.data, options.row)


def _seconds(told: str) -> float:
    """A time that one can wait for."""
    try:
        seconds = float(told)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{told} is no time to wait; write a number of seconds, such as 60")
    return seconds


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """`key=value`, where values are JSON if they can be, else text."""
    settings: dict[str, Any] = {}
    for told in options.set:
        key, found, value = told.partition("=")
        if not found:
            raise ValueError(f"--set {told}: write key=value")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings
