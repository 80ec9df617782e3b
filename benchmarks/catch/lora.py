"""Train the tiny model on Catch with all weights, and with a low-rank adapter: `make bench-lora`.

Both start from the same weights. The script writes `lora.md` and `lora.png` next to this file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import conditions

from examples.catch.main_catch import register_catch
from examples.catch.recipe import METRIC, CatchRun
from skyrl_train.entrypoints.main_base import run_command
from skyrl_train.report import compare_curves

HERE = Path(__file__).parent
ARMS = {
    "all weights": (),
    "adapter of rank 8": ("trainer.policy.model.lora.rank=8", "trainer.policy.optimizer_config.lr=3e-3"),
}


def main() -> None:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--output_dir", type=Path, default=Path("outputs/bench-lora"))
    args = options.parse_args()
    register_catch()
    output_dir = args.output_dir.resolve()
    runs = {
        name: CatchRun(output_dir, "shaped", args.seed, label=name.replace(" ", "-"), overrides=overrides)
        for name, overrides in ARMS.items()
    }
    run_command(lambda: measure(runs, conditions()))


def measure(runs: dict[str, CatchRun], setup: str) -> None:
    """Train both, and write the table and the figure."""
    rows = []
    for name, run in runs.items():
        run.prepare()
        run.train()
        before, after = run.catch_rates()
        optimal = run.baselines().optimal
        step = next((row["step"] for row in run.metrics() if row.get(METRIC, 0.0) >= 0.9 * optimal), None)
        rows.append(f"| {name} | {before:.1%} | {after:.1%} | {after / optimal:.1%} | {step} |")
    first = next(iter(runs.values()))
    baselines = first.baselines()
    page = [
        "# Catch with an adapter",
        "",
        f"`make bench-lora`, {setup}. {first.n_steps} steps with seed {first.seed} from the same weights; the learning "
        "rate is 1e-3 for all weights and 3e-3 for the adapter, which is on all linear layers. The optimal player "
        f"catches {baselines.optimal:.1%} of the validation set, random play {baselines.chance:.1%}.",
        "",
        "| trained | before | after | of optimal | 90% of optimal at step |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "![Catch rates over training](lora.png)",
    ]
    (HERE / "lora.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    compare_curves(
        {name: run.metrics() for name, run in runs.items()},
        HERE / "lora.png",
        metric=METRIC,
        title="Catch with all weights, and with an adapter",
        baselines=baselines.as_lines(),
    )
    print("\n".join(page))


if __name__ == "__main__":
    main()
