"""The command `skyrl-gym`, or `skyrl env`: environments, judges and benchmarks without a trainer."""

import argparse
import json
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_gym.benchmarks.play import play_benchmarks
from skyrl_gym.benchmarks.scores import format_scores, score_benchmarks
from skyrl_gym.benchmarks.suite import BENCHMARKS, benchmark_rows
from skyrl_gym.chat_endpoint import EndpointConfig
from skyrl_gym.checkup.play import play
from skyrl_gym.checkup.resources import child_processes, exit_soon
from skyrl_gym.checkup.rows import read_row
from skyrl_gym.checkup.rules import RULES, TIMEOUT_SECONDS, Checkup, Finding
from skyrl_gym.envs.entry_point import load_attribute, suggest_name
from skyrl_gym.envs.registration import EnvSpec, registry, spec
from skyrl_gym.error import Error
from skyrl_gym.judges.agreement import measure_agreement
from skyrl_gym.judges.panel import load_panel

SIGNS = {"passed": "✓", "failed": "✗", "advice": "!"}
NO_ROW = "The environment got an empty row; pass a dataset with --data."


def main(argv: Sequence[str] | None = None, prog: str = "skyrl-gym") -> int:
    """Run the command line. Exit status 1 means a broken rule, 2 a wrong command."""
    parser = _parser(prog)
    name = next(iter(sys.argv[1:] if argv is None else argv), "")
    if name not in COMMANDS and (hint := suggest_name(name, list(COMMANDS))):
        parser.error(f"there is no command {name!r}.{hint}")
    options = parser.parse_args(argv)
    try:
        return COMMANDS[options.command](options)
    except (
        Error,
        AssertionError,
        ImportError,
        OSError,
        ValueError,
    ) as error:  # a field missing in the row is an AssertionError
        sys.stderr.write(f"{error}\n")
        if options.command == "play" and options.data is None and not isinstance(error, Error | ImportError):
            sys.stderr.write(f"{NO_ROW}\n")
        return 2


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Check, play and list environments without a trainer.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="test an environment for everything that training does to it")
    check.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=TIMEOUT_SECONDS,
        help=f"time limit of a call; one that exceeds it ends the check (default: {TIMEOUT_SECONDS:g})",
    )
    for command in (check, commands.add_parser("play", help="play an environment by hand, in place of the model")):
        command.add_argument("env", help="module:Class, or the id of a registered environment")
        command.add_argument("--data", type=Path, help="a .parquet, .json or .jsonl dataset")
        command.add_argument("--row", type=int, default=0, help="index of the dataset row to play (default: 0)")
        command.add_argument(
            "--set", metavar="KEY=VALUE", action="append", default=[], help="a key of env_config, e.g. topk=5"
        )
    judge = commands.add_parser("judge", help="compare judges with labelled samples")
    judge.add_argument("judges", type=Path, help="a YAML file of judges")
    judge.add_argument("samples", type=Path, help="a .jsonl file of labelled samples")
    judge.add_argument("--min-agreement", type=float, default=0.0, help="exit with status 1 below this accuracy")
    evaluate = commands.add_parser("eval", help="evaluate a model behind an OpenAI-compatible API on benchmarks")
    evaluate.add_argument("benchmarks", nargs="+", help=f"{', '.join(BENCHMARKS)}; NAME=FILE, or NAME=sample")
    evaluate.add_argument("--base-url", required=True, help="the URL before /chat/completions")
    evaluate.add_argument("--model", required=True, help="the model's name at the API")
    evaluate.add_argument("--api-key-env", default="", help="the environment variable with the key")
    evaluate.add_argument("--samples", type=int, default=1, help="samples per problem (default: 1)")
    evaluate.add_argument("--limit", type=int, help="evaluate only the first problems of each benchmark")
    evaluate.add_argument("--concurrency", type=int, default=16, help="open requests (default: 16)")
    evaluate.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="e.g. temperature=0.6")
    evaluate.add_argument("--output", type=Path, default=Path("eval.jsonl"), help="file of samples, also to continue")
    commands.add_parser("list", help="list the environments that come with skyrl-gym")
    return parser


def _check(options: argparse.Namespace) -> int:
    """Print one line per finding. If a call hangs, exit this process soon after."""
    processes = child_processes()
    checkup = Checkup(_spec(options.env), _row(options), _settings(options), options.timeout)
    findings: list[Finding] = []
    for finding in checkup.run():
        is_repeated = any(finding.detail == earlier.detail for earlier in findings)
        detail = "as above" if finding.detail and is_repeated else finding.detail
        indented = textwrap.indent(detail, "    ") + "\n" if detail else ""
        printable = indented.encode("utf-8", "backslashreplace").decode()  # it may quote a lone surrogate
        sys.stdout.write(f"{SIGNS[finding.verdict]} {finding.rule}\n{printable}")
        sys.stdout.flush()
        findings.append(finding)
    if options.data is None and findings[0].verdict == "failed":  # it cannot be constructed
        sys.stdout.write(f"    {NO_ROW}\n")
    if checkup.image_sizes:
        sizes = ", ".join(f"{n} of {size} pixels" for size, n in checkup.image_sizes.most_common())
        sys.stdout.write(f"\nImages: {sizes}\n")
    sys.stdout.write(f"\n{options.env}: {_format_counts(findings)}\n")
    sys.stdout.flush()
    status = int(any(finding.verdict == "failed" for finding in findings))
    if checkup.is_stuck:
        exit_soon(status, child_processes() - processes)
    return status


def _play(options: argparse.Namespace) -> int:
    play(_spec(options.env), _row(options), _settings(options), sys.stdin, sys.stdout)
    return 0


def _list(_: argparse.Namespace) -> int:
    for id, env_spec in sorted(registry.items()):
        sys.stdout.write(f"{id:<18} {env_spec.entry_point}\n")
    return 0


def _judge(options: argparse.Namespace) -> int:
    panel = load_panel(options.judges)
    try:
        agreement = measure_agreement(panel, options.samples)
    finally:
        panel.close()
    sys.stdout.write(f"{agreement}\n")
    return int(agreement.accuracy < options.min_agreement)


def _evaluate(options: argparse.Namespace) -> int:
    rows = [row for name in options.benchmarks for row in benchmark_rows(name, options.limit)]
    config = EndpointConfig(options.base_url, options.model, options.api_key_env, _settings(options))
    samples = list(play_benchmarks(rows, config, options.samples, options.concurrency, options.output))
    sys.stdout.write(f"{format_scores(score_benchmarks(samples))}\nThe samples are in {options.output}\n")
    failed = [sample["error"] for sample in samples if sample["error"] is not None]
    if failed:
        sys.stderr.write(f"{len(failed)} of {len(samples)} samples failed; the first: {failed[0]}\n")
    return int(len(failed) == len(samples))


def run() -> None:
    """Run the `skyrl-gym` script."""
    sys.exit(main())


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "check": _check,
    "play": _play,
    "judge": _judge,
    "eval": _evaluate,
    "list": _list,
}


def _format_counts(findings: Sequence[Finding]) -> str:
    verdicts = [finding.verdict for finding in findings]
    n_passed, n_failed, n_suggestions = (verdicts.count(verdict) for verdict in ("passed", "failed", "advice"))
    counts = f"{n_passed} passed, {n_failed} failed, {n_suggestions} suggestions"
    n_unchecked = len(RULES) - len(findings)
    return f"{counts}, {n_unchecked} not checked" if n_unchecked else counts


def _spec(name: str) -> EnvSpec:
    """Return the spec of an environment. Modules in the current folder are importable."""
    if ":" not in name:
        return spec(name)
    sys.path.insert(0, "")
    return EnvSpec(name.rpartition(":")[2], load_attribute(name))


def _row(options: argparse.Namespace) -> Mapping[str, Any]:
    return {} if options.data is None else read_row(options.data, options.row)


def _seconds(text: str) -> float:
    """Parse a time limit."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not a time limit; use a number of seconds, such as 60")
    return seconds


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Parse the `key=value` pairs of `--set`. A value that is not JSON is text."""
    settings: dict[str, Any] = {}
    for pair in options.set:
        key, found, value = pair.partition("=")
        if not found:
            raise ValueError(f"--set {pair} has no value; use key=value")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings
