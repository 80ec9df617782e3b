"""Training in bfloat16 with 8-bit AdamW beside float32 and plain bfloat16, and adapters: `make bench-precision`.

Three tasks: Catch with the tiny model, and SmolLM2-135M-Instruct with the task of `make bench-real`, fine-tuned on
answers (SFT) and reinforced (GRPO). SFT is repeated with adapters of four ranks. There are three seeds, but two of
GRPO, whose runs are longer. Writes `precision.md` and `precision.png` next to this file. Runs of a seed see the same
prompts in the same order.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
from harness import conditions
from matplotlib import pyplot

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "real"))

from task import N_NEW, N_PROMPTS, N_SAMPLES, N_STEPS, SFT_ROWS, write_rows  # noqa: E402, a neighboring benchmark

EIGHT_BIT = (
    "trainer.policy.optimizer_config.name=adamw_8bit",
    "trainer.policy.model.train_dtype=bfloat16",
    "trainer.policy.model.dtype=bfloat16",
)
KINDS = {
    "float32, AdamW": (),
    "bfloat16, 8-bit AdamW": EIGHT_BIT,
    "bfloat16 rounded to nearest": (*EIGHT_BIT, "trainer.policy.optimizer_config.stochastic_rounding=false"),
}
ADAPTERS = {
    f"float32, adapter of rank {rank}": (
        f"trainer.policy.model.lora.rank={rank}",
        "trainer.policy.model.lora.alpha=32",
        "trainer.policy.optimizer_config.lr=3e-4",  # adapters learn with higher rates than all weights
    )
    for rank in (8, 16, 32, 64)
}
STOCHASTIC = dict(list(KINDS.items())[:2])
TASKS = {"catch": KINDS, "sft": KINDS, "adapters": ADAPTERS, "grpo": STOCHASTIC}
COLORS = ("tab:blue", "tab:orange", "tab:gray", "tab:green")
METRICS = {  # metric, title, number of last steps to average
    "catch": ("eval/environment/catch_rate", "Catch: catch rate of the validation", 1),
    "sft": ("train/loss", "SmolLM2-135M, SFT: loss", 5),
    "adapters": ("train/loss", "SmolLM2-135M, SFT of adapters: loss", 5),
    "grpo": ("reward/avg_raw_reward", "SmolLM2-135M, GRPO: reward", 10),
}
GRPO_STEPS = 40
"""After fewer steps, the reward still rises steeply, and differences between seeds hide differences in precision."""
REAL = (
    "trainer.policy.optimizer_config.lr=1e-5",
    "trainer.policy.optimizer_config.weight_decay=0",
    "trainer.policy.optimizer_config.scheduler=constant",
    "trainer.epochs=1",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=-1",
    "trainer.resume_mode=none",
)


def command(task: str, kind: str, seed: int, folder: Path, model: Path) -> list[str]:
    """Return the command of a run, whose metrics are written below `folder`."""
    if task == "catch":
        learn = [sys.executable, "-m", "examples.catch.learn", "--seed", str(seed), "--output_dir", str(folder)]
        return [*learn, *TASKS[task][kind]]
    (folder / "data").mkdir(parents=True, exist_ok=True)
    is_sft = task in ("sft", "adapters")
    write_rows(folder / "data", seed, is_sft=is_sft, n_steps=N_STEPS if is_sft else GRPO_STEPS)
    settings = [
        *REAL,
        *TASKS[task][kind],
        f"trainer.policy.model.path={model}",
        f"data.train_data=['{folder}/data/train.jsonl']",
        f"trainer.output_dir={folder}",
        f"trainer.seed={seed}",
    ]
    if is_sft:
        settings += [f"trainer.train_batch_size={SFT_ROWS}"]
    else:
        settings += [
            f"trainer.train_batch_size={N_PROMPTS}",
            f"trainer.policy_mini_batch_size={N_PROMPTS}",
            "trainer.algorithm.use_kl_loss=false",
            f"generator.n_samples_per_prompt={N_SAMPLES}",
            f"generator.sampling_params.max_generate_length={N_NEW}",
            "environment.env_class=skyrl_side:LargerNumber",
            "environment.skyrl_gym.max_env_workers=0",
        ]
    name = "sft" if is_sft else "train"
    return [sys.executable, "-m", "skyrl_train.entrypoints.cli", name, *settings]


def variables() -> dict[str, str]:
    """Return the environment of a run, which imports the environment class of `make bench-real`."""
    paths = [*(str(HERE.parent / name) for name in ("real", "training", ".")), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the rows of the only run below a folder, or [] if there is none."""
    files = list(folder.rglob("metrics.jsonl"))
    return [json.loads(line) for line in files[0].read_text().splitlines()] if files else []


def run(task: str, kind: str, seed: int, output: Path, model: Path) -> list[dict[str, float]]:
    """Train, unless the run exists, and return its metrics."""
    folder = output / f"{task}-{list(TASKS[task]).index(kind)}-{seed}"
    log = output / f"{folder.name}.log"
    if not (folder / "finished").exists():
        with log.open("w") as file:
            # Catch ends with status 1 if the model has not learned, which is a result here.
            subprocess.run(
                command(task, kind, seed, folder, model), stdout=file, stderr=file, env=variables(), check=False
            )
        rows = read_metrics(folder)
        if not any(METRICS[task][0] in row for row in rows):
            raise RuntimeError(f"{task}, {kind}, seed {seed} has no results; see {log}")
        (folder / "finished").touch()
    print(f"{task}, {kind}, seed {seed}", flush=True)
    return read_metrics(folder)


def main() -> None:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--tasks", nargs="+", default=list(TASKS))
    options.add_argument("--output_dir", type=Path, default=Path("outputs/bench-precision"))
    options.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    options.add_argument("--jobs", type=int, default=1, help="number of runs at once")
    args = options.parse_args()
    output, model = args.output_dir.resolve(), args.model.resolve()
    output.mkdir(parents=True, exist_ok=True)
    seeds = {task: args.seeds[:2] if task == "grpo" else args.seeds for task in args.tasks}
    runs = [(task, kind, seed) for task in args.tasks for seed in seeds[task] for kind in TASKS[task]]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = dict(zip(runs, pool.map(lambda key: run(*key, output, model), runs), strict=True))
    lines = ["| task | weights and optimizer | first | last | peak memory, GB |", "|---|---|--:|--:|--:|"]
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(1, len(args.tasks), figsize=(5 * len(args.tasks), 4), squeeze=False)
    for axis, task in zip(axes[0], args.tasks, strict=True):
        metric, title, n_last = METRICS[task]
        for color, kind in zip(COLORS, TASKS[task], strict=False):
            curves, cells = [], []
            for seed in seeds[task]:
                rows = results[task, kind, seed]
                curve = [row[metric] for row in rows if metric in row]
                axis.plot([row["step"] for row in rows if metric in row], curve, color=color, alpha=0.3, linewidth=1)
                curves.append(curve)
                peak = max(row.get("memory/step", 0) for row in rows)
                first, last = (statistics.mean(part) for part in (curve[:n_last], curve[-n_last:]))
                cells.append((f"{first:.3f}", f"{last:.3f}", f"{peak:.2f}"))
            steps = [row["step"] for row in results[task, kind, args.seeds[0]] if metric in row]
            axis.plot(
                steps, [statistics.mean(values) for values in zip(*curves, strict=False)], color=color, label=kind
            )
            lines.append(
                f"| {task} | {kind} | {' | '.join(' / '.join(column) for column in zip(*cells, strict=True))} |"
            )
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "precision.png", dpi=120)
    text = (
        f"# Training in bfloat16\n\n`make bench-precision`, {conditions()}. Slashes separate seeds. `first` and `last` "
        "are means of five steps, for GRPO of ten, and for Catch a validation.\n\n"
    )
    table = "\n".join(lines) + "\n\n![Curves](precision.png)\n"
    (HERE / "precision.md").write_text(text + table, encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
