"""Train the tiny model on Catch with several seeds and reward modes: `make bench-catch`.

The script trains every combination with the recipe of `make catch`, one after the other, and writes `results.md` and
`results.png` next to this file.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import get_args

from harness import conditions

from examples.catch.env import RewardMode
from examples.catch.main_catch import register_catch
from examples.catch.recipe import METRIC, CatchRun
from skyrl_train.entrypoints.main_base import run_command
from skyrl_train.report import compare_curves

HERE = Path(__file__).parent


def measure(run: CatchRun) -> str:
    """Train, and return the result as a row of the table."""
    started = time.monotonic()
    run.prepare()
    prepared = time.monotonic()
    run.train()
    finished = time.monotonic()
    before, after = run.catch_rates()
    optimal = run.baselines().optimal
    step_at_90 = next((row["step"] for row in run.metrics() if row.get(METRIC, 0.0) >= 0.9 * optimal), None)
    return (
        f"| {run.reward_mode} | {run.seed} | {before:.1%} | {after:.1%} | {after / optimal:.1%} | {step_at_90} "
        f"| {prepared - started:.0f} s | {finished - prepared:.0f} s |"
    )


def main() -> None:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--output_dir", type=Path, default=Path("outputs/bench-catch"))
    args = options.parse_args()
    register_catch()
    output_dir = args.output_dir.resolve()
    runs = [CatchRun(output_dir, mode, seed) for mode in get_args(RewardMode) for seed in args.seeds]
    run_command(lambda: measure_all(runs, conditions()))


def measure_all(runs: list[CatchRun], setup: str) -> None:
    """Train all runs, and rewrite the table and the figure after each."""
    rows = []
    for n_done, run in enumerate(runs, start=1):
        rows.append(measure(run))
        write(runs[:n_done], rows, setup)


def write(runs: list[CatchRun], rows: list[str], setup: str) -> None:
    """Write the table and the figure."""
    baselines = runs[0].baselines()
    table = [
        "# Catch with the tiny model",
        "",
        f"`make bench-catch`, {setup}. {runs[0].n_steps} steps; the optimal player catches {baselines.optimal:.1%} of "
        f"the validation set, random play {baselines.chance:.1%}. Runs of one seed share a warm start.",
        "",
        "| rewards | seed | before | after | of optimal | 90% of optimal at step | data and warm start | GRPO |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        "![Catch rates over training](results.png)",
    ]
    (HERE / "results.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    compare_curves(
        {f"{run.reward_mode}, seed {run.seed}": run.metrics() for run in runs},
        HERE / "results.png",
        metric=METRIC,
        title="Catch with the tiny model",
        baselines=baselines.as_lines(),
    )
    print("\n".join(table))


if __name__ == "__main__":
    main()
