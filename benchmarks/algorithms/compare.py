"""Compare all algorithms on Catch under the same budget: `make bench-algorithms`.

All runs start from the same warm-started model and train for the same number of steps on the same prompts. The script
rewrites `results.md`, `results.json` and `results.png` next to this file after every run. It skips runs that have
finished with the same keys. Remove a run's folder to repeat it. Up to `--jobs` runs execute concurrently, one thread
each.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain
from pathlib import Path
from typing import Any

from harness import conditions
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pairs import MODEL, SECTIONS, TEACHER, Pair

from examples.catch.main_catch import register_catch
from examples.catch.recipe import METRIC, Baselines, CatchRun
from skyrl_train.entrypoints.main_base import run_command

HERE = Path(__file__).parent
DONE = "benchmark.json"  # in the folder of a finished run
Result = dict[str, Any]


def make_run(pair: Pair, options: argparse.Namespace) -> CatchRun:
    """Return a pair's run: the recipe of `make catch` with the pair's keys."""
    label = "".join(letter if letter.isalnum() or letter in "+-" else "_" for letter in pair.name)
    base = CatchRun(options.output_dir, "shaped", options.seed, options.steps, label)
    teacher = CatchRun(options.output_dir, "shaped", options.seed, options.steps, "grpo")
    model_paths = {
        MODEL: str(base.model_dir),
        TEACHER: str(teacher.folder.path / f"export/global_step_{options.steps}/policy"),
    }
    overrides = ["trainer.eval_interval=5", "trainer.ckpt_interval=-1"]
    for override in pair.overrides:
        key, _, value = override.partition("=")
        overrides.append(f"{key}='{model_paths[value]}'" if value in model_paths else override)
    return CatchRun(options.output_dir, "shaped", options.seed, options.steps, label, tuple(overrides))


def train(pair: Pair, options: argparse.Namespace) -> None:
    """Train one pair in this process."""
    register_catch()
    run = make_run(pair, options)
    run.prepare()
    setup, started = conditions(), time.monotonic()
    run_command(run.train)
    done = {"keys": pair.overrides, "conditions": setup, "seconds": round(time.monotonic() - started)}
    (run.folder.path / DONE).write_text(json.dumps(done) + "\n")


def load_result(pair: Pair, options: argparse.Namespace) -> Result | None:
    """Return the result of a finished run with these keys, or None."""
    run = make_run(pair, options)
    rows, done = run.metrics(), run.folder.path / DONE
    if not done.is_file() or not rows or rows[-1]["step"] < options.steps:
        return None
    result = json.loads(done.read_text())
    if result["keys"] != list(pair.overrides):
        return None  # the run had different keys
    return {"name": pair.name, "curve": {row["step"]: row[METRIC] for row in rows if METRIC in row}, **result}


def train_all(options: argparse.Namespace) -> None:
    """Train every unfinished pair in a separate process. GRPO comes first because it later serves as a teacher."""
    pairs = [pair for section in SECTIONS.values() for pair in section]
    if unknown := set(options.only or ()) - {pair.name for pair in pairs}:
        raise SystemExit(f"--only: unknown pairs {', '.join(sorted(unknown))}; see {HERE / 'pairs.py'}")
    first, rest = pairs[0], [pair for pair in pairs[1:] if not options.only or pair.name in options.only]
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for pair, log in chain(train_unfinished(pool, [first], options), train_unfinished(pool, rest, options)):
            if load_result(pair, options) is None:
                print(f"{pair.name}: failed, see {log}", flush=True)
                failed.append(pair.name)
            else:
                report(pair, options)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {', '.join(failed)}")


def train_unfinished(
    pool: ThreadPoolExecutor, pairs: list[Pair], options: argparse.Namespace
) -> Iterator[tuple[Pair, Path]]:
    """Train the unfinished pairs, `--jobs` at a time, and yield each finished pair with its log."""
    tasks = {pool.submit(train_in_process, pair, options): pair for pair in pairs if not load_result(pair, options)}
    for task in as_completed(tasks):
        yield tasks[task], task.result()


def train_in_process(pair: Pair, options: argparse.Namespace) -> Path:
    """Train one pair in a separate process with one thread. Return its log file."""
    log = options.output_dir / "logs" / f"{make_run(pair, options).name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = [f"--train={pair.name}", f"--steps={options.steps}", f"--seed={options.seed}"]
    with log.open("w") as output:
        subprocess.run(
            [sys.executable, __file__, *arguments, f"--output_dir={options.output_dir}"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return log


def report(pair: Pair, options: argparse.Namespace) -> None:
    """Print a run's result and rewrite the table and the figure."""
    result = load_result(pair, options)
    assert result is not None, f"{pair.name} has just been trained"
    print(f"{pair.name}: {list(result['curve'].values())[-1]:.1%} in {result['seconds']} s", flush=True)
    baselines = make_run(pair, options).baselines()
    results = {
        heading: [(pair, result) for pair in section if (result := load_result(pair, options))]
        for heading, section in SECTIONS.items()
    }
    write_table(results, baselines, options)
    write_figure(results, baselines)
    all_results = [result for section in results.values() for _, result in section]
    (HERE / "results.json").write_text(json.dumps(all_results, indent=1) + "\n")


Results = dict[str, list[tuple[Pair, Result]]]


def write_table(results: Results, baselines: Baselines, options: argparse.Namespace) -> None:
    """Write one table per section."""
    setup = " and ".join(sorted({result["conditions"] for section in results.values() for _, result in section}))
    lines = [
        "# Every algorithm on Catch",
        "",
        f"`make bench-algorithms`, {setup}. {options.jobs} runs at once, one thread each. {options.steps} steps from "
        f"one warm-started model, seed {options.seed}, shaped rewards. The optimal player catches "
        f"{baselines.optimal:.1%} of the validation set, random play {baselines.chance:.1%}.",
        "",
        "[pairs.py](pairs.py) lists the changes of each row to the recipe of `make catch`. With one seed and one task,",
        "the table shows results and times for this setting only. It is not a ranking.",
        "",
        "![Catch rates over training](results.png)",
    ]
    for heading, section in results.items():
        lines += [
            "",
            f"## {heading}",
            "",
            "| algorithm | catch rate before | after | of optimal | half of optimal at step | 90% at step | time |",
            "|---|---|---|---|---|---|---|",
        ]
        for pair, result in section:
            curve = result["curve"]
            before, *_, after = curve.values()
            step_at_half, step_at_90 = (find_first_step(curve, share * baselines.optimal) for share in (0.5, 0.9))
            lines.append(
                f"| {pair.name} | {before:.1%} | {after:.1%} | {after / baselines.optimal:.0%} "
                f"| {step_at_half} | {step_at_90} | {result['seconds']} s |"
            )
    (HERE / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_first_step(curve: dict[int, float], rate: float) -> str:
    """Return the first evaluated step with at least this catch rate, or ""."""
    return next((str(step) for step, value in curve.items() if value >= rate), "")


def write_figure(results: Results, baselines: Baselines) -> None:
    """Draw a small chart per run, with GRPO's curve in grey behind it."""
    runs = [entry for section in results.values() for entry in section]
    grpo = runs[0][1]["curve"]
    n_columns = 6
    n_rows = -(-len(runs) // n_columns)
    figure = Figure(figsize=(2.5 * n_columns, 1.9 * n_rows + 0.6), dpi=110, facecolor="white", layout="constrained")
    figure.suptitle("Catch rate over training steps (grey: grpo; dashed: optimal and random play)", fontsize=12)
    for index, (pair, result) in enumerate(runs):
        axes = figure.add_subplot(n_rows, n_columns, index + 1)
        for level in (baselines.optimal, baselines.chance):
            axes.axhline(level, color="#b9c0cb", linewidth=0.9, linestyle=(0, (5, 4)))
        axes.plot(list(grpo), list(grpo.values()), color="#b9c0cb", linewidth=2)
        axes.plot(list(result["curve"]), list(result["curve"].values()), color="#2f6fde", linewidth=2)
        axes.set_title(pair.name, fontsize=8.5)
        axes.set_ylim(-0.03, 1.06)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.tick_params(labelsize=7, colors="#6a7383", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(HERE / "results.png", format="png")


def main() -> None:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--output_dir", type=Path, default=Path("outputs/bench-algorithms"))
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once, one thread each")
    options.add_argument("--only", nargs="*", help="names of pairs (default: all)")
    options.add_argument("--train", help="train only this pair, in this process")
    args = options.parse_args()
    args.output_dir = args.output_dir.resolve()
    if args.train:
        train(next(p for section in SECTIONS.values() for p in section if p.name == args.train), args)
    else:
        run_command(lambda: train_all(args))


if __name__ == "__main__":
    main()
