"""`make bench-agent`: mini-swe-agent, unmodified, learns to write a word to a file with SmolLM2-135M-Instruct.

One step of supervised fine-tuning on eight traces shows the model the form of a command. In a test without it, stopped
early, none of 48 samples was right. Then `skyrl-agent train` runs mini-swe-agent in an isolated workspace for every
rollout, and a shell command grades the file. The script writes the learning curve to `results.md` next to this file.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
from harness import conditions
from task import write_rows

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = ROOT / "outputs/calculator/models/SmolLM2-135M-Instruct"  # shared with `make real`
N_TRACES, N_STEPS, N_PROMPTS, N_SAMPLES = 8, 24, 2, 6


def run(*command: str | Path) -> None:
    """Run a command in a separate process. CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True)


def train(folder: Path, n_steps: int) -> Path:
    """Warm-start the model and train it. Return the file with the metrics."""
    write_rows(folder)
    lines = (folder / "traces.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "traces.jsonl").write_text("".join(lines[:N_TRACES]), encoding="utf-8")
    shared = (
        f"trainer.output_dir={folder}",
        "trainer.logger=jsonl",
        "trainer.run_name=run",
        "trainer.eval_interval=-1",
    )
    constant = ("trainer.policy.optimizer_config.scheduler=constant", "trainer.ckpt_interval=-1", "data.val_data=[]")
    run(
        *("skyrl_train.entrypoints.cli", "sft", *shared, *constant, "trainer.project_name=warm_start"),
        *(f"trainer.policy.model.path={MODEL}", f"data.train_data={folder / 'traces.jsonl'}", "data.max_length=128"),
        *(f"trainer.train_batch_size={N_TRACES}", "trainer.epochs=1", "trainer.policy.optimizer_config.lr=1e-4"),
        *("trainer.hf_save_interval=1000", "trainer.seed=1"),
    )
    model = folder / "warm_start/run/export/global_step_1/policy"
    run(
        *("skyrl_agent.cli", "train", HERE / "mini.yaml", *shared, *constant, "trainer.project_name=grpo"),
        *(f"trainer.policy.model.path={model}", f"data.train_data={folder / 'train.jsonl'}"),
        *(f"trainer.train_batch_size={N_PROMPTS}", f"trainer.policy_mini_batch_size={N_PROMPTS}"),
        *(f"generator.n_samples_per_prompt={N_SAMPLES}", "generator.sampling_params.max_generate_length=24"),
        *("trainer.algorithm.use_kl_loss=false", "trainer.policy.optimizer_config.lr=2e-5"),
        *("trainer.policy.optimizer_config.num_warmup_steps=0", f"trainer.max_training_steps={n_steps}"),
        *("trainer.hf_save_interval=-1", "trainer.max_prompt_length=64"),
    )
    return folder / "grpo/run/metrics.jsonl"


def write_report(metrics: Path, setup: str) -> None:
    """Write the curve and the page of a run's metrics."""
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [step for step in steps if "reward/avg_raw_reward" in step]
    rewards = [step["reward/avg_raw_reward"] for step in steps]
    seconds = sum(step["timing/step"] for step in steps)
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02))
    figure.tight_layout()
    figure.savefig(HERE / "curve.png", dpi=120)
    invalid = int(sum(step.get("generate/n_invalid", 0) for step in steps))
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    values = {"first": first, "last": last, "minutes": seconds / 60, "per_step": seconds / len(steps)}
    page = PAGE.format(setup=setup, n_steps=len(steps), n=len(steps) * N_PROMPTS * N_SAMPLES, invalid=invalid, **values)
    (HERE / "results.md").write_text(page, encoding="utf-8")
    (HERE / "results.json").write_text(json.dumps({"conditions": setup, "rewards": rewards}) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs/bench-agent")
    parser.add_argument("--n_steps", type=int, default=N_STEPS, help="fewer steps write no files")
    parser.add_argument("--metrics", type=Path, help="write the page of an earlier run, without training")
    options = parser.parse_args()
    folder = options.output_dir / time.strftime("%Y%m%d-%H%M%S")
    metrics = options.metrics
    if metrics is None:
        folder.mkdir(parents=True)
        metrics = train(folder, options.n_steps)
    if options.n_steps == N_STEPS:
        write_report(metrics, conditions())


PAGE = """# mini-swe-agent learns a task

`make bench-agent`, {setup}.

mini-swe-agent 2.4.6 runs unmodified, in an isolated workspace for each rollout, with SmolLM2-135M-Instruct and a
short prompt (`mini.yaml`). The task is "Write juice to note.txt.". A shell command grades the file. One step of
supervised fine-tuning on eight traces first shows the model the form of a command. GRPO starts from that warm start.
In a test without the warm start, none of 48 samples was right. That test was stopped early, so a longer run might
have found a reward. After three steps of fine-tuning on 24 traces, all of 32 samples were right, so nothing was left
to learn. Each step has two prompts with six samples each, and no prompt occurs twice. This is one run with one seed,
without an evaluation on held-out prompts.

| steps | rollouts | invalid | reward, first three steps | reward, last three steps | seconds per step | minutes |
|--:|--:|--:|--:|--:|--:|--:|
| {n_steps} | {n} | {invalid} | {first:.3f} | {last:.3f} | {per_step:.0f} | {minutes:.0f} |

Every rollout starts a new process of the agent, and `import litellm` alone takes 2.5 seconds of CPU time.

![Reward by step](curve.png)
"""

if __name__ == "__main__":
    main()
