"""Compare shaped and episodic rewards with the same model and budget, in one plot: `make catch-compare`.

python -m examples.catch.compare --seed 42
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from examples.catch.env import RewardMode
from examples.catch.learn import learn, parser
from examples.catch.main_catch import register_catch
from examples.catch.recipe import METRIC, CatchRun
from skyrl_report.learning_curve import compare_curves
from skyrl_train.entrypoints.main_base import run_command


def compare(runs: Sequence[CatchRun]) -> bool:
    """Train every run and plot their curves together. Return True if all of them learned."""
    have_learned = [learn(run) for run in runs]
    plot = compare_curves(
        {f"{run.reward_mode} rewards": run.metrics() for run in runs},
        runs[0].folder.path.parent / f"shaped-and-episodic-seed{runs[0].seed}.png",
        metric=METRIC,
        title="Catch with a reward every turn, and with one at the end",
        baselines=runs[0].baselines().as_lines(),
    )
    print(f"\nBoth curves: {plot}")
    return all(have_learned)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parser(__doc__.splitlines()[0]).parse_args(argv)
    register_catch()
    output_dir: Path = args.output_dir.expanduser().resolve()
    runs = [CatchRun(output_dir, mode, args.seed, args.steps) for mode in get_args(RewardMode)]
    results: list[bool] = []
    run_command(lambda: results.append(compare(runs)))
    sys.exit(0 if results[0] else 1)


if __name__ == "__main__":
    main()
