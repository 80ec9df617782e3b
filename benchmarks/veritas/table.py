"""Print the legal-move rates of the runs of `openspiel.sh` as a page: `table.py <outputs> <name>`.

Exit status 1 means that a run ended below `MIN_RATE`.
"""

import json
import sys
from pathlib import Path

from harness import conditions

RUNS = {
    "lora": "adapter of rank 32, `openspiel-ppo-trainer.sh --tiny`",
    "continued": "`LORA_ADAPTER_PATH=` the first run's adapter, lr 1e-3",
    "full": "`ENABLE_LORA=0`: all weights, from the model of the first run",
    "merged": "`ENABLE_LORA=0`, from the first run's adapter, merged by `merge.sh`, lr 1e-4",
}
MIN_RATE = 0.95

HEAD = """# OpenSpiel recipe with a tiny model

{conditions}, under other load.
`make bench-veritas`: legal moves in tic-tac-toe after up to six random moves, with greedy evaluations on 256
validation positions that are not trained. Before the runs, the model is fine-tuned on answers to other positions.

| run | {steps} | seconds per step |
|---|{rules}---|"""


def main() -> None:
    """Read the metrics and print the page."""
    outputs, name = Path(sys.argv[1]), sys.argv[2]
    rates: dict[str, dict[int, float]] = {}
    seconds: dict[str, float] = {}
    for run in RUNS:
        (path,) = outputs.glob(f"*/*/*/{name}-{run}/metrics.jsonl")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rates[run] = {row["step"]: row["eval/all/avg_score"] for row in rows if "eval/all/avg_score" in row}
        times = [row["timing/step"] for row in rows if "timing/step" in row]
        seconds[run] = sum(times) / len(times)
    steps = sorted({step for run in rates.values() for step in run if step % 10 == 0})
    titles = " | ".join(f"step {step}" for step in steps)
    print(HEAD.format(conditions=conditions(), steps=titles, rules="---|" * len(steps)))
    for run, title in RUNS.items():
        cells = " | ".join(f"{rates[run][step]:.1%}" if step in rates[run] else "" for step in steps)
        print(f"| {title} | {cells} | {seconds[run]:.1f} |")
    last = {run: rates[run][max(rates[run])] for run in RUNS}
    if weak := {run: rate for run, rate in last.items() if rate < MIN_RATE}:
        sys.exit(f"legal moves at the end of a run must be at least {MIN_RATE:.0%}: {weak}")


if __name__ == "__main__":
    main()
