"""`make bench-real`: GRPO and SFT on SmolLM2-135M-Instruct, step by step next to TRL.

SkyRL, TRL with `generate` and TRL with continuous batching train the same pretrained model on the same prompts, in the
same order, with equal numbers of samples and equal optimizers. They run in separate processes and take turns. The
script writes learning curves, step times and memory to `results.md` next to this file.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import matplotlib.pyplot as plt
from harness import Contender, alternate, conditions
from task import N_NEW, N_PROMPTS, N_SAMPLES, N_STEPS, SFT_ROWS, write_rows

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = ROOT / "outputs/calculator/models/SmolLM2-135M-Instruct"  # shared with `make real`
TRL = ROOT / ".venv-differential/bin/python"
VARIABLES = {
    "PYTHONPATH": ":".join(map(str, (ROOT / "skyrl-train", HERE.parent, HERE.parent / "training", HERE))),
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
SIDES: Mapping[str, tuple[str | Path, str, str]] = {
    "SkyRL": (sys.executable, "skyrl_side.py", ""),
    "TRL": (TRL, "trl_side.py", ""),
    "TRL, generate": (TRL, "trl_side.py", ""),
    "TRL, continuous batching": (TRL, "trl_side.py", "-continuous"),
}
GRPO, SFT = ("SkyRL", "TRL, generate", "TRL, continuous batching"), ("SkyRL", "TRL")
N_SEEDS = 3


def measure(method: str, names: Sequence[str], seed: int, n_steps: int) -> dict[str, Contender]:
    """Train with each framework, one step at a time in turn. Return the finished contenders by name."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_rows(folder, seed, is_sft=method == "sft")
        contenders = []
        for side in names:
            python, script, suffix = SIDES[side]
            command = [python, HERE / script, method + suffix, str(seed), MODEL, folder]
            contenders.append(stack.enter_context(Contender.running(side, command, VARIABLES)))
        alternate(contenders, n_steps, n_warmups=0)
    return {contender.name: contender for contender in contenders}


def plot(runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], fact: str, path: Path) -> None:
    """Draw the mean and the range of a fact over the seeds. `runs` has the facts of each seed and step."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for (name, seeds), style in zip(runs.items(), ("-", "--", ":"), strict=False):  # equal curves stay visible
        steps = [[facts[fact] for facts in step] for step in zip(*seeds, strict=True)]
        numbers = range(1, len(steps) + 1)
        (line,) = axes.plot(numbers, [statistics.fmean(step) for step in steps], style, label=name)
        axes.fill_between(
            numbers, [min(step) for step in steps], [max(step) for step in steps], color=line.get_color(), alpha=0.15
        )
    axes.set(xlabel="step", ylabel=fact)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def table(runs: Mapping[str, Sequence[Contender]], fact: str) -> str:
    """Return a Markdown table with a row per framework: the fact at the start and the end, seconds and memory."""
    lines = [
        f"| | {fact}, first five steps | {fact}, last five | seconds per step | compared with SkyRL | memory, MiB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    seconds = {name: [s.seconds for c in contenders for s in c.samples[2:]] for name, contenders in runs.items()}
    for name, contenders in runs.items():
        first, last = (
            " / ".join(f"{statistics.fmean(s.facts[fact] for s in c.samples[part]):.3f}" for c in contenders)
            for part in (slice(5), slice(-5, None))
        )
        median = statistics.median(seconds[name])
        ratio = median / statistics.median(seconds["SkyRL"])
        peak = max(sample.peak_bytes for c in contenders for sample in c.samples) >> 20
        lines.append(f"| {name} | {first} | {last} | {median:.2f} | {ratio:.2f} × | {peak:,} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="fewer seeds write no files")
    parser.add_argument("--n_steps", type=int, default=N_STEPS, help="fewer steps write no files")
    options = parser.parse_args()
    is_complete = options.n_steps == N_STEPS and len(options.seeds) >= N_SEEDS
    setup = conditions()
    tables, records = {}, {}
    for method, names, fact in (("grpo", GRPO, "reward"), ("sft", SFT, "loss")):
        runs: dict[str, list[Contender]] = {name: [] for name in names}
        for seed in options.seeds:
            print(f"--- {method}, seed {seed}", flush=True)
            for name, contender in measure(method, names, seed, options.n_steps).items():
                runs[name].append(contender)
        tables[method] = table(runs, fact)
        records[method] = {
            name: [[s.facts for s in c.samples] for c in contenders] for name, contenders in runs.items()
        }
        if is_complete:
            plot(records[method], fact, HERE / f"{method}.png")
    if is_complete:
        (HERE / "results.json").write_text(json.dumps({"conditions": setup, "steps": records}, indent=1) + "\n")
        (HERE / "results.md").write_text(PAGE.format(setup=setup, n_seeds=len(options.seeds), **tables, **SIZES))
    print(f"\n{setup}\n\n" + "\n\n".join(tables.values()))


SIZES = {"prompts": N_PROMPTS, "samples": N_SAMPLES, "new": N_NEW, "rows": SFT_ROWS}
PAGE = """# A pretrained model, next to TRL

`make bench-real`, {setup}.

SmolLM2-135M-Instruct in float32, all weights trained with AdamW at a learning rate of 1e-5. All contenders get the same
prompts in the same order and take turns, step by step. Each seed uses different prompts. Slashes separate
the results of the {n_seeds} seeds. Step times exclude the first two steps.

## GRPO

"Which number is larger, 17 or 45?" A step has {prompts} prompts with {samples} samples of at most {new} tokens, and one
optimizer step. The reward is 1 if the larger number is the last one in the reply. No prompt occurs twice.

{grpo}

![Reward by step](grpo.png)

## Supervised fine-tuning

A step has {rows} questions with their answers.

{sft}

![Loss by step](sft.png)
"""

if __name__ == "__main__":
    main()
