"""Train the tiny model on Catch synchronously and asynchronously, with a fast and with a slow environment:
`make bench-async`.

The script writes `asynchronous.md` and `asynchronous.png` next to this file.
"""

import argparse
import statistics
from pathlib import Path

from harness import conditions
from slow_catch import RARE_S, RARE_SHARE, USUAL_S

from examples.catch.recipe import METRIC, CatchRun
from skyrl_gym.envs import deregister, register
from skyrl_report.learning_curve import compare_curves
from skyrl_train.entrypoints.main_base import run_command

ENVIRONMENTS = {"fast": "examples.catch.env:CatchEnv", "slow": "slow_catch:SlowCatchEnv"}
COMMON = ("trainer.algorithm.off_policy_correction.tis_ratio_type=token", "generator.batched=false")
ARMS: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    **{
        f"at most {n} {'step' if n == 1 else 'steps'} old": (
            "trainer.fully_async.enabled=true",
            f"trainer.fully_async.max_staleness_steps={n}",
        )
        for n in (1, 4)
    },
}
HEAD = (
    "| environment | rollouts | step (s) | wait for rollouts (s) | mean staleness (steps) | catch rate | step at 90% |"
)


def measure(environment: str, rollouts: str, run: CatchRun) -> str:
    """Train, and return a row of the table."""
    register(id="catch", entry_point=ENVIRONMENTS[environment])
    try:
        run.prepare()
        run.train()
    finally:
        deregister("catch")
    steps = [row for row in run.metrics() if row["step"] > 2]  # the first steps warm up
    seconds, waiting = (statistics.median(row[f"timing/{name}"] for row in steps) for name in ("step", "generate"))
    age = statistics.fmean(row.get("async/staleness_mean", 0.0) for row in steps)
    optimal = run.baselines().optimal
    step_at_90 = next((row["step"] for row in run.metrics() if row.get(METRIC, 0.0) >= 0.9 * optimal), None)
    return (
        f"| {environment} | {rollouts} | {seconds:.2f} | {waiting:.2f} | {age:.2f} | {run.catch_rates()[1]:.1%} "
        f"| {step_at_90} |"
    )


def compare(runs: dict[tuple[str, str], CatchRun], page: Path) -> None:
    """Train the runs, by environment and rollouts. Rewrite the page and its figure after each."""
    rows: list[str] = []
    for n_done, ((environment, rollouts), run) in enumerate(runs.items(), start=1):
        rows.append(measure(environment, rollouts, run))
        baselines = run.baselines()
        lines = [
            "# Catch with asynchronous training",
            "",
            f"`make bench-async`, {conditions()}. {run.n_steps} steps of 512 games with seed {run.seed}. A turn in the "
            f"slow environment takes {USUAL_S:g} s, and {RARE_SHARE:.0%} of turns take {RARE_S:g} s, like calls of a "
            "remote tool. In asynchronous runs, the engine is a second process on the same cores. Seconds are medians. "
            f"The optimal player catches {baselines.optimal:.1%} of the validation set, random play "
            f"{baselines.chance:.1%}.",
            "",
            HEAD,
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"![Catch rates over training]({page.stem}.png)",
        ]
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
        compare_curves(
            {f"{name[0]}, {name[1]}": run.metrics() for name, run in list(runs.items())[:n_done]},
            page.with_suffix(".png"),
            metric=METRIC,
            title="Catch with asynchronous training",
            baselines=baselines.as_lines(),
        )
        print("\n".join(lines))


def main() -> None:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--output_dir", type=Path, default=Path("outputs/bench-async"))
    args = options.parse_args()
    output_dir = args.output_dir.resolve()
    runs = {
        (environment, rollouts): CatchRun(
            output_dir,
            "shaped",
            args.seed,
            label=f"{environment}-{rollouts}".replace(" ", "-"),
            overrides=(*COMMON, *overrides),
        )
        for environment in ENVIRONMENTS
        for rollouts, overrides in ARMS.items()
    }
    page = Path(__file__).with_name("asynchronous.md")
    run_command(lambda: compare(runs, page))


if __name__ == "__main__":
    main()
