"""Page of a Catch benchmark: a table with a row per run, and their learning curves."""

import time
from collections.abc import Mapping
from pathlib import Path

from examples.catch.recipe import METRIC, CatchRun
from skyrl_report.learning_curve import compare_curves

COLUMNS = "before | after | of optimal | 90% of optimal at step | data and warm start | GRPO"


def measure(run: CatchRun) -> str:
    """Train, and return the values of `COLUMNS`."""
    started = time.monotonic()
    run.prepare()
    prepared = time.monotonic()
    run.train()
    finished = time.monotonic()
    before, after = run.catch_rates()
    optimal = run.baselines().optimal
    step_at_90 = next((row["step"] for row in run.metrics() if row.get(METRIC, 0.0) >= 0.9 * optimal), None)
    return (
        f"{before:.1%} | {after:.1%} | {after / optimal:.1%} | {step_at_90} | {prepared - started:.0f} s "
        f"| {finished - prepared:.0f} s"
    )


def measure_all(runs: Mapping[str, CatchRun], page: Path, title: str, text: str, head: str) -> None:
    """Train the runs, and rewrite the page and the figure beside it after each.

    Args:
        runs: by the names of their lines in the figure. `|` separates the table's first columns, with the headings
            `head`.
        page: the Markdown file.
        title: its heading.
        text: the paragraph below the heading.
        head: the first columns of the table.
    """
    rows: list[str] = []
    for n_done, (name, run) in enumerate(runs.items(), start=1):
        rows.append(f"| {name} | {measure(run)} |")
        baselines = run.baselines()
        n_columns = f"{head} | {COLUMNS}".count("|") + 1
        lines = [
            f"# {title}",
            "",
            f"{text} The optimal player catches {baselines.optimal:.1%} of the validation set, random play "
            f"{baselines.chance:.1%}.",
            "",
            f"| {head} | {COLUMNS} |",
            "|" + "---|" * n_columns,
            *rows,
            "",
            f"![Catch rates over training]({page.stem}.png)",
        ]
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
        compare_curves(
            {name.replace(" | ", ", "): run.metrics() for name, run in list(runs.items())[:n_done]},
            page.with_suffix(".png"),
            metric=METRIC,
            title=title,
            baselines=baselines.as_lines(),
        )
        print("\n".join(lines))
