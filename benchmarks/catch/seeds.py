"""Train the tiny model on Catch with several seeds and reward modes: `make bench-catch`.

The script trains every combination with the recipe of `make catch`, one after the other, and writes `results.md` and
`results.png` next to this file.
"""

import argparse
from pathlib import Path
from typing import get_args

from harness import conditions
from table import measure_all

from examples.catch.env import RewardMode
from examples.catch.main_catch import register_catch
from examples.catch.recipe import CatchRun
from skyrl_train.entrypoints.main_base import run_command


def main() -> None:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--output_dir", type=Path, default=Path("outputs/bench-catch"))
    args = options.parse_args()
    register_catch()
    output_dir = args.output_dir.resolve()
    runs = {
        f"{mode} | {seed}": CatchRun(output_dir, mode, seed) for mode in get_args(RewardMode) for seed in args.seeds
    }
    n_steps = next(iter(runs.values())).n_steps
    text = f"`make bench-catch`, {conditions()}. {n_steps} steps. Runs of one seed share a warm start."
    page = Path(__file__).with_name("results.md")
    run_command(lambda: measure_all(runs, page, "Catch with the tiny model", text, "rewards | seed"))


if __name__ == "__main__":
    main()
