"""`skyrl env …`: environments without a trainer.

check   drive one through everything that training will do to it
play    take the place of the model in a terminal
list    the environments that come with skyrl-gym
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_gym.checkup import Checkup, Finding
from skyrl_gym.entry_point import load_attribute
from skyrl_gym.envs.registration import EnvSpec, registry, spec
from skyrl_gym.error import Error
from skyrl_gym.play import play

SIGNS = {"kept": "✓", "broken": "✗", "advice": "!"}


def main(argv: Sequence[str] | None = None, prog: str = "skyrl-gym") -> int:
    """The command line. The exit status is 1 where a rule is broken, and 2 where the command is wrong."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, told in (("check", "drive an environment through training's demands"), ("play", "play it by hand")):
        command = commands.add_parser(name, help=told)
        command.add_argument("env", help="module:Class, or the name of one that is registered")
        command.add_argument("--data", type=Path, help="a .json or .jsonl dataset; its first row is played")
        command.add_argument("--row", type=int, default=0, help="which row of it")
        command.add_argument(
            "--set", metavar="KEY=VALUE", action="append", default=[], help="of env_config, e.g. topk=5"
        )
    commands.add_parser("list", help="list the environments that come with skyrl-gym")
    options = parser.parse_args(argv)
    try:
        return COMMANDS[options.command](options)
    except (Error, AssertionError, ImportError, OSError, ValueError) as error:  # a row's lack is an AssertionError
        sys.stderr.write(f"{error}\n")
        return 2


def _check(options: argparse.Namespace) -> int:
    findings = []
    for finding in Checkup(_spec(options.env), _row(options), _settings(options)).run():
        findings.append(finding)
        sys.stdout.write(_line(finding))
        sys.stdout.flush()
    n_broken = sum(finding.verdict == "broken" for finding in findings)
    n_advised = sum(finding.verdict == "advice" for finding in findings)
    sys.stdout.write(
        f"\n{options.env}: {len(findings) - n_broken - n_advised} kept, {n_broken} broken, {n_advised} to consider\n"
    )
    return int(n_broken > 0)


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


def _line(finding: Finding) -> str:
    told = f"\n    {finding.told}" if finding.told else ""
    return f"{SIGNS[finding.verdict]} {finding.rule}{told}\n"


def _spec(name: str) -> EnvSpec:
    """How to make the environment; a module is looked for in the current folder too."""
    if ":" not in name:
        return spec(name)
    sys.path.insert(0, "")
    return EnvSpec(name.rpartition(":")[2], load_attribute(name))


def _row(options: argparse.Namespace) -> Mapping[str, Any]:
    if options.data is None:
        return {}
    if options.data.suffix not in (".json", ".jsonl"):
        raise ValueError(f"--data {options.data}: a file of .json or .jsonl is read here")
    text = options.data.read_text(encoding="utf-8")
    rows = (
        json.loads(text)
        if options.data.suffix == ".json"
        else [json.loads(line) for line in text.split("\n") if line.strip()]
    )
    if not isinstance(rows, list):
        raise ValueError(f"--data {options.data}: a .json file holds a list of rows")
    if not 0 <= options.row < len(rows):
        raise ValueError(f"--row {options.row}: {options.data} has rows 0 to {len(rows) - 1}")
    row = rows[options.row]
    if not isinstance(row, dict):
        raise ValueError(f"row {options.row} of {options.data} is {str(row)[:80]!r}; a row is an object")
    return row


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
