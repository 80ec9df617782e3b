"""Train a small language model to play Catch: `make catch`.

    python -m examples.catch.learn --seed 42

Prepares the data and the model, trains with GRPO, and compares the result with optimal and random play. The exit status
is 1 if the model did not learn.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from examples.catch.env import RewardMode
from examples.catch.main_catch import register_catch
from examples.catch.recipe import METRIC, N_STEPS, TRAIN_METRIC, CatchRun
from skyrl_report.learning_curve import plot_learning_curve
from skyrl_report.page import write_report
from skyrl_train.entrypoints.main_base import run_command


def learn(run: CatchRun) -> bool:
    """Prepare and train, print the catch rates, and return True if the required rate is reached."""
    started = time.monotonic()
    run.prepare()
    run.train()
    before, after = run.catch_rates()
    baselines = run.baselines()
    plot_learning_curve(
        run.metrics(),
        run.folder.learning_curve,
        metric=METRIC,
        title=f"A tiny language model learns Catch ({run.reward_mode} rewards)",
        baselines=baselines.as_lines(),
        train_metric=TRAIN_METRIC,
    )
    write_report(run.folder, command=run.command, baselines={METRIC: baselines.as_lines()})
    required = run.required_share * baselines.optimal
    has_learned = after >= required
    print(f"\nCatch rate on the validation set ({run.name}, {run.n_steps} steps, {time.monotonic() - started:.0f} s)\n")
    for label, rate in (
        ("random play", baselines.chance),
        ("before training", before),
        ("after training", after),
        ("optimal player", baselines.optimal),
    ):
        print(f"  {label:<16} {rate:6.1%}   {'█' * round(40 * rate)}")
    verdict = "Passed" if has_learned else "FAILED"
    print(f"\n{verdict}: catch rate {after:.1%} (required {required:.1%}, optimal {baselines.optimal:.1%})")
    print(f"Learning curve: {run.folder.learning_curve}\nReport:         {run.folder.report}")
    return has_learned


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options shared by `learn` and `compare`."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--seed", type=int, default=42, help="seed of the model, the data order and sampling")
    options.add_argument("--output_dir", type=Path, default=Path("outputs"), help="folder of the run folders")
    options.add_argument("--steps", type=int, default=N_STEPS, help="training steps")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--reward_mode", choices=get_args(RewardMode), default="shaped")
    options.add_argument("overrides", nargs="*", help="configuration overrides key=value")
    args = options.parse_args(argv)
    register_catch()
    run = CatchRun(
        args.output_dir.expanduser().resolve(), args.reward_mode, args.seed, args.steps, overrides=tuple(args.overrides)
    )
    results: list[bool] = []
    run_command(lambda: results.append(learn(run)))
    sys.exit(0 if results[0] else 1)


if __name__ == "__main__":
    main()
