"""`make bench-training`: seconds per whole training step, compared with TRL, and next to a process that keeps a core
busy.

Both frameworks train the same random Qwen3 model in float32 on the same prompts, with equal numbers of samples, tokens
and threads. They run in separate processes and take turns. The script writes `results.md` and `results.json` next to
this file.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from harness import Contender, alternate, conditions, copy_rate, matmul_rate
from transformers import AutoConfig, AutoModelForCausalLM
from workloads import WORKLOADS, Workload, write_inputs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRL_PYTHON = ROOT / ".venv-differential/bin/python"
VARIABLES = {
    "PYTHONPATH": f"{ROOT / 'skyrl-train'}:{HERE.parent}:{HERE}",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
BUSY = "while True: pass"


def update_flops(workload: Workload, folder: Path) -> float:
    """Count an update's floating-point operations without attention: 6 per weight and token that needs it, or 4 if an
    adapter is trained instead of the weights.

    Every token of a row needs the body, since prefixes are not shared. Only sampled tokens need the head.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    head = model.get_output_embeddings().weight.numel()
    body = model.num_parameters() - head - model.get_input_embeddings().weight.numel()
    n_sampled = workload.n_trajectories * workload.n_turns * workload.n_new
    return (4 if workload.lora_rank else 6) * (
        body * workload.n_trajectories * workload.n_row_tokens + head * n_sampled
    )


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy."""
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        try:
            yield
        finally:
            process.kill()


def measure(workload: Workload, n_times: int, names: Sequence[str]) -> dict[str, object]:
    """Measure a workload. Return a row of the table."""
    pythons = {"skyrl": Path(sys.executable), "trl": TRL_PYTHON}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_inputs(workload, folder)
        bound = update_flops(workload, folder) / matmul_rate()
        print(f"--- {workload.name}", flush=True)
        commands = {side: [pythons[side], HERE / f"{side}_child.py", workload.name, folder] for side in names}
        contenders = [
            stack.enter_context(Contender.running(side, command, VARIABLES)) for side, command in commands.items()
        ]
        alternate(contenders, n_times)
        alone = contenders[0].median()
        with busy_core():
            busy = [contenders[0].measure().seconds for _ in range(n_times)]
    ours = contenders[0]
    row: dict[str, object] = {
        "workload": workload.name,
        "skyrl": ours.spread(),
        "generate": "" if workload.is_sft else round(ours.median("generate"), 2),
        "update": round(ours.median("policy_train"), 2),
        "bound": f"{bound / ours.median('policy_train'):.0%}",
        "busy": round(statistics.median(busy) / alone, 2),
    }
    for contender in contenders:
        row[f"{contender.name}_samples"] = [asdict(sample) for sample in contender.samples]
        row[f"{contender.name}_mib"] = max(sample.peak_bytes for sample in contender.samples) >> 20
        for fact in contender.samples[0].facts:
            row[f"{contender.name}_{fact}"] = round(statistics.median(s.facts[fact] for s in contender.samples), 4)
    if len(contenders) > 1:
        row |= {"trl": contenders[1].spread(), "ratio": round(contenders[1].median() / alone, 2)}
    return row


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n_times", type=int, default=5)
    parser.add_argument("--only", choices=WORKLOADS, help="measure one workload, and write no files")
    parser.add_argument("--without_trl", action="store_true", help="measure SkyRL alone, and write no files")
    options = parser.parse_args()
    names = ["skyrl"] if options.without_trl else ["skyrl", "trl"]
    selected = [WORKLOADS[options.only]] if options.only else list(WORKLOADS.values())
    rates = f"A matrix product runs at {matmul_rate() / 1e9:.0f} GFlop/s, a copy at {copy_rate() / 1e9:.0f} GB/s"
    setup = f"{conditions()}. {rates}"
    rows = [measure(workload, options.n_times, names) for workload in selected]
    columns = {
        "workload": "workload",
        "TRL, s": "trl",
        "SkyRL, s": "skyrl",
        "TRL / SkyRL": "ratio",
        "generate, s": "generate",
        "update, s": "update",
        "update / matmul bound": "bound",
        "beside a busy process": "busy",
        "memory, MiB (TRL)": "trl_mib",
        "memory, MiB": "skyrl_mib",
        "entropy (TRL)": "trl_entropy",
        "entropy": "skyrl_entropy",
        "loss (TRL)": "trl_loss",
        "loss": "skyrl_loss",
        "gradient (TRL)": "trl_grad_norm",
        "gradient": "skyrl_grad_norm",
    }
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(str(row.get(key, '')) for key in columns.values())} |" for row in rows]
    table = "\n".join(lines) + "\n"
    if not options.only and not options.without_trl:
        (HERE / "results.json").write_text(json.dumps({"conditions": setup, "workloads": rows}, indent=1) + "\n")
        (HERE / "results.md").write_text(PAGE.format(setup=setup, n_times=options.n_times, table=table))
    print(f"\n{setup}\n\n{table}")


PAGE = """# Seconds of a training step

`make bench-training`, {setup}.

Training steps of random Qwen3 models with four layers, in float32, with one optimizer step on all samples. The method
is GRPO unless noted. Medians of {n_times} alternating steps after two warm-up steps, with minimum and maximum.

- `w1`: 16 prompts of 64 tokens × 8 samples of 64 tokens, hidden size 128, vocabulary 1,024.
- `w1-kl`: the same with a KL loss, and thus a reference model.
- `w3`: 8 prompts of 32 tokens × 8 samples of 32 tokens, hidden size 256, vocabulary 151,936.
- `lora`: `w1` with an adapter of rank 32 on all linear layers in place of all weights.
- `sft`: supervised fine-tuning on 128 rows of 64 tokens with a response of 64, with the model of `w1`, against TRL's
  `SFTTrainer`. Every step has the same rows, so losses and gradients are comparable.
- `catch`: 16 games × 8 samples of 5 turns of one token, 327 tokens each, with the model of `w1`. TRL plays with a
  rollout function that calls `generate` once a turn for all games.

{table}
The bound is the time of the update's matrix products without attention (forward and backward pass, every token of every
row), at the measured rate of a large product. `beside a busy process` is the slowdown of a step while a second process
keeps one of the cores busy. Entropy, loss and gradient norm are medians of the first updates. They show that both
frameworks do the same work.
"""

if __name__ == "__main__":
    main()
